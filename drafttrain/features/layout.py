"""How documents lie in the rows of a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import DraftBatch
from drafttrain.features.transfer import to_device

Rows = Sequence[Sequence[Sample]]


@dataclass(frozen=True)
class Place:
    """Where one document lies: tokens `start` .. `end`-1 of row `row`."""

    sample: Sample
    row: int
    start: int
    end: int


def places(rows: Rows) -> Iterator[Place]:
    """The documents of each row, one after the other without gaps."""
    for row, documents in enumerate(rows):
        start = 0
        for sample in documents:
            end = start + len(sample.ids)
            yield Place(sample, row, start, end)
            start = end


def by_document(rows: Rows) -> dict[str, list[Place]]:
    """Where each document lies, by its id, in the order in which they come first."""
    found: dict[str, list[Place]] = {}
    for place in places(rows):
        found.setdefault(place.sample.id, []).append(place)
    return found


def lay_out(rows: Rows, device: torch.device | str = "cpu") -> DraftBatch:
    """Tokens, positions, segments and spans of packed rows, without features.

    Rows are as long as the longest; the rest is padding: token 0, segment -1, span 0.

    Args:
        rows: B rows of documents.
        device: where the tensors go.

    Returns:
        A batch whose tensors are [B, T].

    Raises:
        ValueError: no row, or a row without tokens.
    """
    lengths = [sum(len(sample.ids) for sample in documents) for documents in rows]
    if not lengths or min(lengths) == 0:
        raise ValueError("a batch needs at least one row, and a row at least one token")
    shape = (len(lengths), max(lengths))
    tokens = torch.zeros(shape, dtype=torch.int64)
    positions = torch.zeros(shape, dtype=torch.int64)
    segments = torch.full(shape, -1, dtype=torch.int64)
    spans = torch.zeros(shape, dtype=torch.int64)
    documents_in = [0] * len(lengths)
    spans_in = [0] * len(lengths)
    ids: list[list[str]] = [[] for _ in lengths]
    for place in places(rows):
        row, here = place.row, slice(place.start, place.end)
        tokens[row, here] = torch.from_numpy(place.sample.ids.astype(np.int64))
        positions[row, here] = torch.arange(place.end - place.start)
        segments[row, here] = documents_in[row]
        for first, last in place.sample.spans:
            spans_in[row] += 1
            spans[row, place.start + first : place.start + last + 1] = spans_in[row]
        documents_in[row] += 1
        ids[row].append(place.sample.id)
    return DraftBatch(
        tokens=to_device(tokens, device),
        positions=to_device(positions, device),
        segments=to_device(segments, device),
        spans=to_device(spans, device),
        sample_ids=ids,
    )
