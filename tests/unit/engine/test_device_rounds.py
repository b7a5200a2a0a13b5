"""Rounds that stay on the device, their graphs replaced by calls: same outputs, no synchronisation, constant launches.
`tests/gpu` does the same with graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.engine.device_rounds import DeviceRounds, RoundInput
from drafttrain.engine.engine import Engine
from drafttrain.engine.graphs import Graph, bucket_of, buckets
from drafttrain.engine.memory import handed_over, memory_needed
from drafttrain.engine.proposers import NGramProposer, build_proposer
from drafttrain.engine.records import Completion, Request
from drafttrain.engine.sampling import SamplingParams
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.vocab_map import VocabMap
from tests.draft_support import new_draft
from tests.support import RAGGED_PROMPTS, VOCAB, tiny_target

Shape = TreeShape | DynamicTree | None
SHAPES: dict[str, Shape] = {
    "chain": None,
    "static": TreeShape.from_branching((3, 2, 1)),
    "dynamic": DynamicTree(depth=3, top_k=3, nodes=8),
}
REQUESTS = [Request(str(i), prompt, 9 + i % 4) for i, prompt in enumerate(RAGGED_PROMPTS)]


def draft_of(target: CausalLM, kind: str = "eagle3") -> Drafter:
    """A draft that is right now and then: its target has few layers that matter."""
    if kind == "eagle1":
        return new_draft(Eagle1Config(family="eagle1"), target)
    vocab_map = VocabMap.from_ids(range(0, VOCAB, 2), VOCAB)
    return new_draft(Eagle3Config(family="eagle3", draft_vocab_size=31, taps=(2, 4, 3)), target, vocab_map=vocab_map)


def plain(target: CausalLM) -> list[Completion]:
    engine = Engine(target, max_batch=1, max_length=64)
    return [engine.generate([request])[0] for request in REQUESTS]


class Forbidden(TorchDispatchMode):
    """Fails on whatever would wait for a device: reading a value, or a shape that depends on values."""

    NAMES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "bincount", "item")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        assert not any(name.startswith(bad) for bad in self.NAMES), f"{name} synchronises"
        if name in ("index", "index_put", "index_put_"):
            assert all(i is None or i.dtype != torch.bool for i in args[1]), "an index of bools synchronises"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_records_equal_those_of_the_host_s_rounds(shape: str, batch: int) -> None:
    """Rows of different length join, leave and move; buckets of 1, 2, 4 and 5 are filled up."""
    target = tiny_target("llama", num_hidden_layers=6)
    outputs = []
    for on_device in (False, True):
        proposer = build_proposer(draft_of(target), tree=SHAPES[shape])
        engine = Engine(target, proposer, k=3, max_batch=batch, max_length=64, on_device=on_device)
        completions = engine.generate(REQUESTS)
        outputs.append(([c.tokens for c in completions], [c.writers for c in completions]))
        counts = [(r.request, r.round, r.accepted, r.emitted, r.reason, r.batch) for r in engine.records]
        outputs[-1] += (counts,)  # type: ignore[operator]
        assert (engine._rounds is not None) == on_device
        assert sum(r.accepted for r in engine.records) > 0
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == [c.tokens for c in plain(target)]


@pytest.mark.parametrize("kind", ["mistral-window", "gemma2"])
@pytest.mark.parametrize("shape", ["static", "chain"])
def test_architectures(kind: str, shape: str) -> None:
    """Sliding windows of 6 tokens, softcapped scores, layers that differ."""
    target = tiny_target(kind, num_hidden_layers=6)
    proposer = build_proposer(draft_of(target, "eagle1"), tree=SHAPES[shape])
    engine = Engine(target, proposer, k=3, max_batch=3, max_length=64, on_device=True)
    assert [c.tokens for c in engine.generate(REQUESTS[:4])] == [c.tokens for c in plain(target)[:4]]


def test_plain_decoding() -> None:
    target = tiny_target("llama")
    engine = Engine(target, max_batch=4, max_length=64, on_device=True)
    assert [c.tokens for c in engine.generate(REQUESTS)] == [c.tokens for c in plain(target)]


@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_in_a_round_synchronises(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The draft's loop, the verification and the reading of features, each in a mode that forbids it."""
    target = tiny_target("llama", num_hidden_layers=6)
    proposer = build_proposer(draft_of(target), tree=SHAPES[shape])
    engine = Engine(target, proposer, k=3, max_batch=3, max_length=64, on_device=True)
    call, ran = Graph.__call__, []

    def forbidding(self: Graph[Any]) -> Any:
        ran.append(self)
        with Forbidden():
            return call(self)

    # On a CPU the reference of the compaction and of the walk stand in for kernels; they are pure tensor code too.
    monkeypatch.setattr(Graph, "__call__", forbidding)
    engine.generate(REQUESTS[:3])
    assert ran


def test_the_mode_that_forbids_does() -> None:
    """Negative control."""
    for bad in (lambda x: int(x[0]), lambda x: x[x > 0], lambda x: bool(x.any()), lambda x: x.nonzero()):
        with pytest.raises(AssertionError, match="synchronises"), Forbidden():
            bad(torch.ones(3))


@pytest.mark.parametrize("k", [2, 5])
def test_launches_do_not_depend_on_k(k: int) -> None:
    """Three calls from Python a round, however long the chain is."""
    target = tiny_target("llama", num_hidden_layers=6)
    engine = Engine(target, build_proposer(draft_of(target)), k=k, max_batch=2, max_length=64, on_device=True)
    engine.generate(REQUESTS[:2])
    rounds = engine._rounds
    assert isinstance(rounds, DeviceRounds)
    played = {(r.request, r.round) for r in engine.records}
    assert rounds.launches == 3 * max(1 + number for _, number in played)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_recorded_rounds_keep_is_known_before(shape: str) -> None:
    """The states that the verifications of all buckets leave are no more than was counted: of chains exactly that."""
    target = tiny_target("llama", num_hidden_layers=6)
    proposer = build_proposer(draft_of(target), tree=SHAPES[shape])
    engine = Engine(target, proposer, k=3, max_batch=5, max_length=64, on_device=True)
    engine.generate(REQUESTS)
    engine.generate(REQUESTS[:1])  # whatever is accepted above, the bucket of one row is used, too
    assert engine._rounds is not None and engine._rounds._buckets.keys() <= {1, 2, 4, 5}
    kept = sum(
        feature.numel() * feature.element_size()
        for bucket in engine._rounds._buckets.values()
        for feature in bucket._verified.features.values()
    )
    reach = proposer.reach(3)
    counted = handed_over(target, len(proposer.feature_spec.taps), reach.tokens + 1, 5)
    assert 0 < kept <= counted
    if shape == "chain":
        assert engine._rounds._buckets.keys() == {1, 2, 4, 5} and kept == counted
    # Nothing is recorded on a CPU, so nothing is counted there.
    assert engine.memory.graphs == 0
    assert memory_needed(target, proposer, reach, 5, 64, recorded=True).graphs > counted


def test_sampled_rows_go_by_the_host() -> None:
    """A batch with a sampled row is the host's; outputs are those of an engine without device rounds."""
    target = tiny_target("llama", num_hidden_layers=6)
    params = SamplingParams(temperature=1.0, seed=3)
    requests = [Request(r.id, r.prompt_ids, 8, params if i % 2 else SamplingParams()) for i, r in enumerate(REQUESTS)]
    outputs = []
    for on_device in (False, True):
        engine = Engine(target, build_proposer(draft_of(target)), k=3, max_batch=3, max_length=64, on_device=on_device)
        outputs.append([c.tokens for c in engine.generate(requests)])
    assert outputs[0] == outputs[1]


def test_a_row_that_is_not_finite_is_told_apart() -> None:
    """The others come to what they come to alone; what the draft reads of it is finite."""
    target = tiny_target("llama", num_hidden_layers=6)
    proposer = build_proposer(draft_of(target))
    engine = Engine(target, proposer, k=2, max_batch=2, max_length=64, on_device=True)
    with torch.no_grad():
        target.embedding_weight[60] = torch.nan
    rounds = engine._rounds
    assert rounds is not None
    with torch.inference_mode():
        alone = rounds.play([RoundInput(0, 5, 2)])
        both = rounds.play([RoundInput(0, 5, 2), RoundInput(0, 60, 2)])
    assert both.finite == [True, False]
    assert (both.accepted[0], both.kept[0], both.bonus[0]) == (alone.accepted[0], alone.kept[0], alone.bonus[0])
    assert bool(proposer._hidden.isfinite().all())


def test_drafts_of_the_host_stay_there() -> None:
    target = tiny_target("llama")
    assert Engine(target, NGramProposer(), max_length=64, on_device=True)._rounds is None
    assert Engine(target, NGramProposer(), max_length=64)._rounds is None


def test_buckets() -> None:
    assert [buckets(n) for n in (1, 2, 3, 8, 33)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 16, 32, 33]]
    assert [bucket_of(n, [1, 2, 4, 6]) for n in (1, 2, 3, 5, 6)] == [1, 2, 4, 6, 6]
    with pytest.raises(EngineError, match="7 rows"):
        bucket_of(7, [1, 2, 4, 6])
    with pytest.raises(EngineError, match="at most 0 rows"):
        buckets(0)


def test_more_uncommitted_tokens_than_bits_are_refused() -> None:
    cache = tiny_target("llama").new_cache(1, 200)
    lengths: Tensor = torch.tensor([3])
    cache.begin_on_device(lengths, 65)
    with pytest.raises(ValueError, match="at most 64"):
        cache.begin_on_device(lengths, 64, offset=1)
