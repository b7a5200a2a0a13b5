"""The report as one HTML page that needs no network and no other file."""

from __future__ import annotations

import json
from html import escape
from importlib import resources

from drafttrain.bench.report import charts, text
from drafttrain.bench.report.answers import answers_section
from drafttrain.bench.report.tables_html import table_sections, value
from drafttrain.bench.result import BASELINE, DraftResult, EvalResult, Setting

_COLOURS = 5

_DEFINITIONS = {
    "tau": "tokens emitted a round, the target's own token included, pooled over rounds; 1.00 without a "
    "draft. The token of the prefill belongs to no round.",
    "alpha by depth": "share of draft tokens of that depth that were accepted where the depth before was. "
    "Depths behind a stop token or the length limit are not counted.",
    "accepted": "accepted draft tokens / proposed draft tokens",
    "speed-up": "decode tokens a second over the same engine without a draft: same prompts, batch and "
    "temperature, run in turns. A ratio above tau is impossible and is reported as no result.",
    "end to end": "the same ratio with the prefill and its token counted in",
    "of ceiling": "speed-up as a share of tau x T_AR / (T_draft + T_verify), medians of this run: what the "
    "engine's own overhead leaves",
    "exact": "greedy answers that equal those without a draft token for token. Trees, GPUs and "
    "prompts above 1,024 tokens may break a near-tie otherwise: the gap is the target's top-2 logit difference where "
    "answers part.",
    "memory": "what the engine holds for a draft: weights + caches for the whole batch, with what proposals need "
    "of the target's cache",
    "training": "tokens through the draft, wall hours of its steps and their hardware, without prompts and answers; "
    "unknown where no run says",
    "predicted": "tau x a plain round / a drafted round, from round times fitted over all settings by batch, tokens "
    "verified and draft steps",
    "oracle": "replays the answers of the run without a draft: the most that K drafts can give. Greedy only.",
    "[a, b]": "95 % bootstrap interval over prompts; paired with the baseline for the speed-up",
}

_COLUMNS = (
    "draft",
    "tau",
    "mean of prompts",
    "accepted",
    "alpha by depth",
    "tokens/s",
    "speed-up",
    "end to end",
    "of ceiling",
    "exact",
)


def render_html(result: EvalResult) -> str:
    """The whole page."""
    names = list(dict.fromkeys(e.draft for e in result.drafts if e.draft != BASELINE))
    colours = {name: f"var(--c{index % _COLOURS})" for index, name in enumerate(names)}
    # Tables name a draft without its variant, which need not have been measured as a chain.
    bases = {entry.base: colours[entry.draft] for entry in reversed(result.drafts) if entry.draft != BASELINE}
    title = f"{result.run or 'Reference drafts'} on {result.target}"
    body = [
        f"<header><div><h1>{escape(title)}</h1>",
        f'<p class="soft">Suite {escape(str(result.suite["name"]))}, {result.prompts} prompts in '
        f"{len(result.categories)} categories · {escape(result.hardware)} · {escape(result.date)}</p></div>",
        '<button id="theme">Light / dark</button></header>',
        _cards(result),
        "".join(f'<div class="note">{escape(note)}</div>' for note in result.notes),
        table_sections(result, {**bases, **colours}),
        "".join(_setting(result, setting, colours) for setting in result.settings),
        answers_section(result.texts),
        _about(result),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_asset('page.css')}</style></head>"
        f"<body><main>{''.join(body)}</main><script>{_asset('page.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _cards(result: EvalResult) -> str:
    """Headline figures: the draft under test in the first setting."""
    entries = [entry for entry in result.drafts if entry.draft != BASELINE]
    if not entries:
        return ""
    first = next((entry for entry in entries if entry.draft == result.run), entries[0])
    acceptance, speed, exact = first.acceptance, first.speed, first.exact
    cards = [
        ("tau", text.number(acceptance.tau), f"tokens a round {text.interval(acceptance.tau_ci)}"),
        (
            "speed-up",
            text.speedup(speed),
            f"decoding {text.interval(speed.speedup_ci)}" if speed and speed.speedup_ci else "decoding",
        ),
        ("accepted", text.percent(acceptance.acceptance_rate), "of the proposed draft tokens"),
        ("depth 1", text.percent(acceptance.alpha[0] if acceptance.alpha else None), "of first draft tokens"),
    ]
    if exact is not None:
        cards.append(("unchanged", text.percent(exact.rate), f"of {exact.total} greedy answers"))
    cells = "".join(
        f'<div class="card"><span>{escape(name)}</span><b>{escape(value)}</b><span>{escape(unit)}</span></div>'
        for name, value, unit in cards
    )
    return f'<div class="cards">{cells}</div><p class="soft">{escape(first.draft)} at {first.setting}</p>'


def _setting(result: EvalResult, setting: Setting, colours: dict[str, str]) -> str:
    entries = result.of(setting)
    drafts = [entry for entry in entries if entry.draft in colours]
    keys = _legend({entry.draft: colours[entry.draft] for entry in drafts})
    trained = _legend({e.draft: colours[e.draft] for e in drafts if e.family != "oracle"})
    parts = _legend({name: f"var(--{name})" for name in ("draft", "verify", "host")})
    cells = (
        _chart(
            "Speed-up",
            "Bar: measured, with its interval. Dashed tick: what an engine without overhead would reach.",
            keys,
            charts.speedups(entries, colours),
        ),
        _chart("Where the time goes", "Decoding time behind each emitted token.", parts, charts.time_split(entries)),
        _chart(
            "Acceptance by depth",
            "Solid: given the depth before. Dashed: unconditional.",
            keys,
            charts.acceptance_by_depth(entries, colours),
        ),
        _chart(
            "Tau by category",
            "With 95 % intervals over the prompts of the category.",
            trained,
            charts.tau_by_category(entries, colours),
        ),
    )
    kind = "greedy" if setting.temperature == 0 else f"temperature {setting.temperature:g}"
    heading = f"{kind.capitalize()}, K = {setting.k}, batch {setting.batch}"
    return (
        f'<h2>{heading}</h2>{_table(entries, colours)}{_divergences(entries)}<div class="charts">{"".join(cells)}</div>'
    )


def _legend(colours: dict[str, str]) -> str:
    return "".join(
        f'<span><span class="key" style="background:{colour}"></span>{escape(name)}</span>'
        for name, colour in colours.items()
    )


def _chart(title: str, caption: str, legend: str, svg: str) -> str:
    return f'<div class="chart"><h3>{title}</h3><p>{caption}</p><div class="legend">{legend}</div>{svg}</div>'


def _divergences(entries: list[DraftResult]) -> str:
    """Where greedy answers part from those without a draft."""
    rows = [
        f"<tr><td>{escape(entry.draft)}</td><td>{escape(d.request)}</td><td>{d.turn + 1}</td><td>{d.index + 1}</td>"
        f"<td>{d.gap:.3g}</td></tr>"
        for entry in entries
        if entry.exact is not None
        for d in entry.exact.divergences
    ]
    if not rows:
        return ""
    columns = ("draft", "prompt", "turn", "first differing token", "top-2 gap there")
    head = "".join(f'<th scope="col">{name}</th>' for name in columns)
    what = "1 greedy answer differs" if len(rows) == 1 else f"{len(rows)} greedy answers differ"
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<details><summary>{what} from those without a draft</summary><div class="table">{table}</div></details>'


def _table(entries: list[DraftResult], colours: dict[str, str]) -> str:
    head = "".join(f'<th scope="col">{name}</th>' for name in _COLUMNS)
    rows = "".join(f"<tr>{''.join(_cells(entry, colours))}</tr>" for entry in entries)
    return f'<div class="table"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _cells(entry: DraftResult, colours: dict[str, str]) -> list[str]:
    acceptance, speed, exact = entry.acceptance, entry.speed, entry.exact
    colour = colours.get(entry.draft, "var(--verify)")
    is_baseline = entry.draft == BASELINE
    return [
        f'<td><span class="key" style="background:{colour}"></span>{escape(text.label(entry))}</td>',
        value(text.number(acceptance.tau), text.interval(acceptance.tau_ci)),
        value(text.number(acceptance.tau_request_mean)),
        value(text.percent(acceptance.acceptance_rate)),
        value(text.chain(acceptance.alpha)),
        value(text.number(text.tokens_per_second(entry), 1)),
        value("1.00x" if is_baseline else text.speedup(speed), text.interval(speed.speedup_ci) if speed else ""),
        value("1.00x" if is_baseline else text.number(speed.end_to_end if speed else None, 2, "x")),
        value(text.percent(speed.of_ceiling if speed else None, 0)),
        value(text.percent(exact.rate if exact else None)),
    ]


def _about(result: EvalResult) -> str:
    facts = {
        "recipe": result.recipe or text.MISSING,
        "commit": result.commit or text.MISSING,
        "versions": ", ".join(f"{name} {version}" for name, version in result.versions.items()),
        "prompts": ", ".join(f"{name} {count}" for name, count in result.categories.items()),
    }
    known = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in facts.items())
    meant = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _DEFINITIONS.items())
    suite = escape(json.dumps(result.suite, indent=2, ensure_ascii=False))
    return (
        f"<h2>What the figures mean</h2><dl>{meant}</dl><h2>How it was measured</h2><dl>{known}</dl>"
        f"<details><summary>The suite as it was run</summary><pre>{suite}</pre></details>"
    )
