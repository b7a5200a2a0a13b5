"""Data sets of any size: rows stay on disk from the file to the training step."""

from __future__ import annotations

import json
import multiprocessing
import re
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from drafttrain.corpus.answers import read_answers
from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.config import PromptSource
from drafttrain.corpus.dataset import build_corpus, split_held_out
from drafttrain.corpus.lines import Lines, pick, write_lines
from drafttrain.corpus.readers import collect_prompts, read_conversations
from drafttrain.corpus.samples import SampleTable, lengths_of, write_samples
from drafttrain.corpus.types import Sample
from drafttrain.training.windows import DataOrder
from tests.chats import CHATML, assistant, chat_tokenizer, user

ROW = 8000
"""Bytes of a row that nobody reads: what a data set may carry along."""


def write_rows(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for number in range(count):
            messages = [user("How are you?"), assistant("fine thanks")]
            file.write(json.dumps({"id": f"c{number}", "messages": messages, "meta": {"pad": "x" * ROW}}) + "\n")
    return path


def high_water() -> int:
    """Bytes that this process held at most."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def data_stage(path: Path, cache: Path) -> int:
    """What a run does with its data up to the first steps, and with prompts; samples trained on."""
    chat = ChatRenderer(chat_tokenizer(CHATML))
    training, _ = split_held_out(read_answers(path), 8)
    corpus = build_corpus(training, chat, max_length=64, vocab_size=600, cache=cache)
    order = DataOrder(corpus.samples, row_length=64, packing=True, window_rows=8, seed=0)
    seen = sum(len(row) for window in islice(order.windows(), 20) for row in window.rows)
    source = PromptSource(source=str(path))
    assert len(collect_prompts([source]).items) == len(read_conversations(source).items) == len(training) + 8
    return seen


def _grow(folder: str, counts: tuple[int, int]) -> list[int]:
    marks = []
    for count in counts:
        path = write_rows(Path(folder) / f"{count}.jsonl", count)
        assert data_stage(path, Path(folder) / str(count)) > 100
        marks.append(high_water())
    return marks


def test_memory_grows_by_an_index_and_not_by_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A million prompts of this kind are 8 GB; what is held for each row is a twentieth of that at most."""
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    few, many = 500, 4000
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        before, after = pool.apply(_grow, (str(tmp_path), (few, many)))
    assert (after - before) / (many - few) < ROW / 20


def test_lines_are_a_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path))
    values = [{"n": n, "text": "ß\n" * n} for n in range(5)]
    lines = write_lines(values, lambda value: value, lambda value: value)
    assert lines == values and lines[1:3] == values[1:3] and lines[-1] == values[-1] and len(lines) == 5
    assert lines != values[:4] and lines != [*values[:4], {}]
    picked = pick(lines, [3, 0])
    assert isinstance(picked, Lines) and picked == [values[3], values[0]] == pick(values, [3, 0])
    with pytest.raises(IndexError):
        lines[5]
    assert not list(tmp_path.iterdir())


def test_samples_come_back_as_they_were_written(tmp_path: Path) -> None:
    written = [
        Sample("a", np.array([1, 2, 3], dtype=np.int32), [(0, 1), (2, 2)]),
        Sample("ü@1", np.array([4], dtype=np.int32), []),
        Sample("c", np.array([5, 6], dtype=np.int32), [(0, 1)]),
    ]
    assert write_samples(written, tmp_path) == 3
    table = SampleTable(tmp_path)
    assert [sample.id for sample in table] == ["a", "ü@1", "c"] and table[-1].id == "c"
    for ours, theirs in zip(table[:], written, strict=True):
        assert ours.ids.tolist() == theirs.ids.tolist() and ours.spans == theirs.spans
    assert lengths_of(table).tolist() == lengths_of(written).tolist() == [3, 1, 2]
    assert table.supervised == sum(sample.supervised for sample in written) == 5
    with pytest.raises(IndexError):
        table[3]
    (tmp_path / "tokens.bin").write_bytes(b"0" * 16)
    with pytest.raises(ValueError, match="lengths differ"):
        SampleTable(tmp_path)
