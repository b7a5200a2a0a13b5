"""Generated texts with every token coloured by who wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from drafttrain.bench.report import text
from drafttrain.bench.result import AnswerText

_DEEPEST_TINT = 5


def answers_section(texts: Sequence[AnswerText]) -> str:
    """The section of the page, or nothing without texts."""
    if not texts:
        return ""
    drafts = list(dict.fromkeys(answer.draft for answer in texts))
    deepest = max((writer for answer in texts for _, writer in answer.pieces), default=0)
    buttons = "".join(f'<button data-draft="{escape(d, quote=True)}">{escape(d)}</button>' for d in drafts)
    depths = "".join(
        f'<span><i class="sample" style="--d:{_tint(depth)}">draft, depth {depth}</i></span>'
        for depth in range(1, deepest + 1)
    )
    return (
        "<h2>Who wrote each token</h2>"
        '<p class="soft">Greedy answers where the suite has them. A token without colour was chosen by the '
        "target (the bonus token that ends each round); a coloured one was proposed by the draft and "
        "accepted.</p>"
        f'<div class="legend"><span class="sample">target</span>{depths}</div>'
        + (f'<div class="tools">{buttons}</div>' if len(drafts) > 1 else "")
        + "".join(_answer(answer) for answer in texts)
    )


def _answer(answer: AnswerText) -> str:
    written = sum(writer > 0 for _, writer in answer.pieces)
    share = text.percent(written / len(answer.pieces), 0) if answer.pieces else text.MISSING
    turn = f", turn {answer.turn + 1}" if answer.turn else ""
    return (
        f'<article class="answer" data-draft="{escape(answer.draft, quote=True)}">'
        f'<div class="head"><span>{escape(answer.category)} · {escape(answer.request)}{turn}</span>'
        f"<span>{escape(answer.draft)} wrote {share} of {len(answer.pieces)} tokens</span></div>"
        f'<div class="question" dir="auto">{escape(answer.prompt)}</div>'
        f'<div class="tokens" dir="auto">{"".join(_piece(*piece) for piece in answer.pieces)}'
        + ("" if answer.reason == "stop" else " <u>… cut at the limit</u>")
        + "</div></article>"
    )


def _piece(content: str, writer: int) -> str:
    """No padding and no borders: Arabic and Indic letters join across tokens."""
    if not content:
        return ""
    shown = escape(content).replace("\n", "<s>↵</s>\n")
    if not writer:
        return shown
    return f'<i style="--d:{_tint(writer)}" title="depth {writer}">{shown}</i>'


def _tint(depth: int) -> int:
    return min(depth, _DEEPEST_TINT) - 1
