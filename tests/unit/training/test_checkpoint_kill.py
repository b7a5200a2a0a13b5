"""A checkpoint is whole or absent, whatever ends the process that writes it. Cases 23 and 28 of docs/cases.md."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

from drafttrain.errors import CheckpointError
from drafttrain.training.checkpoint import TrainState, load_checkpoint, newest_whole, save_checkpoint
from drafttrain.training.strategies.base import Snapshot
from tests.launching import in_child, status

SHAPES = {"weight": torch.Size([64, 64]), "bias": torch.Size([64])}
KEEP = 2


def snapshot(step: int) -> Snapshot:
    """Tensors that say which step they are of."""
    weights = {name: torch.full(shape, float(step)) for name, shape in SHAPES.items()}
    return Snapshot(weights, {f"weight/{key}": weights["weight"].clone() for key in ("exp_avg", "exp_avg_sq")})


def save(folder: Path, step: int) -> None:
    save_checkpoint(folder, TrainState(step=step), snapshot(step), SHAPES, {}, KEEP)


def dying_at(instruction: int, work: Callable[[], Any], report: int | None = None) -> None:
    """Run `work`; SIGKILL comes before the given bytecode instruction. `report`: a pipe for how many there are."""
    seen = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal seen
        frame.f_trace_opcodes = True
        if event == "opcode":
            seen += 1
            if seen == instruction:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)
    work()
    sys.settrace(None)
    if report is not None:
        os.write(report, str(seen).encode())


def assert_whole(folder: Path, steps: set[int]) -> int:
    """The newest checkpoint loads, is of one of `steps` and consistent in itself."""
    newest = newest_whole(folder, lambda message: pytest.fail(message))
    assert newest is not None
    state, found = load_checkpoint(newest, SHAPES, {})
    assert state.step in steps
    for tensor in (*found.weights.values(), *found.moments.values()):
        assert bool((tensor == state.step).all())
    return state.step


def test_fifty_kills_at_random_instructions_leave_the_last_whole_one(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    reader, writer = os.pipe()
    assert status(in_child(lambda: dying_at(0, lambda: save(tmp_path / "dry", 1), writer))) == 0
    instructions = int(os.read(reader, 32))
    assert instructions > 1000
    chosen, last, survived = random.Random(0), 2, 0
    for _ in range(50):
        at = chosen.randint(1, instructions)
        ended = status(in_child(lambda at=at, step=last + 1: dying_at(at, lambda: save(tmp_path, step))))
        assert ended in (0, -signal.SIGKILL)
        survived += ended == 0
        last = assert_whole(tmp_path, {last, last + 1})
    assert survived < 25  # the dry run keeps no older ones, so a few of the chosen instructions are behind the end
    save(tmp_path, last + 1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != "dry") == [
        f"step-{step:08d}" for step in (last, last + 1)
    ]


def test_a_kill_while_the_same_step_is_written_again_leaves_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    reader, writer = os.pipe()
    assert status(in_child(lambda: dying_at(0, lambda: save(tmp_path, 1), writer))) == 0
    chosen, instructions = random.Random(0), int(os.read(reader, 32))
    for _ in range(25):
        at = chosen.randint(1, instructions)
        assert status(in_child(lambda at=at: dying_at(at, lambda: save(tmp_path, 1)))) in (0, -signal.SIGKILL)
        assert_whole(tmp_path, {1})


def test_kills_at_random_times_do_so_too(tmp_path: Path) -> None:
    save(tmp_path, 1)
    began = time.monotonic()
    save(tmp_path, 2)
    duration = time.monotonic() - began

    def for_ever(step: int) -> None:
        while True:
            save(tmp_path, step)
            step += 1

    chosen, last = random.Random(1), 2
    for _ in range(10):
        child = in_child(lambda step=last + 1: for_ever(step))
        time.sleep(chosen.uniform(0, 3 * duration))
        os.kill(child, signal.SIGKILL)
        assert status(child) == -signal.SIGKILL
        last = assert_whole(tmp_path, set(range(last, last + 1000)))


@pytest.mark.parametrize("room", [0, 1000, 20_000, 50_000])
def test_a_full_disk_leaves_the_older_ones(tmp_path: Path, room: int) -> None:
    save(tmp_path, 1)

    def cramped() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
        try:
            save(tmp_path, 2)
        except CheckpointError as error:
            os._exit(7 if "cannot be written" in str(error) and "free some space" in str(error) else 8)

    # 16 kB of weights, 32 kB of moments: each room ends in another file.
    assert status(in_child(cramped)) == (7 if room < 50_000 else 0)
    assert_whole(tmp_path, {1} if room < 50_000 else {2})
    assert not list(tmp_path.glob(".*.part"))


def test_too_little_space_is_found_before_anything_is_written(tmp_path: Path) -> None:
    save(tmp_path, 1)
    # A petabyte that takes no memory.
    huge = torch.zeros(1).expand(1 << 48)
    whole = Snapshot({"weight": huge}, {})
    with pytest.raises(CheckpointError, match=r"needs .* TiB, the disk has .* free"):
        save_checkpoint(tmp_path, TrainState(step=2), whole, {"weight": huge.shape}, {}, KEEP)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
