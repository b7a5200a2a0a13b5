"""The prompts that ship with the toolkit: schema, counts, languages, and train and eval kept apart."""

from __future__ import annotations

import json
import re
import unicodedata
from collections import Counter
from itertools import combinations
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

PROMPTS = Path(__file__).parents[3] / "data" / "prompts"
FILES = ("train", "eval_core")
EVAL_CATEGORIES = {
    "writing",
    "reasoning",
    "maths",
    "coding",
    "extraction",
    "summarising",
    "multilingual",
    "multi_turn",
}
# The closest pair across the files is at 0.27; paraphrases that keep the wording come out above 0.4.
MAX_SIMILARITY = 0.4

# Scripts written without spaces between words: there a word run is a run of characters.
UNSPACED = re.compile(r"([\u0e00-\u0e7f\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff])")

SCRIPTS = {
    "han": r"[\u4e00-\u9fff]",
    "kana": r"[\u3040-\u30ff]",
    "arabic": r"[\u0600-\u06ff]",
    "devanagari": r"[\u0900-\u097f]",
    "cyrillic": r"[\u0400-\u04ff]",
    "french or portuguese accents": r"[àâçèêîôûœãõ]",
    "german": r"[äöüß]",
    "spanish": r"[ñ¿¡]",
    "emoji": r"[\U0001f300-\U0001faff]",
    "code": r"```",
}
TRAIN_SCRIPTS = SCRIPTS | {
    "hangul": r"[\uac00-\ud7af]",
    "greek": r"[\u0370-\u03ff]",
    "hebrew": r"[\u0590-\u05ff]",
    "thai": r"[\u0e00-\u0e7f]",
}

Record = dict[str, Any]


def load(name: str) -> list[Record]:
    text = (PROMPTS / f"{name}.jsonl").read_text(encoding="utf-8")
    return [cast(Record, json.loads(line)) for line in text.splitlines()]


def normal(record: Record) -> str:
    """Text of all turns in one case, with single spaces in place of punctuation."""
    text = unicodedata.normalize("NFKC", " ".join(record["turns"])).casefold()
    return re.sub(r"[\W_]+", " ", text).strip()


def word_runs(text: str, n: int) -> set[tuple[str, ...]]:
    words = UNSPACED.sub(r" \1 ", text).split()
    return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def character_runs(text: str, n: int = 4) -> set[str]:
    return {text[i : i + n] for i in range(max(1, len(text) - n + 1))}


def jaccard(a: set[str], b: set[str]) -> float:
    shared = len(a & b)
    return shared / (len(a) + len(b) - shared)


@pytest.mark.parametrize("name", FILES)
def test_every_line_has_the_schema(name: str) -> None:
    prefix = "eval" if name == "eval_core" else "train"
    for record in load(name):
        assert list(record) == ["id", "category", "turns"]
        assert re.fullmatch(rf"{prefix}-{record['category']}-\d{{2,4}}", record["id"])
        turns = record["turns"]
        assert len(turns) in ((2, 3) if record["category"] == "multi_turn" else (1,)), record["id"]
        for turn in turns:
            assert isinstance(turn, str) and turn == turn.strip() != "", record["id"]
            assert "\ufffd" not in turn and turn == unicodedata.normalize("NFC", turn), record["id"]


def test_ids_are_unique_over_both_files() -> None:
    counts = Counter(record["id"] for name in FILES for record in load(name))
    assert max(counts.values()) == 1


def test_eval_has_eight_categories_of_twelve() -> None:
    assert Counter(r["category"] for r in load("eval_core")) == dict.fromkeys(EVAL_CATEGORIES, 12)


def test_train_is_large_and_no_category_rules_it() -> None:
    counts = Counter(r["category"] for r in load("train"))
    assert counts.total() >= 240
    assert min(counts.values()) >= 10
    assert max(counts.values()) <= counts.total() / 5


@pytest.mark.parametrize("name", FILES)
def test_the_card_states_the_counts(name: str) -> None:
    card = (PROMPTS / f"{name}.card.md").read_text(encoding="utf-8")
    stated = {row[0]: int(row[1]) for row in re.findall(r"^\| (\w+) \| (\d+) \|", card, flags=re.MULTILINE)}
    assert stated == Counter(r["category"] for r in load(name))


@pytest.mark.parametrize("name", FILES)
def test_lengths_vary_from_a_few_words_to_two_hundred(name: str) -> None:
    lengths = sorted(len(normal(r).split()) for r in load(name))
    assert lengths[0] <= 8
    assert 10 <= lengths[len(lengths) // 2] <= 50
    assert 200 <= lengths[-1] <= 300


@pytest.mark.parametrize(("name", "scripts"), [("train", TRAIN_SCRIPTS), ("eval_core", SCRIPTS)])
def test_languages_are_there(name: str, scripts: dict[str, str]) -> None:
    text = "\n".join(turn for r in load(name) for turn in r["turns"]).lower()
    assert [script for script, pattern in scripts.items() if not re.search(pattern, text)] == []


def test_no_turn_is_in_both_files() -> None:
    train, evaluation = ({t.casefold() for r in load(name) for t in r["turns"]} for name in FILES)
    assert train & evaluation == set()


def test_no_eight_words_in_a_row_are_shared() -> None:
    train, evaluation = (set().union(*(word_runs(normal(r), 8) for r in load(name))) for name in FILES)
    assert train & evaluation == set()


def close_pairs(sets: dict[str, set[str]]) -> list[tuple[str, str]]:
    """Pairs with a Jaccard similarity of `MAX_SIMILARITY` or more: what each set shares with all is counted at once."""
    names, sizes = list(sets), np.array([len(elements) for elements in sets.values()])
    having: dict[str, list[int]] = {}
    for at, elements in enumerate(sets.values()):
        for element in elements:
            having.setdefault(element, []).append(at)
    holders = {element: np.array(found) for element, found in having.items()}
    close = []
    for at, elements in enumerate(sets.values()):
        shared = np.bincount(np.concatenate([holders[element] for element in elements]), minlength=len(names))
        similarity = shared / (sizes + sizes[at] - shared)
        close += [(names[other], names[at]) for other in np.flatnonzero(similarity[:at] >= MAX_SIMILARITY)]
    return close


def test_no_prompt_nearly_repeats_another() -> None:
    assert close_pairs({r["id"]: character_runs(normal(r)) for name in FILES for r in load(name)}) == []


def test_the_search_for_close_pairs_finds_what_comparing_all_finds() -> None:
    # Parts of one text, so that many pairs are near the limit.
    text = " ".join(normal(r) for r in load("train")[:12])
    sets = {f"{at}+{size}": character_runs(text[at : at + size]) for at in range(0, 400, 9) for size in (40, 64, 90)}
    expected = [(a, b) for a, b in combinations(sets, 2) if jaccard(sets[a], sets[b]) >= MAX_SIMILARITY]
    assert expected and sorted(close_pairs(sets)) == sorted(expected)


def test_the_similarity_check_sees_a_paraphrase() -> None:
    one, two = (
        character_runs(normal({"turns": [text]}))
        for text in ("What is 17 times 24? Show the steps.", "Show the steps: what is 17 times 25?")
    )
    assert jaccard(one, two) >= MAX_SIMILARITY
    assert word_runs("把下面这句话翻译成中文", 8)
