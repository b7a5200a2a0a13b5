"""The plan's memory against what ranks on a CPU take at their peak: within 15 %.

Shapes are small, and such that weights, optimiser, activations and the target all count.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.recipe.schema import Recipe
from drafttrain.targets.load import load_text_config
from drafttrain.training.launch import Launch
from drafttrain.training.plan.hardware import Hardware
from drafttrain.training.plan.layout import Layout
from drafttrain.training.plan.plan import make_plan
from tests.chats import CHATML, chat_tokenizer
from tests.launching import finish, start_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EAGLE3: dict[str, Any] = {"family": "eagle3", "draft_vocab_size": 1024, "depth": 4}
DRAFTS: dict[str, dict[str, Any]] = {
    "eagle3": EAGLE3,
    "eagle1": {"family": "eagle1", "depth": 2},
    "medusa": {"family": "medusa", "num_heads": 3},
    "draft_lm": {"family": "draft_lm", "layers": [0, 7]},
}
TOLERANCE = 0.15


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of 8 M parameters."""
    folder = tmp_path_factory.mktemp("target")
    tokenizer = chat_tokenizer(CHATML)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def recipe(target: Path, drafter: dict[str, Any], placement: str = "whole", **training: Any) -> dict[str, Any]:
    return {
        "name": "measured",
        "target": {"model": str(target), "dtype": "float32", "placement": placement},
        "data": {
            "prompts": [{"source": "given.jsonl"}],
            "answers": {"source": "given"},
            "max_length": training.get("row_length", 256),
            "held_out": 0,
        },
        "features": {"source": "online", "batch_tokens": 1024},
        "drafter": drafter,
        "loss": {"terms": [{"name": "soft_ce"}]},
        "training": {
            "max_steps": 2,
            "batch_rows": 4,
            "row_length": 256,
            "precision": "fp32",
            "packing": False,
            "save_every": None,
            **training,
        },
        "evaluation": {"prompts": 0},
    }


ONE_RANK: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {}),
    "eagle3, bf16": ("eagle3", {"precision": "bf16"}),
    "eagle3, checkpointing": ("eagle3", {"gradient_checkpointing": True}),
    "eagle3, accumulation": ("eagle3", {"batch_rows": 1, "accumulation": 4}),
    "eagle3, prefetch": ("eagle3", {"prefetch": 2}),
    "eagle1": ("eagle1", {}),
    "medusa": ("medusa", {}),
    "draft_lm": ("draft_lm", {}),
}
TWO_RANKS = {
    "DDP": ("whole", Launch()),
    "FSDP2": ("whole", Launch("fsdp2")),
    **{f"ZeRO-{stage}": ("whole", Launch("zero", stage)) for stage in range(4)},
    "ZeRO-2, target in shards": ("zero3", Launch("zero", 2)),
}


def measure(folder: Path, recipes: list[dict[str, Any]], launches: list[Launch], ranks: int) -> list[tuple[int, int]]:
    """(measured, planned) peak of each run."""
    runs = 1 if ranks == 1 else 3
    jobs = [
        {"recipe": r, "launch": [way.kind, way.stage], "runs": runs} for r, way in zip(recipes, launches, strict=True)
    ]
    (folder / "jobs.json").write_text(json.dumps(jobs))
    ends = finish(
        start_ranks(["-m", "tests.memory_worker", str(folder / "jobs.json"), str(folder / "out.json")], ranks)
    )
    assert [status for status, _ in ends] == [0] * ranks, ends
    cpus = Hardware("CPUs", ranks, 1, 2**40, 1e12, 1e12, 1.0, 1.0, 1e9, 0, True)
    pairs = []
    for measured, values, launch in zip(json.loads((folder / "out.json").read_text()), recipes, launches, strict=True):
        made = Recipe.model_validate(values)
        plan = make_plan(made, load_text_config(made.target), cpus, samples=16, tokens=256)
        pairs.append((measured, plan.peaks[Layout(made.target.placement, launch)]))
    return pairs


@pytest.fixture(scope="module")
def on_one_rank(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    recipes = [recipe(target, DRAFTS[family], **training) for family, training in ONE_RANK.values()]
    pairs = measure(tmp_path_factory.mktemp("one"), recipes, [Launch()] * len(recipes), 1)
    return dict(zip(ONE_RANK, pairs, strict=True))


@pytest.fixture(scope="module")
def on_two_ranks(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int, int]]:
    # What a launch shards is most of it here.
    drafter = {"family": "eagle3", "depth": 2, "num_layers": 3}
    few = {"batch_rows": 1, "row_length": 64}
    recipes = [recipe(target, drafter, placement, **few) for placement, _ in TWO_RANKS.values()]
    pairs = measure(tmp_path_factory.mktemp("two"), recipes, [launch for _, launch in TWO_RANKS.values()], 2)
    return dict(zip(TWO_RANKS, pairs, strict=True))


def assert_near(name: str, pair: tuple[int, int]) -> None:
    measured, planned = pair
    print(f"{name}: measured {measured / 2**20:.1f} MiB, planned {planned / 2**20:.1f}: {planned / measured - 1:+.1%}")
    assert planned == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize("name", ONE_RANK)
def test_one_rank(on_one_rank: dict[str, tuple[int, int]], name: str) -> None:
    assert_near(name, on_one_rank[name])


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="needs DeepSpeed")
@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks(on_two_ranks: dict[str, tuple[int, int]], name: str) -> None:
    assert_near(name, on_two_ranks[name])
