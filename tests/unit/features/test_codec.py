from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.features.building import build_store, convert_store, open_store, spot_check
from drafttrain.features.codec import decode_fp8, encode_fp8
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.reader import StoreReader
from drafttrain.features.sources import StoredFeatures
from tests.tiny_training import samples, tiny_target
from tests.unit.features.test_store import CPU, IDENTITY


def test_every_byte_is_decoded_as_torch_does() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    known = codes.view(torch.float8_e4m3fn).float()
    finite = ~known.isnan()
    for exponent in (-90, -8, 0, 5, 100):
        found = decode_fp8(codes[:, None], torch.full((256,), exponent, dtype=torch.int8))
        assert found.dtype == torch.bfloat16
        assert torch.equal(found[finite, 0].double(), known[finite].double() * 2.0**exponent)


@settings(max_examples=30)
@given(st.integers(0, 2**31), st.floats(-30, 30), st.sampled_from([torch.float32, torch.bfloat16]))
def test_rows_keep_their_values_to_half_a_step(seed: int, size: float, dtype: torch.dtype) -> None:
    """e4m3 has three bits behind the point: at most 1/16 off, but for values 2**-14 below a row's largest."""
    generator = torch.Generator().manual_seed(seed)
    rows = (torch.randn(5, 33, generator=generator) * 2.0**size).to(dtype)
    rows[0] = 0
    rows[1, 7] *= 1000
    found = decode_fp8(*encode_fp8(rows)).double()
    largest = rows.double().abs().amax(-1, keepdim=True)
    allowed = (rows.double().abs() / 16).maximum(largest / 448 * 2.0**-9)
    assert bool(((found - rows.double()).abs() <= allowed).all())
    assert torch.equal(found[0], torch.zeros(33, dtype=torch.float64))


def test_encoding_what_was_decoded_changes_nothing() -> None:
    rows = torch.randn(9, 40)
    once = decode_fp8(*encode_fp8(rows))
    assert torch.equal(decode_fp8(*encode_fp8(once)), once)


def test_an_fp8_store_halves_the_bytes_and_passes_the_spot_check(tmp_path: Path) -> None:
    data, target = samples(8), tiny_target()
    identity = replace(IDENTITY, dtype="fp8")
    config = FeaturesConfig(source="offline", dtype="fp8", batch_tokens=64)
    build_store(tmp_path / "fp8", identity, target, data, config)
    reader = open_store(tmp_path / "fp8", identity, data)
    spot_check(reader, target, data)
    assert reader.identity.bytes_per_token < 0.6 * replace(IDENTITY, dtype="bfloat16").bytes_per_token
    size = sum(file.stat().st_size for file in (tmp_path / "fp8/shards").rglob("*.bin"))
    assert size == reader.tokens * identity.bytes_per_token
    batch = StoredFeatures(reader).batch([data[:3]], CPU)
    assert all(value.dtype == torch.bfloat16 for value in batch.features.values())
    large = replace(identity, hidden_size=8192, taps=("2", "40", "77", "final"))
    assert large.bytes_per_token / replace(large, dtype="bfloat16").bytes_per_token == pytest.approx(0.5, abs=0.001)


@pytest.mark.parametrize("workers", [1, 4])
def test_converting_keeps_every_document(tmp_path: Path, workers: int) -> None:
    data = samples(12)
    build_store(tmp_path / "a", IDENTITY, tiny_target(), data, FeaturesConfig(source="offline", batch_tokens=64))
    # Tiny shards, fewer taps, another type: and back again, which is exact.
    convert_store(tmp_path / "a", tmp_path / "b", dtype="fp8", taps=["2", "final"], shard_bytes=3000)
    convert_store(tmp_path / "b", tmp_path / "c", dtype="bfloat16")
    convert_store(tmp_path / "b", tmp_path / "d", shard_bytes=1 << 20)
    assert len(list((tmp_path / "b/shards").iterdir())) > 2
    assert len(list((tmp_path / "d/shards").iterdir())) == 1
    first, *others = (
        StoredFeatures(StoreReader(tmp_path / name), workers).batch([data[:7], data[7:]], CPU) for name in "bcd"
    )
    for other in others:
        assert other.features.keys() == first.features.keys()
        assert all(torch.equal(other.features[tap], value) for tap, value in first.features.items())
        assert first.top1 is not None and other.top1 is not None and torch.equal(first.top1, other.top1)
