"""What flows through the corpus: prompts, answered conversations, tokenised samples, and what was refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from drafttrain.modeling.taps import Tap

if TYPE_CHECKING:
    from torch import Tensor

Message = dict[str, Any]
"""One chat message as templates read it: `role`, `content`, and whatever else, such as `tool_calls`."""


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for answers.

    Attributes:
        id: unique in its set.
        messages: the given history, up to and including a user (or tool) message.
        turns: further user turns; the answers between them are filled in one by one.
        tools: tool schemas handed to the template.
        meta: provenance such as `source` and `category`; never read by training.
    """

    id: str
    messages: list[Message]
    turns: list[str] = field(default_factory=list)
    tools: list[dict[str, Any]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSONL record of a prompt set; empty fields are left out."""
        return _without_empty(
            {
                "id": self.id,
                "messages": self.messages,
                "turns": self.turns,
                "tools": self.tools,
                "meta": self.meta,
            }
        )

    @staticmethod
    def from_json(record: dict[str, Any]) -> Prompt:
        """The inverse of `to_json`."""
        return Prompt(
            record["id"],
            record["messages"],
            record.get("turns", []),
            record.get("tools", []),
            record.get("meta", {}),
        )


@dataclass(frozen=True)
class Conversation:
    """A conversation with assistant turns.

    Attributes:
        cut: indices of assistant messages that stopped at the token limit. The model did not end them, so
            their end-of-turn token is not supervised.
        tokens: message index -> the very token ids that the model emitted, where they are known. Encoding the
            text again would give others now and then (two newlines as one token or as two), and a draft has to
            follow what is emitted.
    """

    id: str
    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)
    meta: dict[str, Any] = field(default_factory=dict)
    cut: tuple[int, ...] = ()
    tokens: dict[int, list[int]] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The JSONL record of an answered set; empty fields are left out."""
        return _without_empty(
            {
                "id": self.id,
                "messages": self.messages,
                "tools": self.tools,
                "meta": self.meta,
                "cut": list(self.cut),
                "tokens": {str(index): ids for index, ids in self.tokens.items()},
            }
        )

    @staticmethod
    def from_json(record: dict[str, Any]) -> Conversation:
        """The inverse of `to_json`; KeyError or TypeError where the record is something else."""
        return Conversation(
            id=str(record["id"]),
            messages=[dict(message) for message in record["messages"]],
            tools=list(record.get("tools", [])),
            meta=dict(record.get("meta", {})),
            cut=tuple(int(index) for index in record.get("cut", ())),
            tokens={int(index): [int(i) for i in ids] for index, ids in record.get("tokens", {}).items()},
        )


@dataclass(frozen=True)
class Sample:
    """A tokenised conversation.

    Attributes:
        ids: int32 [L].
        spans: (first, last) token of each supervised assistant span, `last` INCLUSIVE. A span
            runs from the first generated token to the end-of-turn token, or to the last one of a cut answer.
    """

    id: str
    ids: NDArray[np.int32]
    spans: list[tuple[int, int]]

    @property
    def supervised(self) -> int:
        """Number of tokens inside spans."""
        return sum(last - first + 1 for first, last in self.spans)


@dataclass(frozen=True)
class Reject:
    """A row that was refused: count in = count out + rejects, always."""

    id: str
    reason: str
    where: str = ""

    def to_json(self) -> dict[str, str]:
        """The JSONL record of a reject list."""
        return {"id": self.id, "reason": self.reason, "where": self.where}


@dataclass(frozen=True)
class States:
    """What the target computed while it wrote.

    Attributes:
        ids: int32 [L], the prompt and what it wrote, as far as it was read again.
        features: tap -> [L, H], in the target's dtype, on the CPU.
        greedy_from: behind each position from here on stands the token that the target finds likeliest.
    """

    ids: NDArray[np.int32]
    features: dict[Tap, Tensor]
    greedy_from: int


class Continuation(NamedTuple):
    """Of prompt number `prompt`: new token ids, the stop token included, and the states if they were asked for."""

    prompt: int
    tokens: list[int]
    states: States | None = None


class TokenGenerator(Protocol):
    """Something that continues token sequences in this process; the engine supplies it."""

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        temperature: float,
        top_p: float,
        top_k: int,
        seed: int,
        stop: frozenset[int],
        taps: Sequence[Tap] = (),
    ) -> Iterator[Continuation]:
        """Continue each prompt once, as they finish, in any order; with the states at `taps`, if there are any."""
        ...


def _without_empty(record: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key in ("id", "messages") or value}
