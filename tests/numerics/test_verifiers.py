"""Every verifier samples the target's distribution: chi-square on a 16-token vocabulary, accepted, residual and
bonus tokens apart. A wide vocabulary would not show a random stream that proposal and residual share."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafttrain.engine.sampling import RowStreams, SamplingParams, draw, probabilities, uniforms
from drafttrain.engine.verify import Proposal, Verdict, verify_chain
from drafttrain.modeling.vocab_map import VocabMap
from tests.numerics.chi_square import SETTINGS, VOCAB, assert_follows, chi_square, critical

ROWS, DEPTH = 40_000, 2


def _setup(params: SamplingParams, spread: float) -> tuple[Tensor, Tensor, Tensor, list[RowStreams]]:
    """Target logits [DEPTH + 1, V], the target's and the draft's distributions, a stream a row."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(DEPTH + 1, VOCAB, generator=generator) * 1.5
    drafts = logits[:DEPTH] + spread * torch.randn(DEPTH, VOCAB, generator=generator)
    p = probabilities(logits[None], [params])[0]
    q = probabilities(drafts[None], [params])[0]
    return logits, p, q, [RowStreams(params.seed, str(row)) for row in range(ROWS)]


def _run_sampled(params: SamplingParams, spread: float) -> tuple[Tensor, Verdict, Tensor]:
    logits, p, q, streams = _setup(params, spread)
    proposal_streams = [s.proposal(0) for s in streams]
    drafted = draw(q[None].expand(ROWS, -1, -1), uniforms(proposal_streams, DEPTH))
    proposal = Proposal(drafted, torch.full((ROWS,), DEPTH), q[None].expand(ROWS, -1, -1).clone(), VocabMap.full(VOCAB))
    verdict = verify_chain(
        logits[None].expand(ROWS, -1, -1), proposal, [params] * ROWS, [s.verdict(0) for s in streams]
    )
    return drafted, verdict, p


@pytest.mark.parametrize("spread", [0.3, 2.0])
@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_chain(name: str, spread: float) -> None:
    drafted, verdict, p = _run_sampled(SETTINGS[name], spread)
    accepted = verdict.accepted
    first = torch.where(accepted >= 1, drafted[:, 0], verdict.bonus)
    assert_follows(first, p[0])
    # Given that the first draft was kept, the second token is the target's again; likewise the bonus token.
    kept = accepted >= 1
    second = torch.where(accepted >= 2, drafted[:, 1], verdict.bonus)[kept]
    assert_follows(second, p[1])
    assert_follows(verdict.bonus[accepted == 2], p[2])


@pytest.mark.parametrize("name", SETTINGS)
def test_residual(name: str) -> None:
    """Tokens emitted on a rejection follow norm((p - q)+)."""
    params = SETTINGS[name]
    _, verdict, p = _run_sampled(params, 2.0)
    q = _setup(params, 2.0)[2]
    residual = (p[0] - q[0]).clamp(min=0)
    assert_follows(verdict.bonus[verdict.accepted == 0], residual / residual.sum())


@pytest.mark.parametrize("name", SETTINGS)
def test_deterministic_chain(name: str) -> None:
    """Drafts chosen without sampling (n-gram, oracle): y ~ p at each node, walk on while they agree."""
    params = SETTINGS[name]
    logits, p, q, streams = _setup(params, 0.3)
    tokens = q.argmax(-1)[None].expand(ROWS, -1)
    verdict = verify_chain(
        logits[None].expand(ROWS, -1, -1),
        Proposal(tokens, torch.full((ROWS,), DEPTH)),
        [params] * ROWS,
        [s.verdict(0) for s in streams],
    )
    first = torch.where(verdict.accepted >= 1, tokens[:, 0], verdict.bonus)
    assert_follows(first, p[0])
    share = float((verdict.accepted >= 1).double().mean())
    assert share == pytest.approx(float(p[0, tokens[0, 0]]), abs=4 * (0.25 / ROWS) ** 0.5)
    assert_follows(verdict.bonus[verdict.accepted == 2], p[2])


def test_acceptance_is_one_minus_total_variation() -> None:
    params = SETTINGS["temperature"]
    _, verdict, p = _run_sampled(params, 1.0)
    q = _setup(params, 1.0)[2]
    expected = float(torch.minimum(p[0], q[0]).sum())
    assert float((verdict.accepted >= 1).double().mean()) == pytest.approx(expected, abs=4 * (0.25 / ROWS) ** 0.5)


def test_draft_vocabulary_smaller_than_the_targets() -> None:
    """Tokens the draft cannot say come out of the residual at the target's rate."""
    params = SETTINGS["temperature"]
    logits, p, _, streams = _setup(params, 0.0)
    vocab = VocabMap.from_ids([1, 3, 4, 8, 9, 15], VOCAB)
    q = probabilities(vocab.restrict(logits[:DEPTH])[None], [params])[0]
    drafted = vocab.to_target(draw(q[None].expand(ROWS, -1, -1), uniforms([s.proposal(0) for s in streams], DEPTH)))
    proposal = Proposal(drafted, torch.full((ROWS,), DEPTH), q[None].expand(ROWS, -1, -1).clone(), vocab)
    verdict = verify_chain(
        logits[None].expand(ROWS, -1, -1), proposal, [params] * ROWS, [s.verdict(0) for s in streams]
    )
    assert_follows(torch.where(verdict.accepted >= 1, drafted[:, 0], verdict.bonus), p[0])


def test_negative_control_typical_acceptance_fails() -> None:
    """Typical acceptance (arXiv 2401.10774) is lossy; a test that it passed would prove nothing."""
    params = SamplingParams(temperature=1.3)
    _, p, q, streams = _setup(params, 2.0)
    drafted = draw(q[0].expand(ROWS, -1), uniforms([s.proposal(0) for s in streams], 1)[:, 0])
    entropy = -(p[0] * p[0].clamp(min=1e-9).log()).sum()
    threshold = torch.minimum(torch.tensor(0.09), 0.3 * torch.exp(-entropy))
    fallback = draw(p[0].expand(ROWS, -1), uniforms([s.verdict(0) for s in streams], 1)[:, 0])
    emitted = torch.where(p[0][drafted] > threshold, drafted, fallback)
    statistic, freedom = chi_square(emitted, p[0])
    assert statistic > critical(freedom)


def test_negative_control_shared_stream_fails() -> None:
    """The uniform that drew the proposal must not decide about it."""
    params = SETTINGS["temperature"]
    logits, p, q, streams = _setup(params, 2.0)
    uniform = uniforms([s.proposal(0) for s in streams], 1)
    drafted = draw(q[0].expand(ROWS, -1), uniform[:, 0])

    proposal = Proposal(
        drafted[:, None],
        torch.ones(ROWS, dtype=torch.int64),
        q[None, :1].expand(ROWS, -1, -1).clone(),
        VocabMap.full(VOCAB),
    )
    verdict = verify_chain(
        logits[None, :2].expand(ROWS, -1, -1), proposal, [params] * ROWS, [s.proposal(0) for s in streams]
    )
    emitted = torch.where(verdict.accepted >= 1, drafted, verdict.bonus)
    statistic, freedom = chi_square(emitted, p[0])
    assert statistic > critical(freedom)


def test_streams_of_a_request_do_not_depend_on_others() -> None:
    def values(generator: torch.Generator) -> list[float]:
        return list(uniforms([generator], 4)[0].tolist())

    first = values(RowStreams(0, "a").verdict(5))
    assert first == values(RowStreams(0, "a").verdict(5))
    others = [RowStreams(0, "a").proposal(5), RowStreams(0, "b").verdict(5), RowStreams(1, "a").verdict(5)]
    assert all(first != values(other) for other in [*others, RowStreams(0, "a").verdict(6)])
