from __future__ import annotations

import pytest
import torch
import transformers

from drafttrain.bench.divergence import AnswerPair, Divergence, exact_match, first_difference, top2_gap
from tests.support import tiny_target


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [([1, 2], [1, 2], None), ([1, 2], [1, 3], 1), ([1], [1, 2], 1), ([], [5], 0), ([], [], None)],
)
def test_first_difference(one: list[int], other: list[int], index: int | None) -> None:
    assert first_difference(one, other) == index


def test_divergences_are_looked_up_behind_the_shared_prefix() -> None:
    asked: list[list[int]] = []

    def gap(ids: list[int]) -> float:
        asked.append(ids)
        return 0.25

    pairs = [
        AnswerPair("a", 0, [7, 8], [1, 2, 3], [1, 2, 3]),
        AnswerPair("b", 1, [9], [1, 2, 3], [1, 4, 3]),
    ]
    result = exact_match(pairs, gap)
    assert (result.matched, result.total, result.rate) == (1, 2, 0.5)
    assert result.divergences == [Divergence("b", 1, 1, 0.25)]
    assert asked == [[9, 1]]
    assert exact_match([], gap).rate is None


def test_gap_is_that_of_the_targets_logits() -> None:
    target = tiny_target()
    ids = [3, 9, 4]
    with torch.no_grad():
        best = target.hf(input_ids=torch.tensor([ids])).logits[0, -1].topk(2).values
    assert top2_gap(target, ids) == pytest.approx(float(best[0] - best[1]), rel=1e-4)


def test_with_a_repetition_penalty_the_gap_is_that_behind_it() -> None:
    """What looks like a clear choice may be a tie of what the greedy choice is made of, and the other way round."""
    target = tiny_target()
    ids = [3, 9, 4, 9]
    with torch.no_grad():
        logits = target.hf(input_ids=torch.tensor([ids])).logits
    processor = transformers.RepetitionPenaltyLogitsProcessor(3.0)
    best = processor(torch.tensor([ids]), logits[:, -1])[0].topk(2).values
    assert top2_gap(target, ids, 3.0) == pytest.approx(float(best[0] - best[1]), rel=1e-4)
