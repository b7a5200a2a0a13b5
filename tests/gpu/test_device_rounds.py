"""Rounds as CUDA graphs: captured at all, the same outputs as the host's rounds, one launch for each part."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.engine.engine import Engine
from drafttrain.engine.graphs import Clock, Graph
from drafttrain.engine.proposers import build_proposer
from drafttrain.engine.records import Request
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.vocab_map import VocabMap
from tests.draft_support import new_draft
from tests.support import RAGGED_PROMPTS, VOCAB, tiny_target

pytestmark = pytest.mark.gpu

SHAPES: dict[str, TreeShape | DynamicTree | None] = {
    "chain": None,
    "static": TreeShape.from_branching((3, 2, 1)),
    "dynamic": DynamicTree(depth=3, top_k=3, nodes=8),
}
REQUESTS = [Request(str(i), prompt, 9 + i % 4) for i, prompt in enumerate(RAGGED_PROMPTS)]


def on_cuda(kind: str = "llama") -> CausalLM:
    return tiny_target(kind, num_hidden_layers=6).to("cuda")


def engine_of(target: CausalLM, shape: str, on_device: bool, batch: int = 5, kind: str = "llama") -> Engine:
    vocab_map = VocabMap.from_ids(range(0, VOCAB, 2), VOCAB)
    twin = tiny_target(kind, num_hidden_layers=6)
    draft = new_draft(Eagle3Config(family="eagle3", draft_vocab_size=31), twin, vocab_map=vocab_map).to("cuda")
    draft.bind(target.embedding_weight, target.head())
    proposer = build_proposer(draft, tree=SHAPES[shape])
    return Engine(target, proposer, k=3, max_batch=batch, max_length=64, on_device=on_device)


@pytest.mark.parametrize("kind", ["llama", "mistral-window", "gemma2"])
@pytest.mark.parametrize("shape", SHAPES)
def test_graphs_play_the_host_s_rounds(shape: str, kind: str) -> None:
    """In fp32: outputs, acceptance and reasons; batches shrink through the buckets."""
    target = on_cuda(kind)
    plain = Engine(target, max_batch=1, max_length=64, on_device=False)
    want = [plain.generate([request])[0].tokens for request in REQUESTS]
    engine = engine_of(target, shape, True, kind=kind)
    assert engine._rounds is not None
    assert [c.tokens for c in engine.generate(REQUESTS)] == want
    host = engine_of(target, shape, False, kind=kind)
    assert [c.tokens for c in host.generate(REQUESTS)] == want
    keys = [[(r.request, r.round, r.accepted, r.emitted) for r in e.records] for e in (engine, host)]
    assert keys[0] == keys[1]
    for bucket in engine._rounds._buckets.values():
        assert all(graph._graph is not None for graph in (bucket.draft, bucket.verify, bucket.observe))


def test_a_second_generation_replays_the_same_graphs() -> None:
    target = on_cuda()
    engine = engine_of(target, "chain", True)
    first = [c.tokens for c in engine.generate(REQUESTS)]
    assert engine._rounds is not None
    graphs = {size: bucket.verify._graph for size, bucket in engine._rounds._buckets.items()}
    assert [c.tokens for c in engine.generate(REQUESTS)] == first
    assert graphs == {size: bucket.verify._graph for size, bucket in engine._rounds._buckets.items()}


def test_nothing_in_a_round_synchronises() -> None:
    """torch raises on every synchronising call; the one at the end of a round is `tolist`, outside the graphs."""
    target = on_cuda()
    engine = engine_of(target, "dynamic", True, batch=1)
    engine.generate(REQUESTS[:1])
    assert engine._rounds is not None
    bucket = engine._rounds._buckets[1]
    with torch.inference_mode():
        torch.cuda.set_sync_debug_mode("error")
        try:
            for part in (bucket._draft, bucket._verify, bucket._observe):
                part()
            for graph in (bucket.draft, bucket.verify, bucket.observe):
                graph()
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_a_graph_reads_its_inputs_anew() -> None:
    x = torch.ones(4, device="cuda")
    graph = Graph(lambda: x * 2, x.device)
    assert graph().tolist() == [2.0] * 4
    x.fill_(3.0)
    assert graph().tolist() == [6.0] * 4
    assert graph.launches == 2


def test_the_clock_counts_the_device_s_time() -> None:
    clock = Clock(torch.device("cuda"))
    clock.mark()
    torch.cuda._sleep(20_000_000)
    clock.mark()
    torch.cuda.synchronize()
    assert clock.spans()[0] > 1e-3
