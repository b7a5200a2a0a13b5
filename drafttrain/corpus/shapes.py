"""The usual shapes of a row (OpenAI messages, ShareGPT, Alpaca, prompt/completion, text), as messages."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from drafttrain.corpus.config import Format
from drafttrain.corpus.types import Conversation, Message, Prompt
from drafttrain.files import parse_json

Row = Mapping[str, Any]

_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "model", "bot", "chatgpt", "bing", "bard", "claude"), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "function", "ipython", "observation"), "tool"),
}
_DIALOGUES = ("messages", "conversations", "conversation", "dialogue", "dialog", "chat")
_QUESTIONS = ("prompt", "question", "query", "user", "problem")
_REPLIES = ("completion", "response", "answer", "assistant", "output", "chosen")
_IDS = ("id", "question_id", "prompt_id", "conversation_id", "task_id", "uuid")
_META = ("category", "topic", "language", "lang", "license")


class ShapeError(Exception):
    """Why a row cannot be read; the text becomes the reason of its reject."""


@dataclass(frozen=True)
class Dialogue:
    """A row in its one shape. `turns` are user turns after `messages`, without answers between them."""

    id: str | None
    messages: list[Message]
    turns: list[str]
    tools: list[dict[str, Any]]
    meta: dict[str, Any] = field(default_factory=dict)


def parse_row(row: Any, format: Format, columns: Mapping[str, str], system: str | None) -> Dialogue:
    """Bring a row of any known shape into messages. Raises ShapeError with the reason."""
    if isinstance(row, str):
        row = {"text": row}
    row = _plain(row)
    _require_unicode(row)
    if not isinstance(row, Mapping):
        raise ShapeError(f"a row is an object with columns, this is a {type(row).__name__}")
    missing = [name for name in columns.values() if name not in row]
    if missing:
        raise ShapeError(f"has no column {missing[0]!r}")
    row = {**row, **{usual: row[name] for usual, name in columns.items()}}
    shape = _detect(row) if format == "auto" else format
    turns: list[str] = []
    if shape in ("messages", "sharegpt"):
        messages, turns = _dialogue(row)
    elif shape == "alpaca":
        instruction, extra = _text(row.get("instruction")), _text(row.get("input"))
        messages = _exchange(f"{instruction}\n\n{extra}" if extra else instruction, row.get("output"))
    elif shape == "prompt":
        messages = _exchange(_first(row, _QUESTIONS), _first(row, _REPLIES))
    else:
        messages = _exchange(row.get("text", ""), None)
    messages = [_normal(message, number) for number, message in enumerate(messages, 1)]
    own_system = _text(row.get("system")) or _text(row.get("system_prompt")) or (system or "")
    if own_system and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": own_system})
    name = next((str(row[key]) for key in _IDS if row.get(key) not in (None, "")), None)
    given = row.get("meta")
    meta = {
        **(given if isinstance(given, dict) else {}),
        **{k: row[k] for k in _META if isinstance(row.get(k), str)},
    }
    return Dialogue(name, messages, turns, _tools(row.get("tools")), meta)


def to_prompt(dialogue: Dialogue, name: str, meta: dict[str, Any]) -> Prompt:
    """Keep what the target has to answer: given answers are dropped, but for histories with tool messages."""
    messages = dialogue.messages
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise ShapeError("has no user turn")
    if any(not str(messages[index]["content"]).strip() for index in users):
        raise ShapeError("has an empty user turn")
    opening = [message["role"] for message in messages[: users[0]]]
    if "assistant" in opening or "tool" in opening:
        raise ShapeError(f"begins with a turn of the {next(role for role in opening if role != 'system')}")
    if any(message["role"] == "tool" or message.get("tool_calls") for message in messages):
        # A tool's result cannot be made up again: the history stays as given, and its end is answered.
        end = max(index for index, message in enumerate(messages) if message["role"] in ("user", "tool"))
        history, turns = messages[: end + 1], []
    else:
        history = messages[: users[0] + 1]
        turns = [str(messages[index]["content"]) for index in users[1:]]
    return Prompt(name, history, turns + dialogue.turns, dialogue.tools, meta)


def to_conversation(dialogue: Dialogue, name: str, meta: dict[str, Any]) -> Conversation:
    """Keep the given answers; what follows the last one is dropped."""
    answers = [index for index, message in enumerate(dialogue.messages) if message["role"] == "assistant"]
    if not answers:
        raise ShapeError("has no assistant turn")
    return Conversation(name, dialogue.messages[: answers[-1] + 1], dialogue.tools, meta)


def is_row(value: Row) -> bool:
    """Whether an object is a row by itself, and not one that holds rows."""
    try:
        _detect(value)
    except ShapeError:
        return False
    held = _parsed(_first(value, _DIALOGUES))
    return not isinstance(held, list) or all(_is_message(item) for item in held)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and ("role" in value or "from" in value)


def _detect(row: Row) -> Format:
    if isinstance(_parsed(_first(row, _DIALOGUES)), list) or _turns(row) is not None:
        return "messages"
    if row.get("instruction") is not None:
        return "alpaca"
    if _first(row, _QUESTIONS) is not None:
        return "prompt"
    if row.get("text") is not None:
        return "text"
    raise ShapeError(f"has none of the known columns (it has: {', '.join(map(str, row)) or 'none'})")


def _dialogue(row: Row) -> tuple[list[Any], list[str]]:
    messages, texts = _parsed(_first(row, _DIALOGUES)), _turns(row) or []
    if isinstance(messages, list) and messages:
        return messages, texts
    if isinstance(asked := _first(row, _QUESTIONS), str):
        texts.insert(0, asked)
    if texts:
        return [{"role": "user", "content": texts[0]}], texts[1:]
    raise ShapeError("has no messages")


def _turns(row: Row) -> list[str] | None:
    """The user's turns of a conversation without answers, as MT-bench has them; None of a row of another shape."""
    turns, asked = row.get("turns"), _first(row, _QUESTIONS)
    if isinstance(turns, list):
        return [_text(turn) for turn in turns]
    return list(asked) if isinstance(asked, list) and all(isinstance(turn, str) for turn in asked) else None


def _exchange(question: Any, reply: Any) -> list[Any]:
    """A question and its reply, either of which may be a text or messages."""
    question, reply = _parsed(question), _parsed(reply)
    messages = list(question) if isinstance(question, list) else [{"role": "user", "content": _text(question)}]
    if _are_objects(reply):
        return [*messages, *reply]
    # Of a reply that is no text (SQuAD's object of spans) nothing can be learnt; the question is sound.
    said = "" if isinstance(reply, list | Mapping) else _text(reply)
    return messages + ([{"role": "assistant", "content": said}] if said else [])


def _normal(message: Any, number: int) -> Message:
    """One message with `role` and a text `content`; keys whose value is None are dropped."""
    if not isinstance(message, Mapping):
        raise ShapeError(f"message {number} is no object")
    kept = {key: value for key, value in message.items() if value is not None and key not in ("from", "value")}
    said = message.get("role") or message.get("from")
    role = _ROLES.get(str(said).lower())
    if role is None:
        raise ShapeError(f"message {number} has the unknown role {said!r}")
    content = message.get("content") if message.get("content") is not None else message.get("value")
    if content is None and not (role == "assistant" and kept.get("tool_calls")):
        raise ShapeError(f"message {number} ({role}) has no content")
    return {**kept, "role": role, "content": _flat(content, number)}


def _flat(content: Any, number: int) -> str:
    """Content parts as one text; parts that are not text cannot be read."""
    if not isinstance(content, list):
        return _text(content)
    parts = []
    for part in content:
        text = part if isinstance(part, str) else part.get("text") if isinstance(part, Mapping) else None
        if not isinstance(text, str):
            raise ShapeError(f"message {number} has content other than text")
        parts.append(text)
    return "".join(parts)


def _tools(value: Any) -> list[dict[str, Any]]:
    """Tool schemas; malformed lists such as `[[]]` count as none, since the row itself is sound."""
    tools = _parsed(value)
    return [tool for tool in tools if isinstance(tool, dict)] if isinstance(tools, list) else []


def _parsed(value: Any) -> Any:
    """Lists that a CSV or Parquet column carries as JSON text."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            parsed = parse_json(value)
        except ValueError:
            return value
        _require_unicode(parsed)
        return parsed if _are_objects(parsed) else value
    return value


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, Mapping) for item in value)


def _plain(value: Any) -> Any:
    """A value as JSON could hold it: tables have times, decimals and bytes as well. Bytes that are no text are None."""
    if value is None or isinstance(value, str | int | float):
        return value
    try:
        if isinstance(value, Mapping):
            return {str(key): _plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [_plain(item) for item in value]
    except RecursionError:
        raise ShapeError("is nested too deeply") from None
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return None
    return str(value)


def _require_unicode(value: Any) -> None:
    """JSON may escape half of a surrogate pair: no file can hold that, and no tokenizer reads it."""
    try:
        json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ShapeError(f"has half of a surrogate pair, {error.object[error.start]!a}") from None


def _first(row: Row, names: tuple[str, ...]) -> Any:
    return next((row[name] for name in names if row.get(name) is not None), None)


def _text(value: Any) -> str:
    if isinstance(value, list | Mapping):
        raise ShapeError(f"has {'a list' if isinstance(value, list) else 'an object'} where a text is read")
    return "" if value is None else str(value)
