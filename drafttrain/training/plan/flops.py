"""Floating-point operations of a training step, target and draft."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.lora import adapters
from drafttrain.losses.config import AcceptanceTerm, HybridTerm, LossConfig
from drafttrain.training.plan.draft_flops import draft_flops
from drafttrain.training.plan.products import Flops, body_flops
from drafttrain.training.plan.workload import Workload


@dataclass(frozen=True)
class StepFlops:
    """Of one sample in one epoch.

    Attributes:
        target: the target's body, and the head rows that labels need.
        first_time: what is computed once a sample: the target's own next tokens, over its whole vocabulary.
        forward, backward: of the draft, by depth.
        merging: of adapters with the weights they stand on, both directions, once a micro-batch.
    """

    target: Flops
    first_time: Flops
    forward: list[Flops]
    backward: list[Flops]
    merging: float = 0.0

    @property
    def draft(self) -> float:
        """Both directions, all depths."""
        return sum(part.total for part in [*self.forward, *self.backward])


def step_flops(
    drafter: Drafter, target: nn.Module, loss: LossConfig, work: Workload, *, recompute: bool, next_tokens: int
) -> StepFlops:
    """Count for a sample of average length.

    Args:
        drafter: as it trains; may be on the meta device.
        target: the Hugging Face model; may be on the meta device.
        recompute: gradient checkpointing.
        next_tokens: of the target's own, that are computed for each sample once.
    """
    tokens, depths = work.tokens_per_sample, drafter.max_depth
    labels = [max(work.answer_tokens - 1 - k, 0) for k in range(depths)]
    forward, backward, again = draft_flops(drafter, tokens, labels)
    if recompute:
        backward = [back + more for back, more in zip(backward, again, strict=True)]
    text = target.config.get_text_config()  # type: ignore[union-attr, operator]
    row = 2.0 * text.hidden_size
    whole = row * text.vocab_size * work.answer_tokens
    full = any(isinstance(term, AcceptanceTerm | HybridTerm) and term.full_target for term in loss.terms)
    head = Flops(head=row * drafter.vocab_map.size * labels[0])
    if full:
        head += Flops(head=whole)
    once = Flops(head=row * text.vocab_size * next_tokens)
    merging = sum(6.0 * one.lora_A.shape[0] * one.lora_B.shape[0] * one.lora_A.shape[1] for _, one in adapters(drafter))
    return StepFlops(body_flops(target, tokens) + head, once, forward, backward, merging)
