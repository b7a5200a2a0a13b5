"""The four charts of a setting, each an SVG of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drafttrain.bench.report import text
from drafttrain.bench.report.axes import (
    BOTTOM,
    LEFT,
    OVER_NO_DRAFT,
    RIGHT,
    ROOM_FOR_FIGURES,
    WIDTH,
    Rows,
    across,
    highest,
    parity,
    speedup_bar,
    upwards,
)
from drafttrain.bench.report.svg import Canvas, ticks
from drafttrain.bench.result import BASELINE, DraftResult

_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
# Left of the bars, for the names of drafts and categories.
_NAMES = 124

Colours = Mapping[str, str]
"""Draft name -> CSS colour."""


def acceptance_by_depth(entries: Sequence[DraftResult], colours: Colours) -> str:
    """Solid: alpha_i, given that depth i-1 was accepted. Dashed: unconditional."""
    height = 260
    canvas = Canvas(WIDTH, height)
    drafts = [entry for entry in entries if entry.acceptance.alpha]
    depths = max((len(entry.acceptance.alpha) for entry in drafts), default=1)
    y = upwards(canvas, [(rate, f"{100 * rate:.0f} %") for rate in _SHARES], "draft depth")

    def x(depth: int) -> float:
        return LEFT + 24 + (WIDTH - LEFT - RIGHT - 48) * ((depth - 1) / max(depths - 1, 1))

    for depth in range(1, depths + 1):
        canvas.text(x(depth), height - BOTTOM + 18, str(depth), anchor="middle")
    for entry in drafts:
        colour = colours[entry.draft]
        for values, css, what in (
            (entry.acceptance.per_position, "series dashed", "accepted, unconditional"),
            (entry.acceptance.alpha, "series", "accepted, given the depth before"),
        ):
            points = [(x(i), y(v)) for i, v in enumerate(values, 1) if v is not None]
            canvas.polyline(points, css, f"stroke:{colour}")
            for depth, value in enumerate(values, 1):
                if value is not None:
                    tip = f"{entry.draft}, depth {depth}: {text.percent(value)} {what}"
                    small = "dashed" in css
                    canvas.dot(x(depth), y(value), f"fill:{colour}", tip, radius=2.5 if small else 4.5)
    said = "; ".join(f"{entry.draft} {text.chain(entry.acceptance.alpha)}" for entry in drafts)
    return canvas.render(f"Acceptance by depth, conditional: {said}")


def tau_by_category(entries: Sequence[DraftResult], colours: Colours) -> str:
    """A dot a draft and category, with its interval; without the oracle, whose tau is K + 1 by design."""
    drafts = [entry for entry in entries if entry.draft != BASELINE and entry.family != "oracle"]
    categories = list(dict.fromkeys(name for entry in drafts for name in entry.categories))
    rows = Rows(len(categories), height=30, bar=30, left=_NAMES)
    canvas = rows.canvas()
    tops = [
        acceptance.tau_ci[1] if acceptance.tau_ci else acceptance.tau or 1.0
        for entry in drafts
        for acceptance in entry.categories.values()
    ]
    marks = [1 + tick for tick in ticks(max(tops, default=2.0) - 1, 4)]
    x = across(canvas, marks, rows.left, "tau: tokens a round")
    for index, category in enumerate(categories):
        middle = rows.middle(index)
        rows.name(canvas, index, category.replace("_", " "))
        for place, entry in enumerate(drafts):
            acceptance = entry.categories.get(category)
            if acceptance is None or acceptance.tau is None:
                continue
            offset = middle + 9 * (place - (len(drafts) - 1) / 2)
            colour = colours[entry.draft]
            if acceptance.tau_ci:
                low, high = acceptance.tau_ci
                canvas.line(x(low), offset, x(high), offset, "whisker", f"stroke:{colour}")
            tip = f"{entry.draft}, {category}: {text.with_interval(acceptance.tau, acceptance.tau_ci)}"
            canvas.dot(x(acceptance.tau), offset, f"fill:{colour}", tip)
    said = (
        f"{entry.draft} " + ", ".join(f"{name} {text.number(found.tau)}" for name, found in entry.categories.items())
        for entry in drafts
    )
    return canvas.render(f"Tau by category: {'; '.join(said)}")


def time_split(entries: Sequence[DraftResult]) -> str:
    """Milliseconds of decoding behind each emitted token: the shorter the bar, the faster."""
    shown = [entry for entry in entries if entry.split is not None and entry.acceptance.emitted]
    rows = _bars(shown)
    canvas = rows.canvas()
    costs = []
    for entry in shown:
        split, emitted = entry.split, entry.acceptance.emitted
        assert split is not None
        costs.append([1000 * s / emitted for s in (split.draft_s, split.verify_s, split.host_s)])
    marks = ticks(max((sum(cost) for cost in costs), default=1.0), 5)
    x = across(canvas, marks, rows.left, "ms of decoding a token", room=ROOM_FOR_FIGURES)
    for index, (entry, cost) in enumerate(zip(shown, costs, strict=True)):
        rows.name(canvas, index, text.label(entry))
        done = 0.0
        for part, name in zip(cost, ("draft", "verify", "host"), strict=True):
            tip = f"{text.label(entry)}: {part:.2f} ms a token in {name} ({text.percent(part / sum(cost))})"
            width = x(done + part) - x(done)
            canvas.rect(x(done), rows.top(index), width, rows.bar, f"fill:var(--{name})", tip, radius=0)
            done += part
        rows.write(canvas, index, x(done) + 6, f"{sum(cost):.1f}")
    said = (
        f"{text.label(entry)} {' + '.join(f'{part:.2f}' for part in cost)}"
        for entry, cost in zip(shown, costs, strict=True)
    )
    return canvas.render(f"Milliseconds of decoding a token, draft + verify + host: {'; '.join(said)}")


def speedups(entries: Sequence[DraftResult], colours: Colours) -> str:
    """Measured speed-up with its interval; a tick where an engine without overhead would be."""
    shown = [(entry, entry.speed) for entry in entries if entry.speed is not None]
    rows = _bars(shown)
    canvas = rows.canvas()
    sound = [speed for _, speed in shown if speed.speedup is not None]
    top = highest([s for speed in sound for s in (speed.speedup, speed.ceiling)], [s.speedup_ci for s in sound])
    x = across(canvas, ticks(top, 5), rows.left, OVER_NO_DRAFT, "x", ROOM_FOR_FIGURES)
    for index, (entry, speed) in enumerate(shown):
        rows.name(canvas, index, entry.draft)
        if speed.speedup is None:
            rows.write(canvas, index, rows.left + 8, "no result: see the notes")
            continue
        speedup_bar(
            canvas,
            rows,
            index,
            x,
            entry.draft,
            colours[entry.draft],
            speed.speedup,
            speed.speedup_ci,
            speed.ceiling,
        )
    parity(canvas, x)
    return canvas.render("Speed-up: " + "; ".join(f"{e.draft} {text.speedup(s)}" for e, s in shown))


def _bars(shown: Sequence[object]) -> Rows:
    return Rows(len(shown), height=40, bar=22, left=_NAMES)
