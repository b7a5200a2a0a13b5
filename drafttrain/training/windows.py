"""The order of training data: a pure function of (seed, epoch), cut into windows of one optimiser step each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from drafttrain.corpus.samples import lengths_of
from drafttrain.corpus.types import Sample
from drafttrain.errors import DataError

Row = list[Sample]

_BUCKET_WINDOWS = 16
_POOL_BLOCKS = 16


def whole_steps(steps: float) -> int:
    """A fraction of a step rounded up to one; 2.1 - 2 is a little more than a tenth, and no reason for a step."""
    return math.ceil(round(steps, 6))


@dataclass(frozen=True)
class Window:
    """The rows of one optimiser step over all ranks.

    Attributes:
        epoch: from 0.
        first_row: rows of the epoch that come before.
        rows: between 1 and batch_rows * accumulation * ranks rows.
    """

    epoch: int
    first_row: int
    rows: list[Row]

    def micro_batches(self, rank: int, ranks: int, batch_rows: int) -> list[list[Row]]:
        """What one rank runs, longest rows first; every rank gets the same number of micro-batches.

        Rows of similar length meet in a micro-batch. Where rows do not suffice (the end of an epoch), a rank gets a
        copy without assistant spans: it keeps the ranks in step and adds nothing to loss or gradient.
        """
        ordered = sorted(self.rows, key=_tokens, reverse=True)
        batches = []
        for start in range(0, len(ordered), batch_rows * ranks):
            chunk = ordered[start : start + batch_rows * ranks]
            mine = chunk[rank::ranks]
            batches.append(mine or [_unsupervised(chunk[-1])])
        return batches


def _tokens(row: Row) -> int:
    return sum(len(sample.ids) for sample in row)


def _unsupervised(row: Row) -> Row:
    return [replace(sample, spans=[]) for sample in row]


class DataOrder:
    """Which rows each optimiser step sees.

    Args:
        samples: the training set.
        row_length: tokens of a packed row; samples must not be longer.
        packing: several samples a row; otherwise one.
        window_rows: rows of one optimiser step over all ranks.
        seed: with the epoch, decides the order.
        shuffle_block: see `block_order`; None shuffles freely.

    Raises:
        DataError: no samples, or one longer than a row.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        *,
        row_length: int,
        packing: bool,
        window_rows: int,
        seed: int,
        shuffle_block: int | None = None,
    ) -> None:
        if not samples:
            raise DataError("there are no training samples", remedy="look at the rejects, or give more prompts")
        self.lengths = lengths_of(samples)
        longest = int(self.lengths.argmax())
        if self.lengths[longest] > row_length:
            raise DataError(
                f"has {self.lengths[longest]} tokens, a row holds {row_length}",
                where=f"sample {samples[longest].id}",
                remedy="raise training.row_length, or lower data.max_length to it",
            )
        self.samples = samples
        self.row_length = row_length
        self.packing = packing
        self.window_rows = window_rows
        self.seed = seed
        self.shuffle_block = shuffle_block

    def epoch_rows(self, epoch: int) -> list[list[int]]:
        """All rows of an epoch, in the order in which they are trained on, as places of samples in the training set;
        each stands in exactly one."""
        rng = np.random.default_rng([self.seed, epoch])
        order = block_order(len(self.samples), self.shuffle_block, rng)
        if self.packing:
            rows = first_fit(self.lengths[order].tolist(), self.row_length)
            return [[order[place] for place in row] for row in rows]
        return self._bucketed([[index] for index in order], rng)

    def _bucketed(self, rows: list[list[int]], rng: np.random.Generator) -> list[list[int]]:
        """Rows of similar length side by side, within stretches short enough to leave the order random."""
        stretch = self.window_rows * _BUCKET_WINDOWS
        stretches: list[list[list[list[int]]]] = []
        for start in range(0, len(rows), stretch):
            near = sorted(rows[start : start + stretch], key=lambda row: self.lengths[row].sum())
            stretches.append([near[i : i + self.window_rows] for i in range(0, len(near), self.window_rows)])
        if self.shuffle_block is None:
            stretches = [[window for part in stretches for window in part]]
        # A short window stays last, so that windows of an epoch begin at multiples of window_rows.
        short = [window for part in stretches for window in part if len(window) < self.window_rows]
        ordered: list[list[list[int]]] = []
        for part in stretches:
            whole = [window for window in part if len(window) == self.window_rows]
            ordered += [whole[index] for index in rng.permutation(len(whole))]
        return [row for window in ordered + short for row in window]

    def steps_in(self, epochs: float) -> int:
        """Optimiser steps of `epochs` passes; a fraction of an epoch is rounded up to a step."""
        whole = int(epochs)
        steps = sum(math.ceil(len(self.epoch_rows(epoch)) / self.window_rows) for epoch in range(whole))
        if epochs > whole:
            last = math.ceil(len(self.epoch_rows(whole)) / self.window_rows)
            steps += whole_steps((epochs - whole) * last)
        return steps

    def windows(self, epoch: int = 0, row: int = 0) -> Iterator[Window]:
        """Windows without end, from `row` rows into `epoch`."""
        while True:
            rows = self.epoch_rows(epoch)
            while row < len(rows):
                window = rows[row : row + self.window_rows]
                yield Window(epoch, row, [[self.samples[index] for index in places] for places in window])
                row += len(window)
            epoch, row = epoch + 1, 0


def block_order(count: int, block: int | None, rng: np.random.Generator) -> list[int]:
    """A permutation of range(count) that a disk can follow: neighbours of the data are neighbours of a store.

    Blocks of `block` neighbours are put in random order and shuffled within pools of `_POOL_BLOCKS`. While a pool is
    read, that many stretches of the disk are in use, however large the store is.
    """
    if block is None:
        return [int(index) for index in rng.permutation(count)]
    runs = [range(start, min(start + block, count)) for start in range(0, count, block)]
    shuffled = [runs[index] for index in rng.permutation(len(runs))]
    order: list[int] = []
    for start in range(0, len(shuffled), _POOL_BLOCKS):
        pool = [index for run in shuffled[start : start + _POOL_BLOCKS] for index in run]
        order += [pool[index] for index in rng.permutation(len(pool))]
    return order


def first_fit(lengths: Sequence[int], row_length: int, open_rows: int = 64) -> list[list[int]]:
    """Pack samples of `lengths` into rows of at most `row_length` tokens, as places in that list: the first of the
    open rows with room takes the next.

    Rows come in the order in which they were opened. Only the `open_rows` latest stay open: the cost is linear.
    """
    rows: list[list[int]] = []
    room: list[int] = []
    oldest = 0
    for place, size in enumerate(lengths):
        oldest = max(oldest, len(rows) - open_rows)
        fits = next((i for i in range(oldest, len(rows)) if room[i] >= size), None)
        if fits is None:
            rows.append([place])
            room.append(row_length - size)
        else:
            rows[fits].append(place)
            room[fits] -= size
    return rows
