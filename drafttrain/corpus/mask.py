"""Which characters of a rendered conversation the served model would have emitted.

The start of an assistant turn is, by definition, the length of what a server would have sent: the messages
before it rendered with the generation prompt. Where the template keeps its history as it is, all starts are
found by one more rendering, in which private-use characters stand around every answer: the cost is linear in
the text. Turns that this cannot place (reasoning, tool calls, templates that rewrite earlier turns) are
rendered one by one; nothing is encoded twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from drafttrain.corpus.types import Message

Render = Callable[..., str]
"""`ChatRenderer.render`: (messages, tools, *, generation_prompt) -> text."""

_OPEN, _CLOSE = "\ue000", "\ue001"
_EMPTY_THINK = re.compile(r"<think>\s*</think>\s*")
_REASONING = ("reasoning_content", "reasoning", "thinking")


@dataclass(frozen=True)
class TemplateTraits:
    """What a probe of the template told.

    Attributes:
        header: generation prompt, if answers follow it directly in rendered conversations; else None.
        end_of_turn: text of the token that ends an assistant turn.
        keeps_history: an earlier assistant turn is rendered as it was when it was the last one.
    """

    header: str | None
    end_of_turn: str
    keeps_history: bool


@dataclass(frozen=True)
class Turn:
    """An assistant turn that the served model would emit as it stands: message index, first character."""

    message: int
    start: int


def lay_out(
    render: Render,
    traits: TemplateTraits,
    messages: list[Message],
    tools: list[dict[str, Any]],
    cut: frozenset[int],
) -> tuple[str, list[Turn]]:
    """Text of a conversation that ends with an assistant message, and its faithful assistant turns in order.

    Args:
        cut: indices of assistant messages that the model did not end.
    """
    last = len(messages) - 1
    text = render(messages, tools)
    plain = _plain_starts(render, traits, messages, tools, text)
    if last in cut or last not in plain:
        shown, start = _last_turn(render, traits, messages, tools, text, finished=last not in cut)
        if shown != text:
            plain = {index: at for index, at in plain.items() if shown.startswith(text[:at])}
            text = shown
        plain.pop(last, None)
        if start is not None:
            plain[last] = start
    turns = []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start = plain.get(index)
        if start is None and index != last:
            start = _earlier_turn(render, traits, messages[: index + 1], tools, text)
        if start is not None:
            turns.append(Turn(index, start + _unsaid(message, text, start)))
    return text, turns


def _plain_starts(
    render: Render, traits: TemplateTraits, messages: list[Message], tools: list[dict[str, Any]], text: str
) -> dict[int, int]:
    """Starts of plain answers, by one rendering with marks around them; empty where marks change the text."""
    if traits.header is None or not traits.keeps_history or _OPEN in text or _CLOSE in text:
        return {}
    marked, leading = [], {}
    for index, message in enumerate(messages):
        content = message.get("content")
        if message["role"] == "assistant" and isinstance(content, str) and content.strip() and _is_plain(message):
            body = content.strip()
            before, _, after = content.partition(body)
            # Outside the white space, so that a template that trims its messages still does.
            marked.append({**message, "content": f"{before}{_OPEN}{body}{_CLOSE}{after}"})
            leading[index] = before
        else:
            marked.append(message)
    if not leading:
        return {}
    pieces = re.split(f"[{_OPEN}{_CLOSE}]", render(marked, tools))
    if len(pieces) != 2 * len(leading) + 1 or "".join(pieces) != text:
        return {}
    starts: dict[int, int] = {}
    position = 0
    for number, (index, before) in enumerate(leading.items()):
        position += len(pieces[2 * number])
        for space in (before, ""):
            if text.endswith(traits.header + space, 0, position):
                starts[index] = position - len(space)
                break
        position += len(pieces[2 * number + 1])
    return starts


def _last_turn(
    render: Render,
    traits: TemplateTraits,
    messages: list[Message],
    tools: list[dict[str, Any]],
    text: str,
    *,
    finished: bool,
) -> tuple[str, int | None]:
    """Text whose last turn is what the model emitted, and where that turn starts (None: unknown)."""
    context = render(messages[:-1], tools, generation_prompt=True)
    content = str(messages[-1].get("content") or "")
    if finished and text.startswith(context) and content.strip() in text[len(context) :]:
        return text, len(context)
    if not _is_text(messages[-1]) or (_thinks(context) and finished and "</think>" not in content):
        return text, None
    # The template cannot show the answer as it was emitted (cut in its reasoning, reasoning removed, ...).
    return context + content + (traits.end_of_turn if finished else ""), len(context)


def _earlier_turn(
    render: Render, traits: TemplateTraits, messages: list[Message], tools: list[dict[str, Any]], text: str
) -> int | None:
    """Start of the turn that ends `messages`, if `text` shows it as it was when it was emitted; else None."""
    context = render(messages[:-1], tools, generation_prompt=True)
    then = render(messages, tools)
    end = then.rfind(traits.end_of_turn)
    if not then.startswith(context) or end < len(context):
        return None
    emitted = then[: end + len(traits.end_of_turn)]
    content = str(messages[-1].get("content") or "").strip()
    return len(context) if text.startswith(emitted) and content in emitted[len(context) :] else None


def _unsaid(message: Message, text: str, start: int) -> int:
    """Characters of an empty think block from the template: a part of the prompt where thinking is off."""
    block = _EMPTY_THINK.match(text, start)
    if block is None or str(message.get("content") or "").lstrip().startswith("<think>"):
        return 0
    return len(block.group())


def _is_text(message: Message) -> bool:
    return not message.get("tool_calls") and not any(message.get(key) for key in _REASONING)


def _is_plain(message: Message) -> bool:
    return _is_text(message) and "think>" not in str(message["content"])


def _thinks(context: str) -> bool:
    return context.rfind("<think>") > context.rfind("</think>")
