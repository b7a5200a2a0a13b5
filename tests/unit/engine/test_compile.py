"""`torch.compile` on the target: the same greedy output, with drafts of every kind and without."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch._dynamo.utils
from torch import nn

from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import EarlyExit, Proposer, ReaderProposer, SkippedLayers, build_proposer
from drafttrain.engine.records import Request
from drafttrain.engine.tree import TreeShape
from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.compiled import compile_parts, require_compiler
from drafttrain.ops.packed_linear import is_packed
from tests.draft_support import new_draft
from tests.support import RAGGED_PROMPTS, tiny_target

REQUESTS = [Request(str(i), prompt, 10) for i, prompt in enumerate(RAGGED_PROMPTS[:5])]


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    try:
        require_compiler(torch.device("cpu"))
    except EngineError as error:
        warnings.warn(f"NOTHING IS PROVEN of torch.compile: {error}", stacklevel=1)
        pytest.skip(f"NOTHING IS PROVEN: {error}")
    yield
    torch._dynamo.reset()


def proposers(target: CausalLM) -> Iterator[Proposer | None]:
    draft = new_draft(Eagle3Config(), target, 1)
    yield None
    yield build_proposer(draft)
    yield build_proposer(draft, tree=TreeShape.from_branching((3, 2)))
    yield ReaderProposer(EarlyExit(target, 3))
    yield ReaderProposer(SkippedLayers(target, [1], [2], "skip"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_greedy_output_is_the_same(kind: str) -> None:
    plain = Engine(tiny_target(kind), max_batch=1, max_length=64)
    want = [plain.generate([request])[0].tokens for request in REQUESTS]
    target = tiny_target(kind)
    # Falling back would give the same output, too.
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for proposer in proposers(target):
            for on_device in (False, True):
                engine = Engine(target, proposer, k=3, max_batch=3, max_length=64, on_device=on_device, compile=True)
                assert [c.tokens for c in engine.generate(REQUESTS)] == want
    assert torch._dynamo.utils.counters["frames"]["ok"] > 0


def test_parts_are_what_lies_between_attention_and_packed_products() -> None:
    target = tiny_target("qwen3", num_hidden_layers=2)
    target.prepare_for_inference()
    packed = any(is_packed(module) for module in target.modules())
    found = compile_parts(list(target.layers), target.norm)
    kinds = [type(part).__name__ for part in found]
    assert kinds.count("Qwen3RMSNorm") == 2 * 4 + 1
    assert kinds.count("Qwen3MLP") == (0 if packed else 2)
    assert not any(isinstance(part, nn.Linear) for part in found)


def test_a_machine_without_a_compiler_is_told_before_anything_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(EngineError, match=r"needs a C\+\+ compiler[^$]*leave it off"):
        Engine(tiny_target(), max_length=32, compile=True)
