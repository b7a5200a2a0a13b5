"""Products of a causal LM's forward, counted from shapes: two operations for each multiply-add.

Norms, rotary embeddings, activations and softmax are left out; they are below a hundredth of the rest. A query
attends to half of its document on average, which kernels that skip the masked half need.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from drafttrain.modeling.blocks import block_config


@dataclass(frozen=True)
class Flops:
    """Of one sample.

    Attributes:
        linear: products with weights of the body; attention: scores and values; head: products with a head.
    """

    linear: float = 0.0
    attention: float = 0.0
    head: float = 0.0

    @property
    def total(self) -> float:
        """All three."""
        return self.linear + self.attention + self.head

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.linear + other.linear, self.attention + other.attention, self.head + other.head)


def body_flops(model: nn.Module, tokens: int) -> Flops:
    """One forward of a causal LM over a document, without its head."""
    text = model.config.get_text_config()  # type: ignore[union-attr, operator]
    width = text.num_attention_heads * head_dim(text)
    attention = text.num_hidden_layers * attention_flops(width, tokens)
    return Flops(linear=2.0 * active_matrices(model) * tokens, attention=attention)


def attention_flops(width: int, tokens: int) -> float:
    """Scores and values of causal attention with `width` = heads * head size."""
    return 4.0 * width * tokens * (tokens + 1) / 2


def active_matrices(model: nn.Module) -> int:
    """Weights that a token is multiplied with in the body: no embedding, no head, of experts those that are chosen."""
    text = model.config.get_text_config()  # type: ignore[union-attr, operator]
    outside = {
        id(module.weight)
        for module in (model.get_input_embeddings(), model.get_output_embeddings())  # type: ignore[operator]
        if module is not None
    }
    experts = getattr(text, "num_experts", None) or getattr(text, "num_local_experts", None)
    share = (getattr(text, "num_experts_per_tok", None) or 1) / experts if experts else 1.0
    count = 0.0
    for name, parameter in model.named_parameters():
        if id(parameter) in outside or parameter.dim() < 2 or name.endswith((".lora_A", ".lora_B")):
            continue
        count += parameter.numel() * (share if parameter.dim() == 3 else 1.0)
    return round(count)


def head_dim(text: Any) -> int:
    """Of a Hugging Face text config; of its first block, where they differ."""
    block = block_config(text)
    return int(getattr(block, "head_dim", None) or block.hidden_size // block.num_attention_heads)
