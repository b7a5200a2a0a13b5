"""Packed rows as attention masks: where each document lies, in place of a mask over all pairs of slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafttrain.ops.ttt_attention import SegmentLayout


def document_mask(layout: SegmentLayout, window: int | None = None) -> Tensor:
    """A mask under which each slot sees its own document up to itself, and `window` tokens of it at most.

    Four dimensions, as transformers demands of a mask that it hands through; on the CPU, so that no layer has to wait
    for the device to learn how rows are cut; and int32, where a plain mask is bool and a packed one int64.

    Returns:
        int32 [1, 1, documents, 5]: row, start, end, 1 for padding, window (0 = none).
    """
    fields = [
        (row, start, end, int(padding), window or 0)
        for (row, start, end), padding in zip(layout.runs, layout.padding, strict=True)
    ]
    return torch.tensor(fields, dtype=torch.int32)[None, None]


def is_document_mask(mask: Tensor) -> bool:
    """Whether a mask is one of these."""
    return mask.dtype == torch.int32


@dataclass(frozen=True)
class Documents:
    """What a document mask says.

    Attributes:
        layout: of the rows, `segments` on the CPU.
        window: tokens that a slot sees at most, itself included, or None.
    """

    layout: SegmentLayout
    window: int | None

    @staticmethod
    def of(mask: Tensor) -> Documents:
        """Read a document mask."""
        fields = mask[0, 0].tolist()
        runs = [(row, start, end) for row, start, end, _, _ in fields]
        return Documents(SegmentLayout.of_runs(runs, [bool(field[3]) for field in fields]), fields[0][4] or None)

    @property
    def plain(self) -> bool:
        """Whether no window cuts anything off."""
        return self.window is None or self.layout.longest <= self.window

    def lengths(self) -> list[list[int]]:
        """Slots of each document, row by row."""
        rows: list[list[int]] = []
        for row, start, end in self.layout.runs:
            if row == len(rows):
                rows.append([])
            rows[row].append(end - start)
        return rows
