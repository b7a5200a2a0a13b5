"""Sizes of a draft, resolved from the recipe and the target. Saved with the draft."""

from __future__ import annotations

from typing import Any

from drafttrain.config import Config
from drafttrain.modeling.blocks import block_config, draft_rope_parameters


class DraftArch(Config):
    """What the modules are built from.

    Attributes:
        hidden_size: H of the draft.
        target_hidden_size: width of one tap.
        vocab_size: rows of the target's embedding and head.
        rope_parameters: the target's, as `draft_rope_parameters` gives them.
        max_position_embeddings: the target's.
    """

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict[str, Any]
    target_hidden_size: int
    target_layers: int
    vocab_size: int

    @staticmethod
    def from_target(
        text: Any,
        *,
        hidden_size: int | None = None,
        intermediate_size: int | None = None,
        num_heads: int | None = None,
        num_kv_heads: int | None = None,
    ) -> DraftArch:
        """Sizes like the target's, but for those given.

        Args:
            text: the target's Hugging Face text config.
        """
        block = block_config(text)
        hidden = hidden_size or text.hidden_size
        heads = num_heads or block.num_attention_heads
        if hidden_size is None and num_heads is None:
            head_dim = getattr(block, "head_dim", None) or hidden // heads
            kv_heads = num_kv_heads or getattr(block, "num_key_value_heads", None) or heads
        else:
            head_dim = hidden // heads if num_heads else (getattr(block, "head_dim", None) or hidden // heads)
            kv_heads = num_kv_heads or min(getattr(block, "num_key_value_heads", None) or heads, heads)
        if heads % kv_heads:
            raise ValueError(f"num_heads {heads} is not a multiple of num_kv_heads {kv_heads}")
        if head_dim % 2:
            raise ValueError(f"hidden_size {hidden} / num_heads {heads} gives a head of {head_dim}: it must be even")
        return DraftArch(
            hidden_size=hidden,
            intermediate_size=intermediate_size or _intermediate(block, hidden),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            rms_norm_eps=_norm_eps(text),
            max_position_embeddings=getattr(text, "max_position_embeddings", None) or 4096,
            rope_parameters=draft_rope_parameters(text),
            target_hidden_size=text.hidden_size,
            target_layers=text.num_hidden_layers,
            vocab_size=text.vocab_size,
        )


def _intermediate(text: Any, hidden: int) -> int:
    size = getattr(text, "intermediate_size", None)
    return size if isinstance(size, int) else 4 * hidden


def _norm_eps(text: Any) -> float:
    for name in ("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon", "norm_eps"):
        value = getattr(text, name, None)
        if value is not None:
            return float(value)
    return 1e-5
