"""States that are kept while the target answers."""

from __future__ import annotations

import pytest
import torch

from drafttrain.corpus.types import Continuation
from drafttrain.engine.generation import TargetGenerator
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import Tap
from tests.support import RAGGED_PROMPTS, tiny_target

TAPS = (Tap.block(1), Tap.pre_norm, Tap.final)
NEW = 9


def answers(
    target: CausalLM, prompts: list[list[int]], taps: tuple[Tap, ...] = TAPS, temperature: float = 0.0, rows: int = 3
) -> dict[int, Continuation]:
    found = TargetGenerator(target, rows).generate(
        prompts, max_new_tokens=NEW, temperature=temperature, seed=1, stop=frozenset(range(5, 64, 3)), taps=taps
    )
    return {said.prompt: said for said in found}


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_states_are_those_of_a_forward_over_prompt_and_answer(kind: str, temperature: float) -> None:
    target = tiny_target(kind)
    prompts = RAGGED_PROMPTS * 3
    said = answers(target, prompts, temperature=temperature)
    plain = answers(target, prompts, taps=(), temperature=temperature)
    assert {index: one.tokens for index, one in said.items()} == {index: one.tokens for index, one in plain.items()}
    assert {len(one.tokens) == NEW for one in said.values()} == {True, False}, "some end, some are cut"
    for index, one in said.items():
        states = one.states
        assert states is not None
        text = [*prompts[index], *one.tokens]
        # All that was said was read again; behind a stop token one token more.
        beyond = len(states.ids) - len(text)
        assert states.ids.tolist()[: len(text)] == text and beyond == (1 if len(one.tokens) < NEW else 0)
        out = target(torch.from_numpy(states.ids).long()[None], taps=TAPS)
        for tap in TAPS:
            torch.testing.assert_close(states.features[tap], out.taps[tap][0], rtol=1e-3, atol=1e-3)
        chosen = target.lm_head(out.final[0]).argmax(-1)[states.greedy_from : -1]
        assert chosen.tolist() == states.ids[states.greedy_from + 1 :].tolist()
        assert (states.greedy_from == len(prompts[index]) - 1) == (temperature == 0)


def test_without_room_for_one_more_token_the_last_states_are_missing() -> None:
    target = tiny_target(max_position_embeddings=16)
    (one,) = TargetGenerator(target).generate([[3] * 10], max_new_tokens=6, taps=TAPS)
    assert one.states is not None and len(one.tokens) == 6 and len(one.states.ids) == 15
    (one,) = TargetGenerator(target).generate([[3] * 15], max_new_tokens=1, taps=TAPS)
    assert one.states is None and len(one.tokens) == 1
