from __future__ import annotations

from collections import Counter
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.errors import DataError
from drafttrain.training.windows import DataOrder, Window, first_fit
from tests.tiny_training import samples


def order(count: int = 23, *, packing: bool = True, window_rows: int = 4, seed: int = 1) -> DataOrder:
    return DataOrder(samples(count), row_length=40, packing=packing, window_rows=window_rows, seed=seed)


def ids(windows: list[Window]) -> list[list[list[str]]]:
    return [[[sample.id for sample in row] for row in window.rows] for window in windows]


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(1, 60),
    row_length=st.integers(20, 64),
    packing=st.booleans(),
    window_rows=st.integers(1, 7),
    epoch=st.integers(0, 3),
)
def test_an_epoch_has_every_sample_once_in_rows_that_fit(
    count: int, row_length: int, packing: bool, window_rows: int, epoch: int
) -> None:
    data = samples(count)
    rows = DataOrder(data, row_length=row_length, packing=packing, window_rows=window_rows, seed=0).epoch_rows(epoch)
    assert sorted(index for row in rows for index in row) == list(range(count))
    assert all(0 < sum(len(data[index].ids) for index in row) <= row_length for row in rows)


@pytest.mark.parametrize("packing", [True, False])
def test_the_order_is_a_function_of_seed_and_epoch(packing: bool) -> None:
    def epoch(number: int, seed: int = 1) -> list[list[int]]:
        return order(packing=packing, seed=seed).epoch_rows(number)

    assert epoch(0) == epoch(0)
    assert epoch(0) != epoch(1)
    assert epoch(0) != epoch(0, seed=2)


@pytest.mark.parametrize("packing", [True, False])
def test_windows_go_on_from_any_data_position(packing: bool) -> None:
    data = order(packing=packing)
    whole = list(islice(data.windows(), 20))
    for index, window in enumerate(whole[:-3]):
        rest = islice(data.windows(window.epoch, window.first_row + len(window.rows)), 3)
        assert ids(list(rest)) == ids(whole[index + 1 : index + 4])


def test_a_partial_window_is_kept_and_steps_are_counted() -> None:
    data = order(packing=False, count=10, window_rows=4)
    sizes = [len(window.rows) for window in islice(data.windows(), 6)]
    assert sizes == [4, 4, 2, 4, 4, 2]
    assert data.steps_in(2) == 6
    assert data.steps_in(1.5) == 5
    assert data.steps_in(0.1) == 1
    # In floats 2.1 - 2 is more than a tenth of an epoch of ten steps.
    tens = order(packing=False, count=40, window_rows=4)
    assert [tens.steps_in(epochs) for epochs in (2.1, 1.3, 0.35)] == [21, 13, 4]


@settings(max_examples=40, deadline=None)
@given(rows=st.integers(1, 12), ranks=st.integers(1, 4), batch_rows=st.integers(1, 4))
def test_ranks_share_a_window_without_loss_or_repeat(rows: int, ranks: int, batch_rows: int) -> None:
    window = Window(0, 0, [[sample] for sample in samples(rows)])
    shares = [window.micro_batches(rank, ranks, batch_rows) for rank in range(ranks)]
    assert len({len(share) for share in shares}) == 1
    assert all(1 <= len(batch) <= batch_rows for share in shares for batch in share)
    supervised = Counter(s.id for share in shares for batch in share for row in batch for s in row if s.spans)
    assert supervised == Counter(sample.id for row in window.rows for sample in row)


def test_packing_fills_rows() -> None:
    data = samples(200, shortest=6, longest=20)
    rows = first_fit([len(sample.ids) for sample in data], 64)
    used = sum(len(sample.ids) for sample in data) / (64 * len(rows))
    assert used > 0.93


def test_unpacked_windows_hold_similar_lengths() -> None:
    data = DataOrder(samples(256, longest=60), row_length=64, packing=False, window_rows=8, seed=0)
    waste = []
    for window in islice(data.windows(), 32):
        lengths = [len(row[0].ids) for row in window.rows]
        waste.append(1 - sum(lengths) / (max(lengths) * len(lengths)))
    assert sum(waste) / len(waste) < 0.1


def test_no_samples_and_too_long_ones_are_errors() -> None:
    with pytest.raises(DataError, match="no training samples"):
        DataOrder([], row_length=8, packing=True, window_rows=1, seed=0)
    with pytest.raises(DataError, match="a row holds 8"):
        DataOrder(samples(5, shortest=10), row_length=8, packing=True, window_rows=1, seed=0)


def test_block_shuffle_keeps_the_disk_near() -> None:
    """Every sample once, another order each epoch, and few stretches of the data in use at any time."""
    data = samples(640)
    order = DataOrder(data, row_length=64, packing=False, window_rows=4, seed=3, shuffle_block=8)
    epochs = [[row[0] for row in order.epoch_rows(epoch)] for epoch in (0, 1)]
    assert all(sorted(epoch) == list(range(640)) for epoch in epochs)
    assert epochs[0] != epochs[1]
    for epoch in epochs:
        # 64 rows are sorted into windows together, half a pool of 16 blocks.
        assert all(8 < len({index // 8 for index in epoch[at : at + 64]}) <= 16 for at in range(0, 640, 64))
    packed = DataOrder(data, row_length=64, packing=True, window_rows=4, seed=3, shuffle_block=8)
    stream = [index // 8 for row in packed.epoch_rows(0) for index in row]
    assert sorted(index for row in packed.epoch_rows(0) for index in row) == list(range(640))
    assert all(len(set(stream[at : at + 64])) <= 32 for at in range(0, 640, 64))
    again = DataOrder(data, row_length=64, packing=False, window_rows=4, seed=3, shuffle_block=8)
    assert [row[0] for row in again.epoch_rows(1)] == epochs[1]
    windows = again.windows(epoch=1)
    assert [row[0].id for row in next(windows).rows] == [data[index].id for index in epochs[1][:4]]
