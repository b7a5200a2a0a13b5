"""Round records for tests, written as short as what they say."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from drafttrain.engine.records import RoundRecord


@pytest.fixture(scope="session")
def record() -> Callable[..., RoundRecord]:
    """Builder of one round; emits the accepted tokens and the bonus unless told otherwise."""
    return _record


def _record(
    request: str = "a",
    *,
    proposed: int = 4,
    accepted: int = 0,
    emitted: int | None = None,
    reason: str | None = None,
    turn: int = 0,
    number: int = 0,
    batch: int = 1,
    draft_s: float = 0.0,
    verify_s: float = 1.0,
    host_s: float = 0.0,
) -> RoundRecord:
    return RoundRecord(
        request=request,
        turn=turn,
        round=number,
        proposed=proposed,
        accepted=accepted,
        emitted=accepted + 1 if emitted is None else emitted,
        reason=reason,
        batch=batch,
        draft_s=draft_s,
        verify_s=verify_s,
        host_s=host_s,
    )
