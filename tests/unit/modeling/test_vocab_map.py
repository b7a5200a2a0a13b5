"""The draft vocabulary: frequent tokens, special ones always, padding never, offsets on disk."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.modeling.vocab_map import VocabMap, looks_absolute

COUNTS = torch.tensor([0, 5, 0, 3, 9, 0, 1, 0])


def test_most_frequent_tokens_and_special_ones() -> None:
    mapping = VocabMap.from_counts(COUNTS, 4, always=[7])
    assert mapping.target_ids.tolist() == [1, 3, 4, 7]
    assert mapping.d2t.tolist() == [1, 2, 2, 4]
    assert mapping.to_draft.tolist() == [-1, 0, -1, 1, 2, -1, -1, 3]


def test_fills_up_when_fewer_distinct_tokens_were_seen() -> None:
    mapping = VocabMap.from_counts(COUNTS, 6)
    assert mapping.target_ids.tolist() == [0, 1, 2, 3, 4, 6]


def test_padding_of_the_target_vocabulary_is_never_drafted() -> None:
    counts = COUNTS.clone()
    counts[7] = 100
    mapping = VocabMap.from_counts(counts, 8, tokenizer_size=6)
    assert mapping.target_ids.tolist() == [0, 1, 2, 3, 4, 5]
    assert mapping.size == 6 and mapping.vocab_size == 8


def test_coverage() -> None:
    assert VocabMap.from_counts(COUNTS, 2).coverage(COUNTS) == pytest.approx(14 / 18)
    assert VocabMap.from_counts(COUNTS, 2).coverage(torch.zeros(8)) == 0.0


@pytest.mark.parametrize(
    ("size", "always", "tokenizer_size"), [(0, [], None), (9, [], None), (1, [1, 2], None), (4, [7], 6), (4, [8], None)]
)
def test_impossible_vocabularies(size: int, always: list[int], tokenizer_size: int | None) -> None:
    with pytest.raises(ValueError, match=r"vocabulary|tokenizer"):
        VocabMap.from_counts(COUNTS, size, always, tokenizer_size)


def test_absolute_ids_are_recognised() -> None:
    mapping = VocabMap.from_counts(COUNTS, 3)
    assert looks_absolute(mapping.target_ids, mapping.t2d)
    assert not looks_absolute(mapping.d2t, mapping.t2d)
    with pytest.raises(ValueError, match="absolute"):
        VocabMap(mapping.target_ids, mapping.t2d)


@pytest.mark.parametrize("d2t", [[0, 0, 6], [-1, 0, 0], [1, 0, 0]])
def test_maps_out_of_range_or_with_repeats_are_refused(d2t: list[int]) -> None:
    with pytest.raises(ValueError, match="no map"):
        VocabMap(torch.tensor(d2t), torch.tensor([True] * 3 + [False] * 5))


def test_maps_that_disagree_are_refused() -> None:
    with pytest.raises(ValueError, match="different sets"):
        VocabMap(torch.tensor([0, 0]), torch.tensor([True, False, True]))


@given(st.sets(st.integers(0, 19), min_size=1), st.integers(0, 2**31))
def test_maps_are_inverse_and_restrict_is_the_adjoint_of_expand(ids: set[int], seed: int) -> None:
    mapping = VocabMap.from_ids(ids, 20)
    draft = torch.arange(mapping.size)
    assert torch.equal(mapping.to_draft[mapping.to_target(draft)], draft)
    assert torch.equal(mapping.to_target(draft), mapping.target_ids)
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(3, mapping.size, generator=generator)
    assert torch.equal(mapping.restrict(mapping.expand(probs)), probs)
    assert mapping.expand(probs).sum() == pytest.approx(float(probs.sum()), rel=1e-5)
    assert VocabMap(**mapping.state()) == mapping


def test_full() -> None:
    full = VocabMap.full(8)
    logits = torch.randn(2, 8)
    assert full.is_full and full.restrict(logits) is logits and full.expand(logits) is logits
    assert full != VocabMap.from_counts(COUNTS, 4)
