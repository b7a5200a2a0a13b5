"""How much data a recipe asks for, as far as that is known before it is read."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from drafttrain.corpus.config import DataConfig, PromptSource
from drafttrain.errors import UserError
from drafttrain.files import find_resource
from drafttrain.recipe.schema import Recipe
from drafttrain.training.windows import whole_steps

_UNKNOWN_ROWS = 100_000
_PROMPT_TOKENS = 100


@dataclass(frozen=True)
class Workload:
    """Sizes of the training data.

    Attributes:
        samples: conversations that are trained on.
        tokens_per_sample: on average.
        answer_tokens: of them supervised, in one span.
        epochs: passes.
        steps: optimiser steps.
        notes: what was assumed.
    """

    samples: int
    tokens_per_sample: int
    answer_tokens: int
    epochs: float
    steps: int
    notes: list[str] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Of one epoch."""
        return self.samples * self.tokens_per_sample

    @property
    def seen(self) -> float:
        """Samples over the whole run."""
        return self.samples * self.epochs


def workload(recipe: Recipe, ranks: int, samples: int | None = None, tokens: int | None = None) -> Workload:
    """Estimate the data of a recipe.

    Args:
        ranks: processes that share the rows of a step.
        samples: training samples, where the user knows better.
        tokens: mean tokens of a sample, likewise.
    """
    notes: list[str] = []
    count = samples if samples is not None else max(_rows(recipe.data, notes) - recipe.data.held_out, 1)
    length, answer = _lengths(recipe.data, tokens, notes)
    training = recipe.training
    per_row = max(training.row_length // length, 1) if training.packing else 1
    if training.packing:
        notes.append("rows are packed without gaps that a sample would fit in")
    rows = training.batch_rows * training.accumulation * ranks
    per_epoch = math.ceil(math.ceil(count / per_row) / rows)
    if training.max_steps is not None:
        return Workload(count, length, answer, training.max_steps / per_epoch, training.max_steps, notes)
    assert training.epochs is not None
    return Workload(count, length, answer, training.epochs, whole_steps(per_epoch * training.epochs), notes)


def _rows(data: DataConfig, notes: list[str]) -> int:
    if data.path is not None:
        return _rows_of_file(data.path, notes)
    return sum(_rows_of(source, notes) for source in data.prompts)


def _rows_of(source: PromptSource, notes: list[str]) -> int:
    if source.count is None:
        return _rows_of_file(source.source, notes)
    there = _lines(source.source)
    return source.count if there is None else min(source.count, there)


def _rows_of_file(name: str, notes: list[str]) -> int:
    rows = _lines(name)
    if rows is not None:
        return rows
    notes.append(f"{name}: number of rows unknown, {_UNKNOWN_ROWS:,} assumed (--samples N says better)")
    return _UNKNOWN_ROWS


def _lines(name: str) -> int | None:
    """Rows of a JSONL file that is here; None of anything else."""
    if Path(name).suffix != ".jsonl":
        return None
    try:
        with find_resource(name).open("rb") as file:
            return sum(1 for line in file if line.strip())
    except UserError:
        return None


def _lengths(data: DataConfig, tokens: int | None, notes: list[str]) -> tuple[int, int]:
    """(tokens of a sample, supervised tokens of it)."""
    regenerated = data.path is None and data.answers.source != "given"
    if regenerated:
        answer = data.answers.max_new_tokens
        length = min(tokens or _PROMPT_TOKENS + answer, data.max_length)
        answer = min(answer, max(length - 1, 1))
    else:
        length = min(tokens or data.max_length, data.max_length)
        answer = max(length // 2, 1)
    if data.supervise == "all":
        answer = length - 1  # a draft has nothing to start from before the second token
    if tokens is None:
        how = f"prompts of {_PROMPT_TOKENS} and answers of max_new_tokens" if regenerated else "data.max_length"
        notes.append(f"samples of {length} tokens ({how}; --tokens N says better), {answer} of them supervised")
    else:
        notes.append(f"samples of {length} tokens, {answer} of them supervised")
    return length, answer
