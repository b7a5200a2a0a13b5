"""Attention that the kernels of torch do not know: sinks, and values narrower than keys, under every kind of mask."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafttrain.modeling.attention import attend
from drafttrain.modeling.documents import document_mask
from drafttrain.ops.tree_attention import pack, unpack
from drafttrain.ops.ttt_attention import SegmentLayout

SCALE = 0.4


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _defined(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, sinks: Tensor | None) -> Tensor:
    """Head by head; a sink is one more score, of a token without a value."""
    group, heads = q.shape[1] // k.shape[1], []
    for head in range(q.shape[1]):
        scores = (q[:, head] @ k[:, head // group].mT * SCALE).masked_fill(~mask[:, 0], -torch.inf).exp()
        total = scores.sum(-1, keepdim=True) + (0 if sinks is None else sinks[head].exp())
        heads.append(scores / total @ v[:, head // group])
    return torch.stack(heads, 1)


@pytest.mark.parametrize("width", [8, 6])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.5, -1.0, 2.0, 0.0])])
def test_every_mask_gives_the_definition(sinks: Tensor | None, width: int) -> None:
    q, k, v = _random(0, 2, 4, 9, 8), _random(1, 2, 2, 9, 8), _random(2, 2, 2, 9, width)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()[None, None]
    wanted = _defined(q, k, v, causal, sinks)
    torch.testing.assert_close(attend(q, k, v, None, SCALE, sinks=sinks), wanted)
    torch.testing.assert_close(attend(q, k, v, causal, SCALE, sinks=sinks), wanted)
    packed = pack(torch.ones(1, 3, 3, dtype=torch.bool).tril(), torch.tensor([6, 5]))
    tree = attend(q[:, :, 6:], k, v, packed, SCALE, sinks=sinks)
    torch.testing.assert_close(tree, _defined(q[:, :, 6:], k, v, unpack(packed, 9), sinks))
    segments = torch.tensor([[0] * 5 + [1] * 4, [0] * 9])
    apart = causal & (segments[:, None, :, None] == segments[:, None, None])
    rows = attend(q, k, v, document_mask(SegmentLayout.of(segments)), SCALE, sinks=sinks)
    torch.testing.assert_close(rows, _defined(q, k, v, apart, sinks))
