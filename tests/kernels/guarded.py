"""Run kernels, interpreted, on tensors that end at an unreadable page.

    TRITON_INTERPRET=1 python -m tests.kernels.guarded tree_attention soft_ce

prints a JSON object: how the process of each ended, 0 where the kernel touched only what is its own.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import sys

import torch
from torch import Tensor

from tests.launching import in_child, status

_alive: list[mmap.mmap] = []


def guarded(x: Tensor) -> Tensor:
    """A copy whose last byte is followed by a page without access."""
    x = x.contiguous()
    size = x.numel() * x.element_size()
    pages = -(-size // mmap.PAGESIZE)
    memory = mmap.mmap(-1, (pages + 1) * mmap.PAGESIZE)
    _alive.append(memory)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + pages * mmap.PAGESIZE
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mprotect(ctypes.c_void_p(address), mmap.PAGESIZE, 0):
        raise OSError(ctypes.get_errno(), "mprotect")
    flat = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=pages * mmap.PAGESIZE - size)
    return flat.view(x.shape).copy_(x)


def tree_attention() -> None:
    """Caches that are full to the last slot, and widths that fill no block."""
    from drafttrain.ops.tree_attention import pack, tree_attention

    for width, of_value, nodes, splits in ((24, 24, 9, 1), (16, 16, 1, 4), (8, 8, 64, 2), (8, 20, 3, 1), (20, 8, 3, 2)):
        k, v = (guarded(torch.randn(1, 2, 70, size)) for size in (width, of_value))
        q = guarded(torch.randn(1, 4, nodes, width))
        sees = torch.ones(1, nodes, nodes, dtype=torch.bool).tril()
        for window in (None, 30):
            packed = guarded(pack(sees, torch.tensor([70 - nodes]), window))
            tree_attention(q, k, v, packed, 1.0, impl="triton", splits=splits)


def tree_walk() -> None:
    """A vocabulary that fills no block, a draft's that is smaller, and trees whose last node counts."""
    from drafttrain.ops.tree_walk import chain_family, walk_by_match, walk_by_rejection

    rows, nodes, vocab, own = 3, 5, 1100, 37
    to_draft = torch.full((vocab,), -1)
    to_draft[-own:] = torch.arange(own)
    tokens = guarded(torch.full((rows, nodes), vocab - 1))
    counts = guarded(torch.tensor([nodes, 2, 0]))
    family = chain_family(nodes, torch.device("cpu"))._replace()
    family = type(family)(*(guarded(x) for x in family))
    p = guarded(torch.rand(rows, nodes + 1, vocab))
    q = guarded(torch.rand(rows, nodes, own))
    decides = guarded(torch.linspace(0, 0.999, rows * nodes, dtype=torch.float64).view(rows, nodes))
    draws = guarded(torch.full((rows, nodes + 1), 0.999999999, dtype=torch.float64))
    walk_by_rejection(p, q, tokens, counts, family, guarded(to_draft), decides, draws, impl="triton")
    chosen = guarded(torch.full((rows, nodes + 1), vocab - 1))
    walk_by_match(chosen, tokens, counts, guarded(torch.arange(nodes)[None]), nodes, impl="triton")


def kv_compact() -> None:
    """A path that ends in the last slot of the last row."""
    from drafttrain.ops.kv_compact import kv_compact

    store = guarded(torch.randn(2, 2, 2, 2, 12, 24))
    kv_compact(store, guarded(torch.tensor([3, 4])), guarded(torch.tensor([[0, 2, 5], [1, 3, 7]])), impl="triton")


def draft_topk() -> None:
    """A vocabulary that ends inside a chunk."""
    from drafttrain.ops.draft_topk import expand, select

    score, _ = expand(guarded(torch.randn(2, 3, 2100)), guarded(torch.randn(2, 3)), 5, impl="triton")
    select(guarded(score.flatten(1)), 7, impl="triton")


def soft_ce() -> None:
    """Vocabularies that fill no block."""
    from drafttrain.ops.soft_ce import soft_ce

    for vocab in (37, 5000):
        soft_ce(guarded(torch.randn(3, vocab)), guarded(torch.randn(3, vocab)), impl="triton")


def stray() -> None:
    """Chooses among one candidate more than there are."""
    from drafttrain.ops.draft_topk.triton import _select

    chosen = torch.empty(1, 3, dtype=torch.int64)
    _select[(1,)](guarded(torch.randn(1, 7)), chosen, 8, COUNT=3, BLOCK=8)


def main() -> None:
    """Run each in a process of its own, which a stray load kills alone."""
    print(json.dumps({name: status(in_child(globals()[name])) for name in sys.argv[1:]}))


if __name__ == "__main__":
    main()
