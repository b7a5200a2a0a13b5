"""The published drafts' own math, written down from the papers on raw tensors: nothing of drafttrain runs here.

T slots, H hidden, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]


def rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight."""
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def rope(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding of [T, heads, D], halves turned against each other."""
    half = x.shape[-1] // 2
    angles = positions[:, None].float() / theta ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


@dataclass
class Layer:
    """A Llama layer with keys and values kept; `prefix` names its tensors."""

    tensors: Tensors
    prefix: str
    heads: int
    kv_heads: int
    theta: float
    eps: float
    keys: list[Tensor] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def weight(self, name: str) -> Tensor:
        return self.tensors[f"{self.prefix}.{name}.weight"]

    def run(self, attended: Tensor, residual: Tensor, positions: Tensor) -> Tensor:
        """`attended` [T, in] feeds q, k and v; `residual` [T, H] is added behind attention."""
        slots = attended.shape[0]
        q, k, v = (
            F.linear(attended, self.weight(f"self_attn.{name}_proj")).view(slots, heads, -1)
            for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads))
        )
        self.keys.append(rope(k, positions, self.theta))
        self.values.append(v)
        keys, values = torch.cat(self.keys), torch.cat(self.values)
        group = self.heads // self.kv_heads
        scores = torch.einsum("thd,shd->hts", rope(q, positions, self.theta), keys.repeat_interleave(group, 1))
        offset = keys.shape[0] - slots
        causal = torch.arange(keys.shape[0])[None] <= torch.arange(slots)[:, None] + offset
        weights = (scores / q.shape[-1] ** 0.5).masked_fill(~causal, -torch.inf).softmax(-1)
        mixed = torch.einsum("hts,shd->thd", weights, values.repeat_interleave(group, 1)).reshape(slots, -1)
        state = residual + F.linear(mixed, self.weight("self_attn.o_proj"))
        normed = rms(state, self.weight("post_attention_layernorm"), self.eps)
        gate, up = (F.linear(normed, self.weight(f"mlp.{name}_proj")) for name in ("gate", "up"))
        return state + F.linear(F.silu(gate) * up, self.weight("mlp.down_proj"))


def eagle3_chain(
    tensors: Tensors,
    prefix: str,
    embedding: Tensor,
    features: Tensor,
    tokens: list[Tensor],
    *,
    heads: int,
    kv_heads: int,
    theta: float,
    eps: float,
    per_tap: bool = False,
    norm_output: bool = False,
    norm_before_residual: bool = False,
) -> list[Tensor]:
    """EAGLE-3: logits over the draft's vocabulary at every slot of the prefix, then at each further step.

    Args:
        features: [T, n * H], the target's states, concatenated.
        tokens: [T], the tokens behind each slot, then [1] for each further step.
    """
    layer = Layer(tensors, prefix, heads, kv_heads, theta, eps)
    if per_tap:
        parts = features.chunk(3, -1)
        features = torch.cat([rms(part, tensors[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)], -1)
    state, position, logits = F.linear(features, tensors["fc.weight"]), 0, []
    for step in tokens:
        positions = torch.arange(position, position + len(step))
        normed = rms(state, layer.weight("hidden_norm"), eps)
        embedded = rms(embedding[step], layer.weight("input_layernorm"), eps)
        residual = normed if norm_before_residual else state
        out = layer.run(torch.cat([embedded, normed], -1), residual, positions)
        read = rms(out, tensors["norm.weight"], eps)
        logits.append(F.linear(read, tensors["lm_head.weight"]))
        state = (read if norm_output else out)[-1:]
        position += len(step)
    return logits


def eagle1_chain(
    tensors: Tensors,
    embedding: Tensor,
    head: Tensor,
    features: Tensor,
    tokens: list[Tensor],
    *,
    heads: int,
    kv_heads: int,
    theta: float,
    eps: float,
) -> list[Tensor]:
    """EAGLE-1: the same, over the target's vocabulary; `features` [T, H] are behind its final norm."""
    layer = Layer(tensors, "layers.0", heads, kv_heads, theta, eps)
    state, position, logits = features, 0, []
    for step in tokens:
        positions = torch.arange(position, position + len(step))
        fused = F.linear(torch.cat([embedding[step], state], -1), tensors["fc.weight"], tensors.get("fc.bias"))
        out = layer.run(fused, fused, positions)
        logits.append(F.linear(out, head))
        state = out[-1:]
        position += len(step)
    return logits


def medusa_logits(tensors: Tensors, features: Tensor, heads: int, layers: int) -> list[Tensor]:
    """Medusa's original modules `{head}.{layer}.linear`, then `{head}.{layers}`."""
    logits = []
    for head in range(heads):
        x = features
        for i in range(layers):
            name = f"{head}.{i}.linear"
            x = x + F.silu(F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"]))
        logits.append(F.linear(x, tensors[f"{head}.{layers}.weight"]))
    return logits
