"""Compaction of the cache, and the expansion of nodes: kernels against definitions."""

from __future__ import annotations

import pytest
import torch

from drafttrain.ops.draft_topk import expand, select
from drafttrain.ops.kv_compact import kv_compact


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("path", [[0, 2, 5], [1, 2, 3], [0, 1, 2], [3, 4, 6]])
def test_compaction(path: list[int], dtype: torch.dtype, device: torch.device) -> None:
    """Sources overlap destinations; the other row keeps its places; nothing else moves."""
    store = torch.randn(2, 2, 3, 2, 16, 24, generator=torch.Generator().manual_seed(0)).to(dtype)
    lengths, source = torch.tensor([3, 9]), torch.tensor([path, [0, 1, 4]])
    want, got = store.clone(), store.clone().to(device)
    for row, (own, start) in enumerate(zip(source.tolist(), lengths.tolist(), strict=True)):
        for place, old in enumerate(own):
            want[:, :, 1 + row, :, start + place] = store[:, :, 1 + row, :, start + old]
    kv_compact(got, lengths.to(device), source.to(device), 1, impl="triton")
    assert torch.equal(got.cpu(), want)
    other = store.clone()
    kv_compact(other, lengths, source, 1, impl="reference")
    assert torch.equal(other, want)


def test_a_path_of_64(device: torch.device) -> None:
    store = torch.arange(130.0).view(1, 1, 1, 1, 130, 1).expand(1, 2, 1, 1, 130, 1).contiguous()
    source = 2 * torch.arange(64)[None]
    got = store.to(device)
    kv_compact(got, torch.tensor([2], device=device), source.to(device), impl="triton")
    assert got[0, 0, 0, 0, :, 0].tolist() == [0, 1, *(2.0 + 2 * n for n in range(64)), *range(66, 130)]


def test_a_store_that_is_no_whole_is_refused() -> None:
    store = torch.zeros(2, 2, 3, 2, 16, 8)
    with pytest.raises(ValueError, match="contiguous"):
        kv_compact(store[:, :, :, :, ::2], torch.tensor([0]), torch.tensor([[0]]))
    with pytest.raises(ValueError, match="at most 128"):
        kv_compact(store, torch.tensor([0]), torch.arange(129)[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("vocab", "count"), [(7, 7), (61, 3), (2048, 4), (4500, 10)])
def test_expansion(vocab: int, count: int, dtype: torch.dtype, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    # Distinct values, so that which tokens are the best is no matter of order.
    logits = torch.stack([torch.randperm(vocab, generator=generator) for _ in range(4)]).view(2, 2, vocab)
    logits = (logits.float() * (20.0 / vocab) if dtype == torch.float32 else logits.clamp(max=2047) / 64).to(dtype)
    score = -torch.rand(2, 2, generator=generator)
    for scores in (None, score):
        want, ids = expand(logits, scores, count, impl="reference")
        got, own = expand(logits.to(device), None if scores is None else scores.to(device), count, impl="triton")
        torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=1e-5)
        if dtype == torch.float32:
            assert torch.equal(own.cpu(), ids)
        chosen = logits.gather(2, own.cpu())
        assert torch.equal(chosen, logits.topk(count, -1).values)
        assert all(len(set(row)) == count for row in own.flatten(0, 1).tolist())


def test_of_equal_logits_the_lower_id_comes_first(device: torch.device) -> None:
    logits = torch.zeros(1, 1, 5000, device=device)
    assert expand(logits, None, 5, impl="triton")[1].flatten().tolist() == [0, 1, 2, 3, 4]


def test_selection(device: torch.device) -> None:
    """Equal scores keep their order, and candidates out of reach (-inf) come last, in order."""
    generator = torch.Generator().manual_seed(0)
    score = torch.randint(-4, 0, (5, 30), generator=generator).float()
    score[1, 5:] = -torch.inf
    score[2] = -torch.inf
    want = select(score, 10, impl="reference")
    assert torch.equal(select(score.to(device), 10, impl="triton").cpu(), want)
    assert want[2].tolist() == list(range(10))


@pytest.mark.parametrize("count", [0, 8, 65])
def test_an_impossible_count_is_refused(count: int) -> None:
    with pytest.raises(ValueError, match="at most 64"):
        expand(torch.zeros(1, 1, 100 if count == 65 else 7), None, count)
