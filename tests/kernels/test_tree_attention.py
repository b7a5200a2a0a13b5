"""Tree attention: the kernel against the definition, and the definition against a mask written out."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from drafttrain.modeling.attention import attend
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.ops.tree_attention import pack, tree_attention, unpack


class Case(NamedTuple):
    """B, Hq, Hkv, queries, width of a key, nodes read before, window, softcap, splits, width of a value if another."""

    rows: int
    heads: int
    kv_heads: int
    queries: int
    width: int
    before: int = 0
    window: int | None = None
    softcap: float | None = None
    splits: int = 1
    value_width: int | None = None


CASES = {
    "decoding": Case(2, 4, 2, 1, 16),
    "decoding, split": Case(2, 4, 1, 1, 16, splits=4),
    "tree of 8": Case(2, 3, 1, 9, 24),
    "tree of 64, its last bit": Case(1, 2, 1, 64, 8),
    "a level behind others": Case(1, 4, 4, 3, 16, before=40, splits=2),
    "window shorter than the tree": Case(1, 2, 1, 4, 8, before=36, window=5, splits=2),
    "window shorter than the text": Case(2, 2, 1, 5, 16, window=33, splits=2),
    "softcap": Case(1, 4, 2, 3, 16, softcap=20.0),
    "values narrower than keys": Case(2, 4, 2, 5, 24, value_width=16),
    "widths of latent attention": Case(1, 2, 2, 3, 192, splits=2, value_width=128),
    "values wider than keys": Case(2, 4, 2, 5, 16, window=33, value_width=40),
    "values wider than keys, split": Case(2, 4, 1, 3, 12, splits=2, value_width=20),
}
# Every case in fp32; those that differ in what they multiply in all dtypes.
RUNS = [(name, torch.float32) for name in CASES]
RUNS += [
    (name, half) for name in ("decoding, split", "tree of 8", "softcap") for half in (torch.float16, torch.bfloat16)
]
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def random_ancestry(queries: int, before: int, rows: int, generator: torch.Generator) -> Tensor:
    """bool [rows, queries, before + queries]: each slot descends from an earlier one, or from none."""
    slots = before + queries
    sees = torch.zeros(rows, slots, slots, dtype=torch.bool)
    for row in range(rows):
        for slot in range(slots):
            parent = int(torch.randint(-1, slot, (), generator=generator)) if slot else -1
            if parent >= 0:
                sees[row, slot] = sees[row, parent]
            sees[row, slot, slot] = True
    return sees[:, before:]


def make(case: Case, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    prefix = torch.tensor([61, 3][: case.rows])
    slots = int(prefix.max()) + case.before + case.queries

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q = draw(case.rows, case.heads, case.queries, case.width)
    k = draw(case.rows, case.kv_heads, slots, case.width)
    v = draw(case.rows, case.kv_heads, slots, case.value_width or case.width)
    sees = random_ancestry(case.queries, case.before, case.rows, generator)
    return q, k, v, pack(sees, prefix, case.window).to(device)


@pytest.mark.parametrize(("name", "dtype"), RUNS, ids=str)
def test_kernel_equals_reference(name: str, dtype: torch.dtype, device: torch.device) -> None:
    case = CASES[name]
    q, k, v, packed = make(case, dtype, device)
    scale = case.width**-0.5
    got = tree_attention(q, k, v, packed, scale, softcap=case.softcap, impl="triton", splits=case.splits)
    want = tree_attention(q.double(), k.double(), v.double(), packed, scale, softcap=case.softcap, impl="reference")
    assert got.dtype == dtype and got.shape == (*q.shape[:3], v.shape[3])
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_what_is_hidden_has_no_weight(device: torch.device) -> None:
    """Other branches and what lies behind the tail may hold anything."""
    case = CASES["tree of 8"]
    q, k, v, packed = make(case, torch.float32, device)
    seen = unpack(packed, k.shape[2]).any(2)[:, 0]
    assert not bool(seen.all())
    got = tree_attention(q, k, v, packed, 1.0, impl="triton", splits=1)
    hidden = (~seen)[:, None, :, None]
    other = tree_attention(
        q, k.masked_fill(hidden, 1e4), v.masked_fill(hidden, -1e4), packed, 1.0, impl="triton", splits=1
    )
    assert torch.equal(got, other)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("lengths", [[4, 4], [2, 5], [0, 3]])
def test_a_packed_mask_is_the_cache_s_own(lengths: list[int], window: int | None) -> None:
    """Unpacked, it is the mask that the cache builds for the same forward, whose own test writes it out by hand."""
    generator = torch.Generator().manual_seed(1)
    cache = StaticKVCache(1, 1, 2, 2, 16, torch.float32)
    cache.set_lengths(torch.tensor(lengths))
    sees = random_ancestry(4, 3, 2, generator)
    cache.begin(2, 4, sees, offset=3)
    want = cache.mask(window)
    assert want is not None
    got = unpack(pack(sees, torch.tensor(lengths), window), want.shape[3])
    assert torch.equal(got, want.expand(2, -1, -1, -1))


def test_attention_takes_packed_masks() -> None:
    """`attend` with a packed mask equals `attend` with the same unpacked."""
    for name in ("tree of 8", "values narrower than keys", "values wider than keys"):
        q, k, v, packed = make(CASES[name], torch.float32, torch.device("cpu"))
        want = attend(q, k, v, unpack(packed, k.shape[2]), 0.3)
        torch.testing.assert_close(attend(q, k, v, packed, 0.3), want)


def test_shapes_that_do_not_fit_are_refused() -> None:
    q, k, v, packed = make(CASES["tree of 8"], torch.float32, torch.device("cpu"))
    with pytest.raises(ValueError, match="do not divide"):
        tree_attention(q, k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1), packed, 1.0)
    with pytest.raises(ValueError, match="do not fit"):
        tree_attention(q, k[..., :8], v, packed, 1.0)
    with pytest.raises(ValueError, match="packed mask"):
        tree_attention(q, k, v, unpack(packed, k.shape[2]), 1.0)
    with pytest.raises(ValueError, match="at most 64"):
        pack(torch.ones(1, 65, 65, dtype=torch.bool), torch.tensor([0]))
