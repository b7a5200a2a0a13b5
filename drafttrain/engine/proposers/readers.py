"""Drafts that read tokens and say what follows each: what chains, trees and the stages of a cascade are made of."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from drafttrain.engine.proposers.base import Row
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.course import Course
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.vocab_map import VocabMap


class Reader(ABC):
    """A causal draft over the target's vocabulary, with a cache of what it has read.

    Between `start` and `finish` of a round: `extend` reads what a row holds and this draft has not read, at least its
    last token, and drafts behind it; `keep` says how many of those drafts the row goes on with. `read` reads tokens
    behind all that without deciding about them; `advance` keeps a chain of those.

    Attributes:
        name: as reports show it.
        vocab_map: full.
        course: of the target, where the draft is a part of it; the states that `extend` and `read` leave behind are
            then the input of the block at which it ends.
    """

    name: str
    vocab_map: VocabMap
    course: Course | None = None
    states: Tensor | None = None
    cache: StaticKVCache

    def attach(self, target: CausalLM, cache: StaticKVCache) -> None:  # noqa: B027 (a model of its own needs neither)
        """Hand over the engine's target and cache."""

    def bytes_needed(self, rows: int, length: int) -> int:
        """What `reserve` will allocate, in bytes."""
        return 0

    def reserve(self, rows: int, length: int) -> None:  # noqa: B027
        """Allocate for `rows` rows of up to `length` tokens."""

    def admit(self, first_row: int, rows: Sequence[Row]) -> None:  # noqa: B027
        """Rows join at first_row .. with their prompts."""

    def move_row(self, source: int, destination: int) -> None:  # noqa: B027
        """Row `source` takes the place of `destination`."""

    def memory_bytes(self) -> int:
        """Weights and cache the draft adds, in bytes."""
        return 0

    def start(self, rows: Sequence[Row]) -> None:
        """A round begins."""
        self._rows = rows

    def finish(self) -> None:  # noqa: B027
        """A round ends."""

    @abstractmethod
    def _known(self, index: int, row: Row) -> int:
        """Set the cached length of a row to what it shares with the row's tokens but the last, and return it."""

    @abstractmethod
    def _run(self, tokens: Tensor) -> Tensor:
        """Tokens [n, T] through the blocks, as announced to the cache: readouts [n, T, H]."""

    @abstractmethod
    def logits(self, readouts: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""

    def extend(self, rows: Sequence[Row], drafts: Tensor | None = None) -> Tensor:
        """Read on.

        Args:
            rows: the engine's, or with drafts of a stage above behind them.
            drafts: int64 [n, w] to be read behind each row; None = none.

        Returns:
            logits [n, w + 1, V] behind each row's last token and behind each draft.
        """
        self._rows = rows
        known = [self._known(index, row) for index, row in enumerate(rows)]
        unread = [row.tokens[start:] for row, start in zip(rows, known, strict=True)]
        self._unread = torch.tensor([len(tokens) for tokens in unread])
        width = 0 if drafts is None else drafts.shape[1]
        tokens = torch.zeros(len(rows), int(self._unread.max()) + width, dtype=torch.int64)
        self._drafts = torch.zeros(len(rows), 0, dtype=torch.int64) if drafts is None else drafts.cpu()
        for index, new in enumerate(unread):
            tokens[index, : len(new)] = torch.tensor(new, dtype=torch.int64)
            tokens[index, len(new) : len(new) + width] = self._drafts[index]
        self.cache.begin(len(rows), tokens.shape[1])
        readouts = self._run(tokens.to(self.cache.device))
        each = torch.arange(len(rows), device=readouts.device)[:, None]
        place = (self._unread[:, None] - 1 + torch.arange(width + 1)).to(readouts.device)
        if self.states is not None:
            self.states = self.states[each, place]
        return self.logits(readouts[each, place])

    def keep(self, accepted: Tensor) -> None:
        """The rows go on with the first accepted[b] drafts of `extend` (int64 [n] on the CPU)."""
        self.cache.lengths[: len(accepted)] += self._unread + accepted

    def read(self, tokens: Tensor, offset: int, sees: Tensor | None = None) -> Tensor:
        """Read tokens [n, w] behind `offset` undecided ones; `sees` as in `StaticKVCache.begin`. Logits [n, w, V]."""
        return self.logits(self._read(tokens, offset, sees))

    def _read(self, tokens: Tensor, offset: int, sees: Tensor | None = None) -> Tensor:
        self.cache.begin(len(tokens), tokens.shape[1], tail_mask=sees, offset=offset)
        return self._run(tokens)

    def pass_through(self, tokens: Tensor, offset: int = 0) -> None:
        """Leave the states of a chain's last tokens [n, 1] behind, whose logits nobody needs."""
        self._read(tokens, offset)

    def advance(self, tokens: Tensor) -> None:
        """The rows go on with these tokens [n, m], which `read` has read."""
        self.cache.lengths[: len(tokens)] += tokens.shape[1]


class ModelReader(Reader):
    """A model of its own with a cache of its own, which remembers what it has read: whatever a row turns into, what it
    still shares with that is used.

    Args:
        model: a causal LM with the target's vocabulary, prepared for inference.
        name: as reports show it.
    """

    def __init__(self, model: CausalLM, name: str) -> None:
        self.model, self.name = model, name
        self.vocab_map = VocabMap.full(model.vocab_size)

    def bytes_needed(self, rows: int, length: int) -> int:
        """Of the cache, in bytes."""
        return self.model.cache_bytes(rows, length)

    def reserve(self, rows: int, length: int) -> None:
        """Allocate the cache."""
        self.cache = self.model.new_cache(rows, length)
        self._seen: list[list[int]] = [[] for _ in range(rows)]
        self._sure = [0] * rows

    def admit(self, first_row: int, rows: Sequence[Row]) -> None:
        """Read the prompts but for their last token, which the first round reads."""
        prompts = [row.request.prompt_ids[:-1] for row in rows]
        lengths = torch.tensor([len(prompt) for prompt in prompts])
        for index, prompt in enumerate(prompts, first_row):
            self._seen[index], self._sure[index] = list(prompt), len(prompt)
        self.cache.set_lengths(torch.zeros_like(lengths), first_row)
        longest = int(lengths.max())
        if longest:
            tokens = torch.zeros(len(rows), longest, dtype=torch.int64)
            for index, prompt in enumerate(prompts):
                tokens[index, : len(prompt)] = torch.tensor(prompt, dtype=torch.int64)
            self.cache.begin(len(rows), longest, first_row=first_row)
            self._run(tokens.to(self.cache.device))
            self.cache.commit(lengths)

    def move_row(self, source: int, destination: int) -> None:
        """Row `source` takes the place of `destination`."""
        self.cache.move_row(source, destination)
        self._seen[destination], self._sure[destination] = self._seen[source], self._sure[source]
        if source != destination:
            self._seen[source], self._sure[source] = [], 0

    def _known(self, index: int, row: Row) -> int:
        seen, sure = self._seen[index], self._sure[index]
        shared = min(len(seen), len(row.tokens) - 1)
        # Tokens that the target has emitted do not change any more.
        while shared > sure and seen[sure:shared] != row.tokens[sure:shared]:
            shared -= 1
        del seen[shared:]
        self._sure[index] = min(shared, len(row.tokens) - row.drafted)
        self.cache.lengths[index] = shared
        return shared

    def keep(self, accepted: Tensor) -> None:
        """The rows go on with the first accepted[b] drafts of `extend`."""
        super().keep(accepted)
        for index, (row, count) in enumerate(zip(self._rows, accepted.tolist(), strict=True)):
            seen = self._seen[index]
            seen += row.tokens[len(seen) :]
            seen += self._drafts[index, :count].tolist()

    def advance(self, tokens: Tensor) -> None:
        """The rows go on with these tokens."""
        super().advance(tokens)
        for seen, new in zip(self._seen, tokens.tolist(), strict=False):
            seen += new

    def compact(self, rows: Sequence[Row], slots: Tensor, kept: Tensor) -> None:
        """Of the tokens read behind all that is kept, those on a path stay.

        Args:
            rows: hold the path's tokens already.
            slots: int64 [n, m], which of the tokens read is the j-th of the path.
            kept: int64 [n], how many of the path were read.
        """
        self.cache.compact(slots)
        self.cache.lengths[: len(rows)] += kept
        for seen, row, count in zip(self._seen, rows, kept.tolist(), strict=False):
            # A row that ended inside the path holds fewer; it leaves.
            seen += row.tokens[len(seen) : len(seen) + count]

    def _run(self, tokens: Tensor) -> Tensor:
        return self.model(tokens, cache=self.cache).final  # type: ignore[no-any-return]

    def logits(self, readouts: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""
        return self.model.lm_head(readouts)

    def memory_bytes(self) -> int:
        """Weights and cache, in bytes."""
        weights = sum(p.numel() * p.element_size() for p in self.model.parameters())
        return weights + (self.cache.bytes() if hasattr(self, "cache") else 0)
