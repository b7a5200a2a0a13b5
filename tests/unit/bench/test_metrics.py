from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafttrain.bench.metrics import acceptance, by_category
from drafttrain.engine.acceptance import acceptance_counts, is_cut, tau
from drafttrain.engine.records import RoundRecord

Make = Callable[..., RoundRecord]


def test_pooled_tau_counts_the_bonus_token(record: Make) -> None:
    """Case 33 of docs/cases.md: 3/2/1/0 accepted is 1.5 accepted and 2.5 emitted a round."""
    result = acceptance([record(proposed=3, accepted=n) for n in (3, 2, 1, 0)])
    assert result.tau == 2.5
    assert result.mean_accepted == 1.5
    assert result.acceptance_rate == 0.5
    # Conditional: 3 of 4, 2 of 3, 1 of 2; the product of the *unconditional* rates would be 0.094.
    assert result.alpha == pytest.approx([3 / 4, 2 / 3, 1 / 2])
    assert result.per_position == pytest.approx([3 / 4, 2 / 4, 1 / 4])
    assert result.judged == [4, 3, 2]


def test_plain_decoding_has_tau_one(record: Make) -> None:
    result = acceptance([record(proposed=0, number=n) for n in range(7)])
    assert result.tau == 1.0
    assert result.acceptance_rate is None
    assert result.alpha == [] and result.per_position == []


def test_tau_is_pooled_and_not_a_mean_of_means(record: Make) -> None:
    records = [record("short", accepted=4)] + [record("long", accepted=0, number=n) for n in range(9)]
    result = acceptance(records)
    assert result.tau == pytest.approx(14 / 10)
    assert result.tau_request_mean == pytest.approx((5 + 1) / 2)


def test_eos_inside_an_accepted_prefix_is_cut(record: Make) -> None:
    """The stop token was draft 2 of 4, all accepted: two emitted, depths 3 and 4 were never judged."""
    cut = record(accepted=4, emitted=2, reason="stop")
    assert is_cut(cut)
    assert acceptance_counts([cut]) == ([1, 1], [1, 1], [1, 1])
    result = acceptance([record(accepted=1), cut])
    assert result.tau == pytest.approx(4 / 2)
    assert result.alpha == [1.0, 0.5, None, None]
    assert result.acceptance_rate == pytest.approx(3 / 6)


def test_cut_rounds_leave_the_deeper_denominators_alone(record: Make) -> None:
    full = record(accepted=2)  # depth 3 rejected
    cut = record(accepted=2, emitted=2, reason="length")  # ended on draft 2
    accepted, reached, offered = acceptance_counts([full, cut])
    assert accepted == [2, 2, 0, 0]
    assert reached == [2, 2, 1, 0]
    assert offered == [2, 2, 1, 1]
    assert acceptance([full, cut]).alpha == [1.0, 1.0, 0.0, None]


@pytest.mark.parametrize(("accepted", "emitted"), [(4, 2), (2, 2)])
def test_truncation_reads_the_same_whether_accepted_was_clipped_or_not(
    record: Make, accepted: int, emitted: int
) -> None:
    assert acceptance_counts([record(accepted=accepted, emitted=emitted, reason="stop")]) == (
        [1, 1],
        [1, 1],
        [1, 1],
    )


def test_a_stop_token_as_bonus_is_no_cut(record: Make) -> None:
    last = record(accepted=1, reason="stop")
    assert not is_cut(last)
    assert acceptance_counts([last]) == ([1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1])


def test_no_rounds_give_no_figures() -> None:
    result = acceptance([])
    assert (result.tau, result.tau_ci, result.tau_request_mean, result.acceptance_rate) == (None,) * 4
    assert tau([]) is None


def test_categories_keep_their_order_and_drop_empty_ones(record: Make) -> None:
    groups = by_category([record("b"), record("a"), record("b")], {"a": "x", "b": "y", "c": "z"})
    assert {name: len(rows) for name, rows in groups.items()} == {"x": 1, "y": 2}


@given(st.lists(st.integers(0, 5), min_size=1, max_size=60))
def test_without_cuts_the_conditional_rates_multiply_to_the_unconditional(record: Make, accepted: list[int]) -> None:
    result = acceptance([record(proposed=5, accepted=n) for n in accepted], samples=10)
    product = 1.0
    for alpha, position in zip(result.alpha, result.per_position, strict=True):
        product *= alpha if alpha is not None else 0.0
        assert position is not None and math.isclose(product, position, abs_tol=1e-12)
    assert result.tau is not None and result.mean_accepted is not None
    assert math.isclose(result.tau, 1 + result.mean_accepted)
    assert math.isclose(1 + sum(p or 0 for p in result.per_position), result.tau)


rounds = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 6), st.booleans())


@given(st.lists(rounds, min_size=1, max_size=40))
def test_counts_are_consistent_under_any_truncation(record: Make, rows: list[tuple[int, int, int, bool]]) -> None:
    records = []
    for proposed, accepted, emitted, last in rows:
        taken = min(accepted, proposed)
        cut = last and emitted <= taken
        records.append(
            record(
                proposed=proposed,
                accepted=taken,
                emitted=emitted if cut else taken + 1,
                reason="stop" if last else None,
            )
        )
    accepted_n, reached, offered = acceptance_counts(records)
    assert all(a <= r <= o for a, r, o in zip(accepted_n, reached, offered, strict=True))
    assert all(later <= sooner for sooner, later in zip(accepted_n, reached[1:], strict=False))
    assert sum(accepted_n) == sum(min(r.accepted, r.emitted) for r in records)


def test_a_tree_counts_by_level(record: Make) -> None:
    """12 nodes in 3 levels: rates are by depth, not by node."""
    rounds = [replace(record(proposed=12, accepted=n), depth=3) for n in (3, 1, 0)]
    result = acceptance([*rounds, replace(record(proposed=4, accepted=1), depth=1)])
    assert result.judged == [4, 2, 1]
    assert result.per_position == pytest.approx([3 / 4, 1 / 3, 1 / 3])
    assert result.acceptance_rate == pytest.approx(5 / 10)


def test_a_chain_that_is_never_cut(record: Make) -> None:
    """1 + alpha_1 + alpha_1 alpha_2 + ...: where no round is cut that is tau."""
    rows = [
        record(f"r{n // 4}", proposed=3, accepted=kept, number=n) for n, kept in enumerate(sorted([0, 1, 2, 3] * 7))
    ]
    result = acceptance(rows)
    assert result.chain == pytest.approx([1.75, 2.25, 2.5]) and result.tau == pytest.approx(result.chain[-1])
    assert [low < point < high for point, (low, high) in zip(result.chain, result.chain_ci, strict=True)] == [True] * 3
    assert result.chain_ci[-1] == pytest.approx(result.tau_ci)
    assert acceptance([]).chain == [] and acceptance(rows[:1]).chain_ci == []
    # A depth that was never reached adds nothing.
    assert acceptance([record(f"r{n}", proposed=3, accepted=0) for n in range(3)]).chain == [1.0, 1.0, 1.0]
