from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from rich.console import Console

from drafttrain.bench.report.answers import answers_section
from drafttrain.bench.report.html import render_html
from drafttrain.bench.report.svg import ticks
from drafttrain.bench.report.terminal import result_table
from drafttrain.bench.result import AnswerText, EvalResult


class Balance(HTMLParser):
    """Fails on tags that close nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_well_formed_and_self_contained(evaluation: EvalResult) -> None:
    page = render_html(evaluation)
    parser = Balance()
    parser.feed(page)
    assert parser.open == []
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?:|fetch\(", page)
    assert "prefers-color-scheme: dark" in page


def test_charts_are_valid_xml(evaluation: EvalResult) -> None:
    charts = re.findall(r"<svg.*?</svg>", render_html(evaluation), re.DOTALL)
    # Four a setting; of the tables, prompt length and choice of draft, each at two temperatures.
    assert len(charts) == 4 * len(evaluation.settings) + 4
    for chart in charts:
        label = ElementTree.fromstring(chart).get("aria-label")
        assert label and re.search(r"\d\.\d\d|\d %|no result", label), label  # what a reader without eyes has of it
        assert "nan" not in chart and "inf" not in chart.replace("stroke:", "")


def test_text_is_escaped(evaluation: EvalResult) -> None:
    page = render_html(evaluation)
    assert "(&lt;b&gt;" in page and "<b>(" not in page
    assert "Say &lt;hello&gt; &amp; show code" in page
    named = replace(evaluation, target='<script>alert("x")</script>')
    assert "<script>alert" not in render_html(named)


def test_tokens_carry_their_writer() -> None:
    answer = AnswerText("d", "r", "c", 0, "q", [("a", 0), ("b", 1), ("", 2), ("c\n", 12)], "length")
    section = answers_section([answer])
    assert '>a<i style="--d:0" title="depth 1">b</i><i style="--d:4" title="depth 12">c<s>↵</s>\n</i>' in section
    assert "wrote 75 % of 4 tokens" in section
    assert "cut at the limit" in section
    assert answers_section([]) == ""


@pytest.mark.parametrize("width", [80, 200])
def test_terminal_table_keeps_every_figure_at_any_width(evaluation: EvalResult, width: int) -> None:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result_table(evaluation))
    shown = console.export_text()
    for entry in evaluation.drafts:
        assert f"{entry.acceptance.tau:.2f}" in shown
    assert "…" not in shown


def test_a_flagged_speedup_appears_nowhere(evaluation: EvalResult) -> None:
    flagged = next(e for e in evaluation.drafts if e.speed is not None and e.speed.flag)
    assert flagged.speed is not None and flagged.speed.speedup is None
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result_table(evaluation))
    for shown in (console.export_text(), render_html(evaluation)):
        assert "no result" in shown
        ratio = flagged.speed.decode_tps / flagged.speed.baseline_tps
        assert shown.count(f"{ratio:.2f}x") == shown.count(f"measured {ratio:.2f}x is above tau")


def test_a_result_without_rounds_still_renders(evaluation: EvalResult) -> None:
    """Every answer ended with the prefill's token: no tau, no speed, no chart to draw."""
    from drafttrain.bench.metrics import acceptance

    empty = acceptance([])
    drafts = [replace(e, acceptance=empty, categories={}, split=None, speed=None) for e in evaluation.drafts]
    page = render_html(replace(evaluation, drafts=drafts, texts=[]))
    Balance().feed(page)
    assert "None" not in page


@pytest.mark.parametrize("top", [0.0, 0.3, 1.0, 1.7, 4.6, 39.0, 1234.5])
def test_ticks_are_round_and_cover(top: float) -> None:
    marks = ticks(top)
    assert marks[0] == 0 and marks[-1] >= top and 2 <= len(marks) <= 8
