"""Fused blocks give what the blocks of transformers give, and stand aside where they would not."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.course import Course
from drafttrain.modeling.fused_block import fuse_blocks
from drafttrain.modeling.taps import Tap
from drafttrain.ops.packed_linear import pack, pack_linears
from tests.support import KINDS, VOCAB, tiny_hf

FUSED = [kind for kind in KINDS if kind.startswith(("llama", "mistral", "qwen"))]
pytestmark = pytest.mark.skipif(pack(torch.eye(16)) is None, reason="this torch has no oneDNN: blocks stay as they are")


def fused(model: CausalLM) -> int:
    return sum(type(block.forward).__name__ == "_FusedBlock" for block in model.layers)


def ids(rows: int, length: int, seed: int = 1) -> Tensor:
    return torch.randint(3, VOCAB, (rows, length), generator=torch.Generator().manual_seed(seed))


def decode(model: CausalLM) -> list[Tensor]:
    """Rows without a cache, two ragged rows behind a prefill, and a tree behind them."""
    tokens, first = ids(2, 24), torch.tensor([7, 12])
    with torch.inference_mode():
        outputs = [model(tokens).final]
        cache = model.new_cache(2, 40)
        cache.begin(2, 12)
        outputs.append(model(tokens[:, :12], cache=cache).final)
        cache.commit(first)
        cache.begin(2, 1)
        outputs.append(model(tokens[:, 12:13], cache=cache).final)
        cache.commit(torch.tensor([1, 1]))
        sees = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
        cache.begin(2, 3, tail_mask=sees)
        out = model(tokens[:, 13:16], cache=cache, taps=[Tap.block(2), Tap.pre_norm])
        return [*outputs, out.final, out.taps[Tap.block(2)], out.taps[Tap.pre_norm]]


@pytest.mark.parametrize("kind", FUSED)
def test_equals_the_blocks_of_transformers(kind: str) -> None:
    changes = {} if kind.startswith("qwen2") else {"attention_bias": True}
    model = CausalLM(tiny_hf(kind, **changes))
    plain = decode(model)
    model.prepare_for_inference()
    assert fused(model) == 4
    for ours, theirs in zip(decode(model), plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5 * float(theirs.abs().max()), rtol=0)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FUSED])
def test_other_architectures_stay_as_they_are(kind: str) -> None:
    model = CausalLM(tiny_hf(kind))
    model.prepare_for_inference()
    assert fused(model) == 0


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bf16_is_as_near_to_the_truth_as_the_blocks(kind: str) -> None:
    hf = tiny_hf(kind).bfloat16()
    exact = CausalLM(copy.deepcopy(hf).double())
    model = CausalLM(hf)
    truth, plain = decode(exact), decode(model)
    model.prepare_for_inference()
    assert fused(model) == 4
    for ours, theirs, true in zip(decode(model), plain, truth, strict=True):
        assert (ours - true).norm() <= 1.2 * (theirs - true).norm()


def test_gradients_take_the_way_of_the_blocks() -> None:
    model = CausalLM(tiny_hf())
    model(ids(1, 6)).final.square().sum().backward()
    weight = model.layers[1].get_parameter("mlp.gate_proj.weight")
    assert weight.grad is not None
    expected, weight.grad = weight.grad.clone(), None
    model.prepare_for_inference()
    model(ids(1, 6)).final.square().sum().backward()
    assert weight.grad is not None
    torch.testing.assert_close(weight.grad, expected)


def test_changed_weights_are_seen_when_prepared_again() -> None:
    model = CausalLM(tiny_hf())
    model.prepare_for_inference()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
    fresh = tiny_hf()
    fresh.load_state_dict(model.hf.state_dict())
    model.prepare_for_inference()
    for ours, theirs in zip(decode(model), decode(CausalLM(fresh)), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def one_plus(norm: Any) -> None:
    own = norm.forward
    norm.forward = lambda x: own(x) + own(x) / norm.weight


def no_rope(attention: Any) -> None:
    own = attention.forward
    turns = (torch.ones(1, 1, 8), torch.zeros(1, 1, 8))
    attention.forward = lambda **kwargs: own(**{**kwargs, "position_embeddings": turns})


def half_residual(block: Any) -> None:
    own = block.mlp.forward
    block.mlp.forward = lambda x: 0.5 * own(x)


@pytest.mark.parametrize(
    "change",
    [
        lambda block: one_plus(block.input_layernorm),
        lambda block: one_plus(block.post_attention_layernorm),
        lambda block: no_rope(block.self_attn),
        half_residual,
        lambda block: setattr(block.mlp, "act_fn", nn.GELU()),
        lambda block: setattr(block.self_attn, "q_norm", nn.Identity()),
    ],
)
def test_a_block_that_computes_something_else_is_left_alone(change: Any) -> None:
    model = CausalLM(tiny_hf())
    change(model.layers[2])
    plain = decode(model)
    model.prepare_for_inference()
    assert [type(block.forward).__name__ == "_FusedBlock" for block in model.layers] == [True, True, False, True]
    for ours, theirs in zip(decode(model), plain, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_what_is_not_packed_is_not_fused() -> None:
    model = CausalLM(tiny_hf())
    assert fuse_blocks(list(model.layers)) == 0
    pack_linears(model.body)
    assert fuse_blocks(list(model.layers)) == 4


@pytest.mark.parametrize("prepared_first", [True, False])
def test_courses_leave_out_what_they_say(prepared_first: bool) -> None:
    course = Course(1, 4, no_attention=frozenset({2}), no_mlp=frozenset({3}))
    model, tokens = CausalLM(tiny_hf()), ids(1, 9)
    states = torch.randn(1, 9, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected = CausalLM(tiny_hf())(tokens, course=course, states=states).final
        if prepared_first:
            model.prepare_for_inference()
        model(tokens, course=course, states=states)
        model.prepare_for_inference()
        out = model(tokens, course=course, states=states).final
    torch.testing.assert_close(out, expected, atol=1e-4, rtol=1e-4)


def test_two_threads_do_not_turn_by_each_others_angles() -> None:
    import threading

    model = CausalLM(tiny_hf())
    model.prepare_for_inference()
    tokens = {start: torch.arange(start, start + 6)[None] for start in (0, 40)}
    expected = {start: model(ids(1, 6), positions=where).final for start, where in tokens.items()}
    wrong: list[int] = []

    def run(start: int) -> None:
        for _ in range(60):
            with torch.inference_mode():
                out = model(ids(1, 6), positions=tokens[start]).final
            if not torch.allclose(out, expected[start], atol=1e-4, rtol=1e-4):
                wrong.append(start)

    threads = [threading.Thread(target=run, args=(start,)) for start in tokens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compiled_parts_take_the_place_of_fused_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[nn.Module] = []
    monkeypatch.setattr(
        "drafttrain.modeling.causal_lm.compile_parts", lambda blocks, norm: compiled.extend([*blocks, norm])
    )
    model = CausalLM(tiny_hf())
    model.prepare_for_inference()
    model.compile_forward()
    assert len(compiled) == 5 and fused(model) == 0
    with torch.no_grad():
        model.layers[0].get_parameter("mlp.up_proj.weight").mul_(2)
    model.prepare_for_inference()
    assert fused(model) == 0
