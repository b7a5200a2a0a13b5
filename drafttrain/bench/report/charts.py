"""The four charts of a setting, each an SVG of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drafttrain.bench.report import text
from drafttrain.bench.report.svg import Canvas, short, ticks
from drafttrain.bench.result import BASELINE, DraftResult

WIDTH = 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 16, 12, 40

Colours = Mapping[str, str]
"""Draft name -> CSS colour."""


def acceptance_by_depth(entries: Sequence[DraftResult], colours: Colours) -> str:
    """Solid: alpha_i, given that depth i-1 was accepted. Dashed: unconditional."""
    height = 260
    canvas = Canvas(WIDTH, height)
    drafts = [entry for entry in entries if entry.acceptance.alpha]
    depths = max((len(entry.acceptance.alpha) for entry in drafts), default=1)
    bottom = height - _BOTTOM

    def x(depth: int) -> float:
        return _LEFT + 24 + (WIDTH - _LEFT - _RIGHT - 48) * ((depth - 1) / max(depths - 1, 1))

    def y(rate: float) -> float:
        return bottom - (bottom - _TOP) * rate

    for rate in (0.0, 0.25, 0.5, 0.75, 1.0):
        canvas.line(_LEFT, y(rate), WIDTH - _RIGHT, y(rate), "axis" if rate == 0 else "grid")
        canvas.text(_LEFT - 8, y(rate) + 4, f"{100 * rate:.0f} %", anchor="end")
    for depth in range(1, depths + 1):
        canvas.text(x(depth), bottom + 18, str(depth), anchor="middle")
    canvas.text((_LEFT + WIDTH - _RIGHT) / 2, height - 4, "draft depth", "label", "middle")
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
    row, left = 30, 124
    height = _TOP + row * max(len(categories), 1) + _BOTTOM
    canvas = Canvas(WIDTH, height)
    tops = [
        acceptance.tau_ci[1] if acceptance.tau_ci else acceptance.tau or 1.0
        for entry in drafts
        for acceptance in entry.categories.values()
    ]
    marks = [1 + tick for tick in ticks(max(tops, default=2.0) - 1, 4)]
    bottom = height - _BOTTOM

    def x(tau: float) -> float:
        return left + (WIDTH - left - _RIGHT) * (tau - 1) / (marks[-1] - 1)

    for mark in marks:
        canvas.line(x(mark), _TOP, x(mark), bottom, "axis" if mark == 1 else "grid")
        canvas.text(x(mark), bottom + 18, short(mark), anchor="middle")
    canvas.text((left + WIDTH - _RIGHT) / 2, height - 4, "tau: tokens a round", "label", "middle")
    for index, category in enumerate(categories):
        middle = _TOP + row * (index + 0.5)
        canvas.text(left - 10, middle + 4, category.replace("_", " "), "tick", "end")
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
    return canvas.render("Tau by category: " + "; ".join(f"{e.draft} {text.number(e.acceptance.tau)}" for e in drafts))


def time_split(entries: Sequence[DraftResult]) -> str:
    """Milliseconds of decoding behind each emitted token: the shorter the bar, the faster."""
    rows = [entry for entry in entries if entry.split is not None and entry.acceptance.emitted]
    row, left = 40, 124
    height = _TOP + row * max(len(rows), 1) + _BOTTOM
    canvas = Canvas(WIDTH, height)
    costs = []
    for entry in rows:
        split, emitted = entry.split, entry.acceptance.emitted
        assert split is not None
        costs.append([1000 * s / emitted for s in (split.draft_s, split.verify_s, split.host_s)])
    marks = ticks(max((sum(cost) for cost in costs), default=1.0), 5)
    bottom = height - _BOTTOM
    scale = (WIDTH - left - _RIGHT - 40) / marks[-1]
    for mark in marks:
        place = left + scale * mark
        canvas.line(place, _TOP, place, bottom, "axis" if mark == 0 else "grid")
        canvas.text(place, bottom + 18, short(mark), anchor="middle")
    canvas.text((left + WIDTH - _RIGHT) / 2, height - 4, "ms of decoding a token", "label", "middle")
    for index, (entry, cost) in enumerate(zip(rows, costs, strict=True)):
        y = _TOP + row * index + 9
        canvas.text(left - 10, y + 15, text.label(entry), "tick", "end")
        start = float(left)
        for part, name in zip(cost, ("draft", "verify", "host"), strict=True):
            tip = f"{text.label(entry)}: {part:.2f} ms a token in {name} ({text.percent(part / sum(cost))})"
            canvas.rect(start, y, scale * part, row - 18, f"fill:var(--{name})", tip, radius=0)
            start += scale * part
        canvas.text(start + 6, y + 15, f"{sum(cost):.1f}", "value")
    return canvas.render("Milliseconds of decoding a token, by draft, verify and host")


def speedups(entries: Sequence[DraftResult], colours: Colours) -> str:
    """Measured speed-up with its interval; a tick where an engine without overhead would be."""
    rows = [entry for entry in entries if entry.speed is not None]
    row, left = 40, 124
    height = _TOP + row * max(len(rows), 1) + _BOTTOM
    canvas = Canvas(WIDTH, height)
    tops = [1.0]
    for entry in rows:
        assert entry.speed is not None
        if entry.speed.flag:
            continue
        tops += [v for v in (entry.speed.speedup, entry.speed.ceiling) if v is not None]
        tops += [entry.speed.speedup_ci[1]] if entry.speed.speedup_ci else []
    marks = ticks(max(tops), 5)
    bottom = height - _BOTTOM
    scale = (WIDTH - left - _RIGHT - 44) / marks[-1]
    for mark in marks:
        place = left + scale * mark
        canvas.line(place, _TOP, place, bottom, "axis" if mark == 0 else "grid")
        canvas.text(place, bottom + 18, f"{short(mark)}x", anchor="middle")
    canvas.text((left + WIDTH - _RIGHT) / 2, height - 4, "decode tokens/s over no draft", "label", "middle")
    for index, entry in enumerate(rows):
        y = _TOP + row * index + 9
        speed = entry.speed
        assert speed is not None
        canvas.text(left - 10, y + 15, entry.draft, "tick", "end")
        if speed.speedup is None:
            canvas.text(left + 8, y + 15, "no result: see the notes", "value")
            continue
        tip = f"{entry.draft}: {text.with_interval(speed.speedup, speed.speedup_ci, unit='x')}"
        canvas.rect(left, y, scale * speed.speedup, row - 18, f"fill:{colours[entry.draft]}", tip)
        end = left + scale * speed.speedup
        if speed.speedup_ci:
            low, high = (left + scale * value for value in speed.speedup_ci)
            middle = y + (row - 18) / 2
            canvas.line(low, middle, high, middle, "interval")
            for x in (low, high):
                canvas.line(x, middle - 4, x, middle + 4, "interval")
            end = max(end, high)
        if speed.ceiling is not None:
            x = left + scale * speed.ceiling
            canvas.line(x, y - 3, x, y + row - 15, "ceiling")
            if abs(x - end) < 44:
                end = max(x, end)
        canvas.text(end + 6, y + 15, f"{speed.speedup:.2f}x", "value")
    canvas.line(left + scale, _TOP, left + scale, bottom, "parity")
    return canvas.render("Speed-up: " + "; ".join(f"{e.draft} {text.speedup(e.speed)}" for e in rows))
