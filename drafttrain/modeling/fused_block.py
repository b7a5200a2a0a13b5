"""Llama-style blocks on CPUs in few operations: with a handful of rows, what lies between the products costs as much
as they do.

The parameters and the result are those of the block, in another order of roundings: residuals are added inside the
products (oneDNN), q and k turn together. A block is replaced only where one trial gives what the block itself gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.modeling.attention import attend
from drafttrain.ops.packed_linear import PackedProduct, packed_product
from drafttrain.ops.recompute import rms_norm

# Blocks of transformers whose whole computation is the one here.
_KNOWN = frozenset(
    f"transformers.models.{family.lower()}.modeling_{family.lower()}.{family}DecoderLayer"
    for family in ("Llama", "Mistral", "Qwen2", "Qwen3")
)
# Of the norm of a block's output; bf16 rounds to 8 bits, several times in a row.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
_TRIAL_TOKENS, _TRIAL_SIZE = 8, 0.05


def fuse_blocks(blocks: Sequence[nn.Module]) -> int:
    """Let blocks whose weights are packed run fused where no gradient is wanted; others stay as they are.

    The fused blocks do not follow later changes of the weights: pack and call it again after one.

    Returns:
        how many were fused.
    """
    unfuse_blocks(blocks)
    turns = _Turns()
    count = 0
    for block in blocks:
        fused = _fused(block, turns)
        if fused is not None:
            block.forward = fused
            count += 1
    return count


def unfuse_blocks(blocks: Sequence[nn.Module]) -> None:
    """Give blocks their own forward back."""
    for block in blocks:
        if isinstance(block.forward, _FusedBlock):
            del block.forward


def _fused(block: nn.Module, turns: _Turns) -> _FusedBlock | None:
    kind = type(block)
    if f"{kind.__module__}.{kind.__qualname__}" not in _KNOWN:
        return None
    try:
        fused = _FusedBlock(block, turns)
        return fused if fused.agrees() else None
    except (AttributeError, RuntimeError, TypeError, ValueError):
        # Another release of transformers, a hand-made module: the block itself is always right.
        return None


class _Turns:
    """cos and sin of a forward, [B, 1, T, D] each, made ready once for all of its blocks.

    The sine's first half is negative: a head turns by head * cos + swap(head) * sine, swap exchanging its halves.
    """

    def __init__(self) -> None:
        self._last: tuple[Tensor, Tensor, Tensor] | None = None

    def of(self, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # One read and one write of the attribute: another thread's turns are never taken for these.
        last = self._last
        if last is None or last[0] is not sin:
            half = sin.shape[-1] // 2
            signed = torch.cat([-sin[..., :half], sin[..., half:]], -1)
            self._last = last = sin, cos.unsqueeze(1), signed.unsqueeze(1)
        return last[1], last[2]


class _FusedBlock:
    """In place of the block's forward. Called as transformers calls a block."""

    def __init__(self, block: Any, turns: _Turns) -> None:
        attention, mlp = block.self_attn, block.mlp
        self.block, self._turns = block, turns
        self._qkv, self._o = _packed(attention.q_proj, 3), _packed(attention.o_proj)
        self._gate_up, self._down = _packed(mlp.gate_proj, 2), _packed(mlp.down_proj)
        if not isinstance(mlp.act_fn, nn.SiLU) and type(mlp.act_fn).__name__ != "SiLUActivation":
            raise ValueError(f"{type(mlp.act_fn).__name__} is not SiLU")
        self._layer: int = attention.layer_idx
        self._dim: int = attention.head_dim
        self._heads, self._kv_heads = (m.out_features // self._dim for m in (attention.q_proj, attention.k_proj))
        self._scale: float = attention.scaling
        self._norms = tuple(_norm(m) for m in (block.input_layernorm, block.post_attention_layernorm))
        names = [name for name in ("q_norm", "k_norm") if hasattr(attention, name)]
        self._head_norms = tuple(_norm(getattr(attention, name)) for name in names)
        if len(names) == 1:
            raise ValueError(f"{names[0]} without the other")

    def __call__(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        cache: Any = None,
        use_cache: bool | None = False,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        **more: Any,
    ) -> Tensor:
        """hidden_states [B, T, H] -> [B, T, H]."""
        x = hidden_states
        if torch.is_grad_enabled() or x.dtype != self._qkv.dtype or position_embeddings is None:
            return self._plain(
                x,
                attention_mask=attention_mask,
                position_ids=position_ids,
                cache=cache,
                use_cache=use_cache,
                position_embeddings=position_embeddings,
                **more,
            )
        if cache is None:
            cache = more.get("past_key_values")  # its name before transformers 5.2x
        cos, sin = self._turns.of(*position_embeddings)
        q, k, v = self._heads_of(rms_norm(x, *self._norms[0]), cos, sin)
        if cache is not None:
            k, v = cache.update(k, v, self._layer)
        mixed = attend(q, k, v, attention_mask, self._scale)
        x = self._o(mixed.transpose(1, 2).reshape(*x.shape[:2], -1), x)
        gate, up = self._gate_up(rms_norm(x, *self._norms[1])).chunk(2, -1)
        return self._down(F.silu(gate).mul_(up), x)

    def agrees(self) -> bool:
        """Whether a trial gives what the block itself gives."""
        weight = self._norms[0][0]
        generator = torch.Generator().manual_seed(0)
        # Small, so that the residual does not hide what attention and MLP give: norms make them as large as ever.
        x = torch.randn(1, _TRIAL_TOKENS, weight.numel(), generator=generator).mul(_TRIAL_SIZE).to(weight.dtype)
        angles = torch.rand(1, _TRIAL_TOKENS, self._dim // 2, generator=generator)
        angles = torch.cat([angles, angles], -1)
        turns = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        with torch.inference_mode():
            own = self._plain(x, attention_mask=None, position_embeddings=turns)
            fused = self(x, position_embeddings=turns)
        return own.shape == fused.shape and bool((own - fused).norm() <= _TOLERANCE[x.dtype] * own.norm())

    def _plain(self, *args: Any, **kwargs: Any) -> Tensor:
        states: Tensor = type(self.block).forward(self.block, *args, **kwargs)
        return states

    def _heads_of(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Normed x [B, T, H] -> turned q [B, Hq, T, D], turned k and v [B, Hkv, T, D]."""
        heads = self._qkv(x).view(*x.shape[:2], -1, self._dim).transpose(1, 2)
        turning = self._heads + self._kv_heads
        qk, v = heads[:, :turning], heads[:, turning:]
        if self._head_norms:
            q_norm, k_norm = self._head_norms
            qk = torch.cat([rms_norm(qk[:, : self._heads], *q_norm), rms_norm(qk[:, self._heads :], *k_norm)], 1)
        half = self._dim // 2
        swapped = torch.cat([qk[..., half:], qk[..., :half]], -1)
        qk = torch.addcmul(qk * cos, swapped, sin)
        return qk[:, : self._heads], qk[:, self._heads :], v


def _packed(module: nn.Module, together: int = 1) -> PackedProduct:
    product = packed_product(module, together)
    if product is None:
        raise ValueError("not packed")
    return product


def _norm(module: Any) -> tuple[Tensor, float]:
    return module.weight.detach(), float(module.variance_epsilon)
