"""Stores that are filled while the target answers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drafttrain.corpus import answers as answering
from drafttrain.errors import RecipeError, StoreError
from drafttrain.features.reader import StoreReader
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.recipe import build
from drafttrain.recipe.build import RunParts, build_run, write_features
from drafttrain.recipe.load import load_recipe
from drafttrain.recipe.schema import Recipe
from tests.tiny_world import make_world, recipe
from tests.unit.recipe.test_build import Said

QUESTIONS = 12


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    world = make_world(tmp_path)
    with (world / "prompts.jsonl").open("w") as file:
        for number in range(QUESTIONS):
            turns = ["one more"] if number % 3 == 0 else []
            messages = [{"role": "user", "content": " ".join(["one", "two", "three"][: 1 + number % 3]) + str(number)}]
            file.write(json.dumps({"id": f"p{number}", "messages": messages, "turns": turns}) + "\n")
    return world


def asked(world: Path, name: str, record: bool = True, **data: Any) -> Recipe:
    path = recipe(
        world,
        world / name,
        data={
            "prompts": [{"source": str(world / "prompts.jsonl")}],
            "answers": {"source": "target", "max_new_tokens": 16, "batch_size": 5},
            "held_out": 2,
            **data,
        },
        features={"source": "offline", "record": record, "dtype": "fp32"},
        evaluation={"prompts": 2},
    )
    return load_recipe(path)


def built(
    wanted: Recipe, monkeypatch: pytest.MonkeyPatch, said: Said | None = None
) -> tuple[RunParts, StoreReader, int]:
    """The run, its store, and how many samples a forward of their own was needed for."""
    forwards: list[str] = []
    own = build.build_store

    def watched(path: Any, identity: Any, target: CausalLM, samples: Any, *rest: Any) -> bool:
        known = set(StoreReader(path, allow_incomplete=True)._entries) if Path(path).exists() else set()
        forwards.extend(sample.id for sample in samples if sample.id not in known)
        return own(path, identity, target, samples, *rest)

    monkeypatch.setattr(build, "build_store", watched)
    report = said or Said()
    parts = build_run(wanted, report)
    write_features(wanted, parts, report)
    return parts, StoreReader(Path(wanted.run_folder) / "features", parts.features), len(forwards)


@pytest.mark.parametrize("supervise", ["answers", "all"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_recorded_features_are_those_that_a_forward_gives(
    supervise: str, temperature: float, world: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"supervise": supervise}
    answers = {"source": "target", "max_new_tokens": 16, "batch_size": 5, "temperature": temperature}
    said = Said()
    parts, recorded, few = built(asked(world, "recorded", answers=answers, **settings), monkeypatch, said)
    again, computed, all_ = built(asked(world, "computed", False, answers=answers, **settings), monkeypatch)
    samples = list(parts.corpus.samples)
    assert parts.corpus.key == again.corpus.key and len(samples) == QUESTIONS - 2
    assert few < all_ == len(samples)
    assert any(line.endswith("samples were recorded while the target answered") for line in said.lines)
    for sample in samples:
        ours, our_top1 = recorded.read(sample)
        theirs, their_top1 = computed.read(sample)
        for tap, value in theirs.items():
            torch.testing.assert_close(ours[tap], value, rtol=1e-3, atol=1e-3)
        np.testing.assert_array_equal(our_top1.numpy(), their_top1.numpy())


def test_what_a_kill_leaves_out_is_computed(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After an error nothing that is queued is written; the answers stand, and a second run completes the store."""
    append, written = answering._append, []

    def dies(*arguments: Any) -> None:
        written.append(arguments)
        if len(written) == 6:
            raise RuntimeError("killed")
        append(*arguments)

    monkeypatch.setattr(answering, "_append", dies)
    wanted = asked(world, "run")
    with pytest.raises(RuntimeError, match="killed"):
        build_run(wanted, Said())
    assert StoreReader(Path(wanted.run_folder) / "features", allow_incomplete=True).counts["documents"] == 0
    monkeypatch.setattr(answering, "_append", append)
    parts, reader, forwards = built(wanted, monkeypatch)
    assert reader.complete and 0 < forwards < len(parts.corpus.samples)
    reader.require(parts.corpus.samples)


def test_an_interruption_keeps_what_was_recorded(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append, written = answering._append, []

    def stops(*arguments: Any) -> None:
        written.append(arguments)
        if len(written) == 6:
            raise KeyboardInterrupt
        append(*arguments)

    monkeypatch.setattr(answering, "_append", stops)
    wanted = asked(world, "run")
    with pytest.raises(KeyboardInterrupt):
        build_run(wanted, Said())
    assert StoreReader(Path(wanted.run_folder) / "features", allow_incomplete=True).counts["documents"] > 0


def test_a_store_of_another_target_is_refused_and_kept(world: Path) -> None:
    wanted = asked(world, "run")
    build_run(wanted, Said())
    store = Path(wanted.run_folder) / "features" / "manifest.json"
    other = json.loads(store.read_text())
    other["identity"]["weights_hash"] = "0" * 64
    store.write_text(json.dumps(other))
    (Path(wanted.run_folder) / "data" / "answers.jsonl").unlink()
    with pytest.raises(StoreError, match="weights hash"):
        build_run(wanted, Said())
    assert json.loads(store.read_text()) == other


def test_recording_needs_answers_and_a_store(world: Path) -> None:
    given = {"answers": {"source": "given"}, "prompts": [{"source": str(world / "conversations.jsonl")}]}
    with pytest.raises(RecipeError, match=r"features\.record .*: there is nothing to record"):
        asked(world, "run", True, **given)
    assert not asked(world, "run", False, **given).features.record
