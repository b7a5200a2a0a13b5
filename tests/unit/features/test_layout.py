from __future__ import annotations

import numpy as np
import pytest
import torch

from drafttrain.corpus.types import Sample
from drafttrain.features.layout import lay_out


def test_rows_are_packed_without_gaps_and_padded_at_the_end() -> None:
    first = Sample("a", np.array([5, 6, 7], np.int32), [(1, 2)])
    second = Sample("b", np.array([8, 9], np.int32), [(0, 0), (1, 1)])
    third = Sample("c", np.array([1, 2, 3, 4], np.int32), [])
    batch = lay_out([[first, second], [third]])
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9], [1, 2, 3, 4, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    assert batch.segments.tolist() == [[0, 0, 0, 1, 1], [0, 0, 0, 0, -1]]
    # Every span of a row has a number of its own, the two adjacent ones of "b" too.
    assert batch.spans.tolist() == [[0, 1, 1, 2, 3], [0, 0, 0, 0, 0]]
    assert batch.sample_ids == [["a", "b"], ["c"]]
    assert all(t.dtype == torch.int64 for t in (batch.tokens, batch.positions, batch.segments, batch.spans))


def test_a_batch_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        lay_out([])
    with pytest.raises(ValueError, match="at least one"):
        lay_out([[]])
