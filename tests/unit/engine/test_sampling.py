"""From logits to what is sampled: what 0 and 1 switch off, and greedy as the limit (case 30 of docs/cases.md)."""

from __future__ import annotations

import pytest
import torch

from drafttrain.config import LEAST_TEMPERATURE
from drafttrain.engine.engine import Engine
from drafttrain.engine.records import Request
from drafttrain.engine.sampling import SamplingParams, probabilities
from tests.support import RAGGED_PROMPTS, tiny_target

LOGITS = 3 * torch.randn(4, 3, 40, generator=torch.Generator().manual_seed(0))


def test_off_is_off() -> None:
    """Alone, and beside rows that cut."""
    plain = LOGITS.softmax(-1)
    off = SamplingParams(temperature=1.0, top_p=1.0, top_k=0, min_p=0.0)
    assert torch.equal(probabilities(LOGITS, [off] * 4), plain)
    cuts = SamplingParams(temperature=1.0, top_p=0.5, top_k=3, min_p=0.1)
    mixed = probabilities(LOGITS, [off, cuts, off, cuts])
    torch.testing.assert_close(mixed[::2], plain[::2])
    assert bool(((mixed[1::2] > 0).sum(-1) <= 3).all())
    for count in (40, 41):  # as many as there are, and more
        whole = SamplingParams(temperature=1.0, top_k=count)
        torch.testing.assert_close(probabilities(LOGITS, [whole, cuts] * 2)[::2], plain[::2])


@pytest.mark.parametrize("others", [{}, {"top_p": 0.3, "top_k": 2, "min_p": 0.5}])
def test_temperature_zero_is_the_argmax(others: dict[str, float]) -> None:
    greedy, warm = SamplingParams(temperature=0.0, **others), SamplingParams(temperature=1.0)  # type: ignore[arg-type]
    probs = probabilities(LOGITS, [greedy, warm] * 2)
    assert bool(probs.isfinite().all())
    assert torch.equal(probs[::2], torch.nn.functional.one_hot(LOGITS[::2].argmax(-1), 40).float())
    near = probabilities(LOGITS, [SamplingParams(temperature=1e-5)] * 4)
    torch.testing.assert_close(near, probabilities(LOGITS, [SamplingParams()] * 4))


def test_the_lowest_temperature_is_finite_on_any_logits() -> None:
    """Below it nothing is sampled: `test_engine.py::test_bad_sampling`."""
    lowest = SamplingParams(temperature=LEAST_TEMPERATURE)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        logits = torch.tensor([[-6e4, 5e4, 6e4, 0.0]], dtype=dtype)
        assert probabilities(logits, [lowest]).tolist() == [[0.0, 0.0, 1.0, 0.0]]


def test_greedy_rows_ignore_what_cuts() -> None:
    target = tiny_target()

    def run(**values: float) -> list[list[int]]:
        params = SamplingParams(temperature=0.0, **values)  # type: ignore[arg-type]
        requests = [Request(str(i), prompt, 8, params) for i, prompt in enumerate(RAGGED_PROMPTS[:3])]
        return [done.tokens for done in Engine(target, max_batch=3, max_length=64).generate(requests)]

    assert run(top_p=0.2, top_k=5, min_p=0.3) == run()
