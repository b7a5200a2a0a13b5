"""Parts of a Llama-style decoder layer, as drafts use them. Parameter names are those that serving engines
load.

Weights are used through `pack` functions that cast and concatenate them once (per unroll in training, per
`prepare_for_inference` when serving): one matrix product for q, k, v and one for gate and up.

B rows, T slots, H hidden, Hq/Hkv heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafttrain.ops.recompute import rms_norm

_SCALED_FROM_PRETRAINING = ("llama3", "yarn", "longrope")


class RMSNorm(nn.Module):
    """Root mean square norm of [..., size] with a weight (not 1 + weight)."""

    def __init__(self, size: int, eps: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size, device=device))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size] in x's dtype."""
        return rms_norm(x, self.weight.to(x.dtype), self.eps)


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, hidden: int, intermediate: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, intermediate, bias=False, device=device)
        self.up_proj = nn.Linear(hidden, intermediate, bias=False, device=device)
        self.down_proj = nn.Linear(intermediate, hidden, bias=False, device=device)

    def pack(self, dtype: torch.dtype) -> Tensor:
        """Gate and up as one matrix [2 * intermediate, H]."""
        return torch.cat([self.gate_proj.weight.to(dtype), self.up_proj.weight.to(dtype)])


class SelfAttention(nn.Module):
    """The projections of grouped-query attention; the attention itself is the cache's."""

    def __init__(
        self,
        in_features: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale = head_dim**-0.5
        self.q_proj = nn.Linear(in_features, heads * head_dim, bias=False, device=device)
        self.k_proj = nn.Linear(in_features, kv_heads * head_dim, bias=False, device=device)
        self.v_proj = nn.Linear(in_features, kv_heads * head_dim, bias=False, device=device)
        self.o_proj = nn.Linear(heads * head_dim, hidden, bias=False, device=device)

    def pack(self, dtype: torch.dtype) -> Tensor:
        """q, k and v as one matrix [(Hq + 2 Hkv) * D, in_features]."""
        return torch.cat([self.q_proj.weight.to(dtype), self.k_proj.weight.to(dtype), self.v_proj.weight.to(dtype)])

    def split(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Packed [B, T, (Hq + 2 Hkv) * D] -> rotated q [B, Hq, T, D], rotated k and v [B, Hkv, T, D]."""
        batch, slots, _ = qkv.shape
        heads = qkv.view(batch, slots, self.heads + 2 * self.kv_heads, self.head_dim).transpose(1, 2)
        turning = self.heads + self.kv_heads
        qk = rotate(heads[:, :turning], cos, sin)
        return qk[:, : self.heads], qk[:, self.heads :], heads[:, turning:]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding in the half-split layout of transformers.

    Args:
        x: [B, heads, T, D].
        cos, sin: [B, 1, T, R / 2]; the first R <= D entries of each head turn, the rest pass.
    """
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return torch.cat([*turned, x[..., 2 * half :]] if 2 * half < x.shape[-1] else turned, dim=-1)


def rope_parameters_of(config: Any) -> dict[str, Any]:
    """The rotary parameters of a Hugging Face text config, in transformers 5 form.

    Reads `rope_parameters` (nested by layer type: that of full attention) and the older `rope_theta`,
    `rope_scaling` and `partial_rotary_factor`.

    Returns:
        At least `rope_type` and `rope_theta`.
    """
    nested = dict(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    inner = [value for value in nested.values() if isinstance(value, dict)]
    parameters = dict(nested.get("full_attention") or inner[0]) if inner else nested
    kind = parameters.pop("type", None)
    parameters.setdefault("rope_type", kind or "default")
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = float(getattr(config, "rope_theta", None) or 10000.0)
    factor = getattr(config, "partial_rotary_factor", None)
    if factor is not None:
        parameters.setdefault("partial_rotary_factor", factor)
    if parameters["rope_type"] in _SCALED_FROM_PRETRAINING:
        original = getattr(config, "original_max_position_embeddings", None)
        parameters.setdefault("original_max_position_embeddings", original or config.max_position_embeddings)
    return parameters


def draft_rope_parameters(config: Any) -> dict[str, Any]:
    """Those that a draft turns with: the target's.

    But where it turns a part of its wider heads ("proportional", Gemma 4), a draft turns whole ones at the same base:
    no engine knows that kind in a draft.
    """
    parameters = rope_parameters_of(config)
    if parameters["rope_type"] == "proportional":
        return {"rope_type": "default", "rope_theta": parameters["rope_theta"]}
    return parameters


def block_config(config: Any, index: int = 0) -> Any:
    """The config of one block, where blocks differ in size (Gemma 4); else the config itself."""
    return config.per_layer_config[index] if getattr(config, "is_heterogeneous", False) else config


class Rotary(nn.Module):
    """cos and sin for rotary positions, with every scaling that transformers knows.

    Kinds whose frequencies depend on the length of the input (dynamic, longrope) use those of the pretraining
    length: a draft must rotate cached keys and new queries alike.

    Args:
        parameters: as `rope_parameters_of` returns them.
        head_dim: D.
        max_positions: `max_position_embeddings`.
    """

    inv_freq: Tensor

    def __init__(
        self,
        parameters: dict[str, Any],
        head_dim: int,
        max_positions: int,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        kind = parameters["rope_type"]
        if kind == "default":
            size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
            exponents = torch.arange(0, size, 2, dtype=torch.int64).float() / size
            inv_freq, self.factor = 1.0 / parameters["rope_theta"] ** exponents, 1.0
        elif kind in ROPE_INIT_FUNCTIONS:
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_positions,
                rope_parameters=dict(parameters),
            )
            inv_freq, self.factor = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        else:
            raise ValueError(f"rotary scaling {kind!r} is not one of default, {', '.join(ROPE_INIT_FUNCTIONS)}")
        self.register_buffer("inv_freq", inv_freq.to(device), persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        # A draft cast to bf16 keeps fp32 frequencies: rounded ones drift with the position.
        frequencies = self.inv_freq
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not frequencies.is_meta:
            self.inv_freq = frequencies.to(self.inv_freq.device)
        return self

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions int64 [B, T] -> cos and sin [B, 1, T, R / 2]."""
        angles = positions[:, None, :, None] * self.inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self.factor != 1.0:
            cos, sin = cos * self.factor, sin * self.factor
        return cos.to(dtype), sin.to(dtype)


def compute_dtype(weight: Tensor) -> torch.dtype:
    """The dtype to compute in: autocast's where it is on, else the weight's."""
    kind = weight.device.type
    if kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return weight.dtype
