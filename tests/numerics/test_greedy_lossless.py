"""Greedy speculative output equals plain greedy output token for token, whatever the draft is worth."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.build import build_drafter, init_from_target, new_vocab_map
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import NGramProposer, OracleProposer, Proposer, build_proposer
from drafttrain.engine.records import Completion, Request
from drafttrain.modeling.causal_lm import CausalLM
from tests.support import RAGGED_PROMPTS, tiny_target

CONFIGS: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(family="eagle3"),
    "eagle3-small-vocabulary": Eagle3Config(family="eagle3", draft_vocab_size=20),
    "eagle3.1": Eagle3Config(family="eagle3", fc_norm=True, norm_output=True),
    "eagle1": Eagle1Config(family="eagle1"),
    "medusa": MedusaConfig(family="medusa"),
    "draft_lm": DraftLMConfig(family="draft_lm", init="target_layers", layers=[0, 3]),
    "draft_lm-perfect": DraftLMConfig(family="draft_lm", init="target_layers", layers=[0, 1, 2, 3]),
}


def _requests(max_new_tokens: int = 24, stop: frozenset[int] = frozenset()) -> list[Request]:
    return [Request(str(i), prompt, max_new_tokens, stop_ids=stop) for i, prompt in enumerate(RAGGED_PROMPTS)]


def _plain(target: CausalLM, requests: list[Request]) -> list[Completion]:
    """Each request by itself, no draft, no batch."""
    engine = Engine(target, max_batch=1, max_length=96)
    return [engine.generate([request])[0] for request in requests]


def _by_hand(target: CausalLM, prompt: list[int], count: int) -> list[int]:
    """Greedy decoding without cache or engine."""
    ids = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            ids.append(int(target.lm_head(target(torch.tensor([ids])).final[0, -1]).argmax()))
    return ids[len(prompt) :]


def _proposer(name: str, target: CausalLM, plain: list[Completion]) -> Proposer:
    if name == "ngram":
        return NGramProposer(shortest=1)
    if name == "oracle":
        return OracleProposer({c.id: c.tokens for c in plain})
    config = CONFIGS[name]
    vocab_map = new_vocab_map(config, target.vocab_size, torch.arange(target.vocab_size).flip(0))
    torch.manual_seed(1)
    drafter = build_drafter(config, target.config, vocab_map)
    init_from_target(drafter, target)
    return build_proposer(drafter)


def test_plain_decoding_is_greedy_decoding() -> None:
    target = tiny_target("llama")
    requests = _requests(12)
    assert [c.tokens for c in _plain(target, requests)] == [_by_hand(target, r.prompt_ids, 12) for r in requests]


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("name", [*CONFIGS, "ngram", "oracle"])
def test_output_equals_plain(name: str, batch: int) -> None:
    target = tiny_target("llama")
    requests = _requests()
    plain = _plain(target, requests)
    engine = Engine(target, _proposer(name, target, plain), k=4, max_batch=batch, max_length=96)
    drafted = engine.generate(requests)
    assert [c.tokens for c in drafted] == [c.tokens for c in plain]
    assert all(len(c.tokens) == 24 and c.reason == "length" for c in drafted)
    if name in ("oracle", "draft_lm-perfect"):
        # 1 token by the prefill, then 23 in rounds of up to 5: everything proposed is accepted.
        assert all(r.accepted == r.proposed for r in engine.records)
        assert sum(r.emitted for r in engine.records) == 23 * len(requests)
        assert len(engine.records) == 5 * len(requests)


@pytest.mark.parametrize("name", ["eagle3", "draft_lm-perfect", "oracle"])
@pytest.mark.parametrize("kind", ["qwen3", "gemma2", "mistral-window", "gemma3"])
def test_architectures(kind: str, name: str) -> None:
    target = tiny_target(kind)
    requests = _requests(16)
    plain = _plain(target, requests)
    engine = Engine(target, _proposer(name, target, plain), k=3, max_batch=3, max_length=96)
    assert [c.tokens for c in engine.generate(requests)] == [c.tokens for c in plain]


@pytest.mark.parametrize("name", ["draft_lm-perfect", "oracle", "eagle3", "medusa"])
def test_a_stop_token_inside_an_accepted_prefix_ends_the_output_there(name: str) -> None:
    target = tiny_target("llama")
    free = _plain(target, _requests())
    stop = frozenset({free[0].tokens[7], free[3].tokens[2]})
    requests = _requests(stop=stop)
    plain = _plain(target, requests)
    engine = Engine(target, _proposer(name, target, free), k=4, max_batch=7, max_length=96)
    drafted = engine.generate(requests)
    assert [(c.tokens, c.reason) for c in drafted] == [(c.tokens, c.reason) for c in plain]
    assert any(c.reason == "stop" for c in drafted)
    for completion in drafted:
        mine = [r for r in engine.records if r.request == completion.id]
        assert 1 + sum(r.emitted for r in mine) == len(completion.tokens) == len(completion.writers)
        assert not stop & set(completion.tokens[:-1])
