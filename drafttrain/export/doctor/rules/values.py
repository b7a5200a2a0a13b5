"""The weights themselves, read one tensor at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch

from drafttrain.export.doctor.case import EAGLE, Case, floats, listed
from drafttrain.export.doctor.finding import Finding, Mend, error, warning
from drafttrain.export.doctor.rules.rule import Rule


def not_finite(case: Case) -> Iterator[Finding]:
    """NaN and Inf."""
    broken = [name for name, tensor in floats(case) if not bool(tensor.isfinite().all())]
    if broken:
        yield error(
            f"NaN or Inf in {listed(broken)}",
            "one such value makes all logits NaN: nothing is accepted",
            "export an earlier checkpoint; if training was in float16, train in bfloat16",
        )


def zero(case: Case) -> Iterator[Finding]:
    """Weights that were never filled. A bias of zeros is fine."""
    empty = [
        name for name, tensor in floats(case) if not name.endswith("bias") and tensor.numel() and not bool(tensor.any())
    ]
    blocks = [name for name in empty if name.startswith("blocks.")]
    if blocks:
        yield warning(
            f"{listed(blocks)} {'is' if len(blocks) == 1 else 'are'} zero",
            "such a block of Medusa is the identity: the head reads the target's state as it is, untrained",
            "check that the trained weights were stored",
        )
    rest = [name for name in empty if name not in blocks]
    if rest:
        yield error(
            f"{listed(rest)} {'is' if len(rest) == 1 else 'are'} zero",
            "a part of the draft says nothing: it was never filled, or lost in a conversion",
            "export again from the trained weights",
        )


def norm_flavour(case: Case) -> Iterator[Finding]:
    """Case 19 of docs/cases.md: weights of a (1 + w) norm in a draft whose norms multiply by w."""
    suspects = {}
    for name, info in case.draft.tensors.items():
        if "norm" in name and name.endswith(".weight") and info.is_float:
            weight = case.draft.tensor(name)
            mean = float(weight.float().mean())
            if abs(mean) < 0.25 and bool(weight.any()):
                suspects[name] = (mean, weight)
    if not suspects:
        return
    values = ", ".join(f"{name} (mean {mean:.3f})" for name, (mean, _) in list(suspects.items())[:4])
    if case.facts.norms_add_one:
        yield error(
            f"norm weights near 0: {values}; {case.facts.model_type} multiplies by 1 + weight",
            "they were copied from the target as they lie there: the draft's norms multiply by the weight itself",
            "add 1 to them",
            Mend(
                tensors={
                    case.draft.names[name]: (weight.float() + 1).to(weight.dtype)
                    for name, (_, weight) in suspects.items()
                }
            ),
        )
    else:
        yield warning(
            f"norm weights near 0: {values}",
            "weights of a (1 + weight) norm look so; in the draft they nearly silence what they norm",
            "check where they come from; the trial tries to add 1",
        )


def shared(case: Case) -> Iterator[Finding]:
    """Case 20 of docs/cases.md: residual blocks of Medusa that are one and the same."""
    seen: dict[str, str] = {}
    twins = []
    for name in sorted(case.draft.tensors):
        if name.startswith("blocks.") and name.endswith(".weight"):
            tensor = case.draft.tensor(name)
            if not bool(tensor.any()):
                continue
            digest = hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
            if digest in seen:
                twins.append(f"{name} = {seen[digest]}")
            seen.setdefault(digest, name)
    if twins:
        yield error(
            f"blocks hold the same weights: {listed(twins, 3)}",
            "heads for different depths must differ: they shared a module in training, or one was written over others",
            "train with a block of its own for each layer and head",
        )


RULES = (
    Rule("not-finite", not_finite),
    Rule("zero-weights", zero),
    Rule("norm-flavour", norm_flavour, EAGLE, needs_target=True),
    Rule("shared-blocks", shared, ("medusa",)),
)
