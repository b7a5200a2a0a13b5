"""One pass of the frozen target over documents: the states a draft reads and the target's own next token."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafttrain.corpus.types import Sample
from drafttrain.errors import DataError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import Tap

UNKNOWN = -1
"""`top1` where it was not computed: far from any supervised label."""

_TOP1_ROWS = 1024


@dataclass
class Captured:
    """Features of one document.

    Attributes:
        sample: the document, of L tokens.
        features: tap -> [L, H], the target's dtype and device.
        top1: int64 [L], argmax of the target's logits after each position, `UNKNOWN` where no label depends on it;
            None if it was not asked for.
    """

    sample: Sample
    features: dict[Tap, Tensor]
    top1: Tensor | None


Compute = Callable[[Sequence[Sample], Sequence[Tap]], Iterable[Captured]]
"""(samples, taps) -> each sample with these taps and its top1, in any order."""


def group_by_length(samples: Sequence[Sample], batch_tokens: int) -> list[list[Sample]]:
    """Batches of similar length, at most `batch_tokens` tokens with padding (a longer document goes alone)."""
    groups: list[list[Sample]] = []
    for sample in sorted(samples, key=lambda s: len(s.ids)):
        if groups and (len(groups[-1]) + 1) * len(sample.ids) <= batch_tokens:
            groups[-1].append(sample)
        else:
            groups.append([sample])
    return groups


def capture(
    target: CausalLM,
    samples: Sequence[Sample],
    taps: Sequence[Tap],
    *,
    batch_tokens: int,
    wants_top1: Callable[[Sample], bool],
) -> Iterator[Captured]:
    """Run the target over `samples`, in order of length.

    How samples are grouped depends on them alone: another grouping would round otherwise, and a resumed run differ.

    Raises:
        DataError: NaN or infinite features, or a row count other than the token count; names the sample.
    """
    for group in group_by_length(samples, batch_tokens):
        # Not a generator under inference_mode: the mode would leak into the consumer between two yields.
        yield from _forward(target, group, taps, wants_top1)


@torch.inference_mode()
def _forward(
    target: CausalLM, group: list[Sample], taps: Sequence[Tap], wants_top1: Callable[[Sample], bool]
) -> list[Captured]:
    ids = torch.zeros(len(group), max(len(s.ids) for s in group), dtype=torch.int64)
    for row, sample in enumerate(group):
        ids[row, : len(sample.ids)] = torch.from_numpy(sample.ids.astype(np.int64))
    # Right padding is harmless: the target is causal.
    output = target(ids.to(target.device), taps=[tap for tap in taps if tap != Tap.final])
    states = {**output.taps, Tap.final: output.final}
    captured = []
    for row, sample in enumerate(group):
        features = {tap: states[tap][row, : len(sample.ids)] for tap in taps}
        check_features(sample, features)
        top1 = top1_of(target, sample, output.final[row]) if wants_top1(sample) else None
        captured.append(Captured(sample, features, top1))
    return captured


def check_features(sample: Sample, features: dict[Tap, Tensor]) -> None:
    """Refuse features that are not finite or whose rows are not the document's tokens.

    Raises:
        DataError: names the sample and the tap.
    """
    for tap, value in features.items():
        if value.shape[0] != len(sample.ids):
            raise DataError(
                f"tap {tap} has {value.shape[0]} feature rows for {len(sample.ids)} tokens",
                where=f"sample {sample.id}",
                remedy="a feature server must not cache prefixes or split prefills; rebuild the features",
            )
        # One reduction: a NaN or an infinity anywhere shows in the sum.
        if not bool(torch.isfinite(value.sum(dtype=torch.float32))):
            bad = (~torch.isfinite(value)).any(-1).nonzero().flatten().tolist()
            raise DataError(
                f"tap {tap} has NaN or infinite features at token positions {bad[:8]}",
                where=f"sample {sample.id}",
                remedy="try another dtype for the target, or remove this sample",
            )


def label_sources(sample: Sample) -> Tensor:
    """int64 positions whose next token may be a label, or which lie in an assistant span; sorted."""
    wanted = torch.zeros(len(sample.ids), dtype=torch.bool)
    for first, last in sample.spans:
        wanted[max(first - 1, 0) : last + 1] = True
    return wanted.nonzero().flatten()


def top1_of(target: CausalLM, sample: Sample, final: Tensor, greedy_from: int | None = None) -> Tensor:
    """int64 [L] of `Captured`, from the target's head alone, in chunks.

    Args:
        final: [at least L, H].
        greedy_from: behind each position from here on the sample has the target's likeliest token; None: nowhere.
    """
    top1 = torch.full((len(sample.ids),), UNKNOWN, dtype=torch.int64, device=final.device)
    wanted = label_sources(sample)
    if greedy_from is not None:
        known = wanted[(wanted >= greedy_from) & (wanted < len(sample.ids) - 1)]
        top1[known] = torch.from_numpy(sample.ids.astype(np.int64))[known + 1].to(final.device)
        wanted = wanted[(wanted < greedy_from) | (wanted == len(sample.ids) - 1)]
    wanted = wanted.to(final.device)
    for rows in torch.split(wanted, _TOP1_ROWS):
        top1[rows] = target.lm_head(final[rows]).argmax(-1)
    return top1
