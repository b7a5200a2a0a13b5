"""The tokenised corpus: conversations as samples, cached whole under a key of all that decides them."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.types import Conversation, Reject, Sample
from drafttrain.errors import DataError, UserError
from drafttrain.files import atomic_folder, cache_dir, read_json, require_free_space, sha256_text, write_json

_SCHEMA = 1


@dataclass(frozen=True)
class Corpus:
    """Tokenised conversations.

    Attributes:
        key: names the data, template, tokenizer, max_length and vocabulary that made it.
        samples: in the order of the conversations; read-only views of one array.
        rejects: conversations that gave no sample, with the reason.
        conversations: how many went in: those that gave samples + rejects.
    """

    key: str
    samples: list[Sample]
    rejects: list[Reject]
    conversations: int

    @property
    def tokens(self) -> int:
        """All tokens."""
        return sum(len(sample.ids) for sample in self.samples)

    @property
    def supervised(self) -> int:
        """Tokens inside assistant spans."""
        return sum(sample.supervised for sample in self.samples)


def corpus_key(conversations: Sequence[Conversation], chat: ChatRenderer, *, max_length: int, vocab_size: int) -> str:
    """Hex digest over everything that decides the samples."""
    data = sha256_text("\n".join(json.dumps(item.to_json(), sort_keys=True) for item in conversations))
    parts = {
        "schema": _SCHEMA,
        "data": data,
        "template": chat.template_hash,
        "tokenizer": chat.tokenizer_hash,
        "stop": sorted(chat.stop_ids),
        "max_length": max_length,
        "vocab_size": vocab_size,
    }
    return sha256_text(json.dumps(parts, sort_keys=True))


def build_corpus(
    conversations: Sequence[Conversation],
    chat: ChatRenderer,
    *,
    max_length: int,
    vocab_size: int,
    cache: Path | None = None,
) -> Corpus:
    """Tokenise conversations, or read what an earlier call with the same key left in `cache`.

    Args:
        max_length: tokens of a sample.
        vocab_size: rows of the target's embedding; a tokenizer that goes beyond belongs to another model.
        cache: folder of tokenised corpora; `cache_dir()/corpus` where None.

    Raises:
        DataError: no conversations, none that can be learnt from, or token ids the target does not have.
    """
    if not conversations:
        raise DataError("the data set is empty", where="data", remedy="give prompts, or a file of conversations")
    key = corpus_key(conversations, chat, max_length=max_length, vocab_size=vocab_size)
    folder = (cache or cache_dir() / "corpus") / key[:32]
    stored = _load(folder, key)
    if stored is not None:
        return stored
    samples: list[Sample] = []
    rejects: list[Reject] = []
    for conversation in conversations:
        outcome = chat.samples(conversation, max_length)
        if isinstance(outcome, Reject):
            rejects.append(outcome)
        else:
            samples += outcome
    if not samples:
        raise DataError(
            f"none of {len(conversations)} conversations can be learnt from; the first, "
            f"{rejects[0].id!r}: {rejects[0].reason}",
            where=chat.name,
            remedy="raise max_length, or use a template that shows answers as the model emits them",
        )
    for sample in samples:
        if int(sample.ids.max()) >= vocab_size:
            raise DataError(
                f"token {int(sample.ids.max())} of sample {sample.id!r} is outside the target's vocabulary "
                f"of {vocab_size}",
                where=chat.name,
                remedy="use the tokenizer that belongs to the target",
            )
    _save(folder, Corpus(key, samples, rejects, len(conversations)))
    loaded = _load(folder, key)
    assert loaded is not None
    return loaded


def require_rest(count: int, held_out: int) -> None:
    """Refuse to hold out all of `count` conversations.

    Raises:
        DataError: nothing would be left to train on.
    """
    if held_out >= count:
        raise DataError(
            f"{held_out} of {count} conversations are to be held out: none is left to train on",
            where="data.held_out",
            remedy="lower held_out or give more prompts",
        )


def split_held_out(
    conversations: Sequence[Conversation], held_out: int, *, seed: int = 0
) -> tuple[list[Conversation], list[Conversation]]:
    """(training, held out): a seeded choice that does not depend on the order of the file.

    Raises:
        DataError: nothing would be left to train on.
    """
    require_rest(len(conversations), held_out)
    names = sorted(conversation.id for conversation in conversations)
    chosen = set(random.Random(seed).sample(names, held_out))
    training = [conversation for conversation in conversations if conversation.id not in chosen]
    return training, [conversation for conversation in conversations if conversation.id in chosen]


def token_counts(samples: Sequence[Sample], vocab_size: int) -> torch.Tensor:
    """int64 [vocab_size]: how often each token is a label, that is in a span but not its first token."""
    labels = [sample.ids[first + 1 : last + 1] for sample in samples for first, last in sample.spans]
    ids = np.concatenate([np.empty(0, dtype=np.int32), *labels])
    return torch.from_numpy(np.bincount(ids, minlength=vocab_size).astype(np.int64))


def _save(folder: Path, corpus: Corpus) -> None:
    ids = np.concatenate([sample.ids for sample in corpus.samples])
    require_free_space(folder.parent, 2 * ids.nbytes)
    meta = {
        "key": corpus.key,
        "conversations": corpus.conversations,
        "ids": [sample.id for sample in corpus.samples],
        "lengths": [len(sample.ids) for sample in corpus.samples],
        "spans": [sample.spans for sample in corpus.samples],
        "rejects": [reject.to_json() for reject in corpus.rejects],
    }
    try:
        with atomic_folder(folder) as partial:
            np.save(partial / "tokens.npy", ids)
            write_json(partial / "corpus.json", meta)
    except (OSError, UserError):
        if not folder.is_dir():  # else another process was faster, and its corpus is the same
            raise


def _load(folder: Path, key: str) -> Corpus | None:
    if not folder.is_dir():
        return None
    try:
        meta = read_json(folder / "corpus.json")
        ids = np.load(folder / "tokens.npy", mmap_mode="r", allow_pickle=False)
        if meta["key"] != key or len(ids) != sum(meta["lengths"]):
            raise ValueError("key or length differs")
    except Exception as error:
        raise DataError(
            f"the cached corpus is damaged: {error}", where=folder, remedy="remove that folder and run again"
        ) from None
    ends = np.cumsum(meta["lengths"]).tolist()
    samples = [
        Sample(name, ids[end - length : end], [(int(first), int(last)) for first, last in spans])
        for name, length, end, spans in zip(meta["ids"], meta["lengths"], ends, meta["spans"], strict=True)
    ]
    return Corpus(key, samples, [Reject(**reject) for reject in meta["rejects"]], meta["conversations"])
