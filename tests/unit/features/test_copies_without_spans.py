"""A rank without rows of its own at the end of an epoch runs over a copy that has no spans. What a source remembers of
it must not stand for the document, whose labels come in a later epoch."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafttrain.features.building import open_store
from drafttrain.features.sources import FeatureSource, OnlineFeatures
from tests.tiny_training import samples, tiny_target
from tests.unit.features import test_hybrid, test_stream
from tests.unit.features.test_store import CPU, IDENTITY, SPEC

DATA = samples(4)
COPIES = [replace(sample, spans=[]) for sample in DATA]


@contextmanager
def source_of(kind: str, folder: Path) -> Iterator[FeatureSource]:
    if kind == "online":
        yield OnlineFeatures(tiny_target(), SPEC, batch_tokens=1)
    elif kind == "hybrid":
        with closing(test_hybrid.hybrid(folder, DATA)) as source:
            yield source
        open_store(folder, IDENTITY, DATA)  # which refuses one that lacks labels
    else:
        with test_stream.serving() as server, closing(test_stream.client(server.url)) as source:
            yield source


@pytest.mark.parametrize("kind", ["online", "hybrid", "stream"])
def test_the_labels_of_a_document_are_known_after_a_copy_without_spans(kind: str, tmp_path: Path) -> None:
    expected = OnlineFeatures(tiny_target(), SPEC, batch_tokens=1).batch([DATA], CPU)
    assert expected.top1 is not None and bool((expected.top1 >= 0).any())
    with source_of(kind, tmp_path / "store") as source:
        for rows in (COPIES[:2], DATA, COPIES, DATA):
            batch = source.batch([rows], CPU)
            if rows is DATA:
                assert batch.top1 is not None and torch.equal(batch.top1, expected.top1)
        for tap, value in expected.features.items():
            assert torch.equal(batch.features[tap], value)
