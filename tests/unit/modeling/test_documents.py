"""Attention over packed rows equals its masked definition; what it takes is tested in `test_draft_lm.py`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from drafttrain.modeling import attention
from drafttrain.modeling.attention import attend
from drafttrain.modeling.documents import Documents, document_mask
from drafttrain.ops.ttt_attention import SegmentLayout

ROWS = {
    "packed": [[0] * 5 + [1] * 4 + [-1] * 2, [0] * 11, [0] + [1] * 10, [0] * 3 + [1] * 4 + [2] * 4],
    "one document a row": [[0] * 9 + [-1] * 2, [0] * 11],
    "one slot": [[0], [-1]],
}


def definition(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor, window: int | None, scale: float, softcap: float | None
) -> Tensor:
    """Over all pairs of slots."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    place = torch.arange(q.shape[2])
    seen = (segments[:, :, None] == segments[:, None, :]) & (place <= place[:, None])
    if window is not None:
        seen = seen & (place > place[:, None] - window)
    scores = scale * (q @ k.transpose(-1, -2))
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("window", [None, 1, 3, 11])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2)])
def test_equal_to_the_masked_definition(
    rows: str, window: int | None, softcap: float | None, heads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "_TILE", 4)
    segments = torch.tensor(ROWS[rows])
    count, length = segments.shape
    generator = torch.Generator().manual_seed(0)
    inputs = [
        torch.randn(count, h, length, 8, dtype=torch.float64, generator=generator) for h in (heads[0], *[heads[1]] * 2)
    ]
    mask = document_mask(SegmentLayout.of(segments), window)
    real = segments >= 0
    results = []
    for masked in (False, True):
        q, k, v = leaves = [x.clone().requires_grad_() for x in inputs]
        out = definition(q, k, v, segments, window, 0.4, softcap) if masked else attend(q, k, v, mask, 0.4, softcap)
        out.transpose(1, 2)[real].pow(2).sum().backward()
        results.append([out.detach(), *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None and theirs is not None
        torch.testing.assert_close(ours.transpose(1, 2)[real], theirs.transpose(1, 2)[real], rtol=1e-5, atol=1e-5)


def test_bf16_rounds_once() -> None:
    """Within the half of a bf16 step that the result itself is rounded by, and as much again for the weights'."""
    segments = torch.tensor(ROWS["packed"])
    q, k, v = (torch.randn(4, 2, 11, 8, generator=torch.Generator().manual_seed(s)).bfloat16() for s in range(3))
    for window in (None, 3):
        ours = attend(q, k, v, document_mask(SegmentLayout.of(segments), window), 0.4)
        theirs = definition(q.float(), k.float(), v.float(), segments, window, 0.4, None)
        real = segments >= 0
        difference = ours.float().transpose(1, 2)[real] - theirs.transpose(1, 2)[real]
        assert ours.dtype == torch.bfloat16 and float(difference.abs().max()) < 2**-7 * float(v.abs().max())


@pytest.mark.parametrize("rows", ROWS)
def test_a_mask_says_what_its_layout_said(rows: str) -> None:
    layout = SegmentLayout.of(torch.tensor(ROWS[rows]))
    read = Documents.of(document_mask(layout, 7))
    assert (read.layout.runs, read.layout.single, read.layout.padding) == (layout.runs, layout.single, layout.padding)
    assert read.window == 7 and Documents.of(document_mask(layout)).window is None
    assert read.lengths() == [[len(part) for part in parts] for parts in runs_of(ROWS[rows])]


def runs_of(rows: list[list[int]]) -> list[list[list[int]]]:
    return [[[x for x in row if x == name] for name in dict.fromkeys(row)] for row in rows]
