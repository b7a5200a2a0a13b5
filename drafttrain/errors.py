"""Errors a user can act on: what is wrong, where it stands, and what mends it."""

from __future__ import annotations

from pathlib import Path


class UserError(Exception):
    """Bad input, configuration or environment. The CLI prints it without a traceback and exits with status 2."""

    def __init__(self, what: str, *, where: str | Path | None = None, remedy: str | None = None) -> None:
        self.what = what
        self.where = None if where is None else str(where)
        self.remedy = remedy
        message = what if self.where is None else f"{self.where}: {what}"
        super().__init__(message if remedy is None else f"{message}\n  {remedy}")


class RecipeError(UserError):
    """A recipe, suite or override that does not say something valid."""


class DataError(UserError):
    """Prompts, answers or templates that cannot be used."""


class TargetError(UserError):
    """A target model or tokenizer that cannot be loaded or does not fit."""


class StoreError(UserError):
    """A feature store that is foreign, damaged or incomplete."""


class FeatureServerError(UserError):
    """A feature server that is gone, refuses, or gives something else than what was asked for."""


class CheckpointError(UserError):
    """A checkpoint or saved draft that is foreign, damaged or incomplete."""


class EngineError(UserError):
    """A request or setting that the engine cannot serve."""


class RequestError(EngineError):
    """One request that cannot go on; those beside it can.

    Attributes:
        request: its id.
    """

    def __init__(self, request: str, what: str, *, remedy: str | None = None) -> None:
        super().__init__(what, remedy=remedy)
        self.request = request


class AlreadyReported(UserError):
    """Another process of this run shows the same error; this one ends with the same status and says nothing."""
