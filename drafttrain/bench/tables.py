"""The four tables of a report: speed-up by length, by choice of draft, by batch size and by variant.

Each varies one thing and holds the others at the suite's first value of them; `result.json` has every combination.
A table with a single value says nothing, so it is left out with a line on how to get it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from drafttrain.bench.bootstrap import Interval
from drafttrain.bench.lengths import LengthBucket
from drafttrain.bench.result import BASELINE, DraftResult, EvalResult, Memory, Setting
from drafttrain.bench.speed import Cell
from drafttrain.bench.training_cost import TrainingCost


@dataclass(frozen=True)
class Series:
    """A draft along the columns of a grid; None where it was not measured."""

    draft: str
    cells: list[Cell | None]


@dataclass(frozen=True)
class Grid:
    """Speed-ups of every draft along one thing.

    Attributes:
        held: the settings that do not vary, for people.
        along: what does.
        columns: its values.
        answers: in each column.
    """

    held: str
    along: str
    columns: list[str]
    answers: list[int]
    series: list[Series]


@dataclass(frozen=True)
class VariantRow:
    """A draft and what it proposes.

    Attributes:
        draft: its name without the variant; variant: "K=4" or a tree.
        memory: what it adds; None where that was not recorded.
        training: what it cost; None where nobody knows.
        trained: false where there is nothing to train.
    """

    draft: str
    family: str
    variant: str
    cell: Cell
    tau_ci: Interval | None
    acceptance_rate: float | None
    host_share: float | None
    memory: Memory | None
    training: TrainingCost | None
    trained: bool


@dataclass(frozen=True)
class Listing:
    """Drafts or variants one below the other."""

    held: str
    rows: list[VariantRow]


@dataclass(frozen=True)
class Tables:
    """The sections of a report, each with one entry a temperature.

    Attributes:
        prompt_length, output_length: by tokens.
        draft: every draft with its fastest variant.
        batch: by requests decoded together.
        variant: chains of each K and trees.
        missing: section -> how to get it.
    """

    prompt_length: list[Grid] = field(default_factory=list)
    output_length: list[Grid] = field(default_factory=list)
    draft: list[Listing] = field(default_factory=list)
    batch: list[Grid] = field(default_factory=list)
    variant: list[Listing] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


TITLES = {
    "prompt_length": "Speed-up by prompt length",
    "output_length": "Speed-up by output length",
    "draft": "By choice of draft",
    "batch": "Speed-up by batch size",
    "variant": "By variant",
}
"""Of the sections, in the order in which reports show them."""

_REMEDIES = {
    "prompt_length": "all prompts are in one range of lengths; give a file with others, or prompt_buckets=[64,96]",
    "output_length": "all answers are in one range of lengths; add max_new_tokens=256, or output_buckets=[16,32,64]",
    "draft": "one draft was measured; add drafts=[run,ngram]",
    "batch": "one batch size was measured; add batch=[1,8]",
    "variant": "one variant of each draft was measured; add k=[4,2,6], or trees=[{branching: [3,2,1]}]",
}


def tables(result: EvalResult) -> Tables:
    """Make the tables of a result."""
    found = Tables()
    settings = result.settings
    for temperature in dict.fromkeys(setting.temperature for setting in settings):
        here = [setting for setting in settings if setting.temperature == temperature]
        home = here[0]
        entries = [entry for entry in result.of(home) if entry.draft != BASELINE]
        for name, buckets in (("prompt_length", _by_prompt), ("output_length", _by_output)):
            grid = _length_grid(home, entries, name.replace("_", " "), buckets)
            if len(grid.columns) > 1:
                getattr(found, name).append(grid)
        batches = _batch_grid(result, home, here)
        if len(batches.columns) > 1:
            found.batch.append(batches)
        variants = _variants(result, home, here)
        best = _fastest(variants.rows)
        if len(best) > 1:
            found.draft.append(Listing(variants.held, best))
        if len(variants.rows) > len(best):
            found.variant.append(variants)
    for name, remedy in _REMEDIES.items():
        if not getattr(found, name):
            found.missing[name] = remedy
    return found


def _by_prompt(entry: DraftResult) -> list[LengthBucket]:
    return entry.by_prompt


def _by_output(entry: DraftResult) -> list[LengthBucket]:
    return entry.by_output


def _held(setting: Setting, *, k: bool = True, batch: bool = True) -> str:
    parts = ["greedy" if setting.temperature == 0 else f"T={setting.temperature:g}"]
    parts += [f"K={setting.k}"] if k else []
    parts += [f"batch {setting.batch}"] if batch else []
    return ", ".join(parts)


def _length_grid(
    home: Setting, entries: Sequence[DraftResult], along: str, buckets: Callable[[DraftResult], list[LengthBucket]]
) -> Grid:
    lows: dict[int, LengthBucket] = {}
    for entry in entries:
        for bucket in buckets(entry):
            # Drafts see the same answers; one that leaves out some rounds may lack a bucket.
            if bucket.low not in lows or bucket.answers > lows[bucket.low].answers:
                lows[bucket.low] = bucket
    order = sorted(lows)
    series = []
    for entry in entries:
        own = {bucket.low: bucket for bucket in buckets(entry)}
        series.append(Series(entry.draft, [own.get(low) for low in order]))
    return Grid(_held(home), along, [str(lows[low]) for low in order], [lows[low].answers for low in order], series)


def _batch_grid(result: EvalResult, home: Setting, here: Sequence[Setting]) -> Grid:
    batches = [setting for setting in here if setting.k == home.k]
    drafts = list(dict.fromkeys(e.draft for s in batches for e in result.of(s) if e.draft != BASELINE))
    found = {(entry.draft, setting.batch): entry for setting in batches for entry in result.of(setting)}
    series = []
    for draft in drafts:
        cells = [found.get((draft, setting.batch)) for setting in batches]
        series.append(Series(draft, [None if entry is None else _cell(entry) for entry in cells]))
    answers = [max((e.prefills for e in result.of(setting)), default=0) for setting in batches]
    columns = [str(setting.batch) for setting in batches]
    return Grid(_held(home, batch=False), "batch size", columns, answers, series)


def _cell(entry: DraftResult) -> Cell:
    speed = entry.speed
    return Cell(
        entry.prefills,
        entry.acceptance.tau,
        speed.speedup if speed else None,
        speed.speedup_ci if speed else None,
        speed.flag if speed else None,
    )


def _variants(result: EvalResult, home: Setting, here: Sequence[Setting]) -> Listing:
    """Drafts in the order of the suite, the variants of each together."""
    entries = [e for s in here if s.batch == home.batch for e in result.of(s) if e.draft != BASELINE]
    order = list(dict.fromkeys(entry.base for entry in entries))
    entries.sort(key=lambda entry: order.index(entry.base))
    return Listing(_held(home, k=False), [_row(result, entry) for entry in entries])


def _row(result: EvalResult, entry: DraftResult) -> VariantRow:
    split, memory = entry.split, entry.memory
    return VariantRow(
        draft=entry.base,
        family=entry.family,
        variant=entry.proposes,
        cell=_cell(entry),
        tau_ci=entry.acceptance.tau_ci,
        acceptance_rate=entry.acceptance.acceptance_rate,
        host_share=split.host_s / split.total_s if split and split.total_s > 0 else None,
        memory=memory,
        training=result.training if entry.base == result.run else None,
        # What brings no weights of its own has nothing that could have been trained.
        trained=memory is None or memory.weights > 0,
    )


def _fastest(rows: Sequence[VariantRow]) -> list[VariantRow]:
    """Of each draft the variant with the highest speed-up; one without a result only where there is no other."""
    best: dict[str, VariantRow] = {}
    for row in rows:
        known = best.get(row.draft)
        if known is None or (row.cell.speedup or 0.0) > (known.cell.speedup or 0.0):
            best[row.draft] = row
    return list(best.values())
