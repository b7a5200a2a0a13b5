"""Products of a draft's training step, by depth, counted from the shapes of its weights.

A product with a weight costs as much again in the backward for each gradient that is wanted: of the weight, where it
is trained (an adapter's gradient comes from that of the sum), and of the input, where something before it is trained.

L tokens of a document, K depths, H hidden, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.eagle.base import EagleDrafter
from drafttrain.drafters.eagle.eagle1 import Eagle1Drafter
from drafttrain.drafters.eagle.eagle3 import Eagle3Drafter
from drafttrain.drafters.eagle.layer import EagleLayer
from drafttrain.drafters.lm.model import DraftLM
from drafttrain.drafters.medusa.model import MedusaDrafter
from drafttrain.training.plan.products import Flops, attention_flops, body_flops

# Flash attention's backward recomputes the scores: five products where the forward has two.
_ATTENTION_BACKWARD = 2.5

Counted = tuple[list[Flops], list[Flops], list[Flops]]
"""By depth: forward, backward, and what checkpointing computes again: not the last product of a layer, whose result
the backward does not read."""


def draft_flops(drafter: Drafter, tokens: int, labels: Sequence[int]) -> Counted:
    """Of one document.

    Args:
        drafter: as it trains; may be on the meta device.
        tokens: L.
        labels: [K], supervised at each depth.
    """
    if isinstance(drafter, Eagle3Drafter):
        return _eagle3(drafter, tokens, labels)
    if isinstance(drafter, Eagle1Drafter):
        return _eagle1(drafter, tokens, labels)
    if isinstance(drafter, MedusaDrafter):
        return _medusa(drafter, tokens, labels)
    assert isinstance(drafter, DraftLM)
    return _draft_lm(drafter, tokens, labels)


def is_trained(modules: Iterable[nn.Module | None]) -> bool:
    """Whether anything in them is."""
    return any(p.requires_grad for module in modules if module is not None for p in module.parameters())


def _layer_backward(layer: EagleLayer, hidden: int, into: bool) -> tuple[float, float, bool]:
    """(multiply-adds a token of the backward on the state's path, those that checkpointing computes again, whether
    a gradient comes out of the layer).

    Args:
        into: whether the state that the layer reads wants a gradient.
    """
    attention, mlp = layer.self_attn, layer.mlp
    rows = _rows(layer)
    norm = layer.hidden_norm if layer.reads_embedding else layer.input_layernorm
    into = into or is_trained([norm])
    qkv = is_trained([attention.q_proj, attention.k_proj, attention.v_proj])
    count = float(rows * hidden * (qkv + into))
    through = into or qkv or (layer.reads_embedding and is_trained([layer.input_layernorm]))
    behind = through
    # Each of these follows on the one before; gate and up are one product.
    for modules, norm_before in (
        ((attention.o_proj,), None),
        ((mlp.gate_proj, mlp.up_proj), layer.post_attention_layernorm),
        ((mlp.down_proj,), None),
    ):
        behind = behind or is_trained([norm_before])
        trained = is_trained(modules)
        count += sum(module.weight.numel() for module in modules) * (trained + behind)
        behind = behind or trained
    # What no gradient goes through is not computed again, and of the rest not the last product.
    again = _layer_forward(layer, hidden) - mlp.down_proj.weight.numel() - (0 if through else rows * hidden)
    return count, again, behind


def _rows(layer: EagleLayer) -> int:
    attention = layer.self_attn
    return sum(module.weight.shape[0] for module in (attention.q_proj, attention.k_proj, attention.v_proj))


def _layer_forward(layer: EagleLayer, hidden: int) -> int:
    """Weights that a token's state is multiplied with."""
    mlp = layer.mlp
    rest = (layer.self_attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    return _rows(layer) * hidden + sum(module.weight.numel() for module in rest)


def _unrolled_attention(draft: EagleDrafter[Any], tokens: int, depth: int) -> float:
    width = draft.arch.num_heads * draft.arch.head_dim
    return draft.n_layers * (attention_flops(width, tokens) + 4.0 * width * tokens * depth)


def _eagle3(draft: Eagle3Drafter, tokens: int, labels: Sequence[int]) -> Counted:
    layers, hidden, depths = draft.all_layers(), draft.arch.hidden_size, len(labels)
    first_layer = layers[0]
    state = sum(_layer_forward(layer, hidden) for layer in layers)
    # The embedding's part is read once for all depths.
    read = 2.0 * _rows(first_layer) * draft.arch.target_hidden_size * (tokens + depths - 1)
    attention = first_layer.self_attn
    read_back = read * (
        is_trained([attention.q_proj, attention.k_proj, attention.v_proj]) + is_trained([first_layer.input_layernorm])
    )
    fc = 2.0 * draft.fc.weight.numel() * tokens
    norms = is_trained([draft.input_norm, draft.fc_norm])
    fc_back = fc * (is_trained([draft.fc]) + norms)
    into = is_trained([draft.fc]) or norms
    head_back = 1 + is_trained([draft.lm_head])
    forward, backward, again = [], [], []
    for depth, count in enumerate(labels):
        own = 2.0 * state * tokens
        scores = _unrolled_attention(draft, tokens, depth)
        head = 2.0 * draft.lm_head.weight.numel() * count
        back = once_more = 0.0
        for layer in layers:
            more, repeated, into = _layer_backward(layer, hidden, into)
            back += 2.0 * more * tokens
            once_more += 2.0 * repeated * tokens
        first = depth == 0
        forward.append(Flops(own + (read + fc if first else 0.0), scores, head))
        backward.append(
            Flops(back + (read_back + fc_back if first else 0.0), _ATTENTION_BACKWARD * scores, head_back * head)
        )
        again.append(Flops(once_more))
    return forward, backward, again


def _eagle1(draft: Eagle1Drafter, tokens: int, labels: Sequence[int]) -> Counted:
    (layer,) = (module for module in draft.layers if isinstance(module, EagleLayer))
    hidden = draft.arch.hidden_size
    own = 2.0 * _layer_forward(layer, hidden) * tokens
    half = draft.fc.weight.numel() / 2
    feature, fc_trained = 2.0 * half * tokens, is_trained([draft.fc])
    forward, backward, again = [], [], []
    behind = False
    for depth, count in enumerate(labels):
        read = 2.0 * half * (tokens + len(labels) - 1) if depth == 0 else 0.0
        scores = _unrolled_attention(draft, tokens, depth)
        # The head is the target's, frozen: a gradient for its input alone.
        head = 2.0 * hidden * draft.arch.vocab_size * count
        through = behind and not draft.config.detach
        more, repeated, behind = _layer_backward(layer, hidden, fc_trained or through)
        back = 2.0 * more * tokens + (fc_trained + through) * feature + fc_trained * read
        forward.append(Flops(own + feature + read, scores, head))
        backward.append(Flops(back, _ATTENTION_BACKWARD * scores, head))
        again.append(Flops(2.0 * repeated * tokens))
    return forward, backward, again


def _medusa(draft: MedusaDrafter, tokens: int, labels: Sequence[int]) -> Counted:
    hidden, layers = draft.arch.target_hidden_size, draft.config.num_layers
    block = 2.0 * hidden * hidden * tokens
    trained = 2.0 if draft.config.head == "own" else 1.0
    forward, backward = [], []
    for count in labels:
        head = 2.0 * hidden * draft.arch.vocab_size * count
        forward.append(Flops(linear=layers * block, head=head))
        # The first block reads frozen features: no gradient for them.
        backward.append(Flops(linear=(2 * layers - 1) * block, head=trained * head))
    return forward, backward, [Flops()] * len(labels)  # it keeps little and recomputes nothing


def _draft_lm(draft: DraftLM, tokens: int, labels: Sequence[int]) -> Counted:
    body = body_flops(draft.lm.hf, tokens)
    weight = draft.lm.head().weight
    head = 2.0 * weight.numel() * labels[0]
    frozen = sum(
        module.weight.numel()
        for layer in draft.lm.layers
        for module in layer.modules()
        if isinstance(module, nn.Linear) and not is_trained([module])
    )
    linear = 2 * body.linear - 2.0 * frozen * tokens
    block: Any = draft.lm.layers[0]
    if not is_trained([draft.lm.hf.get_input_embeddings(), *_norms(block)]):
        # What the first attention reads wants no gradient then.
        children = block.self_attn.named_children()
        first = [module for name, module in children if isinstance(module, nn.Linear) and name != "o_proj"]
        linear -= 2.0 * sum(module.weight.numel() for module in first) * tokens
    back = Flops(linear, _ATTENTION_BACKWARD * body.attention, (1 + weight.requires_grad) * head)
    text = draft.lm.config
    last = 2.0 * text.num_hidden_layers * text.hidden_size * text.intermediate_size * tokens
    return [replace(body, head=head)], [back], [replace(body, linear=body.linear - last)]


def _norms(layer: nn.Module) -> list[nn.Module]:
    return [module for module in layer.children() if "Norm" in type(module).__name__]
