"""The tokenised corpus: conversations as samples, cached whole under a key of all that decides them."""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.config import Supervise
from drafttrain.corpus.lines import pick
from drafttrain.corpus.samples import SampleTable, write_samples
from drafttrain.corpus.tool_calls import as_rendered
from drafttrain.corpus.types import Conversation, Reject, Sample
from drafttrain.errors import DataError, UserError
from drafttrain.files import atomic_folder, cache_dir, read_json, sha256_text, write_json

_SCHEMA = 1  # of samples: what a conversation becomes
_LAYOUT = 2  # of a corpus on disk


@dataclass(frozen=True)
class Corpus:
    """Tokenised conversations.

    Attributes:
        key: names the data, template, tokenizer, max_length and vocabulary that made it.
        samples: in the order of the conversations; they stay on disk.
        rejects: conversations that gave no sample, with the reason.
        conversations: how many went in: those that gave samples + rejects.
    """

    key: str
    samples: SampleTable
    rejects: list[Reject]
    conversations: int

    @property
    def tokens(self) -> int:
        """All tokens."""
        return int(self.samples.lengths.sum())

    @property
    def supervised(self) -> int:
        """Tokens inside assistant spans."""
        return self.samples.supervised


def corpus_key(
    conversations: Iterable[Conversation],
    chat: ChatRenderer,
    *,
    max_length: int,
    vocab_size: int,
    supervise: Supervise = "answers",
) -> str:
    """Hex digest over everything that decides the samples."""
    data = hashlib.sha256()
    for number, item in enumerate(conversations):
        value = {**item.to_json(), "messages": [as_rendered(message) for message in item.messages]}
        data.update((b"\n" if number else b"") + json.dumps(value, sort_keys=True).encode())
    parts = {
        "schema": _SCHEMA,
        "data": data.hexdigest(),
        "template": chat.template_hash,
        "tokenizer": chat.tokenizer_hash,
        "stop": sorted(chat.stop_ids),
        "max_length": max_length,
        "vocab_size": vocab_size,
        **({} if supervise == "answers" else {"supervise": supervise}),
        **({} if chat.day is None else {"day": chat.day}),
    }
    return sha256_text(json.dumps(parts, sort_keys=True))


def build_corpus(
    conversations: Sequence[Conversation],
    chat: ChatRenderer,
    *,
    max_length: int,
    vocab_size: int,
    supervise: Supervise = "answers",
    cache: Path | None = None,
) -> Corpus:
    """Tokenise conversations, or read what an earlier call with the same key left in `cache`.

    Args:
        conversations: gone through one by one, so they may lie on disk.
        max_length: tokens of a sample.
        vocab_size: rows of the target's embedding; a tokenizer that goes beyond belongs to another model.
        supervise: see `DataConfig`.
        cache: folder of tokenised corpora; `cache_dir()/corpus` where None.

    Raises:
        DataError: no conversations, none that can be learnt from, or token ids the target does not have.
    """
    if not conversations:
        raise DataError("the data set is empty", where="data", remedy="give prompts, or a file of conversations")
    key = corpus_key(conversations, chat, max_length=max_length, vocab_size=vocab_size, supervise=supervise)
    folder = (cache or cache_dir() / "corpus") / f"{key[:32]}.{_LAYOUT}"
    stored = _load(folder, key)
    if stored is None:
        _write(folder, key, conversations, chat, max_length, vocab_size, supervise)
        stored = _load(folder, key)
        assert stored is not None
    return stored


def samples_of(
    conversation: Conversation, chat: ChatRenderer, *, max_length: int, supervise: Supervise = "answers"
) -> list[Sample] | Reject:
    """What a conversation becomes."""
    outcome = chat.samples(conversation, max_length)
    if isinstance(outcome, Reject) or supervise == "answers":
        return outcome
    return [replace(sample, spans=[(0, len(sample.ids) - 1)]) for sample in outcome]


def _write(
    folder: Path,
    key: str,
    conversations: Sequence[Conversation],
    chat: ChatRenderer,
    max_length: int,
    vocab_size: int,
    supervise: Supervise,
) -> None:
    """Tokenise into a folder, which is whole or absent."""
    rejects: list[Reject] = []

    def samples() -> Iterator[Sample]:
        for conversation in conversations:
            outcome = samples_of(conversation, chat, max_length=max_length, supervise=supervise)
            if isinstance(outcome, Reject):
                rejects.append(outcome)
                continue
            for sample in outcome:
                if int(sample.ids.max()) >= vocab_size:
                    raise DataError(
                        f"token {int(sample.ids.max())} of sample {sample.id!r} is outside the target's vocabulary "
                        f"of {vocab_size}",
                        where=chat.name,
                        remedy="use the tokenizer that belongs to the target",
                    )
                yield sample

    try:
        with atomic_folder(folder) as partial:
            if not write_samples(samples(), partial):
                raise DataError(
                    f"none of {len(conversations)} conversations can be learnt from; the first, "
                    f"{rejects[0].id!r}: {rejects[0].reason}",
                    where=chat.name,
                    remedy="raise max_length, or use a template that shows answers as the model emits them",
                )
            meta = {
                "key": key,
                "conversations": len(conversations),
                "rejects": [reject.to_json() for reject in rejects],
            }
            write_json(partial / "corpus.json", meta)
    except (OSError, UserError) as error:
        if isinstance(error, DataError) or not folder.is_dir():
            raise  # else another process was faster, and its corpus is the same


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
) -> tuple[Sequence[Conversation], Sequence[Conversation]]:
    """(training, held out), both in the order of their ids: a seeded choice that does not depend on the file's order.

    Raises:
        DataError: nothing would be left to train on, or two conversations have one id.
    """
    require_rest(len(conversations), held_out)
    names = [conversation.id for conversation in conversations]
    if len(set(names)) < len(names):
        # Features are found by it: one would be given those of the other.
        twice, count = Counter(names).most_common(1)[0]
        raise DataError(
            f"{count} conversations have the id {twice!r}", where="data", remedy="give each conversation its own id"
        )
    order = sorted(range(len(names)), key=names.__getitem__)
    chosen = set(random.Random(seed).sample(order, held_out))
    training = pick(conversations, (index for index in order if index not in chosen))
    return training, pick(conversations, (index for index in order if index in chosen))


def token_counts(samples: Iterable[Sample], vocab_size: int) -> torch.Tensor:
    """int64 [vocab_size]: how often each token is a label, that is in a span but not its first token."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for sample in samples:
        for first, last in sample.spans:
            np.add.at(counts, sample.ids[first + 1 : last + 1], 1)
    return torch.from_numpy(counts)


def answer_counts(
    conversations: Iterable[Conversation], chat: ChatRenderer, *, max_length: int, vocab_size: int
) -> torch.Tensor:
    """int64 [vocab_size]: how often each token is said in the answers of a few conversations. Nothing is stored."""
    outcomes = (chat.samples(conversation, max_length) for conversation in conversations)
    found = (outcome for outcome in outcomes if not isinstance(outcome, Reject))
    return token_counts((sample for samples in found for sample in samples), vocab_size)


def _load(folder: Path, key: str) -> Corpus | None:
    if not folder.is_dir():
        return None
    try:
        meta = read_json(folder / "corpus.json")
        if meta["key"] != key:
            raise ValueError("the key differs")
        rejects = [Reject(**reject) for reject in meta["rejects"]]
        return Corpus(key, SampleTable(folder), rejects, meta["conversations"])
    except Exception as error:
        raise DataError(
            f"the cached corpus is damaged: {error}", where=folder, remedy="remove that folder and run again"
        ) from None
