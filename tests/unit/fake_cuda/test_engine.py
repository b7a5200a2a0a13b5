"""The engine on a GPU that is not there: nothing lies on the wrong device, nothing that is recorded waits, and outputs
are those of the CPU, number for number."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.engine.calibrate import head_accuracies
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import (
    CascadeProposer,
    EarlyExit,
    ModelReader,
    NGramProposer,
    OracleProposer,
    Proposer,
    ReaderProposer,
    RouterProposer,
    SkippedLayers,
    SyntheticProposer,
    build_proposer,
)
from drafttrain.engine.records import Request
from drafttrain.engine.sampling import SamplingParams, Typical
from drafttrain.engine.sequoia import RankCounter, comb, verify_seconds
from drafttrain.engine.skip_search import search_skips
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.targets.load import resolve_device
from tests.draft_support import new_draft
from tests.pretend_cuda import pretended
from tests.support import RAGGED_PROMPTS, VOCAB, tiny_target

PROMPTS = RAGGED_PROMPTS[:2]
STATIC, DYNAMIC = TreeShape.from_branching((3, 2, 1)), DynamicTree(depth=3, top_k=3, nodes=8)
CONFIGS: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(family="eagle3", draft_vocab_size=31, taps=(1, 3, 2)),
    "eagle1": Eagle1Config(family="eagle1"),
    "medusa": MedusaConfig(family="medusa", num_heads=3),
    "draft_lm": DraftLMConfig(family="draft_lm", layers=(0, 3)),
}
SAMPLINGS = {
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, seed=3),
    "penalty": SamplingParams(repetition_penalty=1.3),
    "lossy": SamplingParams(temperature=0.9, seed=3, typical=Typical()),
}

Build = Callable[[CausalLM, str], Proposer]


def draft_of(kind: str, target: CausalLM, device: str) -> Drafter:
    twin = tiny_target("llama")
    vocab_map = VocabMap.from_ids(range(0, VOCAB, 2), VOCAB) if kind == "eagle3" else None
    draft = new_draft(CONFIGS[kind], twin, vocab_map=vocab_map).to(device)
    draft.bind(target.embedding_weight, target.head())
    return draft


def trained(kind: str, tree: TreeShape | DynamicTree | None = None, sampled: bool = False) -> Build:
    return lambda target, device: build_proposer(draft_of(kind, target, device), None, tree, sampled)


def cascade(target: CausalLM, device: str) -> Proposer:
    return CascadeProposer(EarlyExit(target, 3), ReaderProposer(EarlyExit(target, 1)))


def of_a_model(target: CausalLM, device: str) -> Proposer:
    draft = draft_of("draft_lm", target, device)
    draft.prepare_for_inference()
    return CascadeProposer(ModelReader(draft.lm, "draft"), NGramProposer())


PROPOSERS: dict[str, Build] = {
    "eagle3": trained("eagle3"),
    "eagle3-static": trained("eagle3", STATIC),
    "eagle3-dynamic": trained("eagle3", DYNAMIC),
    "eagle3-drawn": trained("eagle3", STATIC, True),
    "eagle1": trained("eagle1"),
    "eagle1-drawn": trained("eagle1", STATIC, True),
    "medusa": trained("medusa"),
    "medusa-drawn": trained("medusa", STATIC, True),
    "draft_lm": trained("draft_lm"),
    "draft_lm-drawn": trained("draft_lm", STATIC, True),
    "draft_lm-dynamic": trained("draft_lm", DYNAMIC),
    "router": lambda target, device: RouterProposer(NGramProposer(), trained("eagle3", STATIC)(target, device), 1),
    "early exit": lambda target, device: ReaderProposer(EarlyExit(target, 2)),
    "skipped": lambda target, device: ReaderProposer(SkippedLayers(target, [1], [2]), None, DYNAMIC),
    "cascade": cascade,
    "cascade of a model": of_a_model,
}


def outputs(build: Build | None, device: str, sampling: SamplingParams, kind: str = "llama") -> list[object]:
    target = tiny_target(kind).to(device)
    proposer = None if build is None else build(target, device)
    engine = Engine(target, proposer, k=3, max_batch=2, max_length=64)
    assert str(engine.cache.device) == ("cuda:0" if device == "cuda" else "cpu")
    mixed = [sampling if i % 2 else SamplingParams() for i in range(len(PROMPTS))]
    requests = [Request(str(i), p, 3 + i % 2, m) for i, (p, m) in enumerate(zip(PROMPTS, mixed, strict=True))]
    found: list[object] = [(c.tokens, c.writers, c.reason) for c in engine.generate(requests)]
    return found + [(r.proposed, r.accepted, r.emitted) for r in engine.records]


SAMPLED = ("eagle3", "eagle1-drawn", "medusa-drawn", "draft_lm-drawn", "router", "cascade")


@pytest.mark.parametrize(
    ("name", "sampling"),
    [*((name, "greedy") for name in PROPOSERS if "drawn" not in name), *((name, "sampled") for name in SAMPLED)],
)
def test_every_draft(name: str, sampling: str) -> None:
    """Greedy rounds of EAGLE as graphs, all others by the host; sampled rows beside greedy ones."""
    want = outputs(PROPOSERS[name], "cpu", SAMPLINGS[sampling])
    with pretended(triton=False):
        assert outputs(PROPOSERS[name], "cuda", SAMPLINGS[sampling]) == want


@pytest.mark.parametrize(
    ("name", "sampling"), [("eagle3", "penalty"), ("router", "penalty"), ("eagle3-drawn", "lossy")]
)
def test_what_changes_the_target_s_choice(name: str, sampling: str) -> None:
    want = outputs(PROPOSERS[name], "cpu", SAMPLINGS[sampling])
    with pretended(triton=False):
        assert outputs(PROPOSERS[name], "cuda", SAMPLINGS[sampling]) == want


@pytest.mark.parametrize(
    ("name", "sampling"),
    [("eagle3-dynamic", "greedy"), ("eagle3", "greedy"), ("eagle3-drawn", "sampled"), ("draft_lm", "sampled")],
)
def test_with_kernels(name: str, sampling: str) -> None:
    """Attention, walks, compaction and expansion by the kernels that a GPU takes, interpreted. Sampled drafts are
    checked by one, too."""
    want = outputs(PROPOSERS[name], "cpu", SAMPLINGS[sampling])
    with pretended() as launched:
        assert outputs(PROPOSERS[name], "cuda", SAMPLINGS[sampling]) == want
    assert ("_reject" if sampling == "sampled" else "_match") in launched


@pytest.mark.parametrize("kind", ["llama-tied", "qwen2-window", "gemma2"])
def test_architectures(kind: str) -> None:
    """Plain decoding as graphs: nothing in a forward waits for the device, nor lies elsewhere."""
    want = outputs(None, "cpu", SamplingParams(), kind)
    with pretended(triton=False):
        assert outputs(None, "cuda", SamplingParams(), kind) == want


def test_drafts_that_replay() -> None:
    def run(device: str, make: Callable[[dict[str, list[int]]], Proposer]) -> list[list[int]]:
        target = tiny_target().to(device)
        requests = [Request(str(i), prompt, 6) for i, prompt in enumerate(RAGGED_PROMPTS[:3])]
        plain = {c.id: c.tokens for c in Engine(target, max_batch=2, max_length=64).generate(requests)}
        engine = Engine(target, make(plain), k=3, max_batch=2, max_length=64)
        assert [c.tokens for c in engine.generate(requests)] == list(plain.values())
        return list(plain.values())

    for make in (OracleProposer, lambda plain: SyntheticProposer(plain, VOCAB, 0.6)):
        want = run("cpu", make)
        with pretended(triton=False):
            assert run("cuda", make) == want


def test_a_draft_on_the_cpu_beside_a_target_on_a_gpu() -> None:
    """`device: cpu`; and one on another GPU than the target, where kernels and graphs have to follow."""
    sampling = SAMPLINGS["sampled"]
    for name, params in (("draft_lm-drawn", sampling), ("draft_lm-dynamic", SamplingParams())):
        want = outputs(PROPOSERS[name], "cpu", params)
        with pretended(devices=2, triton=False):
            for device in ("cpu", "cuda:1"):
                assert outputs(lambda target, _, d=device, n=name: PROPOSERS[n](target, d), "cuda", params) == want


def test_a_target_on_a_gpu_that_is_not_the_current_one() -> None:
    """Kernels and graphs go where the tensors are: `target.device=cuda:1`."""
    want = outputs(PROPOSERS["eagle3"], "cpu", SamplingParams())
    with pretended(devices=2):
        target = tiny_target("llama").to("cuda:1")
        engine = Engine(target, PROPOSERS["eagle3"](target, "cuda:1"), k=3, max_batch=2, max_length=64)
        requests = [Request(str(i), prompt, 3 + i % 2) for i, prompt in enumerate(PROMPTS)]
        found: list[object] = [(c.tokens, c.writers, c.reason) for c in engine.generate(requests)]
        assert torch.cuda.current_device() == 0
    assert found + [(r.proposed, r.accepted, r.emitted) for r in engine.records] == want


def test_calibration() -> None:
    def run(device: str) -> list[object]:
        target = tiny_target("llama").to(device)
        answers = [([5, 9, 13, 4], [7, 8, 9, 10, 11, 12]), ([3, 3], [6, 5, 4, 3, 2])]
        medusa = draft_of("medusa", target, device)
        shape = comb(3, 2)
        counter = RankCounter(target, trained("eagle3", shape)(target, device), k=2, max_batch=2, max_length=64)
        counter.count(shape)
        counter.generate([Request(str(i), prompt, 6) for i, prompt in enumerate(RAGGED_PROMPTS[:2])])
        assert verify_seconds(target, [0, 3], context=8, repeats=1).keys() == {0, 3}
        skips = search_skips(target, answers, evaluations=16)
        return [head_accuracies(target, medusa, answers, 4), counter.acceptance(), skips.attention, skips.mlp]  # type: ignore[arg-type]

    want = run("cpu")
    with pretended(triton=False):
        assert run("cuda") == want


def test_the_memory_of_engines_that_are_gone_is_free() -> None:
    """At once, and not when garbage is next collected: the next engine asks what is free."""
    with pretended(triton=False):
        target = tiny_target("llama").to("cuda")
        engine = Engine(target, PROPOSERS["eagle3"](target, "cuda"), k=2, max_length=64)
        engine.generate([Request("a", [5, 6, 7], 4)])
        assert engine._rounds is not None
        kept = [weakref.ref(engine.cache), *(weakref.ref(b.verify) for b in engine._rounds._buckets.values())]
        gc.disable()
        try:
            del engine
            assert [ref() for ref in kept] == [None, None]
        finally:
            gc.enable()


def test_a_rank_that_sees_one_gpu_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's --gpus-per-task=1 shows each rank its own GPU as number 0."""
    monkeypatch.setenv("LOCAL_RANK", "3")
    with pretended(devices=1):
        assert resolve_device("auto") == torch.device("cuda:0")
    with pretended(devices=8):
        assert resolve_device("auto") == torch.device("cuda:3")
        assert resolve_device("cuda:2") == torch.device("cuda:2")
