"""What makes two targets the same: weights, vocabulary, template. Names do not count."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_BLOB = re.compile(r"[0-9a-f]{64}")
_SAMPLES, _BLOCK = 64, 4096


@dataclass(frozen=True)
class TargetIdentity:
    """Written into feature stores, drafts and provenance, and compared when they are used.

    Attributes:
        name: as the recipe gave it; for messages only.
        weights_hash: fingerprint of the weight files.
        tokenizer_hash: SHA-256 of the vocabulary (token -> id).
        template_hash: SHA-256 of the chat template, "" without one.
        vocab_size: rows of the head.
        tokenizer_size: ids the tokenizer knows; ids from there up are padding.
    """

    name: str
    weights_hash: str
    tokenizer_hash: str
    template_hash: str
    vocab_size: int
    tokenizer_size: int
    hidden_size: int
    n_layers: int

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return asdict(self)

    @staticmethod
    def from_dict(value: dict[str, Any]) -> TargetIdentity:
        """Inverse of `to_dict`."""
        return TargetIdentity(**value)

    def differences(self, other: TargetIdentity) -> list[str]:
        """Names of the fields in which two targets differ, `name` left out."""
        mine, theirs = asdict(self), asdict(other)
        return [key for key in mine if key != "name" and mine[key] != theirs[key]]


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 over the vocabulary, added tokens included."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary, ensure_ascii=False).encode()).hexdigest()


def template_hash(tokenizer: Any) -> str:
    """SHA-256 of the chat template, "" without one."""
    template = getattr(tokenizer, "chat_template", None)
    return "" if not template else hashlib.sha256(str(template).encode()).hexdigest()


def weights_fingerprint(files: list[Path]) -> str:
    """A hash that is quick for a 140 GB checkpoint.

    A file of a hub cache is named by its SHA-256 already. Of others, the size and 64 evenly spaced blocks are hashed:
    enough to tell revisions, fine-tunes and quantisations apart; it is no defence against a forger.
    """
    digest = hashlib.sha256()
    for file in sorted(files, key=lambda path: path.name):
        real = file.resolve()
        digest.update(file.name.encode())
        if _BLOB.fullmatch(real.name):
            digest.update(real.name.encode())
            continue
        size = real.stat().st_size
        digest.update(str(size).encode())
        with real.open("rb") as handle:
            for index in range(_SAMPLES):
                handle.seek(max(0, size - _BLOCK) * index // (_SAMPLES - 1))
                digest.update(handle.read(_BLOCK))
    return digest.hexdigest()
