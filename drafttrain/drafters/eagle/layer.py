"""One decoder layer of an EAGLE draft.

The products that depend on a token's embedding alone are taken apart from those on the state: W cat(e, h) =
W_e e + W_h h. Training computes the first once for all unrolled steps, since step k only reads it k slots
further on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafttrain.drafters.arch import DraftArch
from drafttrain.drafters.base import DraftCache
from drafttrain.modeling.blocks import GatedMLP, RMSNorm, SelfAttention
from drafttrain.modeling.compiled import compiled
from drafttrain.ops.packed_linear import Matrix, linear
from drafttrain.ops.recompute import gated_linear, normed_linear


class LayerWeights(NamedTuple):
    """A layer's weights in the compute dtype, packed for few matrix products.

    qkv: [(Hq + 2 Hkv) * D, H] on the state; qkv_embedding: the same on the embedding, or None.
    """

    qkv: Matrix
    qkv_embedding: Matrix | None
    o: Matrix
    gate_up: Matrix
    down: Matrix
    state_norm: Tensor | None
    embedding_norm: Tensor | None
    post_norm: Tensor


class EagleLayer(nn.Module):
    """Attention and gated MLP with residuals.

    Args:
        arch: sizes.
        reads_embedding: EAGLE-3's first layer: q, k and v also read the normed embedding, and the state's
            norm is called `hidden_norm`; `input_layernorm` is the embedding's.
        state_norm: whether the state is normed before attention (EAGLE-1's only layer is not).
        norm_before_residual: the residual is the normed state.
    """

    def __init__(
        self,
        arch: DraftArch,
        *,
        reads_embedding: bool,
        state_norm: bool = True,
        norm_before_residual: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps = arch.rms_norm_eps
        self.reads_embedding, self.norm_before_residual = reads_embedding, norm_before_residual
        hidden, embedding = arch.hidden_size, arch.target_hidden_size
        in_features = hidden + embedding if reads_embedding else hidden
        self.self_attn = SelfAttention(
            in_features, hidden, arch.num_heads, arch.num_kv_heads, arch.head_dim, device=device
        )
        self.mlp = GatedMLP(hidden, arch.intermediate_size, device=device)
        if reads_embedding:
            self.input_layernorm: RMSNorm | None = RMSNorm(embedding, self.eps, device=device)
            self.hidden_norm: RMSNorm | None = RMSNorm(hidden, self.eps, device=device)
        else:
            self.input_layernorm = RMSNorm(hidden, self.eps, device=device) if state_norm else None
            self.hidden_norm = None
        self.post_attention_layernorm = RMSNorm(hidden, self.eps, device=device)

    def compile_training(self) -> None:
        """See `Drafter.compile_training`."""
        self._before = compiled(self._before)  # type: ignore[method-assign]
        self._after = compiled(self._after)  # type: ignore[method-assign]

    def pack(self, dtype: torch.dtype) -> LayerWeights:
        """Cast and concatenate the weights; differentiable."""
        qkv, embedding = self.self_attn.pack(dtype), None
        if self.reads_embedding:
            split = qkv.shape[1] - self.post_attention_layernorm.weight.shape[0]
            embedding, qkv = qkv[:, :split].contiguous(), qkv[:, split:].contiguous()
        state_norm = self.hidden_norm if self.reads_embedding else self.input_layernorm
        embedding_norm = self.input_layernorm if self.reads_embedding else None
        return LayerWeights(
            qkv=qkv,
            qkv_embedding=embedding,
            o=self.self_attn.o_proj.weight.to(dtype),
            gate_up=self.mlp.pack(dtype),
            down=self.mlp.down_proj.weight.to(dtype),
            state_norm=None if state_norm is None else state_norm.weight.to(dtype),
            embedding_norm=None if embedding_norm is None else embedding_norm.weight.to(dtype),
            post_norm=self.post_attention_layernorm.weight.to(dtype),
        )

    def read_embedding(self, weights: LayerWeights, embedding: Tensor) -> Tensor | None:
        """The part of q, k, v that comes from the embedding [B, T, Ht] -> [B, T, (Hq + 2 Hkv) * D]."""
        if weights.qkv_embedding is None or weights.embedding_norm is None:
            return None
        return normed_linear(embedding, weights.embedding_norm, self.eps, weights.qkv_embedding)[1]

    def run(
        self,
        weights: LayerWeights,
        index: int,
        state: Tensor,
        from_embedding: Tensor | None,
        cos: Tensor,
        sin: Tensor,
        cache: DraftCache,
        recompute: bool = False,
    ) -> Tensor:
        """state [B, T, H] -> [B, T, H], without a norm at the end.

        Args:
            index: the layer's number in the cache.
            from_embedding: of `read_embedding`, or None.
            recompute: keep no activations of what stands before and after the attention (gradient
                checkpointing).
        """
        if recompute:
            before = checkpoint(self._before, weights, state, from_embedding, cos, sin, use_reentrant=False)
        else:
            before = self._before(weights, state, from_embedding, cos, sin)
        residual, q, k, v = before
        attended = cache.attend(index, q, k, v, self.self_attn.scale)
        if recompute:
            after: Tensor = checkpoint(self._after, weights, residual, attended, recompute, use_reentrant=False)
            return after
        return self._after(weights, residual, attended, recompute)

    def _before(
        self, weights: LayerWeights, state: Tensor, from_embedding: Tensor | None, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if weights.state_norm is None:
            normed, qkv = state, linear(state, weights.qkv)
        else:
            normed, qkv = normed_linear(state, weights.state_norm, self.eps, weights.qkv)
        if from_embedding is not None:
            qkv = qkv + from_embedding
        return (normed if self.norm_before_residual else state, *self.self_attn.split(qkv, cos, sin))

    def _after(self, weights: LayerWeights, residual: Tensor, attended: Tensor, checkpointed: bool) -> Tensor:
        state = residual + linear(attended.transpose(1, 2).flatten(2), weights.o)
        _, gate_up = normed_linear(state, weights.post_norm, self.eps, weights.gate_up)
        return state + gated_linear(gate_up, weights.down, checkpointed=checkpointed)
