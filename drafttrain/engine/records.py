"""What goes into the engine and what comes out. Every metric is derived from these records."""

from __future__ import annotations

from dataclasses import dataclass, field

from drafttrain.engine.sampling import SamplingParams
from drafttrain.errors import EngineError


@dataclass(frozen=True)
class Request:
    """One generation.

    Attributes:
        id: unique in a call.
        prompt_ids: the prompt's token ids, at least one.
        max_new_tokens: upper bound on emitted tokens.
        sampling: how the target's distribution is sampled; greedy by default.
        stop_ids: a token of this set ends the output and is its last token.
        stop: the token that completes one of these strings in the output ends it and is its last token, as in
            transformers; it may end in the middle of a token.
        turn: turn of a conversation, copied into the records.
        beyond: tokens that are emitted behind a stop id, for who wants the target's states at it.
    """

    id: str
    prompt_ids: list[int]
    max_new_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: frozenset[int] = frozenset()
    turn: int = 0
    stop: tuple[str, ...] = ()
    beyond: int = 0


@dataclass(frozen=True)
class Completion:
    """The output of one request.

    Attributes:
        tokens: emitted ids, the stop token included.
        reason: "stop" (a stop id or string), "length" (max_new_tokens), "context" (the cache or the model's context is
            full), "cancelled" or "error"; with the last two the tokens are those before it.
        writers: a number a token: 0 = the target, d = accepted from depth d of the draft.
        error: why it failed, or None.
    """

    id: str
    turn: int
    tokens: list[int]
    reason: str
    writers: list[int]
    error: EngineError | None = None


@dataclass(frozen=True)
class RoundRecord:
    """One row in one round of decoding. The token that the prefill emits belongs to no round.

    Attributes:
        request, turn: whose row.
        round: number of this request's round, from 0.
        proposed: draft tokens checked: of a chain its length, of a tree its nodes.
        accepted: draft tokens the target agreed with, before truncation: of a tree the depth it came to.
        emitted: tokens that reached the output, after truncation at a stop id, the target's own token included.
        reason: why the request ended in this round, or None.
        batch: rows that took part.
        draft_s, verify_s, host_s: seconds of the whole round, shared by its `batch` rows.
        depth: depth of what was proposed: of a chain its length.
    """

    request: str
    turn: int
    round: int
    proposed: int
    accepted: int
    emitted: int
    reason: str | None
    batch: int
    draft_s: float
    verify_s: float
    host_s: float
    depth: int | None = None

    @property
    def levels(self) -> int:
        """Depth of what was proposed."""
        return self.proposed if self.depth is None else self.depth
