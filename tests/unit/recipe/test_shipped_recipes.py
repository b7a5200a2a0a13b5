"""Every recipe that ships loads, says how to run it, and gives a draft of the size worked out here by hand.

Drafts are built on the meta device from the published configs of their targets (tests/fixtures/configs).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from drafttrain.drafters.build import build_drafter
from drafttrain.recipe.load import load_recipe
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import load_text_config

ROOT = Path(__file__).resolve().parents[3]
CONFIGS = ROOT / "tests" / "fixtures" / "configs"
RECIPES = sorted(
    path.relative_to(ROOT).as_posix() for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "accelerate"
)
TARGETS = {
    "smollm2-135m": "smollm2-135m",
    "meta-llama/Llama-3.3-70B-Instruct": "llama-3.3-70b",
    "meta-llama/Llama-3.1-8B-Instruct": "llama-3.1-8b",
    "Qwen/Qwen3-8B": "qwen3-8b",
}


def mlp(hidden: int, inner: int) -> int:
    return 3 * hidden * inner


def attention(width: int, hidden: int, heads: int, kv_heads: int, head_dim: int) -> int:
    """`width` goes into q, k and v; `hidden` comes out."""
    return width * head_dim * (heads + 2 * kv_heads) + heads * head_dim * hidden


def eagle3(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int) -> int:
    """Three taps into fc; a layer that reads (embedding, state); four norms; a head of its own."""
    layer = attention(2 * hidden, hidden, heads, kv_heads, head_dim) + mlp(hidden, inner)
    return 3 * hidden * hidden + layer + 4 * hidden + hidden * vocabulary


def block(hidden: int, inner: int, heads: int, kv_heads: int, head_dim: int) -> int:
    return attention(hidden, hidden, heads, kv_heads, head_dim) + mlp(hidden, inner) + 2 * hidden


SMOLLM2 = (576, 1536, 9, 3, 64)
SAVED: dict[str, Callable[[Any], int]] = {
    "recipes/quickstart.yaml": lambda draft: eagle3(*SMOLLM2, draft.draft_vocab_size),
    "recipes/smollm2/eagle3.yaml": lambda draft: eagle3(*SMOLLM2, draft.draft_vocab_size),
    "recipes/smollm2/eagle3_more.yaml": lambda draft: eagle3(*SMOLLM2, draft.draft_vocab_size),
    "recipes/smollm2/eagle3_all.yaml": lambda draft: eagle3(*SMOLLM2, draft.draft_vocab_size),
    "recipes/eagle3.yaml": lambda draft: eagle3(*SMOLLM2, draft.draft_vocab_size),
    # fc over (embedding, feature); a layer without its first norm.
    "recipes/smollm2/eagle1.yaml": lambda draft: 2 * 576 * 576 + block(*SMOLLM2) - 576,
    # Residual blocks, without a bias; the target's head serves all.
    "recipes/smollm2/medusa.yaml": lambda draft: draft.num_heads * draft.num_layers * 576 * 576,
    # Blocks of the target, the last norm, and the embedding, which is the head, too.
    "recipes/smollm2/draft_lm.yaml": lambda draft: len(draft.layers) * block(*SMOLLM2) + 576 + 49152 * 576,
    "recipes/eagle_llama70b.yaml": lambda draft: eagle3(8192, 28672, 64, 8, 128, 32000),
    "recipes/eagle3_qwen3_8b.yaml": lambda draft: eagle3(4096, 12288, 32, 8, 128, 32000),
    "recipes/medusa_llama8b.yaml": lambda draft: 5 * (4096 * 4096 + 4096 * 128256),
    # Llama-3.2-1B as published: 1.24 B.
    "recipes/draft_llama70b.yaml": lambda draft: 16 * block(2048, 8192, 32, 8, 64) + 2048 + 128256 * 2048,
}


def test_the_recipes_of_the_readme_are_there() -> None:
    assert set(RECIPES) == set(SAVED)


@pytest.mark.parametrize("path", RECIPES)
def test_a_shipped_recipe_loads_and_builds_its_draft(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = load_recipe(path)
    overrides = []
    if recipe.drafter.family == "draft_lm" and recipe.drafter.init == "checkpoint":
        overrides = [f"drafter.checkpoint={CONFIGS / 'llama-3.2-1b'}"]
    recipe = load_recipe(path, overrides)
    text = load_text_config(TargetConfig(model=str(CONFIGS / TARGETS[recipe.target.model])))
    drafter = build_drafter(recipe.drafter, text, device="meta")
    count = sum(parameter.numel() for parameter in drafter.parameters())
    trained = sum(parameter.numel() for parameter in drafter.parameters() if parameter.requires_grad)
    with capsys.disabled():
        print(f"\n{path}: {recipe.drafter.family}, {count:,} parameters, {trained:,} trained", end="")
    assert all(parameter.is_meta for parameter in drafter.parameters())
    assert count == SAVED[path](recipe.drafter)


@pytest.mark.parametrize("path", RECIPES)
def test_the_first_lines_are_the_commands_that_run_it(path: str) -> None:
    text = (ROOT / path).read_text(encoding="utf-8")
    recipe = load_recipe(path)
    header = text[: text.index("\nname:")]
    assert f"drafttrain/train.py {path}" in header
    assert f"drafttrain eval {recipe.run_folder} --suite eval/suites/core.yaml" in header


@pytest.mark.parametrize("path", sorted((ROOT / "recipes" / "accelerate").glob("*.yaml")), ids=lambda p: p.name)
def test_launch_configs_name_known_keys(path: Path) -> None:
    from accelerate.commands.config.config_args import load_config_from_file

    assert yaml.safe_load(path.read_text(encoding="utf-8"))["compute_environment"] == "LOCAL_MACHINE"
    loaded = load_config_from_file(str(path))
    assert loaded.num_processes == 1
