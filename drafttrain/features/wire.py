"""What a feature server and its clients say to each other: HTTP, bodies in safetensors, nothing pickled.

    GET  /v1/target    -> JSON: protocol, identity and dtype of the target, tokens of the largest request
    POST /v1/features  -> for N tokens of some documents, one after the other: the taps asked for [N, H], top1 [N]

Every call carries `Authorization: Bearer TOKEN`. An error is a JSON object with `error`, and `where` and `remedy` if
known. 503 means that the queue is full: come again.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from drafttrain.corpus.types import Sample
from drafttrain.errors import UserError
from drafttrain.files import cache_dir
from drafttrain.modeling.taps import Tap

PROTOCOL = 1
TARGET_PATH, FEATURES_PATH = "/v1/target", "/v1/features"
TOKEN_VARIABLE = "DRAFTTRAIN_FEATURES_TOKEN"
_META = "meta"


@dataclass(frozen=True)
class FeatureRequest:
    """Documents, the taps wanted of each of their tokens, and of which documents top1 is wanted, too."""

    samples: list[Sample]
    taps: tuple[Tap, ...]
    top1: list[bool]

    @property
    def tokens(self) -> int:
        """N."""
        return sum(len(sample.ids) for sample in self.samples)

    def pack(self) -> bytes:
        """The body."""
        spans = [[at, *span] for at, sample in enumerate(self.samples) for span in sample.spans]
        meta = {"taps": [str(tap) for tap in self.taps], "names": [sample.id for sample in self.samples]}
        return _pack(
            {
                "ids": torch.from_numpy(np.concatenate([sample.ids.astype(np.int32) for sample in self.samples])),
                "lengths": torch.tensor([len(sample.ids) for sample in self.samples]),
                "spans": torch.tensor(spans, dtype=torch.int64).view(-1, 3),
                "top1": torch.tensor(self.top1),
            },
            meta,
        )

    @staticmethod
    def unpack(body: bytes) -> FeatureRequest:
        """The inverse.

        Raises:
            ValueError: anything that is not a request; says what.
        """
        tensors, meta = _unpack(body)
        try:
            ids, lengths, spans, top1 = (tensors[name] for name in ("ids", "lengths", "spans", "top1"))
            taps = tuple(Tap.parse(name) for name in meta["taps"])
            names = [str(name) for name in meta["names"]]
        except (KeyError, TypeError) as error:
            raise ValueError(f"lacks {error}") from None
        if ids.dtype != torch.int32 or ids.dim() != 1 or lengths.dim() != 1 or spans.dim() != 2 or spans.shape[1] != 3:
            raise ValueError("tensors of other types or shapes than ids int32 [N], lengths [D], spans [S, 3]")
        if not len(lengths) == len(names) == len(top1) or not len(names):
            raise ValueError(f"{len(names)} names, {len(lengths)} lengths, {len(top1)} flags")
        if int(lengths.min()) < 1 or int(lengths.sum()) != len(ids):
            raise ValueError(f"lengths that sum to {int(lengths.sum())} for {len(ids)} tokens")
        samples = [
            Sample(name, part.numpy(), []) for name, part in zip(names, ids.split(lengths.tolist()), strict=True)
        ]
        for at, first, last in spans.tolist():
            if not (0 <= at < len(samples) and 0 <= first <= last < len(samples[at].ids)):
                raise ValueError(f"span {first}..{last} of document {at}, which has no such tokens")
            samples[at].spans.append((first, last))
        return FeatureRequest(samples, taps, [bool(flag) for flag in top1.tolist()])


@dataclass(frozen=True)
class FeatureAnswer:
    """Features of a request's documents, in its order.

    Attributes:
        features: tap -> [N, H].
        top1: int32 [N], -1 where it is not known.
        weights_hash: of the target that computed them.
    """

    features: dict[Tap, Tensor]
    top1: Tensor
    weights_hash: str

    def pack(self) -> bytes:
        """The body."""
        tensors = {f"tap.{tap}": value.contiguous() for tap, value in self.features.items()}
        return _pack({**tensors, "top1": self.top1}, {"weights_hash": self.weights_hash})

    @staticmethod
    def unpack(body: bytes) -> FeatureAnswer:
        """The inverse.

        Raises:
            ValueError: anything else.
        """
        tensors, meta = _unpack(body)
        try:
            top1, weights = tensors.pop("top1"), str(meta["weights_hash"])
        except KeyError as error:
            raise ValueError(f"lacks {error}") from None
        return FeatureAnswer({Tap.parse(n.removeprefix("tap.")): value for n, value in tensors.items()}, top1, weights)


def _pack(tensors: dict[str, Tensor], meta: dict[str, Any]) -> bytes:
    text = np.frombuffer(json.dumps(meta).encode(), dtype=np.uint8).copy()
    body: bytes = save({**tensors, _META: torch.from_numpy(text)})
    return body


def _unpack(body: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    try:
        tensors: dict[str, Tensor] = load(body)
        meta = json.loads(tensors.pop(_META).numpy().tobytes())
    except (SafetensorError, KeyError, ValueError, TypeError) as error:
        raise ValueError(f"not a body of protocol {PROTOCOL}: {error}") from None
    if not isinstance(meta, dict):
        raise ValueError("its meta is no object")
    return tensors, meta


def find_token(file: str | Path | None, *, make: bool = False) -> tuple[str, str]:
    """The secret that a server and its clients share, and where it was found.

    Looked for in `file`, else in the environment (DRAFTTRAIN_FEATURES_TOKEN), else in `features.token` of the cache
    folder.

    Args:
        make: write a new one where the file does not exist, readable by its owner alone.

    Raises:
        UserError: no token, or an empty one.
    """
    if file is None and os.environ.get(TOKEN_VARIABLE):
        return os.environ[TOKEN_VARIABLE], TOKEN_VARIABLE
    path = Path(file).expanduser() if file is not None else cache_dir() / "features.token"
    if make and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        with os.fdopen(handle, "w", encoding="utf-8") as written:
            written.write(secrets.token_urlsafe(32) + "\n")
    if not path.is_file():
        raise UserError(
            "no such file: the token of the feature server",
            where=path,
            remedy=f"copy the server's token file and name it in features.token_file, or set {TOKEN_VARIABLE}",
        )
    token = path.read_text(encoding="utf-8").strip()
    if not token:
        raise UserError("holds no token", where=path, remedy="remove it: the server makes a new one")
    return token, str(path)


def given_token(file: str | Path | None) -> str | None:
    """The secret of a server that need not have one: from `file`, else from the environment; None where neither says.

    Raises:
        UserError: see `find_token`.
    """
    return find_token(file)[0] if file is not None or os.environ.get(TOKEN_VARIABLE) else None
