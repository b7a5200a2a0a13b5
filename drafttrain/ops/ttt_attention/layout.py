"""Where the documents of packed rows begin and end."""

from __future__ import annotations

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

    @property
    def longest(self) -> int:
        """Slots in the longest run."""
        return max(end - start for _, start, end in self.runs)

    def cumulative_lengths(self) -> Tensor:
        """int32 [runs + 1], where each run begins in the flattened slots; on the device of `segments`."""
        lengths = [0] + [end - start for _, start, end in self.runs]
        return torch.tensor(lengths, device=self.segments.device).cumsum(0).to(torch.int32)
