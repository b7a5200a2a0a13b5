from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import DraftBatch
from drafttrain.errors import StoreError, UserError
from drafttrain.features.building import build_store, open_store
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.hybrid import HybridFeatures
from drafttrain.features.lock import WHOLE, Part
from drafttrain.features.reader import StoreReader
from drafttrain.features.sources import OnlineFeatures, StoredFeatures
from drafttrain.features.store import Manifest
from drafttrain.features.writer import StoreWriter
from drafttrain.modeling.causal_lm import CausalLM
from tests.tiny_training import samples, tiny_target
from tests.unit.features.test_store import CPU, IDENTITY, SPEC

CONFIG = FeaturesConfig(source="hybrid", batch_tokens=1)


class CountingTarget:
    """A target that says how many tokens it has run over."""

    def __init__(self) -> None:
        self.target, self.tokens = tiny_target(), 0

        def count(module: object, arguments: tuple[torch.Tensor, ...], named: object) -> None:
            self.tokens += arguments[0].numel()

        self.target.register_forward_pre_hook(count, with_kwargs=True)


def hybrid(
    path: Path, data: list[Sample], target: CausalLM | None = None, part: Part = WHOLE, dtype: str = "float32"
) -> HybridFeatures:
    return HybridFeatures(path, replace(IDENTITY, dtype=dtype), target or tiny_target(), data, CONFIG, part)


def same(ours: DraftBatch, theirs: DraftBatch) -> bool:
    assert ours.top1 is not None and theirs.top1 is not None
    assert ours.features.keys() == theirs.features.keys()
    close = all(torch.equal(ours.features[tap], value) for tap, value in theirs.features.items())
    return close and torch.equal(ours.top1, theirs.top1)


def test_what_is_there_is_read_and_what_is_missing_computed_once(tmp_path: Path) -> None:
    data, counting = samples(10), CountingTarget()
    build_store(tmp_path / "s", IDENTITY, tiny_target(), data[:4], CONFIG)
    source = hybrid(tmp_path / "s", data, counting.target)
    assert [sample.id for sample in source.missing] == [sample.id for sample in data[4:]]
    online = OnlineFeatures(tiny_target(), SPEC, batch_tokens=1)
    for _ in range(2):
        for rows in ([data[:3], data[3:5]], [data[5:]]):
            assert same(source.batch(rows, CPU), online.batch(rows, CPU))
        assert counting.tokens == sum(len(sample.ids) for sample in data[4:])
    assert source.target_s > 0
    source.close()
    stored = StoredFeatures(open_store(tmp_path / "s", IDENTITY, data))
    assert same(stored.batch([data], CPU), online.batch([data], CPU))


def test_a_computed_document_is_given_out_as_it_will_be_read(tmp_path: Path) -> None:
    *data, last = samples(6)
    source = hybrid(tmp_path / "s", [*data, last], dtype="fp8")
    computed = source.batch([data], CPU)
    again = source.batch([data], CPU)  # from what is queued, as the last one is missing
    source.close()
    read = hybrid(tmp_path / "s", [*data, last], dtype="fp8")
    assert read.missing == [last]
    assert same(read.batch([data], CPU), computed) and same(again, computed)
    read.close()


def test_a_run_that_stopped_early_leaves_what_it_computed(tmp_path: Path) -> None:
    data = samples(6)
    source = hybrid(tmp_path / "s", data)
    source.batch([data[:2]], CPU)
    source.close()
    assert not StoreReader(tmp_path / "s", allow_incomplete=True).complete
    source = hybrid(tmp_path / "s", data)
    assert len(source.missing) == 4
    source.close()


def test_labels_that_the_store_was_not_built_for_are_refused_before_the_first_batch(tmp_path: Path) -> None:
    data = samples(6)
    build_store(tmp_path / "s", IDENTITY, tiny_target(), data[:2], CONFIG)
    whole = [replace(sample, spans=[(0, len(sample.ids) - 1)]) for sample in data]
    with pytest.raises(StoreError, match=r"s0 is supervised where .*"):
        hybrid(tmp_path / "s", whole)
    source = hybrid(tmp_path / "s", [*data[:2], *whole[2:]])
    assert len(source.missing) == 4
    source.close()


def test_the_store_is_free_as_soon_as_nothing_is_missing(tmp_path: Path) -> None:
    data, more = samples(6), samples(9)
    source, online = hybrid(tmp_path / "s", data), OnlineFeatures(tiny_target(), SPEC, batch_tokens=1)
    source.batch([data[:4]], CPU)
    with pytest.raises(StoreError, match="another job"):
        build_store(tmp_path / "s", IDENTITY, tiny_target(), more, CONFIG)
    assert same(source.batch([data[3:]], CPU), online.batch([data[3:]], CPU))
    assert StoreReader(tmp_path / "s").complete
    assert build_store(tmp_path / "s", IDENTITY, tiny_target(), more, CONFIG)
    assert same(source.batch([data], CPU), online.batch([data], CPU))
    source.close()
    assert StoreReader(tmp_path / "s").complete and len(StoreReader(tmp_path / "s")) == 9


def test_a_store_that_lacks_nothing_is_marked_complete_at_once(tmp_path: Path) -> None:
    """What a run leaves that is killed between its last shard and the mark."""
    data = samples(4)
    build_store(tmp_path / "s", IDENTITY, tiny_target(), data, CONFIG)
    Manifest(IDENTITY, False, {}).write(tmp_path / "s")
    source = hybrid(tmp_path / "s", data)
    source.batch([data[:1]], CPU)
    assert StoreReader(tmp_path / "s").complete
    with StoreWriter(tmp_path / "s", IDENTITY):
        pass
    source.close()


@pytest.mark.parametrize("count", [2, 3])
def test_ranks_let_the_store_go_when_none_of_them_has_anything_left(tmp_path: Path, count: int) -> None:
    """What they compute lies in their queues, none of which fills a shard, and each asks for what the others have."""
    data, counting = samples(12), CountingTarget()
    ranks = [hybrid(tmp_path / "s", data, counting.target, Part(index, count)) for index in range(count)]
    # As the ranks of a run: each its share of every step, the shares turning from epoch to epoch.
    for epoch in range(3):
        for step in range(0, 12, count):
            for rank, source in enumerate(ranks):
                source.batch([[data[step + (rank + epoch) % count]]], CPU)
        if epoch == 0:
            assert counting.tokens == sum(len(sample.ids) for sample in data)
            with pytest.raises(StoreError, match="another job"):
                StoreWriter(tmp_path / "s", IDENTITY)
    assert StoreReader(tmp_path / "s").complete
    # A little more than a shard a rank: queues of unequal length are written a little early.
    assert len(list((tmp_path / "s" / "shards").iterdir())) <= 3 * count
    assert counting.tokens <= 1.5 * sum(len(sample.ids) for sample in data)
    with StoreWriter(tmp_path / "s", IDENTITY):
        pass
    for source in ranks:
        source.close()


def test_ranks_write_together_and_find_what_the_other_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from drafttrain.features.store import StoreIdentity

    monkeypatch.setattr(StoreIdentity, "bytes_per_token", property(lambda self: 256 << 20))  # a shard a document
    data, counting = samples(8), CountingTarget()
    first = hybrid(tmp_path / "s", data, part=Part(0, 2))
    second = hybrid(tmp_path / "s", data, counting.target, part=Part(1, 2))
    with pytest.raises(StoreError, match="another job"):
        hybrid(tmp_path / "s", data)
    first.batch([data[:5]], CPU)
    second.batch([data], CPU)
    assert counting.tokens == sum(len(sample.ids) for sample in data[5:])
    first.close()
    second.close()
    assert StoreReader(tmp_path / "s").complete


def test_a_disk_too_small_is_refused_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import shutil

    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"the disk has .* free"):
        hybrid(tmp_path / "s", samples(3))
    monkeypatch.undo()
    hybrid(tmp_path / "s", samples(3)).close()  # the refused one holds no lock
