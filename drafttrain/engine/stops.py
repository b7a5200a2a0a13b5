"""Strings that end an output, wherever its tokens are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drafttrain.engine.records import Request
from drafttrain.errors import EngineError

# A token gives at least one byte but for special ones, and what stands left of the window may change its first text.
_SPARE = 4


class Stops:
    """Finds where an output ends.

    Args:
        tokenizer: decodes; None where there is none.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def check(self, request: Request) -> None:
        """Refuse stop strings that cannot be found."""
        if request.stop and self._tokenizer is None:
            raise EngineError(
                f"request {request.id} has stop strings, and the engine has no tokenizer to find them with",
                remedy="give the engine a tokenizer, or stop token ids",
            )
        if not all(request.stop):
            raise EngineError(f"request {request.id} has an empty stop string", remedy="leave it out")

    def end(self, request: Request, before: Sequence[int], new: Sequence[int]) -> int | None:
        """How many of the new tokens belong to the output if it ends among them.

        Args:
            request: its stop ids and strings.
            before: the output so far.
            new: what comes behind.

        Returns:
            the count, the token that completes a stop string or is a stop id included, and those beyond it; None if
            the output goes on.
        """
        ends = self._stop_id(request, before, new)
        if request.stop:
            ends += self._strings(request.stop, before, new)
        return min(ends, default=None)

    @staticmethod
    def _stop_id(request: Request, before: Sequence[int], new: Sequence[int]) -> list[int]:
        # Had a token before these been the first stop id, the output would have ended there.
        recent = before[-request.beyond :] if request.beyond else ()
        ends = [
            place + 1 - len(recent) + request.beyond
            for place, token in enumerate([*recent, *new])
            if token in request.stop_ids
        ]
        return [end for end in ends[:1] if end <= len(new)]

    def _strings(self, stop: Sequence[str], before: Sequence[int], new: Sequence[int]) -> list[int]:
        window = max(len(text.encode()) for text in stop) + _SPARE
        context = list(before[-window:])
        if not self._holds(stop, [*context, *new]):
            return []
        for count in range(1, len(new)):
            if self._holds(stop, [*context, *new[:count]]):
                return [count]
        return [len(new)]

    def _holds(self, stop: Sequence[str], tokens: list[int]) -> bool:
        text = self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return any(string in text for string in stop)
