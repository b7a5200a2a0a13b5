"""What ranks do together before they train: agree, let the main one go first, fail with one and the same error."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist
from accelerate import Accelerator

from drafttrain.errors import AlreadyReported, UserError

T = TypeVar("T")


@dataclass(frozen=True)
class _Failure:
    """An error as it travels between ranks."""

    what: str
    where: str | None
    remedy: str | None
    expected: bool

    @staticmethod
    def of(error: Exception) -> _Failure:
        if isinstance(error, UserError):
            return _Failure(error.what, error.where, error.remedy, True)
        return _Failure(f"{type(error).__name__}: {error}", None, "its traceback is in the log of that rank", False)


class Ranks:
    """The processes of a run.

    Attributes:
        rank, count: this process's number, and of how many.
        main: whether this is rank 0, which alone writes and speaks.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self.rank, self.count = accelerator.process_index, accelerator.num_processes
        self.main = accelerator.is_main_process

    def together(self, work: Callable[[], T]) -> T:
        """Run `work` on all ranks; what fails on one fails on all.

        Raises:
            UserError: on the main rank, what the first rank that failed raised; `AlreadyReported` on the others.
        """
        result, error = _attempt(work)
        self._raise_same(error)
        return result  # type: ignore[return-value]

    def main_first(self, work: Callable[[], T]) -> T:
        """Run `work` on the main rank, then on the others, which find what it wrote. Errors as in `together`."""
        if self.count == 1:
            return work()
        result, error = _attempt(work) if self.main else (None, None)
        self._raise_same(error)
        if not self.main:
            result, error = _attempt(work)
        self._raise_same(error)
        return result  # type: ignore[return-value]

    def agree(self, what: str, values: Mapping[str, Any], remedy: str) -> None:
        """Refuse to go on when ranks have different values; every rank raises the same error.

        Args:
            what: for the message: "the recipe".
            values: JSON values, nested as they come.
        """
        flat = {key: repr(value) for key, value in _flatten(values)}
        found = self._gather(flat)
        for rank, other in enumerate(found):
            differing = sorted(key for key in found[0].keys() | other.keys() if found[0].get(key) != other.get(key))
            if differing:
                said = [
                    f"{key} is {found[0].get(key, 'absent')} on rank 0 and {other.get(key, 'absent')} on rank {rank}"
                    for key in differing[:5]
                ]
                self._raise(UserError("; ".join(said), where=f"the ranks disagree on {what}", remedy=remedy))

    def _gather(self, value: T) -> list[T]:
        if self.count == 1:
            return [value]
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def _raise_same(self, error: Exception | None) -> None:
        if self.count == 1:
            if error is not None:
                raise error
            return
        failures = self._gather(None if error is None else _Failure.of(error))
        failed = [rank for rank, failure in enumerate(failures) if failure is not None]
        if not failed:
            return
        if error is not None and not isinstance(error, UserError):
            raise error
        first = failures[failed[0]]
        assert first is not None
        alone = len(failed) < self.count and failed != [0]
        where = ": ".join(part for part in (f"rank {failed[0]}" if alone else None, first.where) if part)
        same = UserError(first.what, where=where or None, remedy=first.remedy)
        if self.main and error is not None:
            raise error
        self._raise(same)

    def _raise(self, error: UserError) -> None:
        raise error if self.main else AlreadyReported(str(error))


def describe(rank: int) -> str:
    """A rank as an error names it."""
    return f"rank {rank} on {socket.gethostname()}"


def _attempt(work: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return None, error


def _flatten(value: Any, above: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _flatten(inner, f"{above}.{key}" if above else str(key))
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from _flatten(inner, f"{above}.{index}")
    else:
        yield above, value
