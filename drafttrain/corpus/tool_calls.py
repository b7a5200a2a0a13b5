"""Arguments of tool calls: JSON text in OpenAI's API, objects in chat templates. Data sets have either."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from drafttrain.corpus.types import Message


def as_rendered(message: Message) -> Message:
    """A message as servers hand it to templates: arguments as the object that a text stands for, and no empty list of
    calls, which some templates would take for calls."""
    if message.get("tool_calls") == []:
        return {key: value for key, value in message.items() if key != "tool_calls"}
    return _each(message, _parsed)


def as_sent(message: Message) -> Message:
    """A message as an OpenAI-compatible server takes it: arguments as JSON text."""
    return _each(message, lambda given: json.dumps(given, ensure_ascii=False) if isinstance(given, Mapping) else given)


def _each(message: Message, change: Callable[[Any], Any]) -> Message:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_changed(call, change) for call in calls]} if isinstance(calls, list) else message


def _changed(call: Any, change: Callable[[Any], Any]) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": change(function["arguments"])}}


def _parsed(given: Any) -> Any:
    if given is not None and not isinstance(given, str):
        return given
    try:
        found = json.loads(given or "{}")
    except ValueError:
        return given
    return found if isinstance(found, dict) else given
