"""What a recipe's draft starts as, from real files in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.corpus.dataset import token_counts
from drafttrain.files import read_json, write_json
from drafttrain.recipe.build import build_run
from drafttrain.recipe.load import load_recipe
from tests.tiny_world import make_world, recipe


class Said:
    """A reporter that keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)

    def progress(self, task: str, done: int, total: int) -> None:
        pass


def test_special_tokens_are_in_the_draft_vocabulary_and_padding_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases 11 and 14 of docs/cases.md."""
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    world = make_world(tmp_path)
    generation = world / "target" / "generation_config.json"
    values = read_json(generation)
    never_said = 10  # <end_of_turn>, of another template
    write_json(generation, {**values, "eos_token_id": [values["eos_token_id"], never_said]})
    for size in (12, None):
        # None: as many as the target's padded head has rows, so more than the tokenizer knows and the data holds.
        rows = size or read_json(world / "target" / "config.json")["vocab_size"]
        drafter = {"family": "eagle3", "draft_vocab_size": rows, "depth": 3}
        said = Said()
        parts = build_run(load_recipe(recipe(world, tmp_path / f"run{rows}", drafter=drafter)), said)
        chosen, tokenizer = parts.drafter.vocab_map.target_ids.tolist(), parts.target.tokenizer
        counts = token_counts(parts.corpus.samples, parts.target.vocab_size)
        assert len(tokenizer) < parts.target.vocab_size and counts[never_said] == 0
        assert len(chosen) == min(rows, len(tokenizer)) and max(chosen) < len(tokenizer)
        header = tokenizer.convert_tokens_to_ids("<|im_start|>")  # in every prompt, in no answer
        assert {tokenizer.eos_token_id, never_said, header} <= set(chosen) and counts[header] == 0
        assert parts.coverage == pytest.approx(sum(float(counts[token]) for token in chosen) / float(counts.sum()))
        assert f"covers {parts.coverage:.2%} of the labels" in said.lines[-1]
        assert (parts.coverage == 1.0) == (size is None)
