"""Several processes, other jobs, and kills (case 28 of docs/cases.md)."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from drafttrain.errors import StoreError
from drafttrain.features.building import build_store, job_name, open_store
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.lock import WHOLE, Part
from drafttrain.features.reader import StoreReader
from drafttrain.features.writer import StoreWriter
from tests.tiny_training import samples, tiny_target
from tests.unit.features.test_store import CPU, IDENTITY, small_shards

DATA = samples(40)
# Blocks of 64 tokens, so that every part has some.
CONFIG = FeaturesConfig(source="offline", batch_tokens=1)


def start(path: Path, part: Part, pause: float = 0.0) -> BaseProcess:
    """A process that writes its part in small shards. Forked: starting anew would import for seconds."""
    process = multiprocessing.get_context("fork").Process(target=_write, args=(path, part, pause))
    process.start()
    return process


def _write(path: Path, part: Part, pause: float) -> None:
    build_store(path, IDENTITY, tiny_target(), DATA, CONFIG, lambda done, total: time.sleep(pause), part)


def until(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < limit, "waited in vain"
        time.sleep(0.02)


def same_as_one_process(path: Path, tmp_path: Path) -> None:
    build_store(tmp_path / "one", IDENTITY, tiny_target(), DATA, CONFIG)
    ours, theirs = open_store(path, IDENTITY, DATA), open_store(tmp_path / "one", IDENTITY, DATA)
    for sample in DATA:
        (features, top1), (expected, expected_top1) = ours.read(sample), theirs.read(sample)
        assert torch.equal(top1, expected_top1)
        assert all(torch.equal(features[tap], value) for tap, value in expected.items())


def test_three_processes_write_one_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_shards(monkeypatch, 60)
    processes = [start(tmp_path / "store", Part(index, 3)) for index in range(3)]
    for process in processes:
        process.join(100)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    reader = StoreReader(tmp_path / "store", IDENTITY)
    assert reader.complete and len(reader) == len(DATA)
    names = [folder.name for folder in (tmp_path / "store/shards").iterdir()]
    assert len(names) > 3 and {int(name) % 3 for name in names} == {0, 1, 2}
    same_as_one_process(tmp_path / "store", tmp_path)


def test_what_was_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_shards(monkeypatch, 60)
    path = tmp_path / "store"
    process = start(path, WHOLE, pause=0.05)
    until(lambda: len(list((path / "shards").glob("[0-9]*"))) >= 2)
    process.kill()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    half = StoreReader(path, allow_incomplete=True)
    assert 0 < len(half) < len(DATA)
    with pytest.raises(StoreError, match="incomplete"):
        StoreReader(path)
    (path / "shards/.000009.x.part").mkdir()  # what a kill within a shard leaves
    assert build_store(path, IDENTITY, tiny_target(), DATA, CONFIG)
    assert not list((path / "shards").glob(".*"))
    same_as_one_process(path, tmp_path)


def test_a_store_being_written_by_another_job_is_refused(tmp_path: Path) -> None:
    path, job = tmp_path / "store", job_name(IDENTITY, DATA)
    with StoreWriter(path, IDENTITY, part=Part(0, 2), job=job):
        with pytest.raises(StoreError, match="being written by another job"):
            build_store(path, IDENTITY, tiny_target(), DATA, CONFIG)
        with pytest.raises(StoreError, match="part 1 of 2 of this job is being written by another process"):
            build_store(path, IDENTITY, tiny_target(), DATA, CONFIG, part=Part(0, 2))
        # The other part of this job is welcome; what it cannot know is whether the first will write its share.
        assert not build_store(path, IDENTITY, tiny_target(), DATA, CONFIG, part=Part(1, 2))
        with pytest.raises(StoreError, match="still goes on"):
            StoreReader(path)
    assert build_store(path, IDENTITY, tiny_target(), DATA, CONFIG, part=Part(0, 2))
    same_as_one_process(path, tmp_path)


def test_a_refused_job_touches_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store"
    build_store(path, IDENTITY, tiny_target(), DATA, CONFIG)
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    with pytest.raises(StoreError, match="weights hash"):
        build_store(path, replace(IDENTITY, weights_hash="e" * 64), tiny_target(), DATA, CONFIG)
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before


def test_a_store_that_needs_nothing_is_used_while_another_job_holds_it(tmp_path: Path) -> None:
    """Runs with other seeds start at once on one complete store."""
    path = tmp_path / "store"
    build_store(path, IDENTITY, tiny_target(), DATA, CONFIG)
    with StoreWriter(path, IDENTITY):
        assert build_store(path, IDENTITY, tiny_target(), DATA, CONFIG)
        assert build_store(path, IDENTITY, tiny_target(), DATA[:5], CONFIG)
        open_store(path, IDENTITY, DATA)
        with pytest.raises(StoreError, match="another job"):
            build_store(path, IDENTITY, tiny_target(), samples(41), CONFIG)


def test_a_shard_that_vanished_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "store"
    build_store(path, IDENTITY, tiny_target(), DATA, CONFIG)
    (path / "shards/000000").rename(tmp_path / "gone")
    with pytest.raises(StoreError, match="holds 0 of 1 shards"):
        StoreReader(path)


def test_threads_and_processes_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "store"
    build_store(path, IDENTITY, tiny_target(), DATA, CONFIG)
    reader = open_store(path, IDENTITY, DATA)
    expected = [sum(float(value.sum()) for value in reader.read(sample, CPU)[0].values()) for sample in DATA]

    def total(index: int) -> float:
        return sum(float(value.sum()) for value in reader.read(DATA[index])[0].values())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(total, list(range(40)) * 5)) == expected * 5
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(_Total(reader), range(40)) == expected


class _Total:
    def __init__(self, reader: StoreReader) -> None:
        self.path = reader.path

    def __call__(self, index: int) -> float:
        reader = StoreReader(self.path, IDENTITY)
        return sum(float(value.sum()) for value in reader.read(DATA[index])[0].values())
