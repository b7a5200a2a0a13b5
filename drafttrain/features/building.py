"""Building a store, opening it, and checking it against the target."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from torch import Tensor

from drafttrain.corpus.samples import lengths_of
from drafttrain.corpus.types import Sample
from drafttrain.errors import StoreError
from drafttrain.features.capture import Compute, capture
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.lock import WHOLE, Part
from drafttrain.features.reader import StoreReader
from drafttrain.features.sources import taps_with_final
from drafttrain.features.store import StoreIdentity
from drafttrain.features.writer import StoreWriter
from drafttrain.files import require_free_space, sha256_text
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import FeatureSpec, Tap
from drafttrain.targets.identity import TargetIdentity

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens to do)."""

_BLOCK = 64
"""Forwards of a block of documents. Blocks follow the data's order: its neighbours are neighbours on disk."""


TOLERANCE = 0.1
"""Largest mean difference between features that are meant to be the same."""


def identity_of(
    target: TargetIdentity, spec: FeatureSpec, *, dtype: str, compute_dtype: str, template_hash: str | None = None
) -> StoreIdentity:
    """What a store of a draft's features is for.

    Args:
        target: whose states they are.
        spec: what the draft reads.
        dtype: element type on disk.
        compute_dtype: in which the target runs.
        template_hash: of the template that rendered the documents; default: the target's own.
    """
    return StoreIdentity(
        target=target.name,
        weights_hash=target.weights_hash,
        tokenizer_hash=target.tokenizer_hash,
        template_hash=target.template_hash if template_hash is None else template_hash,
        taps=tuple(str(tap) for tap in taps_with_final(spec)),
        hidden_size=target.hidden_size,
        dtype=dtype,
        compute_dtype=compute_dtype,
    )


def build_store(
    path: str | Path,
    identity: StoreIdentity,
    target: CausalLM,
    samples: Sequence[Sample],
    config: FeaturesConfig,
    progress: Progress = lambda done, total: None,
    part: Part = WHOLE,
    compute: Compute | None = None,
) -> bool:
    """Compute and write the features of every document that the store lacks, or of this part's share of them.

    Args:
        path: folder of the store; one that was interrupted goes on.
        identity: what the store is for.
        target: computes the features.
        samples: documents; the same for all parts.
        config: shard size and batch size.
        part: the processes of a job write at once, each another part.
        compute: gives the features in place of the target.

    Returns:
        Whether the store is complete: no other part has anything left to write.

    Raises:
        StoreError: a foreign store, one that another job writes to, or a disk that is or becomes too small.
        DataError: features that are not finite; names the sample.
        FeatureServerError: see `FeatureClient`.
    """
    if holds(path, identity, samples):
        return True
    compute = compute or partial(capture, target, batch_tokens=config.batch_tokens, wants_top1=lambda _: True)
    with StoreWriter(
        path, identity, shard_bytes=config.shard_mib << 20, part=part, job=job_name(identity, samples)
    ) as writer:
        absent = writer.missing(samples)
        writer.require_space(absent)
        wanted = {sample.id for sample in absent}
        # Blocks of all documents, not of the missing ones: parts that begin at different times agree on them.
        mine = blocks(lengths_of(samples).tolist(), _BLOCK * config.batch_tokens)[part.index :: part.count]
        taps = tuple(Tap.parse(name) for name in writer.identity.taps)
        total = sum(len(samples[at].ids) for block in mine for at in block if samples[at].id in wanted)
        done = 0
        for block in mine:
            todo = [sample for at in block if (sample := samples[at]).id in wanted]
            for captured in compute(todo, taps):
                writer.add(captured.sample, captured.features, captured.top1)
                done += len(captured.sample.ids)
                progress(done, total)
        return writer.finish(samples)


def holds(path: str | Path, identity: StoreIdentity, samples: Sequence[Sample]) -> bool:
    """Whether a store is complete and has all of `samples`, so that it need not be written to. Takes no lock.

    Raises:
        StoreError: it has other tokens under a sample's id, or lacks labels.
    """
    try:
        reader = StoreReader(path, identity, verify="size")
    except StoreError:
        return False  # a writer mends it, or says what is wrong
    if any(sample.id not in reader for sample in samples):
        return False
    reader.require(samples)
    return True


def blocks(lengths: Sequence[int], tokens: int) -> list[range]:
    """Runs of documents of at least `tokens` tokens each, but for the last, as places in the list of their lengths."""
    ends, size = [], 0
    for place, length in enumerate(lengths, 1):
        size += length
        if size >= tokens or place == len(lengths):
            ends.append(place)
            size = 0
    return [range(start, end) for start, end in zip([0, *ends[:-1]], ends, strict=True)]


def job_name(identity: StoreIdentity, samples: Sequence[Sample]) -> str:
    """Names the job of writing the features of `samples`."""
    text = json.dumps([asdict(identity), [sample.id for sample in samples]], sort_keys=True)
    return sha256_text(text)[:16]


def open_store(
    path: str | Path, identity: StoreIdentity, samples: Sequence[Sample], verify: str = "checksum"
) -> StoreReader:
    """Open a complete store and make sure that it holds every document and the labels in it.

    Raises:
        StoreError: foreign, damaged, incomplete, or lacking a document or labels.
    """
    reader = StoreReader(path, identity, verify=verify)
    reader.require(samples)
    return reader


def spot_check(reader: StoreReader, target: CausalLM, samples: Sequence[Sample], count: int = 2) -> None:
    """Compare a few stored documents with a forward here: hashes say what a store was made for, not that it is right.

    Rows that are shifted, cut or of another numbering differ wholly; other kernels and roundings, fp8 among them,
    differ by percents.

    Raises:
        StoreError: names the sample and the tap.
    """
    chosen = [samples[index * len(samples) // count] for index in range(min(count, len(samples)))]
    for captured in capture(target, chosen, list(reader.taps), batch_tokens=1, wants_top1=lambda _: False):
        stored, _ = reader.read(captured.sample)
        for tap, fresh in captured.features.items():
            off = difference(stored[tap], fresh)
            if off > TOLERANCE:
                raise StoreError(
                    f"the rows of tap {tap} for sample {captured.sample.id} differ from the target's by {off:.0%}",
                    where=reader.path,
                    remedy="build it again in another folder (features.path)",
                )


def difference(found: Tensor, expected: Tensor) -> float:
    """Mean over rows of |found - expected| / |expected|, both [L, H]."""
    wanted = expected.float().cpu()
    error = (found.float().cpu() - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-6)
    return float(error.mean())


def convert_store(
    source: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    taps: Sequence[str] | None = None,
    shard_bytes: int = 256 << 20,
    progress: Progress = lambda done, total: None,
) -> StoreIdentity:
    """Copy a store into shards of another size, another element type, or with fewer taps. An interrupted one goes on.

    Args:
        source: a complete store.
        out: another folder.
        dtype: element type of the copy; None keeps it.
        taps: names of those to keep; None keeps all.

    Raises:
        StoreError: a store that is damaged or incomplete, a tap that it lacks, or what `StoreWriter` refuses.
    """
    if Path(source).resolve() == Path(out).resolve():
        raise StoreError(
            "would be copied onto itself", where=out, remedy="name another folder; the store itself stays as it is"
        )
    reader = StoreReader(source)
    lacking = [name for name in taps or () if name not in reader.identity.taps]
    if lacking:
        raise StoreError(
            f"has no tap {', '.join(lacking)}; it has {', '.join(reader.identity.taps)}", where=reader.path
        )
    kept = tuple(name for name in reader.identity.taps if taps is None or name in taps)
    identity = replace(reader.identity, dtype=dtype or reader.identity.dtype, taps=kept)
    same = (identity.dtype, identity.taps) == (reader.identity.dtype, reader.identity.taps)
    wanted = [Tap.parse(name) for name in kept]
    with StoreWriter(out, identity, shard_bytes=shard_bytes, job=f"copy of {Path(source).resolve()}") as writer:
        present = StoreReader(out, allow_incomplete=True, verify="size")
        total, done = reader.tokens, present.tokens
        require_free_space(out, (total - done) * identity.bytes_per_token)
        for sample, rows in reader.documents():
            if sample.id in present:
                continue
            if same:
                writer.add_rows(sample, rows)
            else:
                writer.add(sample, rows.decode(reader.identity, wanted, "cpu"), rows.top1)
            done += len(sample.ids)
            progress(done, total)
        writer.finish()
    return identity
