"""Answers by the target: fill the assistant turns of a prompt set into a JSONL file; resume after a kill."""

from __future__ import annotations

import fcntl
import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Protocol

from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.config import AnswersConfig
from drafttrain.corpus.lines import Lines
from drafttrain.corpus.types import Conversation, Message, Prompt, Reject, States, TokenGenerator
from drafttrain.errors import DataError
from drafttrain.files import read_json, write_json
from drafttrain.modeling.taps import Tap

_AT_ONCE = 16384
"""Prompts that are in memory at a time; far more than are answered together."""


@dataclass(frozen=True)
class Question:
    """One turn to be answered: a history that ends with a user or tool message."""

    messages: list[Message]
    tools: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Answer:
    """An assistant message.

    Attributes:
        finished: the model ended it itself (False: cut at the token limit).
        tokens: the ids it emitted, where they are known.
        states: what the target computed meanwhile, where it was asked for that.
    """

    message: Message
    finished: bool
    tokens: list[int] = field(default_factory=list)
    states: States | None = None


@dataclass(frozen=True)
class Failure:
    """Why a question has no answer."""

    reason: str


class AnswerSource(Protocol):
    """Who answers. A file is resumed by the same one only."""

    @property
    def identity(self) -> dict[str, Any]:
        """All that decides the answers, JSON values; a server may be asked for its model."""
        ...

    @property
    def settings(self) -> dict[str, Any]:
        """What of it is known here, without asking anybody."""
        ...

    def answer(self, questions: Sequence[Question]) -> Iterator[tuple[int, Answer | Failure]]:
        """Yield (index, outcome) once for each question, as they finish, in any order."""
        ...


class TargetAnswers:
    """Answers by a model in this process.

    Args:
        context_length: positions the model has; a prompt that leaves no room for one token is refused.
        taps: where the model's states are kept, for `Answer.states`; none = nowhere.
    """

    def __init__(
        self,
        generator: TokenGenerator,
        chat: ChatRenderer,
        config: AnswersConfig,
        context_length: int | None = None,
        taps: Sequence[Tap] = (),
    ) -> None:
        self.generator, self.chat, self.config, self.context_length = generator, chat, config, context_length
        self.taps = tuple(taps)

    @property
    def identity(self) -> dict[str, Any]:
        """Sampling, template and tokenizer."""
        sampling = self.config.model_dump(include={"source", "max_new_tokens", "temperature", "top_p", "top_k", "seed"})
        return {**sampling, "template": self.chat.template_hash, "tokenizer": self.chat.tokenizer_hash}

    @property
    def settings(self) -> dict[str, Any]:
        """All of the identity."""
        return self.identity

    def answer(self, questions: Sequence[Question]) -> Iterator[tuple[int, Answer | Failure]]:
        """Render, generate, decode."""
        prompts: list[list[int]] = []
        origin: list[int] = []
        room = self.config.max_new_tokens
        for index, question in enumerate(questions):
            try:
                ids = self.chat.prompt_ids(question.messages, question.tools)
            except DataError as error:
                yield index, Failure(error.what)
                continue
            if self.context_length is not None and len(ids) + room > self.context_length:
                yield (
                    index,
                    Failure(
                        f"the prompt has {len(ids)} tokens; with {room} for the answer it exceeds "
                        f"the context of {self.context_length}"
                    ),
                )
                continue
            prompts.append(ids)
            origin.append(index)
        if not prompts:
            return
        config = self.config
        for position, tokens, states in self.generator.generate(
            prompts,
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            top_p=config.top_p,
            top_k=config.top_k,
            seed=config.seed,
            stop=self.chat.stop_ids,
            taps=self.taps,
        ):
            text, finished = self.chat.answer_text(tokens, config.max_new_tokens)
            yield origin[position], Answer({"role": "assistant", "content": text}, finished, tokens, states)


@dataclass
class Regenerated:
    """What a run of `regenerate` did: prompts = resumed + written + rejects."""

    path: Path
    resumed: int = 0
    written: int = 0
    rejects: list[Reject] = field(default_factory=list)


@dataclass
class _Open:
    """A conversation in the making."""

    prompt: Prompt
    messages: list[Message]
    turns: list[str]
    cut: list[int] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)

    @staticmethod
    def of(prompt: Prompt) -> _Open:
        return _Open(prompt, list(prompt.messages), list(prompt.turns))

    def take(self, answer: Answer) -> bool:
        """Add an answer and the user turn after it; True when the conversation is complete."""
        if not answer.finished:
            self.cut.append(len(self.messages))
        if answer.tokens:
            self.tokens[len(self.messages)] = answer.tokens
        self.messages.append(answer.message)
        if not self.turns:
            return True
        self.messages.append({"role": "user", "content": self.turns.pop(0)})
        return False

    def close(self) -> Conversation:
        prompt = self.prompt
        return Conversation(prompt.id, self.messages, prompt.tools, prompt.meta, tuple(self.cut), self.tokens)


def regenerate(
    prompts: Sequence[Prompt],
    source: AnswerSource,
    out_path: str | Path,
    *,
    resume: bool = True,
    progress: Callable[[int, int], None] | None = None,
    keep: Callable[[Conversation, States], None] | None = None,
) -> Regenerated:
    """Answer `prompts` turn by turn and append each finished conversation to `out_path` at once.

    A file that a killed run left is continued: a torn last line is dropped, what stands is kept, and only the
    other prompts are answered. A complete one is left alone, and may be written to by nobody or read by many. Beside
    the file, `<name>.meta.json` holds the identity of the source.

    Args:
        resume: False starts the file over.
        progress: told (prompts done, all).
        keep: given each conversation that was written, and the states of its last answer, where the source has them.

    Raises:
        DataError: see `unanswered`; or a file that is being written to.
    """
    path = Path(out_path)
    if resume and not unanswered(prompts, source, path):
        return Regenerated(path, resumed=len(prompts))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        _lock(file, path)
        identity = source.identity
        if not resume:
            file.truncate(0)
        elif path.stat().st_size:
            _require_same(path, identity)
        write_json(_meta(path), identity)
        _mend(file, path)
        todo = unanswered(prompts, source, path)
        report = Regenerated(path, resumed=len(prompts) - len(todo))
        for start in range(0, len(todo), _AT_ONCE):
            waiting = [_Open.of(prompts[index]) for index in todo[start : start + _AT_ONCE]]
            for conversation, outcome in _finished(waiting, source):
                if isinstance(outcome, Failure):
                    report.rejects.append(Reject(conversation.prompt.id, outcome.reason, str(path)))
                elif outcome is not None:
                    closed = conversation.close()
                    _append(file, path, closed.to_json())
                    report.written += 1
                    if keep is not None and outcome.states is not None:
                        keep(closed, outcome.states)
                if progress is not None:
                    progress(report.resumed + report.written + len(report.rejects), len(prompts))
    return report


def unanswered(prompts: Sequence[Prompt], source: AnswerSource, path: Path) -> list[int]:
    """Which prompts a file of answers lacks. Nothing is written, nobody is asked.

    Raises:
        DataError: no prompts, an id that occurs twice, or a file of another source or of other prompts.
    """
    ids = [prompt.id for prompt in prompts]
    if not ids:
        raise DataError("there are no prompts to answer", where=path)
    if len(set(ids)) != len(ids):
        twice = next(name for position, name in enumerate(ids) if name in ids[:position])
        raise DataError(f"prompt id {twice!r} occurs twice", where=path, remedy="give each prompt its own id")
    if not path.exists() or not path.stat().st_size:
        return list(range(len(ids)))
    _require_same(path, source.settings)
    with path.open("rb") as file:
        done = _scan(file, path).ids
    foreign = done - set(ids)
    if foreign:
        raise DataError(
            f"holds {len(foreign)} conversations that no prompt asks for, such as {min(foreign)!r}",
            where=path,
            remedy="write to another file, or start over without resuming",
        )
    return [index for index, name in enumerate(ids) if name not in done]


def _finished(waiting: list[_Open], source: AnswerSource) -> Iterator[tuple[_Open, Answer | Failure | None]]:
    """Ask for all turns of some conversations; each whenever it is answered, with the outcome that ends it, or None."""
    while waiting:
        further: list[_Open] = []
        for index, outcome in source.answer([Question(c.messages, c.prompt.tools) for c in waiting]):
            conversation = waiting[index]
            if isinstance(outcome, Failure) or conversation.take(outcome):
                yield conversation, outcome
            else:
                further.append(conversation)
                yield conversation, None
        waiting = further


def read_answers(path: str | Path) -> Lines[Conversation]:
    """Conversations that `regenerate` wrote; they stay on disk. A torn last line, left by a kill, is passed over."""
    source = Path(path)
    if not source.is_file():
        raise DataError("no such file", where=source, remedy="answer the prompts first: drafttrain regenerate")
    file, starts, end = source.open("rb"), array("q"), 0
    for number, line in enumerate(file, 1):
        start, end = end, end + len(line)
        if not line.strip():
            continue
        try:
            Conversation.from_json(json.loads(line))
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith(b"\n"):
                break
            raise DataError(f"line {number} is not a conversation: {error!r}", where=source) from None
        starts.append(start)
    if not starts:
        raise DataError("holds no conversations", where=source)
    return Lines(file, starts, Conversation.from_json)


def _append(file: IO[bytes], path: Path, record: dict[str, Any]) -> None:
    """Write one line at once, past the buffer: closing the file later must not meet a full disk again."""
    line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
    try:
        while line:
            line = line[os.write(file.fileno(), line) :]
    except OSError as error:
        raise DataError(
            f"cannot be written: {error.strerror}",
            where=path,
            remedy="free some space and run again: what stands is kept",
        ) from error


def _lock(file: IO[bytes], path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise DataError("another run is writing to this file", where=path, remedy="wait for it or stop it") from None


def _meta(path: Path) -> Path:
    return path.with_name(path.name + ".meta.json")


def _require_same(path: Path, known: Mapping[str, Any]) -> None:
    """Refuse a file that was written with other settings than those given."""
    if not _meta(path).exists():
        raise DataError("exists, but was not written by regenerate", where=path, remedy="write to another file")
    written = read_json(_meta(path))
    differing = sorted(key for key, value in known.items() if written.get(key) != value)
    if differing:
        changes = ", ".join(f"{key}: {written.get(key)!r} -> {known[key]!r}" for key in differing)
        raise DataError(
            f"was written with other settings ({changes})",
            where=path,
            remedy="write to another file, or start over without resuming",
        )


@dataclass(frozen=True)
class _Standing:
    """What stands in a file: ids of its conversations, bytes of its whole lines, whether the last has its line end."""

    ids: set[str]
    size: int
    ended: bool


def _scan(file: IO[bytes], path: Path) -> _Standing:
    """Read a file from its start; what a kill left of a last line does not count."""
    ids: set[str] = set()
    size, ended = 0, True
    file.seek(0)
    for number, line in enumerate(file, 1):
        try:
            ids.add(Conversation.from_json(json.loads(line)).id)
        except (ValueError, KeyError, TypeError) as error:
            if not line.endswith(b"\n"):
                break
            raise DataError(
                f"line {number} is damaged: {error!r}", where=path, remedy="remove that line and run again"
            ) from None
        size, ended = size + len(line), line.endswith(b"\n")
    return _Standing(ids, size, ended)


def _mend(file: IO[bytes], path: Path) -> None:
    """Cut off what a kill left of a last line, and end the one before it."""
    standing = _scan(file, path)
    file.truncate(standing.size)
    if not standing.ended:
        file.write(b"\n")
        file.flush()
