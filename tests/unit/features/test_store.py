from __future__ import annotations

import errno
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from drafttrain.corpus.types import Sample
from drafttrain.errors import DataError, StoreError, UserError
from drafttrain.features import reader as reader_module
from drafttrain.features import shard as shard_module
from drafttrain.features.building import build_store, open_store, spot_check
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.reader import StoreReader
from drafttrain.features.sources import OnlineFeatures, StoredFeatures
from drafttrain.features.store import StoreIdentity
from drafttrain.features.writer import StoreWriter
from drafttrain.modeling.taps import FeatureSpec, Tap
from tests.tiny_training import HIDDEN, samples, tiny_target

SPEC = FeatureSpec.of([0, 2])
IDENTITY = StoreIdentity(
    target="tiny",
    weights_hash="a" * 64,
    tokenizer_hash="b" * 64,
    template_hash="c" * 64,
    taps=("0", "2", "final"),
    hidden_size=HIDDEN,
    dtype="float32",
    compute_dtype="float32",
)
CPU = torch.device("cpu")


def build(path: Path, data: list[Sample], identity: StoreIdentity = IDENTITY) -> None:
    build_store(path, identity, tiny_target(), data, FeaturesConfig(source="offline", batch_tokens=64))


def small_shards(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(StoreIdentity, "bytes_per_token", property(lambda self: (256 << 20) // tokens))


def test_stored_features_are_the_online_ones_bit_for_bit(tmp_path: Path) -> None:
    data = samples(12)
    build(tmp_path / "store", data)
    offline = StoredFeatures(open_store(tmp_path / "store", IDENTITY, data))
    online = OnlineFeatures(tiny_target(), SPEC, batch_tokens=64)
    rows = [[data[0], data[3]], [data[5]]]
    ours, theirs = online.batch(rows, CPU), offline.batch(rows, CPU)
    assert ours.features.keys() == theirs.features.keys() == {Tap.block(0), Tap.block(2), Tap.final}
    for tap, value in ours.features.items():
        torch.testing.assert_close(value, theirs.features[tap], rtol=1e-5, atol=1e-5)
    assert ours.top1 is not None and theirs.top1 is not None
    assert torch.equal(ours.top1, theirs.top1)
    # The second epoch takes top1 from memory.
    again = online.batch(rows, CPU)
    assert again.top1 is not None and torch.equal(again.top1, ours.top1)


def test_features_are_what_an_independent_forward_gives(tmp_path: Path) -> None:
    data = samples(5)
    target = tiny_target()
    batch = OnlineFeatures(target, FeatureSpec.of([0, 1, 3, "pre_norm"]), batch_tokens=64).batch([data], CPU)
    start = 0
    for sample in data:
        here = slice(start, start + len(sample.ids))
        with torch.no_grad():
            out = target.hf.model(torch.as_tensor(sample.ids)[None].long(), output_hidden_states=True)
            logits = target.hf.lm_head(out.last_hidden_state)[0]
        for index in (0, 1, 3):
            torch.testing.assert_close(
                batch.features[Tap.block(index)][0, here], out.hidden_states[index][0], rtol=1e-4, atol=1e-5
            )
        torch.testing.assert_close(batch.features[Tap.final][0, here], out.last_hidden_state[0], rtol=1e-4, atol=1e-5)
        assert batch.top1 is not None
        first, last = sample.spans[0]
        assert batch.top1[0, here][first - 1 : last + 1].tolist() == logits.argmax(-1)[first - 1 : last + 1].tolist()
        assert (batch.top1[0, here][: first - 1] == -1).all()
        start += len(sample.ids)


def test_a_bf16_store_keeps_a_bf16_target_exactly(tmp_path: Path) -> None:
    data = samples(6)
    identity = replace(IDENTITY, dtype="bfloat16")
    target = tiny_target(dtype=torch.bfloat16)
    build_store(tmp_path / "s", identity, target, data, FeaturesConfig(source="offline", batch_tokens=1))
    stored = StoredFeatures(open_store(tmp_path / "s", identity, data)).batch([data[:2]], CPU)
    online = OnlineFeatures(target, SPEC, batch_tokens=1).batch([data[:2]], CPU)
    for tap, value in online.features.items():
        assert stored.features[tap].dtype == torch.bfloat16
        assert torch.equal(stored.features[tap], value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"weights_hash": "d" * 64}, "weights hash"),
        ({"tokenizer_hash": "d" * 64}, "tokenizer hash"),
        ({"template_hash": "d" * 64}, "template hash"),
        ({"taps": ("0", "3", "final")}, "taps"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"compute_dtype": "bfloat16"}, "compute dtype"),
    ],
)
def test_a_foreign_store_is_refused_by_the_name_of_what_differs(
    tmp_path: Path, change: dict[str, str], named: str
) -> None:
    build(tmp_path / "store", samples(3))
    other = replace(IDENTITY, **change)
    for opening in (
        lambda: StoreReader(tmp_path / "store", other),
        lambda: StoreWriter(tmp_path / "store", other),
    ):
        with pytest.raises(StoreError, match=named):
            opening()
    # The target's name is no difference.
    StoreReader(tmp_path / "store", replace(IDENTITY, target="the same under another name"))


@pytest.mark.parametrize("manifest", ["{", "[]", "{}", '{"identity": []}', '{"identity": {"schema": 1, "taps": []}}'])
def test_a_damaged_manifest_is_one_error(tmp_path: Path, manifest: str) -> None:
    (tmp_path / "manifest.json").write_text(manifest, encoding="utf-8")
    for opening in (StoreReader, StoreWriter):
        with pytest.raises(StoreError):
            opening(tmp_path, IDENTITY)


@pytest.mark.parametrize("file", ["features.bin", "ids.bin", "top1.bin"])
def test_a_truncated_shard_is_found(tmp_path: Path, file: str) -> None:
    build(tmp_path / "store", samples(3))
    damaged = tmp_path / "store/shards/000000" / file
    damaged.write_bytes(damaged.read_bytes()[:-4])
    with pytest.raises(StoreError, match=rf"000000: {file} is truncated"):
        StoreReader(tmp_path / "store", IDENTITY, verify="size")


def test_a_flipped_byte_is_found_by_checksum(tmp_path: Path) -> None:
    build(tmp_path / "store", samples(3))
    damaged = tmp_path / "store/shards/000000/features.bin"
    content = bytearray(damaged.read_bytes())
    content[7] ^= 1
    damaged.write_bytes(content)
    StoreReader(tmp_path / "store", IDENTITY, verify="size")
    with pytest.raises(StoreError, match="checksum differs"):
        StoreReader(tmp_path / "store", IDENTITY)


def test_building_goes_on_after_a_damaged_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_shards(monkeypatch, 40)
    data = samples(12)
    build(tmp_path / "store", data)
    shards = sorted((tmp_path / "store/shards").iterdir())
    assert len(shards) > 2
    kept = (shards[0] / "index.json").stat().st_mtime_ns
    (shards[1] / "features.bin").write_bytes(b"")
    build(tmp_path / "store", data)
    assert (shards[0] / "index.json").stat().st_mtime_ns == kept
    open_store(tmp_path / "store", IDENTITY, data)


def test_a_full_disk_leaves_the_shards_before_usable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_shards(monkeypatch, 40)
    data = samples(12)
    real, written = shard_module.sha256_file, []

    def full_in_the_second_shard(path: Path) -> str:
        written.append(path)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(path)

    monkeypatch.setattr(shard_module, "sha256_file", full_in_the_second_shard)
    with pytest.raises(StoreError, match="disk is full"):
        build(tmp_path / "store", data)
    monkeypatch.setattr(shard_module, "sha256_file", real)
    half = StoreReader(tmp_path / "store", IDENTITY, allow_incomplete=True)
    assert 0 < len(half) < len(data)
    assert not list((tmp_path / "store/shards").glob(".*"))
    with pytest.raises(StoreError, match="incomplete"):
        StoreReader(tmp_path / "store", IDENTITY)
    build(tmp_path / "store", data)
    assert len(open_store(tmp_path / "store", IDENTITY, data)) == len(data)


def test_space_is_checked_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(UserError, match=r"the disk has .* free"):
        build(tmp_path / "store", samples(3))
    assert not list((tmp_path / "store").glob("shards/*"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_features_name_the_sample(tmp_path: Path, value: float) -> None:
    data = samples(4)
    target = tiny_target()
    poison = int(data[2].ids[1])
    target.hf.model.embed_tokens.weight.data[poison, 3] = value
    hit = {sample.id for sample in data if poison in sample.ids}
    with pytest.raises(DataError, match="NaN") as caught:
        OnlineFeatures(target, SPEC).batch([data], CPU)
    assert caught.value.where is not None and caught.value.where.removeprefix("sample ") in hit
    with pytest.raises(DataError, match="NaN"):
        build_store(tmp_path / "store", IDENTITY, target, data, FeaturesConfig(source="offline"))


def test_a_wrong_number_of_rows_is_refused(tmp_path: Path) -> None:
    writer = StoreWriter(tmp_path / "store", IDENTITY)
    sample = Sample("short", np.arange(5, dtype=np.int32), [(1, 4)])
    features = {Tap.parse(tap): torch.zeros(4, HIDDEN) for tap in IDENTITY.taps}
    with pytest.raises(DataError, match="4 feature rows for 5 tokens") as caught:
        writer.add(sample, features, None)
    assert "short" in str(caught.value)


def test_other_tokens_under_a_known_id_are_refused(tmp_path: Path) -> None:
    data = samples(3)
    build(tmp_path / "store", data)
    changed = [replace(data[0], ids=data[0].ids[::-1].copy()), *data[1:]]
    with pytest.raises(StoreError, match=r"s0 has .* other tokens"):
        open_store(tmp_path / "store", IDENTITY, changed)
    with pytest.raises(StoreError, match=r"s0 has .* other tokens"):
        build(tmp_path / "store", changed)
    with pytest.raises(StoreError, match="s3 is not in the store"):
        open_store(tmp_path / "store", IDENTITY, samples(4))


def test_labels_that_a_store_was_not_built_for_are_refused(tmp_path: Path) -> None:
    # The target's tokens are stored where they are labels: elsewhere they would be left out of the loss, unseen.
    data = samples(3)
    build(tmp_path / "store", data)
    whole = [replace(sample, spans=[(0, len(sample.ids) - 1)]) for sample in data]
    for refuses in (lambda: open_store(tmp_path / "store", IDENTITY, whole), lambda: build(tmp_path / "store", whole)):
        with pytest.raises(StoreError, match=r"(?s)s0 is supervised where .* another data\.supervise"):
            refuses()
    build(tmp_path / "whole", whole)
    open_store(tmp_path / "whole", IDENTITY, data)
    # What other samples lack does not matter to a run that does not read them.
    mixed = [whole[0], *data[1:]]
    build(tmp_path / "mixed", mixed)
    assert len(open_store(tmp_path / "mixed", IDENTITY, [whole[0]])) == 3


def test_labels_are_looked_for_when_a_store_is_opened_and_not_at_each_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = samples(3)
    build(tmp_path / "store", data)
    looked: list[str] = []
    real = reader_module.label_sources

    def label_sources(sample: Sample) -> torch.Tensor:
        looked.append(sample.id)
        return real(sample)

    monkeypatch.setattr(reader_module, "label_sources", label_sources)
    source = StoredFeatures(open_store(tmp_path / "store", IDENTITY, data))
    for _ in range(2):
        source.batch([data], CPU)
    assert looked == [sample.id for sample in data]


def test_new_samples_are_added_to_a_complete_store(tmp_path: Path) -> None:
    build(tmp_path / "store", samples(3))
    build(tmp_path / "store", samples(5))
    assert len(open_store(tmp_path / "store", IDENTITY, samples(5))) == 5


def test_a_folder_that_is_no_store_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(StoreError, match="no feature store"):
        build(tmp_path, samples(2))
    with pytest.raises(StoreError, match="no feature store"):
        StoreReader(tmp_path)
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_stored_batches_can_be_trained_on(tmp_path: Path) -> None:
    data = samples(3)
    build(tmp_path / "store", data)
    for source in (StoredFeatures(StoreReader(tmp_path / "store")), OnlineFeatures(tiny_target(), SPEC)):
        weight = torch.nn.Parameter(torch.ones(HIDDEN, 1))
        # Fails on tensors made in inference mode.
        (source.batch([data], CPU).features[Tap.final] @ weight).sum().backward()
        assert weight.grad is not None


def test_a_store_with_more_taps_serves_and_keeps_them(tmp_path: Path) -> None:
    data = samples(5)
    build(tmp_path / "store", data[:3])
    fewer = replace(IDENTITY, taps=("2", "final"))
    build(tmp_path / "store", data, fewer)
    assert StoreReader(tmp_path / "store").identity.taps == IDENTITY.taps
    batch = StoredFeatures(open_store(tmp_path / "store", fewer, data)).batch([data], CPU)
    assert set(batch.features) == {Tap.block(2), Tap.final}
    whole = StoredFeatures(open_store(tmp_path / "store", IDENTITY, data)).batch([data], CPU)
    assert all(torch.equal(value, whole.features[tap]) for tap, value in batch.features.items())


def test_a_spot_check_finds_rows_that_are_not_the_targets(tmp_path: Path) -> None:
    data = samples(6)
    build(tmp_path / "good", data)
    spot_check(open_store(tmp_path / "good", IDENTITY, data), tiny_target(), data)
    # A server with a cached prefix gives rows shifted by one: the counts are right, the hashes too.
    writer = StoreWriter(tmp_path / "shifted", IDENTITY)
    good = open_store(tmp_path / "good", IDENTITY, data)
    for sample in data:
        features, top1 = good.read(sample)
        writer.add(sample, {tap: value.roll(1, 0) for tap, value in features.items()}, top1)
    writer.finish()
    with pytest.raises(StoreError, match=r"tap 0 for sample s\d differ"):
        spot_check(open_store(tmp_path / "shifted", IDENTITY, data), tiny_target(), data)
