"""One record a round: what every figure in a report is derived from."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RoundRecord:
    """What one row did in one round of decoding. The prefill, and the token it emits, are no round.

    Attributes:
        request: id of the request.
        turn: turn of the conversation, from 0.
        round: number of the round within the request and turn, from 0.
        proposed: draft tokens that were put before the target (the depth of a chain).
        accepted: how many of them the target accepted, before truncation.
        emitted: tokens given to the caller after truncation at a stop token or a limit, bonus token included.
        reason: why the row finished in this round ("stop", "length"), or None if it goes on.
        batch: rows that took part in the round.
        draft_s: wall seconds of the whole batched round spent drafting; a row's share is 1/batch, like the next two.
        verify_s: wall seconds in the target's forward and the acceptance rule.
        host_s: wall seconds of everything else.
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
