"""Packed weights give what `F.linear` gives."""

from __future__ import annotations

import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.head import Head
from drafttrain.ops.packed_linear import PackedWeight, linear, pack, pack_linears
from drafttrain.ops.packed_linear.dispatch import linear_add
from tests.support import tiny_hf, tiny_target

needs_onednn = pytest.mark.skipif(pack(torch.eye(16)) is None, reason="this torch has no oneDNN: F.linear is used")
# A dot product of 576 terms in another order; bf16 rounds the result to 8 bits.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


@needs_onednn
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (5,), (2, 3), (64,), (1, 300)])
def test_equals_reference(dtype: torch.dtype, bias: bool, rows: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    for out, inside in ((192, 576), (577, 33), (1, 7)):
        weight = torch.randn(out, inside, generator=generator).to(dtype)
        offset = torch.randn(out, generator=generator).to(dtype) if bias else None
        x = torch.randn(*rows, inside, generator=generator).to(dtype)
        packed = pack(weight)
        assert packed is not None and packed.shape == weight.shape
        expected = F.linear(x, weight, offset)
        with torch.inference_mode():
            got = linear(x, packed, offset)
        torch.testing.assert_close(got, expected, atol=TOLERANCE[dtype] * float(expected.abs().max()), rtol=0)


@needs_onednn
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("inside", [576, 3000])
def test_a_row_alone_is_summed_as_among_others(dtype: torch.dtype, inside: int) -> None:
    generator = torch.Generator().manual_seed(0)
    packed = pack(torch.randn(300, inside, generator=generator).to(dtype))
    assert packed is not None
    x = torch.randn(40, inside, generator=generator).to(dtype)
    residual = torch.randn(40, 300, generator=generator).to(dtype)
    with torch.inference_mode():
        together, added = linear(x, packed), linear_add(x, packed, None, residual)
        for i in range(len(x)):
            own, its = x[i].view(1, 1, -1), residual[i].view(1, 1, -1)
            assert torch.equal(linear(own, packed), together[i].view(1, 1, -1))
            assert torch.equal(linear_add(own, packed, None, its), added[i].view(1, 1, -1))


def test_where_it_cannot_pack_it_says_so() -> None:
    assert pack(torch.ones(3)) is None
    assert pack(torch.ones(3, 3, dtype=torch.float64)) is None
    assert pack(torch.ones(3, 3, device="meta")) is None


@needs_onednn
def test_gradients_are_untouched_and_changes_are_seen_when_packed_again() -> None:
    layer = nn.Linear(24, 16)
    x = torch.randn(3, 24)
    plain = layer(x).detach()
    pack_linears(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), plain)
        layer.weight.mul_(2)
    assert layer(x).requires_grad
    pack_linears(layer)
    with torch.no_grad():
        torch.testing.assert_close(layer(x), F.linear(x, layer.weight, layer.bias))


class _Attention(nn.Module):
    def __init__(self, bias: bool, widths: tuple[int, int, int] = (16, 8, 8)) -> None:
        super().__init__()
        for name, width in zip("qkv", widths, strict=True):
            self.add_module(f"{name}_proj", nn.Linear(24, width, bias=bias))
        self.gate_proj, self.up_proj = nn.Linear(24, 32, bias=True), nn.Linear(12, 32, bias=True)


@needs_onednn
@pytest.mark.parametrize("bias", [False, True])
def test_modules_that_read_one_input_share_a_product(bias: bool) -> None:
    parent = _Attention(bias)
    x, y = torch.randn(2, 3, 24), torch.randn(2, 3, 24)
    names = ("q_proj", "k_proj", "v_proj")

    def read(name: str, x: Tensor) -> Tensor:
        out: Tensor = parent.get_submodule(name)(x)
        return out

    with torch.no_grad():
        expected = {name: (read(name, x), read(name, y)) for name in names}
        gate, up = parent.gate_proj(x), parent.up_proj(x[..., :12])
        pack_linears(parent)
        for order in (names, names[::-1], ("k_proj", "k_proj")):
            for name in order:
                torch.testing.assert_close(read(name, x), expected[name][0])
        # Inputs that take turns, as those of two threads may.
        for name in names:
            torch.testing.assert_close(read(name, x), expected[name][0])
            torch.testing.assert_close(read(name, y), expected[name][1])
        torch.testing.assert_close(parent.gate_proj(x), gate)
        torch.testing.assert_close(parent.up_proj(x[..., :12]), up)
    assert torch.equal(parent.q_proj(x), F.linear(x, parent.q_proj.weight, parent.q_proj.bias))
    assert parent.q_proj(x).requires_grad


@needs_onednn
def test_no_input_is_kept_when_all_have_read_it() -> None:
    parent = _Attention(bias=False)
    pack_linears(parent)
    with torch.no_grad():
        x = torch.randn(3, 24)
        seen = weakref.ref(x)
        for name in ("q_proj", "k_proj", "v_proj"):
            parent.get_submodule(name)(x)
        del x
    assert seen() is None


@needs_onednn
def test_a_model_is_packed_once_and_again_after_a_change() -> None:
    model = tiny_target()
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        plain = model.lm_head(model(ids).final)
        model.prepare_for_inference()
        head = model.head()
        assert isinstance(head.packed, PackedWeight)
        torch.testing.assert_close(model.lm_head(model(ids).final), plain, atol=1e-4, rtol=1e-4)
        model.prepare_for_inference()
        assert model.head() is head
        for parameter in model.parameters():
            parameter.mul_(1.1)
        model.prepare_for_inference()
        fresh = CausalLM(tiny_hf())
        for parameter in fresh.parameters():
            parameter.mul_(1.1)
        torch.testing.assert_close(
            model.lm_head(model(ids).final), fresh.lm_head(fresh(ids).final), atol=1e-3, rtol=1e-3
        )
    assert set(model.state_dict()) == set(CausalLM(tiny_hf()).state_dict())


def test_a_prepared_head_keeps_bias_and_scalings() -> None:
    head = Head(torch.randn(32, 16), torch.randn(32), softcap=5.0, scale=0.5)
    x = torch.randn(2, 16)
    with torch.no_grad():
        torch.testing.assert_close(head.prepared()(x), head(x))
    assert head.prepared()(x.requires_grad_()).requires_grad
