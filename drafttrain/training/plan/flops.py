"""Floating-point operations of a training step, counted from shapes: two for each multiply-add of a matrix product.

Norms, rotary embeddings, activations and softmax are left out; they are below a hundredth of the rest. A query
attends to half of its document on average, which kernels that skip the masked half need.

L tokens of a document, K depths, H hidden, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.eagle.base import EagleDrafter
from drafttrain.drafters.eagle.eagle1 import Eagle1Drafter
from drafttrain.drafters.eagle.eagle3 import Eagle3Drafter
from drafttrain.drafters.eagle.layer import EagleLayer
from drafttrain.drafters.lm.model import DraftLM
from drafttrain.drafters.medusa.model import MedusaDrafter
from drafttrain.losses.config import AcceptanceTerm, HybridTerm, LossConfig
from drafttrain.training.plan.workload import Workload

# Flash attention's backward recomputes the scores: five products where the forward has two.
_ATTENTION_BACKWARD = 2.5


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


@dataclass(frozen=True)
class StepFlops:
    """Of one sample in one epoch.

    Attributes:
        target: the target's body, and the head rows that labels need.
        first_time: what is computed once a sample: the target's own next tokens, over its whole vocabulary.
        forward, backward: of the draft, by depth.
    """

    target: Flops
    first_time: Flops
    forward: list[Flops]
    backward: list[Flops]

    @property
    def draft(self) -> float:
        """Both directions, all depths."""
        return sum(part.total for part in [*self.forward, *self.backward])


def step_flops(drafter: Drafter, target: nn.Module, loss: LossConfig, work: Workload, recompute: bool) -> StepFlops:
    """Count for a sample of average length.

    Args:
        drafter: as it trains; may be on the meta device.
        target: the Hugging Face model; may be on the meta device.
        recompute: gradient checkpointing.
    """
    tokens, depths = work.tokens_per_sample, drafter.max_depth
    labels = [max(work.answer_tokens - 1 - k, 0) for k in range(depths)]
    forward, backward, again = _DRAFTS[type(drafter)](drafter, tokens, labels)
    if recompute:
        backward = [back + more for back, more in zip(backward, again, strict=True)]
    text = target.config.get_text_config()  # type: ignore[union-attr, operator]
    row = 2.0 * text.hidden_size
    whole = row * text.vocab_size * work.answer_tokens
    full = any(isinstance(term, AcceptanceTerm | HybridTerm) and term.full_target for term in loss.terms)
    head = Flops(head=row * drafter.vocab_map.size * labels[0])
    if full:
        head += Flops(head=whole)
    once = Flops() if drafter.vocab_map.is_full else Flops(head=whole)
    return StepFlops(body_flops(target, tokens) + head, once, forward, backward)


def body_flops(model: nn.Module, tokens: int) -> Flops:
    """One forward of a causal LM over a document, without its head."""
    text = model.config.get_text_config()  # type: ignore[union-attr, operator]
    dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    width = text.num_attention_heads * dim
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
    for parameter in model.parameters():
        if id(parameter) in outside or parameter.dim() < 2:
            continue
        count += parameter.numel() * (share if parameter.dim() == 3 else 1.0)
    return round(count)


Counted = tuple[list[Flops], list[Flops], list[Flops]]
"""By depth: forward, backward, and what checkpointing computes again: not the last product of a layer, whose result
the backward does not read."""


def _layer(layer: EagleLayer, hidden: int) -> tuple[int, int]:
    """Weights of a layer: (that read the state or what follows from it, that read the embedding)."""
    attention = [layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight, layer.self_attn.v_proj.weight]
    rest = [layer.self_attn.o_proj.weight, *(p for p in layer.mlp.parameters())]
    rows = sum(weight.shape[0] for weight in attention)
    embedding = rows * (attention[0].shape[1] - hidden)
    return rows * hidden + sum(weight.numel() for weight in rest), embedding


def _unrolled_attention(draft: EagleDrafter[Any], tokens: int, depth: int) -> float:
    width = draft.arch.num_heads * draft.arch.head_dim
    return draft.n_layers * (attention_flops(width, tokens) + 4.0 * width * tokens * depth)


def _eagle3(draft: Eagle3Drafter, tokens: int, labels: list[int]) -> Counted:
    sizes = [_layer(layer, draft.arch.hidden_size) for layer in draft.all_layers()]
    state, embedding = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
    depths = len(labels)
    last = sum(layer.mlp.down_proj.weight.numel() for layer in draft.all_layers())
    # Read once for all depths. Its norm is trained, so the gradient goes through; so it does in fc if it has norms.
    read = 2.0 * embedding * (tokens + depths - 1)
    fc = 2.0 * draft.fc.weight.numel() * tokens
    through_fc = 2.0 if draft.input_norm is not None or draft.fc_norm is not None else 1.0
    through_head = 2.0 if draft.config.train_head else 1.0
    forward, backward, again = [], [], []
    for depth, count in enumerate(labels):
        own = 2.0 * state * tokens
        attention = _unrolled_attention(draft, tokens, depth)
        head = 2.0 * draft.lm_head.weight.numel() * count
        first = depth == 0
        forward.append(Flops(own + (read + fc if first else 0.0), attention, head))
        back = 2 * own + (2 * read + through_fc * fc if first else 0.0)
        backward.append(Flops(back, _ATTENTION_BACKWARD * attention, through_head * head))
        again.append(Flops(own - 2.0 * last * tokens))
    return forward, backward, again


def _eagle1(draft: Eagle1Drafter, tokens: int, labels: list[int]) -> Counted:
    state, _ = _layer(draft._layer(), draft.arch.hidden_size)
    half = draft.fc.weight.numel() / 2
    last = draft._layer().mlp.down_proj.weight.numel()
    forward, backward, again = [], [], []
    for depth, count in enumerate(labels):
        own = 2.0 * state * tokens
        feature = 2.0 * half * tokens
        read = 2.0 * half * (tokens + len(labels) - 1) if depth == 0 else 0.0
        attention = _unrolled_attention(draft, tokens, depth)
        # The head is the target's, frozen: a gradient for its input alone.
        head = 2.0 * draft.arch.hidden_size * draft.arch.vocab_size * count
        through = 1.0 if depth == 0 or draft.config.detach else 2.0
        forward.append(Flops(own + feature + read, attention, head))
        backward.append(Flops(2 * own + through * feature + read, _ATTENTION_BACKWARD * attention, head))
        again.append(Flops(own - 2.0 * last * tokens))
    return forward, backward, again


def _medusa(draft: MedusaDrafter, tokens: int, labels: list[int]) -> Counted:
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


def _draft_lm(draft: DraftLM, tokens: int, labels: list[int]) -> Counted:
    body = body_flops(draft.lm.hf, tokens)
    weight = draft.lm.head().weight
    head = 2.0 * weight.numel() * labels[0]
    back = Flops(2 * body.linear, _ATTENTION_BACKWARD * body.attention, (2.0 if weight.requires_grad else 1.0) * head)
    text = draft.lm.config
    last = 2.0 * text.num_hidden_layers * text.hidden_size * text.intermediate_size * tokens
    return [replace(body, head=head)], [back], [replace(body, linear=body.linear - last)]


_DRAFTS: dict[type[Drafter], Any] = {
    Eagle3Drafter: _eagle3,
    Eagle1Drafter: _eagle1,
    MedusaDrafter: _medusa,
    DraftLM: _draft_lm,
}
