"""What must not change the loss: ranks, ZeRO stage, FSDP2, accumulation, packing, a resume.

All curves are of 30 steps. In fp32 they differ by 1e-7, the order of sums; 1e-5 is demanded, and a wrong factor on one
micro-batch shows at 1e-1.
"""

from __future__ import annotations

import json
import math
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from drafttrain.training.launch import Launch
from tests.launching import finish, start_ranks
from tests.rank_worker import make_trainer
from tests.tiny_trainer import Recorder

FAMILIES = ("eagle3", "medusa", "draft_lm")
PLAIN: list[tuple[Any, ...]] = [("replicated",), ("fsdp2",)]
ZERO: list[tuple[Any, ...]] = [("zero", stage) for stage in range(4)] if find_spec("deepspeed") else []
NAMES = {launch: "-".join(map(str, launch)) for launch in PLAIN + [("zero", stage) for stage in range(4)]}
# Twelve documents in steps of eight: the last step of an epoch is a partial one, which some ranks have less of.
SHAPE = {"batch_rows": 2, "accumulation": 2}
HALF = 15

pytestmark = pytest.mark.timeout(900)
needs_deepspeed = pytest.mark.skipif(not ZERO, reason="needs DeepSpeed (pip install drafttrain[deepspeed])")


def job(launch: tuple[Any, ...], family: str, folder: str, **values: Any) -> dict[str, Any]:
    return {"launch": launch, "family": family, "folder": folder, **SHAPE, **values}


def jobs() -> list[dict[str, Any]]:
    """Everything that two ranks train."""
    found = [job(launch, family, f"{family}-{NAMES[launch]}") for launch in PLAIN + ZERO for family in FAMILIES]
    found += [job(launch, "eagle3", f"bf16-{NAMES[launch]}", precision="bf16") for launch in PLAIN + ZERO]
    # Saved under one strategy, gone on with under the next.
    chain = [("replicated",), *ZERO[2:], ("fsdp2",), *ZERO[1:2]]
    return found + [
        job(launch, "frozen_embedding", "chain", schedule="constant", warmup=0, max_steps=5 * (index + 1))
        for index, launch in enumerate(chain)
    ]


@pytest.fixture(scope="module")
def on_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Folder of a job -> its records, from one launch of two gloo ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    (folder / "jobs.json").write_text(json.dumps(jobs()))
    done = finish(start_ranks(["-m", "tests.rank_worker", f"{folder}/jobs.json", f"{folder}/out.json"], 2))
    assert [status for status, _ in done] == [0, 0], "".join(output for _, output in done)
    results = json.loads((folder / "out.json").read_text())
    found: dict[str, list[dict[str, Any]]] = {}
    for each, records in zip(jobs(), results, strict=True):
        found.setdefault(each["folder"], []).extend(records)
    return found


def on_one_rank(folder: Path, family: str, **values: Any) -> list[dict[str, Any]]:
    trainer = make_trainer(folder, Launch(), family, **values)
    recorder = Recorder()
    trainer.fit([recorder])
    return recorder.records


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """Family -> records of one rank without accumulation."""
    folder = tmp_path_factory.mktemp("alone")
    return {family: on_one_rank(folder / family, family, batch_rows=8) for family in FAMILIES}


def assert_same_curve(ours: list[dict[str, Any]], theirs: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    assert [r["step"] for r in ours] == [r["step"] for r in theirs]
    assert len(ours) == 30 and ours[-1]["loss"] < ours[0]["loss"]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["tokens"] == other["tokens"]
        assert math.isclose(mine["loss"], other["loss"], rel_tol=tolerance), (mine, other)
        assert math.isclose(mine["grad_norm"], other["grad_norm"], rel_tol=30 * tolerance), (mine, other)


@pytest.mark.parametrize("family", FAMILIES)
def test_accumulation_is_batch(tmp_path: Path, alone: dict[str, Any], family: str) -> None:
    assert_same_curve(on_one_rank(tmp_path, family, batch_rows=2, accumulation=4), alone[family])


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_is_padded(tmp_path: Path, family: str) -> None:
    # Steps of all documents, so that both see the same ones.
    packed = on_one_rank(tmp_path / "packed", family, documents=8, batch_rows=8, packing=True)
    padded = on_one_rank(tmp_path / "padded", family, documents=8, batch_rows=8, packing=False)
    assert_same_curve(packed, padded)


@pytest.mark.slow
@pytest.mark.parametrize("launch", PLAIN, ids=NAMES.get)
@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_are_one(
    on_two_ranks: dict[str, Any], alone: dict[str, Any], family: str, launch: tuple[Any, ...]
) -> None:
    assert_same_curve(on_two_ranks[f"{family}-{NAMES[launch]}"], alone[family])


@pytest.mark.slow
@needs_deepspeed
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_zero_stage_is_none(on_two_ranks: dict[str, Any], alone: dict[str, Any], family: str, stage: int) -> None:
    assert_same_curve(on_two_ranks[f"{family}-zero-{stage}"], alone[family])


@pytest.mark.slow
@pytest.mark.parametrize("launch", PLAIN[1:] + ZERO, ids=NAMES.get)
def test_bf16_is_the_same_everywhere(on_two_ranks: dict[str, Any], launch: tuple[Any, ...]) -> None:
    # bf16 keeps 8 bits, and gradients are rounded before they are summed over micro-batches.
    assert_same_curve(on_two_ranks[f"bf16-{NAMES[launch]}"], on_two_ranks["bf16-replicated"], 1e-3)


@pytest.mark.slow
def test_a_run_goes_on_under_another_strategy(on_two_ranks: dict[str, Any], tmp_path: Path) -> None:
    records = on_two_ranks["chain"]
    steps = len(records)
    whole = on_one_rank(tmp_path, "frozen_embedding", batch_rows=8, schedule="constant", warmup=0, max_steps=steps)
    assert steps >= 10
    for mine, other in zip(records, whole, strict=True):
        assert mine["step"] == other["step"] and math.isclose(mine["loss"], other["loss"], rel_tol=1e-5)
