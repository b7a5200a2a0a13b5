"""Memory of one rank: what is known to the byte, and estimates that say so.

Every rank holds the whole target and the whole draft (data parallel). B rows of T tokens, K depths, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.eagle.base import EagleDrafter
from drafttrain.drafters.lm.model import DraftLM
from drafttrain.drafters.medusa.model import MedusaDrafter
from drafttrain.features.sources import taps_with_final
from drafttrain.losses.fused import block_logits, chunk_logits
from drafttrain.recipe.schema import Recipe

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp32": 4, "bf16": 2}


@dataclass(frozen=True)
class Item:
    """A part of a rank's memory.

    Attributes:
        exact: it follows from parameter counts alone.
        phase: when it is there. Training and measuring take turns.
    """

    name: str
    nbytes: int
    exact: bool
    phase: Literal["always", "training", "measuring"] = "always"


def peak(items: Sequence[Item]) -> int:
    """Bytes of what is always there and of the larger of the two phases."""
    sums = {"always": 0, "training": 0, "measuring": 0}
    for item in items:
        sums[item.phase] += item.nbytes
    return sums["always"] + max(sums["training"], sums["measuring"])


def memory_items(recipe: Recipe, drafter: Drafter, target: nn.Module, ranks: int, on_cpu: bool) -> list[Item]:
    """All parts of one rank's memory."""
    training = recipe.training
    unit, target_unit = _BYTES[training.precision], _BYTES[recipe.target.dtype]
    text: Any = target.config.get_text_config()  # type: ignore[union-attr, operator]
    weights = sum(p.numel() for p in drafter.parameters())
    trained = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    tokens = training.batch_rows * training.row_length
    taps = len(taps_with_final(drafter.feature_spec))
    items = [
        Item("target weights", target_unit * sum(p.numel() for p in target.parameters()), True),
        Item("draft weights, fp32", 4 * weights, True),
        Item("gradients, fp32", 4 * trained, True),
        Item("Adam moments, fp32", 8 * trained, True),
    ]
    if ranks > 1:
        items.append(Item("gradient buckets of DDP", 4 * trained, True))
    if unit == 2:
        items.append(Item("bf16 copies of the draft's weights", 2 * weights, True, "training"))
    recompute = training.gradient_checkpointing
    transient = {
        "activations of the draft": activation_bytes(drafter, tokens, unit, recompute),
        "features of a micro-batch": tokens * taps * text.hidden_size * (unit + target_unit),
        "logits of a chunk and rows of labels": _loss_bytes(drafter, tokens, unit, on_cpu),
    }
    if recipe.features.source in ("online", "hybrid"):
        transient["a forward of the target"] = _forward_bytes(text, recipe, target_unit)
    items += [Item(name, nbytes, False, "training") for name, nbytes in transient.items()]
    if recipe.evaluation.prompts:
        measuring = _serving_bytes(text, recipe, weights, target_unit)
        items.append(Item("measuring acceptance: copy of the draft, cache, logits", measuring, False, "measuring"))
    return items


def activation_bytes(drafter: Drafter, tokens: int, unit: int, recompute: bool) -> int:
    """What the backward needs of the forward over B * T = `tokens` slots and all depths, `unit` bytes an element.

    With `recompute`, one layer at a time is whole again.
    """
    elements = kept_elements(drafter, recompute)
    if recompute and not isinstance(drafter, MedusaDrafter):
        elements += _layer_elements(*_widths(drafter), recompute=False)
    return elements * tokens * unit


def kept_elements(drafter: Drafter, recompute: bool) -> int:
    """Elements a slot that lie between the forward and the backward; heads are apart, they run in chunks."""
    if isinstance(drafter, MedusaDrafter):
        # The input of each residual block and what its activation read; the first input is the feature.
        return drafter.config.num_heads * (2 * drafter.config.num_layers - 1) * drafter.arch.target_hidden_size
    widths = _widths(drafter)
    if isinstance(drafter, DraftLM):
        layers: int = drafter.lm.n_layers
        layer = widths[0] if recompute else _layer_elements(*widths, recompute=False)
        return layers * layer + 2 * widths[0]
    assert isinstance(drafter, EagleDrafter)
    once = len(drafter.feature_spec.taps) * drafter.arch.target_hidden_size + widths[1] + 2 * widths[2]
    per_depth = drafter.n_layers * _layer_elements(*widths, recompute=recompute) + 2 * widths[0]
    return drafter.max_depth * per_depth + once


def _widths(drafter: Drafter) -> tuple[int, int, int, int]:
    """Of a layer: hidden, all query heads, all key heads, MLP."""
    if isinstance(drafter, DraftLM):
        text: Any = drafter.lm.config
        dim, kv_heads = _head_dim(text), _kv_heads(text)
        return text.hidden_size, text.num_attention_heads * dim, kv_heads * dim, text.intermediate_size
    assert isinstance(drafter, EagleDrafter)
    arch = drafter.arch
    return arch.hidden_size, arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim, arch.intermediate_size


def _head_dim(text: Any) -> int:
    return int(getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)


def _kv_heads(text: Any) -> int:
    return int(getattr(text, "num_key_value_heads", None) or text.num_attention_heads)


def _layer_elements(hidden: int, q: int, kv: int, inner: int, *, recompute: bool) -> int:
    """Elements a slot that one decoder layer keeps.

    State and normed state before and behind the attention; q, k, v, the attended values and their transpose;
    gate, up, their activation and product. Recomputed layers keep their input, q, k, v and what was attended.
    """
    if recompute:
        return 3 * hidden + 3 * q + 2 * kv
    return 4 * hidden + 3 * q + 2 * kv + 4 * inner


def _loss_bytes(drafter: Drafter, tokens: int, unit: int, on_cpu: bool) -> int:
    device = torch.device("cpu" if on_cpu else "cuda")
    chunk, block = chunk_logits(device), block_logits(device)
    hidden = drafter.lm.hidden_size if isinstance(drafter, DraftLM) else drafter.saved_arch()["hidden_size"]
    # At most every token is a label: its rows and their gradients, and the target's rows.
    rows = tokens * int(hidden) * (2 * drafter.max_depth + 1) * unit
    return 2 * chunk * unit + 4 * block * 4 + rows


def _forward_bytes(text: Any, recipe: Recipe, unit: int) -> int:
    """Without gradients, one layer's largest intermediates and the captured states at a time."""
    inner = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    top1 = 1024 * text.vocab_size * unit
    return int(recipe.features.batch_tokens * (8 * text.hidden_size + 3 * inner) * unit + top1)


def _serving_bytes(text: Any, recipe: Recipe, draft_weights: int, unit: int) -> int:
    """A copy of the draft, the target's cache and the logits of one verification."""
    evaluation = recipe.evaluation
    rows = min(evaluation.batch_size, evaluation.prompts)
    length = recipe.data.max_length + evaluation.max_new_tokens
    cache = 2 * text.num_hidden_layers * _kv_heads(text) * _head_dim(text) * length * rows * unit
    return int(draft_weights * unit + cache + rows * (evaluation.k + 1) * text.vocab_size * 4)
