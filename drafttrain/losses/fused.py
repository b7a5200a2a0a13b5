"""Head, softmax, loss and their gradient in one pass over chunks of supervised rows.

Logits exist for one chunk at a time, in the dtype of the matrix products; their gradient is written over
them, and the fp32 arithmetic of the loss runs on blocks small enough for a cache. What stays is the gradient
of the draft's rows and, where it is trained, of its head.

Labels come sorted by how many depths supervise them, so the rows of each depth are a prefix of every chunk:
the target's distribution at a label is computed once and shared by all depths without being copied.

Legend: N labels, K depths, N_k rows of depth k, H draft width, H_t target width, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafttrain.losses.terms import Distribution, Rows, Term
from drafttrain.modeling.head import Head
from drafttrain.ops.backend import use_triton
from drafttrain.ops.soft_ce import soft_ce

SLAB = 2**21  # elements of a head's gradient that are computed at a time


def chunk_logits(device: torch.device) -> int:
    """Logits that may exist at a time: 16 MB in bf16 on a CPU, 128 MB elsewhere."""
    return 2**23 if device.type == "cpu" else 2**26


def block_logits(device: torch.device) -> int:
    """Logits in one block of fp32 arithmetic: a CPU's cache should hold it; elsewhere kernels should be few."""
    return 2**19 if device.type == "cpu" else 2**23


@dataclass
class HeadGroup:
    """A head, the depths that read it, and its parameters in the dtype of the products."""

    head: Head
    depths: list[int]
    compute: Head


@dataclass
class FusedLoss:
    """One evaluation of the vocabulary-sized terms.

    Attributes:
        groups: the heads in use; every depth is in exactly one.
        counts: N_k, not increasing: depth k supervises the first N_k labels.
        scales: factor on the sums of each depth (its weight over its number of labels).
        terms: (name, weight, function).
        labels: int64 [N], draft ids of the corpus' tokens, -1 outside the draft vocabulary.
        top1: int64 [N], draft ids of the target's argmax.
        target_rows: [N, H_t], final features that predict the labels; None if no term reads the target.
        target_head: the target's head over the draft vocabulary, in the dtype of the products.
        full_lse: [N], log-sum-exp of the target's logits over its whole vocabulary; None if no term reads it.
        chunk_rows: rows of logits that exist at a time.
        with_grad: whether gradients are wanted.
        sums: result: unweighted sums, name -> float64 [K].
        correct: result: int64 [K], rows in which the draft's argmax is the target's.
    """

    groups: list[HeadGroup]
    counts: list[int]
    scales: list[float]
    terms: Sequence[tuple[str, float, Term]]
    labels: Tensor
    top1: Tensor
    target_rows: Tensor | None
    target_head: Head | None
    full_lse: Tensor | None
    chunk_rows: int
    with_grad: bool
    sums: dict[str, Tensor] = field(init=False)
    correct: Tensor = field(init=False)

    def __post_init__(self) -> None:
        depths, device = len(self.counts), self.labels.device
        self.sums = {name: torch.zeros(depths, dtype=torch.float64, device=device) for name, _, _ in self.terms}
        self.correct = torch.zeros(depths, dtype=torch.int64, device=device)

    def __call__(self, rows: Sequence[Tensor]) -> Tensor:
        """Rows [N_k, H] of each depth -> scalar loss, differentiable in the rows and the heads."""
        parameters = [parameter for group in self.groups for parameter in (group.head.weight, group.head.bias)]
        loss: Tensor = _WithGradient.apply(self, *rows, *parameters)  # type: ignore[no-untyped-call]
        return loss

    def run(self, rows: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Tensor, list[Tensor | None]]:
        """The loss, and the gradients of the rows and of each group's weight and bias where `wanted`."""
        depths = len(rows)
        parameters = [parameter for group in self.groups for parameter in (group.head.weight, group.head.bias)]
        grads: list[Tensor | None] = [None] * (depths + len(parameters))
        for slot, x in enumerate([*rows, *parameters]):
            if wanted[slot] and x is not None:  # parameters' gradients add up over chunks, in fp32 at least
                dtype = x.dtype if slot < depths else torch.promote_types(x.dtype, torch.float32)
                grads[slot] = torch.zeros_like(x, dtype=dtype)
        for start, end in self._chunks():
            target_logits = None
            if self.target_head is not None and self.target_rows is not None:
                head = self.target_head
                target_logits = F.linear(self.target_rows[start:end], head.weight, head.bias)
            for number, group in enumerate(self.groups):
                taken = [rows[k][start : min(end, self.counts[k])] for k in group.depths]
                logits, x = self._loss(group, taken, target_logits, start, end)
                if self.with_grad:
                    sizes = [len(part) for part in taken]
                    scale = torch.cat(
                        [logits.new_full((n, 1), self.scales[k]) for k, n in zip(group.depths, sizes, strict=True)]
                    )
                    _backward(
                        logits, x, scale, group.compute.weight,
                        [None if grads[k] is None else grads[k][start : start + n]  # type: ignore[index]
                         for k, n in zip(group.depths, sizes, strict=True)],
                        grads[depths + 2 * number],
                        grads[depths + 2 * number + 1],
                    )  # fmt: skip
                # Else they would lie beside those that come next.
                del logits, x
        weights = torch.tensor(self.scales, dtype=torch.float64, device=self.labels.device)
        total = torch.zeros((), dtype=torch.float64, device=self.labels.device)
        for name, weight, _ in self.terms:
            total += weight * (self.sums[name] * weights).sum()
        return total.to(torch.promote_types(rows[0].dtype, torch.float32)), grads

    def _chunks(self) -> list[tuple[int, int]]:
        """Ranges of labels whose rows of one group fit a chunk."""
        size = max(group.compute.weight.shape[0] for group in self.groups)
        fit = chunk_logits(self.labels.device) // size
        shared = max(len(group.depths) for group in self.groups)
        step = max(1, min(self.chunk_rows, fit) // shared)
        return [(start, min(start + step, len(self.labels))) for start in range(0, len(self.labels), step)]

    def _loss(
        self, group: HeadGroup, taken: list[Tensor], target_logits: Tensor | None, start: int, end: int
    ) -> tuple[Tensor, Tensor]:
        """Add up the terms of one chunk; returns the gradient of the raw logits, and the head's input."""
        head = group.compute
        x = torch.cat(taken).to(head.weight.dtype)
        logits = F.linear(x, head.weight, head.bias)
        offsets = [0]
        for part in taken:
            offsets.append(offsets[-1] + len(part))
        if self._has_kernel(head, x.device, logits.dtype):
            assert target_logits is not None
            self._loss_by_kernel(group.depths, logits, target_logits, offsets, start)
            return logits, x
        block = max(1, block_logits(x.device) // logits.shape[1])
        for at in range(0, end - start, block):
            labels = slice(start + at, min(start + at + block, end))
            target = None
            if target_logits is not None and self.target_head is not None:
                target = Distribution.of(self.target_head.finish(_wide(target_logits[at : at + block])))
            mass = None
            if self.full_lse is not None and target is not None:
                mass = (target.lse - self.full_lse[labels]).exp()
            for k, offset, size in zip(group.depths, offsets[:-1], map(len, taken), strict=True):
                n = min(size - at, block)
                if n <= 0:
                    continue
                here = logits[offset + at : offset + at + n]
                rows = Rows(
                    Distribution.of(head.finish(_wide(here))),
                    None if target is None else target.first(n),
                    self.labels[labels][:n],
                    None if mass is None else mass[:n],
                )
                self.correct[k] += (rows.draft.top == self.top1[labels][:n]).sum()
                gradient = self._terms(k, rows)
                if self.with_grad and gradient is not None:
                    here.copy_(_through_finish(head, rows.draft.logits, gradient))
        return logits, x

    def _has_kernel(self, head: Head, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether one kernel computes all terms: a lone cross-entropy or divergence of heads that do nothing else."""
        heads = (head, self.target_head)
        return (
            [name for name, _, _ in self.terms] in (["soft_ce"], ["forward_kl"])
            and self.full_lse is None
            and all(one is not None and one.softcap is None and one.scale == 1.0 for one in heads)
            and use_triton("soft_ce", "auto", device, dtype)
        )

    def _loss_by_kernel(
        self, depths: Sequence[int], logits: Tensor, target_logits: Tensor, offsets: Sequence[int], start: int
    ) -> None:
        """What `_loss` does with its blocks; `offsets` [depths + 1] are where each depth's rows begin."""
        ((name, weight, _),) = self.terms
        for k, offset, stop in zip(depths, offsets, offsets[1:], strict=False):
            n = stop - offset
            if n == 0:
                continue
            value, top = soft_ce(
                logits[offset:stop], target_logits[:n], divergence=name == "forward_kl", weight=weight,
                gradient=self.with_grad, impl="triton",
            )  # fmt: skip
            self.sums[name][k] += value.sum(dtype=torch.float64)
            self.correct[k] += (top == self.top1[start : start + n]).sum()

    def _terms(self, k: int, rows: Rows) -> Tensor | None:
        """Add the sums of all terms at depth k; returns the weighted gradient of the logits, if any."""
        total: Tensor | None = None
        for name, weight, term in self.terms:
            value, gradient = term(rows)
            self.sums[name][k] += value.sum(dtype=torch.float64)
            if total is None:
                total = gradient if weight == 1.0 else gradient.mul_(weight)
            else:
                total.add_(gradient, alpha=weight)
        return total


class _WithGradient(torch.autograd.Function):
    """Computes the gradients in the forward: nothing of the logits has to be kept or computed again."""

    @staticmethod
    def forward(ctx: Any, job: FusedLoss, *inputs: Tensor | None) -> Tensor:
        rows = [x for x in inputs[: len(job.counts)] if x is not None]
        wanted = [need and job.with_grad for need in ctx.needs_input_grad[1:]]
        loss, ctx.grads = job.run(rows, wanted)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *upstream: Tensor) -> Any:
        grads, ctx.grads = ctx.grads, None
        if grads is None:
            raise RuntimeError("the loss was differentiated twice; its gradients are kept for one backward")
        return None, *(None if g is None else g.mul_(upstream[0].to(g.dtype)) for g in grads)


def _backward(
    grad_logits: Tensor,
    x: Tensor,
    scale: Tensor,
    weight: Tensor,
    grad_rows: Sequence[Tensor | None],
    grad_weight: Tensor | None,
    grad_bias: Tensor | None,
) -> None:
    """Gradients of logits = x W^T + b, scaled by row, written to `grad_rows` and added to the parameters'."""
    if any(out is not None for out in grad_rows):
        grad_x = (grad_logits @ weight) * scale
        done = 0
        for out in grad_rows:
            if out is not None:
                out.copy_(grad_x[done : done + len(out)])
                done += len(out)
    if grad_weight is not None:
        # A product in x's dtype is added to the fp32 sum: by slabs of the vocabulary, or it would be held whole twice.
        scaled = x * scale
        slab = max(1, SLAB // x.shape[1])
        for part, columns in zip(grad_weight.split(slab), grad_logits.split(slab, dim=1), strict=True):
            part.add_(columns.t() @ scaled)
    if grad_bias is not None:
        grad_bias.add_((scale.t() @ grad_logits)[0])


def _wide(logits: Tensor) -> Tensor:
    """Logits in fp32, or fp64 if they are; a tensor of its own where it converts."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _through_finish(head: Head, logits: Tensor, gradient: Tensor) -> Tensor:
    """Gradient before `head.finish`, given the logits after it."""
    if head.softcap is not None:  # d/dx c tanh(x / c) = 1 - tanh^2
        gradient = gradient * (1.0 - (logits / head.softcap).square())
    return gradient if head.scale == 1.0 else gradient * head.scale
