"""`training.compile`: the losses of eager training, few graphs whatever the lengths of rows, the same names on disk."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.utils
from rich.console import Console

from drafttrain.errors import EngineError
from drafttrain.modeling.compiled import require_compiler
from drafttrain.recipe.load import load_recipe
from drafttrain.training.run import train_recipe
from drafttrain.training.trainer import Trainer
from tests.integration.test_train_invariants import make, run
from tests.launching import finish, start_ranks
from tests.rank_worker import run_job
from tests.tiny_trainer import FAMILIES
from tests.tiny_training import samples

# An odd number: at the end of an epoch a row is alone.
DATA = samples(25, shortest=6, longest=60)


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    try:
        require_compiler(torch.device("cpu"))
    except EngineError as error:
        warnings.warn(f"NOTHING IS PROVEN of torch.compile: {error}", stacklevel=1)
        pytest.skip(f"NOTHING IS PROVEN: {error}")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


def both(folder: Path, family: str, **values: Any) -> tuple[Trainer, list[Any], list[Any]]:
    """The compiled trainer, and the records with and without."""
    options = {"max_steps": 16, "batch_rows": 2, "lr": 2e-3, **values}
    eager = run(make(folder / "eager", family, DATA, **options))
    trainer = make(folder / "compiled", family, DATA, compile=True, **options)
    # Falling back would give the same losses, too.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        return trainer, run(trainer), eager


def graphs() -> int:
    """Compiled since the last reset."""
    found: int = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", FAMILIES)
def test_losses_are_those_of_eager_training(tmp_path: Path, family: str) -> None:
    """fp32, within 1e-5 (sums in another order); rows of a dozen lengths, and of one and two rows."""
    trainer, ours, theirs = both(tmp_path, family)
    steps = islice(trainer.order.windows(), len(ours))
    lengths = {max(len(sample.ids) for row in window.rows for sample in row) for window in steps}
    assert len(lengths) >= 10
    assert 0 < graphs() <= GRAPHS[family]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert mine["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)
    assert len({record["loss"] for record in ours}) == len(ours)
    plain = make(tmp_path / "plain", family, DATA)
    assert list(trainer.drafter.state_dict()) == list(plain.drafter.state_dict())
    assert trainer.trained == plain.trained


GRAPHS = {"eagle3": 6, "eagle1": 6, "medusa": 3, "draft_lm": 4}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("values", "tolerance"),
    [({"precision": "bf16"}, 2e-2), ({"gradient_checkpointing": True}, 1e-5), ({"prefetch": 2}, 1e-5)],
    ids=["bf16", "checkpointing", "prefetch"],
)
def test_it_goes_with_other_switches(tmp_path: Path, values: dict[str, Any], tolerance: float) -> None:
    _, ours, theirs = both(tmp_path, "eagle3", max_steps=5, **values)
    assert graphs() > 0
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["loss"] == pytest.approx(other["loss"], rel=tolerance)


def jobs() -> list[dict[str, Any]]:
    """Each strategy that goes with it, for a draft whose weights are handed to what is compiled, and for one whose
    modules hold them."""
    launches: list[tuple[Any, ...]] = [("replicated",), ("fsdp2",)]
    launches += [("zero", stage) for stage in range(3)] if find_spec("deepspeed") else []
    common = {"batch_rows": 2, "accumulation": 2, "max_steps": 6, "compile": True}
    return [
        {**common, "launch": launch, "family": family, "folder": f"{family}-{'-'.join(map(str, launch))}"}
        for launch in launches
        for family in ("eagle3", "draft_lm")
    ]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_train_the_same_under_every_strategy(tmp_path: Path) -> None:
    (tmp_path / "jobs.json").write_text(json.dumps(jobs()))
    done = finish(start_ranks(["-m", "tests.rank_worker", f"{tmp_path}/jobs.json", f"{tmp_path}/out.json"], 2))
    assert [status for status, _ in done] == [0, 0], "".join(output for _, output in done)
    results = json.loads((tmp_path / "out.json").read_text())
    for job, records in zip(jobs(), results, strict=True):
        eager = {
            **job,
            "launch": ("replicated",),
            "compile": False,
            "folder": f"eager-{job['folder']}",
            "batch_rows": 4,
        }
        for ours, theirs in zip(records, run_job(tmp_path, eager), strict=True):
            assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5), job["folder"]


def test_a_machine_without_a_compiler_is_told_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe("recipes/quickstart.yaml", ["training.compile=true"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EngineError, match=r"needs a C\+\+ compiler[^$]*leave it off"):
        train_recipe(recipe, "auto", Console())
    assert list(tmp_path.iterdir()) == []
