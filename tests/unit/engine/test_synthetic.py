"""The draft of a given quality."""

from __future__ import annotations

import pytest

from drafttrain.bench.metrics import acceptance
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import SyntheticProposer
from drafttrain.engine.records import Request
from drafttrain.errors import EngineError
from tests.support import RAGGED_PROMPTS, VOCAB, tiny_target


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_accepts_at_its_rate_and_changes_nothing(rate: float) -> None:
    target = tiny_target()
    requests = [Request(str(i), prompt, 90) for i, prompt in enumerate(RAGGED_PROMPTS)]
    plain = Engine(target, max_batch=7, max_length=110).generate(requests)
    draft = SyntheticProposer({c.id: c.tokens for c in plain}, VOCAB, rate)
    engine = Engine(target, draft, k=3, max_batch=7, max_length=110)
    assert [c.tokens for c in engine.generate(requests)] == [c.tokens for c in plain]
    found = acceptance(engine.records, samples=100)
    for alpha, judged in zip(found.alpha, found.judged, strict=True):
        if judged:
            assert alpha == pytest.approx(rate, abs=4 * (rate * (1 - rate) / judged) ** 0.5 + 1e-9)


def test_a_rate_is_a_probability() -> None:
    with pytest.raises(EngineError, match=r"rate is 1\.5"):
        SyntheticProposer({}, VOCAB, 1.5)
