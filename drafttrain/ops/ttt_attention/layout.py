"""Where the documents of packed rows begin and end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SegmentLayout:
    """Runs of equal segment ids in rows [B, T]; they cover every slot, padding included.

    Build it once per batch and hand it to every call: on CUDA it costs a synchronisation.

    Attributes:
        segments: int64 [B, T], -1 on padding.
        runs: (row, start, end) with end exclusive, in row-major order.
        single: every row is one document from slot 0, with nothing but padding after it. Plain causal
            attention is then right for every real slot, since padding only ever lies in the future.
    """

    segments: Tensor
    runs: tuple[tuple[int, int, int], ...]
    single: bool

    @staticmethod
    def of(segments: Tensor) -> SegmentLayout:
        """Read the runs of `segments` [B, T]; a document is one contiguous run."""
        host = segments.detach().cpu()
        n_rows, length = host.shape
        first = torch.ones_like(host, dtype=torch.bool)
        first[:, 1:] = host[:, 1:] != host[:, :-1]
        starts = first.flatten().nonzero().flatten().tolist()
        ends = [*starts[1:], n_rows * length]
        runs = tuple(
            (start // length, start % length, start % length + end - start)
            for start, end in zip(starts, ends, strict=True)
        )
        single = not bool((first[:, 1:] & (host[:, 1:] >= 0)).any())
        return SegmentLayout(segments, runs, single)

    @staticmethod
    def of_runs(runs: Sequence[tuple[int, int, int]], padding: Sequence[bool]) -> SegmentLayout:
        """The layout of known runs, each a document or padding; its `segments` are on the CPU."""
        names = torch.tensor([-1 if blank else number for number, blank in enumerate(padding)])
        lengths = torch.tensor([end - start for _, start, end in runs])
        segments = names.repeat_interleave(lengths).view(runs[-1][0] + 1, -1)
        single = all(start == 0 or blank for (_, start, _), blank in zip(runs, padding, strict=True))
        return SegmentLayout(segments, tuple(runs), single)

    @property
    def padding(self) -> list[bool]:
        """Whether each run is padding."""
        host = self.segments.cpu()
        return [int(host[row, start]) < 0 for row, start, _ in self.runs]

    @property
    def longest(self) -> int:
        """Slots in the longest run."""
        return max(end - start for _, start, end in self.runs)

    def cumulative_lengths(self, device: torch.device) -> Tensor:
        """int32 [runs + 1] on `device`, where each run begins in the flattened slots."""
        lengths = [0] + [end - start for _, start, end in self.runs]
        return torch.tensor(lengths, device=device).cumsum(0).to(torch.int32)
