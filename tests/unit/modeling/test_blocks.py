"""Rotary parameters from either form of config, and blocks against those of transformers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

from drafttrain.modeling.blocks import RMSNorm, Rotary, rope_parameters_of, rotate
from drafttrain.ops.recompute import rms_norm
from tests.support import KINDS, tiny_hf

SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 500000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "llama3": KINDS["llama3-rope"][1]["rope_parameters"],
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [2.0, 3.0, 4.0, 5.0],
        "original_max_position_embeddings": 64,
    },
}


@pytest.mark.parametrize("kind", list(SCALINGS))
def test_rotation_equals_transformers(kind: str) -> None:
    config = LlamaConfig(
        hidden_size=32, num_attention_heads=4, max_position_embeddings=128, rope_parameters=dict(SCALINGS[kind])
    )
    positions = torch.tensor([[0, 1, 7, 50], [3, 4, 5, 63]])
    q, k = torch.randn(2, 4, 4, 8), torch.randn(2, 2, 4, 8)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions)
    expected = apply_rotary_pos_emb(q, k, cos, sin)
    ours = Rotary(rope_parameters_of(config), 8, 128)(positions, torch.float32)
    torch.testing.assert_close(rotate(q, *ours), expected[0])
    torch.testing.assert_close(rotate(k, *ours), expected[1])


def test_old_and_new_keys_give_the_same_parameters() -> None:
    scaling = {k: v for k, v in SCALINGS["llama3"].items() if k not in ("rope_theta", "rope_type")}
    old = SimpleNamespace(rope_theta=5000.0, rope_scaling={"type": "llama3", **scaling}, max_position_embeddings=128)
    new = SimpleNamespace(rope_parameters=SCALINGS["llama3"], max_position_embeddings=128)
    assert rope_parameters_of(old) == rope_parameters_of(new) == SCALINGS["llama3"]
    plain = SimpleNamespace(rope_theta=1e6, rope_scaling=None, max_position_embeddings=128)
    assert rope_parameters_of(plain) == {"rope_type": "default", "rope_theta": 1e6}


def test_parameters_of_targets() -> None:
    assert rope_parameters_of(tiny_hf("llama3-rope").config)["rope_theta"] == 5000.0
    # One entry a layer type: a draft layer attends to everything.
    gemma3 = tiny_hf("gemma3").config
    assert rope_parameters_of(gemma3) == gemma3.rope_parameters["full_attention"]
    partial = SimpleNamespace(rope_theta=1e4, partial_rotary_factor=0.5, max_position_embeddings=128)
    assert rope_parameters_of(partial)["partial_rotary_factor"] == 0.5


def test_partial_rotary_factor_leaves_the_rest_alone() -> None:
    parameters = rope_parameters_of(tiny_hf("phi").config)
    assert parameters["partial_rotary_factor"] == 0.5
    cos, sin = Rotary(parameters, 8, 128)(torch.tensor([[9]]), torch.float32)
    x = torch.randn(1, 2, 1, 8)
    turned = rotate(x, cos, sin)
    assert torch.equal(turned[..., 4:], x[..., 4:])
    assert not torch.allclose(turned[..., :4], x[..., :4])


def test_unknown_scaling_is_named() -> None:
    with pytest.raises(ValueError, match="'spiral' is not one of"):
        Rotary({"rope_type": "spiral", "rope_theta": 1e4}, 8, 128)


def test_frequencies_stay_fp32_in_a_cast_model() -> None:
    rotary = Rotary(SCALINGS["default"], 8, 128)
    before = rotary.inv_freq.clone()
    assert torch.equal(rotary.to(torch.bfloat16).inv_freq, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    theirs, ours = LlamaRMSNorm(16, eps=1e-5).to(dtype), RMSNorm(16, 1e-5).to(dtype)
    with torch.no_grad():
        ours.weight.copy_(theirs.weight.copy_(torch.randn(16)))
    x = torch.randn(3, 16).to(dtype)
    torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(rms_norm(x, ours.weight, 1e-5), theirs(x))
