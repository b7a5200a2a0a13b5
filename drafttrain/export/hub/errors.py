"""Errors of a hub as one line that says what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec

from drafttrain.errors import UserError


@contextmanager
def explained(repo: str) -> Iterator[None]:
    """Turn what the hub's client raises into a `UserError`."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    unreachable: tuple[type[BaseException], ...] = (OfflineModeIsEnabled, *_transport_errors())
    try:
        yield
    except GatedRepoError:
        raise UserError("is gated", where=repo, remedy="ask for access on its page, and set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise UserError(
            "no such repository, or no leave to see it",
            where=repo,
            remedy="check the name; set HF_TOKEN if it is private",
        ) from None
    except RevisionNotFoundError:
        raise UserError("has no such revision", where=repo, remedy="check --revision") from None
    except unreachable as error:
        raise UserError(
            f"the hub cannot be reached: {_first(error)}",
            where=repo,
            remedy="check the network, HF_ENDPOINT and HF_HUB_OFFLINE",
        ) from None
    except (HfHubHTTPError, EntryNotFoundError) as error:
        raise UserError(f"the hub refuses: {_first(error)}", where=repo, remedy="check what the token may do") from None


def _transport_errors() -> tuple[type[BaseException], ...]:
    """Of the HTTP library that the hub's client is built on: another one since its version 2."""
    return tuple(import_module(name).TransportError for name in ("httpx", "httpx2") if find_spec(name) is not None)


def _first(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
