"""Batches made on a stream of their own: whole when they are used, and not overwritten while they are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafttrain.drafters.base import DraftBatch
from drafttrain.features.building import build_store, open_store
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.prefetch import InTurn, Prefetcher
from drafttrain.features.sources import FeatureSource, OnlineFeatures, StoredFeatures
from drafttrain.features.transfer import to_device
from tests.tiny_training import samples, tiny_target
from tests.unit.features.test_store import IDENTITY, SPEC

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.int64])
def test_a_pinned_copy_is_a_copy(dtype: torch.dtype) -> None:
    whole = torch.arange(4096 * 300).remainder(251).to(dtype).view(300, 4096)
    for tensor in (whole, whole[7:200], whole[:, 1024:2048], whole[0, 0], whole[:0]):
        moved = to_device(tensor, "cuda")
        assert moved.is_cuda and moved.is_contiguous()
        assert torch.equal(moved.cpu(), tensor)


def busy(seconds: float = 0.02) -> None:
    """Keep the current stream occupied, without waiting for it."""
    torch.cuda._sleep(int(seconds * 1e9))


def used(batch: DraftBatch) -> list[torch.Tensor]:
    """Copies that are made late, on the current stream."""
    busy()
    return [tensor.clone() for tensor in batch.tensors()]


def source_of(kind: str, path: Path) -> FeatureSource:
    data = samples(24)
    if kind == "online":
        target = tiny_target().to(CUDA)
        return OnlineFeatures(target, SPEC, batch_tokens=64)
    if not path.exists():
        build_store(path, IDENTITY, tiny_target(), data, FeaturesConfig(source="offline", batch_tokens=64))
    return StoredFeatures(open_store(path, IDENTITY, data), workers=2)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("kind", ["online", "stored"])
def test_what_is_used_is_what_was_made(tmp_path: Path, kind: str, count: int) -> None:
    """Batches come and go while the stream that uses them lags behind: memory that is given back too early, or a batch
    that is used before it is made, shows as other numbers."""
    order = [[[sample], [other]] for sample, other in zip(samples(24), samples(24)[::-1], strict=True)] * 3
    in_turn, ahead = source_of(kind, tmp_path / "s"), source_of(kind, tmp_path / "s")
    expected = []
    for rows in order:
        expected.append([tensor.cpu() for tensor in InTurn(in_turn, CUDA).take(rows).batch.tensors()])
    batches = Prefetcher(ahead, CUDA, count, iter(order))
    seen = [used(batches.take(rows).batch) for rows in order]
    batches.close()
    for ours, theirs in zip(seen, expected, strict=True):
        assert all(torch.equal(mine.cpu(), other) for mine, other in zip(ours, theirs, strict=True))
    in_turn.close()
    ahead.close()


def test_a_batch_is_made_while_the_stream_that_trains_is_busy() -> None:
    order = [[[samples(1)[0]]]] * 5
    batches = Prefetcher(OnlineFeatures(tiny_target().to(CUDA), SPEC), CUDA, 1, iter(order))
    for rows in order[:3]:  # kernels are loaded, memory is allocated: these wait for the whole device
        batches.take(rows)
        torch.cuda.synchronize()
    busy(2.0)
    behind = torch.cuda.current_stream().record_event()
    batches.take(order[3])
    batches._asked[0].result.result(timeout=60)  # the one after it, begun since
    assert not behind.query(), "it waited for the stream that trains"
    torch.cuda.synchronize()
    batches.close()
