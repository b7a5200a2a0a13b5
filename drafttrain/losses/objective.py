"""The weighted sum of terms over depths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from drafttrain.drafters.base import DepthOutput, DraftBatch
from drafttrain.losses.config import FeatureTerm, LossConfig
from drafttrain.losses.fused import FusedLoss, HeadGroup, chunk_logits
from drafttrain.losses.supervision import supervised
from drafttrain.losses.terms import Term, build_term, reads_mass, reads_target
from drafttrain.modeling.head import Head
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap


@dataclass
class ObjectiveOutput:
    """Result of one micro-batch; sums and counts add up over micro-batches and ranks.

    Attributes:
        loss: scalar with gradient, sum over depths k and terms of w_k weight S_k / counts[k].
        sums: term -> float64 [K], S_k: unweighted sums over supervised labels.
        correct: int64 [K], labels at which the draft's argmax is the target's.
        total: int64 [K], supervised labels, those outside the draft vocabulary (always misses) included.
    """

    loss: Tensor
    sums: dict[str, Tensor]
    correct: Tensor
    total: Tensor


@dataclass
class _Labels:
    """Supervised labels, those of most depths first, so that each depth has a prefix of them.

    Attributes:
        index: int64 [N], into the flattened [B * T].
        counts: N_k.
    """

    index: Tensor
    counts: list[int]

    @staticmethod
    def of(batch: DraftBatch, depths: int) -> _Labels:
        """Those of a batch. A label supervised at depth k is so at every depth before."""
        masks = torch.stack([supervised(batch, depth) for depth in range(depths)]).flatten(1)
        n_depths = masks.sum(0)
        index = masks[0].nonzero().flatten()
        index = index[n_depths[index].argsort(descending=True, stable=True)]
        return _Labels(index, masks.sum(1).tolist())

    def keep(self, inside: Tensor) -> _Labels:
        """Those where `inside` [N], in the same order."""
        before = torch.cat([inside.new_zeros(1, dtype=torch.int64), inside.cumsum(0)])
        return _Labels(self.index[inside], before[torch.tensor(self.counts, device=inside.device)].tolist())


class Objective:
    """The loss of a recipe. No parameters; keeps the target's head restricted to the draft vocabulary."""

    def __init__(self, config: LossConfig) -> None:
        self.config = config
        vocabulary = [term for term in config.terms if not isinstance(term, FeatureTerm)]
        self.terms: list[tuple[str, float, Term]] = [(term.name, term.weight, build_term(term)) for term in vocabulary]
        self.feature_terms = [term for term in config.terms if isinstance(term, FeatureTerm)]
        self.reads_target = any(reads_target(term) for term in vocabulary)
        self.reads_mass = any(reads_mass(term) for term in vocabulary)
        self._prepared: tuple[Tensor, VocabMap, Head] | None = None
        self._moved: tuple[VocabMap, VocabMap] | None = None

    def counts(self, batch: DraftBatch, depths: int) -> Tensor:
        """Supervised labels of each depth, float64 [K]: add them up over what one optimiser step sees."""
        return torch.stack([supervised(batch, depth).sum(dtype=torch.float64) for depth in range(depths)])

    def __call__(
        self,
        outputs: Sequence[DepthOutput],
        batch: DraftBatch,
        heads: Callable[[int], Head],
        target_head: Head,
        vocab_map: VocabMap,
        counts: Tensor,
    ) -> ObjectiveOutput:
        """The loss of one micro-batch.

        Args:
            outputs: depths 0, 1, .. K-1 of the draft.
            batch: with `Tap.final` among its features; without `top1` the target's whole head runs over the
                supervised rows to find it.
            heads: depth -> the draft's head over the draft vocabulary.
            target_head: over the whole target vocabulary, frozen.
            vocab_map: draft vocabulary.
            counts: [K] numbers of supervised labels over all micro-batches and ranks of the step.

        Raises:
            ValueError: outputs that do not fit, or that were detached from the draft's parameters.
        """
        self._check(outputs)
        with_grad = torch.is_grad_enabled()
        vocab_map = self._on_device(vocab_map, batch.tokens.device)
        labels = _Labels.of(batch, len(outputs))
        scales = [
            self.config.depth_weight(output.depth) / count if count else 0.0
            for output, count in zip(outputs, counts.tolist(), strict=True)
        ]
        feature_loss, feature_sums = self._feature_loss(outputs, batch, labels, scales)

        dtype = _product_dtype(outputs[0].readout)
        with torch.no_grad():
            kept, top1, full_lse = self._sayable(batch, labels, target_head, vocab_map, dtype)
            fused = FusedLoss(
                groups=_groups(heads, len(outputs), dtype),
                counts=kept.counts,
                scales=scales,
                terms=self.terms,
                labels=vocab_map.to_draft[batch.tokens.flatten()[kept.index]],
                top1=top1,
                target_rows=_before(batch, kept.index, dtype) if self.reads_target else None,
                target_head=self._restricted(target_head, vocab_map, dtype) if self.reads_target else None,
                full_lse=full_lse,
                chunk_rows=self.config.chunk_rows,
                with_grad=with_grad and bool(self.terms),
            )
        # A label's flat index less the offset is the slot that predicts it: both lie in one document.
        rows = [
            output.readout.flatten(0, 1).index_select(0, kept.index[:n] - output.offset)
            for output, n in zip(outputs, kept.counts, strict=True)
        ]
        loss = fused(rows) + feature_loss
        total = torch.tensor(labels.counts, device=fused.correct.device)
        return ObjectiveOutput(loss, {**fused.sums, **feature_sums}, fused.correct, total)

    def _check(self, outputs: Sequence[DepthOutput]) -> None:
        for depth, output in enumerate(outputs):
            if output.depth != depth or not 1 <= output.offset <= depth + 2:
                raise ValueError(f"output {depth} is of depth {output.depth} with offset {output.offset}")
            read = {"readout": output.readout} if self.terms else {}
            if self.feature_terms:
                if output.hidden is None:
                    raise ValueError("smooth_l1 compares features, and this draft predicts none")
                read["hidden"] = output.hidden
            for name, tensor in read.items():
                if torch.is_grad_enabled() and not tensor.requires_grad:
                    raise ValueError(f"the {name} of depth {depth} was detached: its loss would train nothing")

    def _feature_loss(
        self, outputs: Sequence[DepthOutput], batch: DraftBatch, labels: _Labels, scales: list[float]
    ) -> tuple[Tensor | float, dict[str, Tensor]]:
        """Terms on features. The feature that a label's logits come from, f_{j-1}, is the one to predict."""
        loss: Tensor | float = 0.0
        sums: dict[str, Tensor] = {}
        for term in self.feature_terms:
            per_depth = []
            for output, n, scale in zip(outputs, labels.counts, scales, strict=True):
                assert output.hidden is not None
                index = labels.index[:n]
                predicted = output.hidden.flatten(0, 1).index_select(0, index - output.offset)
                true = _before(batch, index, torch.promote_types(predicted.dtype, torch.float32))
                error = F.smooth_l1_loss(predicted.to(true.dtype), true, reduction="none", beta=term.beta)
                total = error.mean(-1).sum()
                loss = loss + term.weight * scale * total
                per_depth.append(total.detach().double())
            sums[term.name] = torch.stack(per_depth)
        return loss, sums

    def _sayable(
        self, batch: DraftBatch, labels: _Labels, target_head: Head, vocab_map: VocabMap, dtype: torch.dtype
    ) -> tuple[_Labels, Tensor, Tensor | None]:
        """Labels whose target argmax the draft can say, the argmax as draft id, full log-sum-exps."""
        full_lse = None
        if batch.top1 is not None:
            top1 = batch.top1.flatten()[labels.index - 1]
        else:
            top1, full_lse = self._whole_target(batch, labels.index, target_head, dtype)
        draft_ids = vocab_map.to_draft[top1]
        inside = draft_ids >= 0
        kept = labels.keep(inside)
        if not self.reads_mass:
            return kept, draft_ids[inside], None
        if full_lse is None:
            full_lse = self._whole_target(batch, kept.index, target_head, dtype)[1]
        else:
            full_lse = full_lse[inside]
        return kept, draft_ids[inside], full_lse

    def _whole_target(
        self, batch: DraftBatch, index: Tensor, target_head: Head, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        """Argmax and log-sum-exp of the target over its whole vocabulary, before labels `index`."""
        head = _cast(target_head, dtype)
        fit = chunk_logits(index.device) // head.weight.shape[0]
        top1, lse = [], []
        for part in torch.split(index, max(1, min(self.config.chunk_rows, fit))):
            logits = head(_before(batch, part, dtype))
            top1.append(logits.argmax(-1))
            lse.append(logits.to(torch.promote_types(dtype, torch.float32)).logsumexp(-1))
        return torch.cat(top1), torch.cat(lse)

    def _restricted(self, target_head: Head, vocab_map: VocabMap, dtype: torch.dtype) -> Head:
        """The target's head over the draft vocabulary in `dtype`, made once for a target and a map."""
        if self._prepared is not None:
            weight, known, head = self._prepared
            if weight is target_head.weight and known is vocab_map and head.weight.dtype == dtype:
                return head
        head = target_head if vocab_map.is_full else target_head.rows(vocab_map.target_ids)
        head = _cast(head, dtype)
        self._prepared = (target_head.weight, vocab_map, head)
        return head

    def _on_device(self, vocab_map: VocabMap, device: torch.device) -> VocabMap:
        """The map where the batch is, moved once."""
        if self._moved is None or self._moved[0] is not vocab_map or self._moved[1].d2t.device != device:
            self._moved = (vocab_map, vocab_map.to(device))
        return self._moved[1]


def _product_dtype(readout: Tensor) -> torch.dtype:
    """Autocast's dtype where it is on, else the draft's own."""
    device = readout.device.type
    if device in ("cpu", "cuda") and torch.is_autocast_enabled(device):
        return torch.get_autocast_dtype(device)
    return readout.dtype


def _before(batch: DraftBatch, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Final features that predict the labels `index` [N] -> [N, H_target]."""
    return batch.features[Tap.final].flatten(0, 1).index_select(0, index - 1).to(dtype)


def _cast(head: Head, dtype: torch.dtype) -> Head:
    """The head with its parameters in `dtype`."""
    return replace(head, weight=head.weight.to(dtype), bias=head.cast_bias(dtype))


def _groups(heads: Callable[[int], Head], depths: int, dtype: torch.dtype) -> list[HeadGroup]:
    """Depths by the head that they share; each head is cast once."""
    groups: dict[tuple[int, int, float | None, float], HeadGroup] = {}
    for depth in range(depths):
        head = heads(depth)
        key = (id(head.weight), id(head.bias), head.softcap, head.scale)
        if key not in groups:
            groups[key] = HeadGroup(head, [], _cast(head, dtype))
        groups[key].depths.append(depth)
    return list(groups.values())
