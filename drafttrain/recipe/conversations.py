"""From a recipe's `data` section to conversations on disk: collect the prompts once, answer them, resume.

`drafttrain prompts`, `drafttrain regenerate` and a training run take the same steps into the same files: each
goes on from where another stopped.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from drafttrain.corpus.answers import (
    AnswerSource,
    Regenerated,
    TargetAnswers,
    read_answers,
    regenerate,
    unanswered,
)
from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.config import PromptSource
from drafttrain.corpus.dataset import require_rest
from drafttrain.corpus.lines import write_lines
from drafttrain.corpus.openai_server import ServerAnswers
from drafttrain.corpus.readers import (
    ReadResult,
    collect_prompts,
    read_conversations,
    read_prompts,
    write_prompts,
)
from drafttrain.corpus.types import Conversation, Prompt, Reject, TokenGenerator
from drafttrain.engine.generation import TargetGenerator
from drafttrain.errors import DataError, UserError
from drafttrain.features.recording import StateKeeper
from drafttrain.files import atomic_file, find_resource, read_json, read_jsonl, sha256_file, write_json
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import Tap
from drafttrain.recipe.origin import folder_digest, local_file, origin_of, same_origin
from drafttrain.recipe.schema import Recipe

Progress = Callable[[str, int, int], None]
"""Called with (what: "prompts" or "answers", done, all)."""


@dataclass(frozen=True)
class InProcess:
    """The target as a writer of prompts and answers.

    Attributes:
        generator: continues token sequences.
        context_length: positions the target has, None where it does not say.
    """

    generator: TokenGenerator
    context_length: int | None = None

    @staticmethod
    def of(target: CausalLM, batch_size: int) -> InProcess:
        """A loaded target on the bundled engine, `batch_size` sequences at a time."""
        return InProcess(TargetGenerator(target, batch_size), target.context)


@dataclass(frozen=True)
class ConversationFiles:
    """Where a run keeps its data.

    Attributes:
        prompts: the collected prompts, one JSON object a line.
        answers: the answered conversations.
        rejects: rows that were refused, with reasons; absent if there are none.
        unanswered: prompts that got no answer in the last attempt, with reasons; absent if there are none.
        origin: what the prompts were collected from.
    """

    prompts: Path
    answers: Path
    rejects: Path
    unanswered: Path
    origin: Path

    @staticmethod
    def of(recipe: Recipe) -> ConversationFiles:
        """Inside the run's folder."""
        folder = Path(recipe.run_folder) / "data"
        return ConversationFiles(
            folder / "prompts.jsonl",
            folder / "answers.jsonl",
            folder / "rejects.jsonl",
            folder / "unanswered.jsonl",
            folder / "prompts.origin.json",
        )


def prepare_prompts(
    recipe: Recipe, chat: ChatRenderer, target: Callable[[], InProcess], progress: Progress | None = None
) -> Sequence[Prompt]:
    """The recipe's prompts: from disk if collected from the same sources before, else collected and written.

    Args:
        target: called only if a source is `self`.

    Raises:
        DataError: a source that cannot be read, or a run folder whose prompts came from other sources.
    """
    files = ConversationFiles.of(recipe)
    origin = origin_of(recipe, chat)
    if files.prompts.exists() and files.origin.exists():
        if same_origin(read_json(files.origin), origin):
            return read_prompts(PromptSource(source=str(files.prompts))).items
        if files.answers.exists():
            raise DataError(
                "holds answers to prompts from other sources, or by another target",
                where=files.answers.parent,
                remedy="choose another output_dir, or remove that folder",
            )
    found = collect(recipe, chat, target, progress)
    write_prompts(files.prompts, found.items)
    _write_rejects(files.rejects, found.rejects)
    write_json(files.origin, origin)
    return found.items


def collect(
    recipe: Recipe, chat: ChatRenderer, target: Callable[[], InProcess], progress: Progress | None = None
) -> ReadResult[Prompt]:
    """The recipe's prompts, read and written anew; nothing is kept on disk.

    Args:
        target: called only if a source is `self`.
    """
    sources = recipe.data.prompts
    if not sources:
        raise DataError("the recipe has no prompts", where="data.prompts", remedy="it reads data.path instead")
    writes = any(source.source == "self" for source in sources)
    return collect_prompts(
        sources,
        chat=chat,
        generator=target().generator if writes else None,
        progress=None if progress is None else partial(progress, "prompts"),
    )


def answer_prompts(
    recipe: Recipe,
    chat: ChatRenderer,
    target: Callable[[], InProcess],
    progress: Progress | None = None,
    prompts: Sequence[Prompt] | None = None,
    keeper: StateKeeper | None = None,
) -> Regenerated:
    """Answer the recipe's prompts into the run's folder; what is there already is kept.

    Args:
        target: called only if it has to write prompts or answers.
        prompts: of `prepare_prompts`, where they are at hand.
        keeper: of the target's states meanwhile.
    """
    prompts = prepare_prompts(recipe, chat, target, progress) if prompts is None else prompts
    files = ConversationFiles.of(recipe)
    tell = None if progress is None else partial(progress, "answers")
    source = _answer_source(recipe, chat, target, () if keeper is None else keeper.taps)
    keep = None if keeper is None else keeper.keep
    report = regenerate(prompts, source, files.answers, progress=tell, keep=keep)
    _write_rejects(files.unanswered, report.rejects)
    return report


def prepare_conversations(
    recipe: Recipe,
    chat: ChatRenderer,
    target: Callable[[], InProcess],
    progress: Progress | None = None,
    keeper: StateKeeper | None = None,
    *,
    settled: bool = False,
) -> Sequence[Conversation]:
    """All conversations of a recipe: read where they are given, answered where they are not yet.

    Args:
        target: called only if it has to write prompts or answers.
        keeper: of the target's states while it answers.
        settled: the data is what is there: a prompt that got no answer is not asked again, and nothing is written.

    Raises:
        DataError: nothing usable; see `prepare_prompts` and `regenerate`.
    """
    files = ConversationFiles.of(recipe)
    if recipe.data.path is not None:
        return present_conversations(recipe)
    if recipe.data.answers.source == "given":
        conversations, rejects = _given(recipe.data.prompts)
        if not settled:
            _write_rejects(files.rejects, rejects)
        return conversations
    # Before hours of answers, not behind them.
    prompts = prepare_prompts(recipe, chat, target, progress)
    require_rest(len(prompts), recipe.data.held_out)
    if settled and files.answers.exists():
        # Refuses what was answered by another source.
        unanswered(prompts, _answer_source(recipe, chat, target), files.answers)
        return present_conversations(recipe)
    report = answer_prompts(recipe, chat, target, progress, prompts, keeper)
    if report.rejects and not report.resumed + report.written:
        raise DataError(
            f"none of the {len(report.rejects)} prompts got an answer; the first: {report.rejects[0].reason}",
            where=files.unanswered,
            remedy="mend what the reasons in that file name, such as prompts that leave the context no room",
        )
    return present_conversations(recipe)


def what_was_left_out(recipe: Recipe) -> list[str]:
    """A line for the rows that were refused and one for the prompts without an answer, if there are any."""
    files = ConversationFiles.of(recipe)
    lines = []
    for path, what in ((files.rejects, "row(s) refused"), (files.unanswered, "prompt(s) without an answer")):
        if path.exists():
            rejects = [Reject(**value) for _, value in read_jsonl(path)]
            lines.append(f"{len(rejects)} {what}, the first: {rejects[0].reason}; listed in {path}")
    return lines


def present_conversations(recipe: Recipe) -> Sequence[Conversation]:
    """The conversations that are there: given ones, or those answered so far. They stay on disk.

    Raises:
        DataError: none yet, or not readable.
    """
    data = recipe.data
    if data.path is not None:
        return read_answers(_resource(data.path))
    if data.answers.source == "given":
        return _given(data.prompts)[0]
    return read_answers(ConversationFiles.of(recipe).answers)


def _given(sources: Sequence[PromptSource]) -> tuple[Sequence[Conversation], list[Reject]]:
    """Conversations that were answered elsewhere, and the rows that are none."""
    found = [read_conversations(source) for source in sources]
    rejects = [reject for one in found for reject in one.rejects]
    if len(found) == 1:
        return found[0].items, rejects
    # Two files may count their rows alike.
    named = (
        replace(conversation, id=f"{number}-{conversation.id}" if number else conversation.id)
        for number, one in enumerate(found)
        for conversation in one.items
    )
    return write_lines(named, Conversation.to_json, Conversation.from_json), rejects


def data_hashes(recipe: Recipe) -> dict[str, str]:
    """SHA-256 of each file or folder that the run's data came from or went to, for its provenance."""
    files = ConversationFiles.of(recipe)
    named = [source.source for source in recipe.data.prompts if source.source != "self"]
    if recipe.data.path is not None:
        named.append(recipe.data.path)
    paths = {name: path for name in named if (path := local_file(name)) is not None}
    paths |= {path.name: path for path in (files.prompts, files.answers) if path.exists()}
    folders = {name: digest for name in named if (digest := folder_digest(name)) is not None}
    return {name: sha256_file(path) for name, path in paths.items()} | folders


def _answer_source(
    recipe: Recipe, chat: ChatRenderer, target: Callable[[], InProcess], taps: Sequence[Tap] = ()
) -> AnswerSource:
    answers = recipe.data.answers
    if answers.source == "server":
        return ServerAnswers(answers, recipe.data.template_kwargs)
    if answers.source == "given":
        raise DataError(
            "the answers are given: there is nothing to regenerate",
            where="data.answers.source",
            remedy="use 'target' or 'server'",
        )
    writer = target()
    return TargetAnswers(writer.generator, chat, answers, writer.context_length, taps)


def _resource(name: str) -> Path:
    try:
        return find_resource(name)
    except UserError as error:
        raise DataError(error.what, where=error.where, remedy=error.remedy) from None


def _write_rejects(path: Path, rejects: list[Reject]) -> None:
    if not rejects:
        path.unlink(missing_ok=True)
        return
    # In place of the one before at once: other processes may be reading it.
    with atomic_file(path) as partial:
        lines = [json.dumps(reject.to_json(), ensure_ascii=False) + "\n" for reject in rejects]
        partial.write_text("".join(lines), encoding="utf-8")
