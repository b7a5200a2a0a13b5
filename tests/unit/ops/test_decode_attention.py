"""Attention over a cache is attention, whatever it pads; for its bits see tests/numerics/test_batch_invariance.py."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from drafttrain.ops import decode_attention as module
from drafttrain.ops.decode_attention import Shapes, decode_attention, fits, shapes_for, takes


def _inputs(
    rows: int, heads: tuple[int, int], n_new: int, keys: int, dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(keys)
    q = torch.randn(rows, heads[0], n_new, dim, generator=generator)
    k, v = (torch.randn(rows, heads[1], keys, dim, generator=generator) for _ in range(2))
    mask = torch.rand(rows, 1, n_new, keys, generator=generator) < 0.6
    mask[..., 0] = True
    return q, k, v, mask


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (5, 1)])
@pytest.mark.parametrize(("rows", "n_new", "keys"), [(1, 1, 64), (3, 5, 192), (2, 33, 576)])
def test_equals_its_definition(heads: tuple[int, int], rows: int, n_new: int, keys: int) -> None:
    q, k, v, mask = _inputs(rows, heads, n_new, keys, 16)
    group = heads[0] // heads[1]
    scores = q.double() @ k.double().repeat_interleave(group, 1).transpose(-1, -2) * 0.3
    expected = scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v.double().repeat_interleave(group, 1)
    with torch.inference_mode():
        assert takes(q, k, v, mask)
        torch.testing.assert_close(decode_attention(q, k, v, mask, 0.3).double(), expected, atol=1e-5, rtol=1e-4)
        shared = decode_attention(q, k, v, mask[:1], 0.3)
        torch.testing.assert_close(shared[:1].double(), expected[:1], atol=1e-5, rtol=1e-4)


def test_what_it_does_not_take() -> None:
    q, k, v, mask = _inputs(2, (4, 2), 3, 64, 8)
    assert not takes(q, k, v, mask)  # gradients are wanted
    with torch.inference_mode():
        assert takes(q, k, v, mask)
        assert not takes(q, k, v, None)
        assert not takes(q, k, v, mask.float())
        assert not takes(q, k[:, :, :63], v[:, :, :63], mask[..., :63])
        assert not takes(q.to("meta"), k, v, mask)
    assert fits(1, 1024, 1024) and not fits(1, 1025, 1024)
    assert fits(8, 1024, 1024) and not fits(9, 1024, 1024)


@pytest.mark.parametrize(
    ("rest", "more"), [((64, 128, 192, 384, 448, 512), 192), ((64, 128, 192, 256, 512), 256), ((512,), 512)]
)
def test_enough_keys_and_few_more(rest: tuple[int, ...], more: int) -> None:
    shapes = Shapes(4, rest)
    for length in range(1, 2200):
        keys = shapes.keys(length)
        assert length <= keys < length + more and shapes.keys(keys) == keys
        assert (keys - 1) % 512 + 1 in rest


def test_layers_of_several_widths_share_what_suits_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {64: Shapes(4, (64, 128, 512)), 128: Shapes(16, (64, 256, 512)), 80: None}
    monkeypatch.setattr(module, "_found", lambda dim, value_dim, dtype: found[dim])
    dtype = torch.float64  # of no other test: what was found before is kept
    assert shapes_for([(64, 64)], dtype) == found[64]
    assert shapes_for([(64, 64), (128, 128)], dtype) == Shapes(16, (64, 512))
    assert shapes_for([(64, 64), (80, 80)], dtype) is None
    assert shapes_for([], dtype) is None


def test_no_mask_is_kept_behind_its_owner() -> None:
    q, k, v, mask = _inputs(1, (4, 2), 3, 64, 8)
    with torch.inference_mode():
        decode_attention(q, k, v, mask, 1.0)
        made = len(module._recent)
        decode_attention(q, k, v, mask, 1.0)
        assert len(module._recent) == made >= 1
    del mask
    gc.collect()
    assert len(module._recent) == made - 1
