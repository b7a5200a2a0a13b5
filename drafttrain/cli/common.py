"""What several commands share: a recipe's arguments, its chat, its target when one is needed, a progress bar."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from drafttrain.corpus.chat import ChatRenderer
    from drafttrain.recipe.conversations import InProcess
    from drafttrain.recipe.schema import Recipe
    from drafttrain.recipe.settle import Native
    from drafttrain.targets.model import TargetModel

Subparsers = argparse._SubParsersAction  # argparse gives the type no public name


EVAL_PROMPTS = "data/prompts/eval_core.jsonl"
"""Where the prompts of quick measurements come from."""


def positive(text: str) -> int:
    """An argument that is at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def add_prompts(parser: argparse.ArgumentParser, default: str = EVAL_PROMPTS) -> None:
    """`--prompts FILE --count N`, the same in every command that measures on a few prompts."""
    parser.add_argument("--prompts", default=default, metavar="FILE", help=f"default: {default}")
    parser.add_argument(
        "--count", type=positive, default=8, metavar="N", help="how many of them, spread over the file's categories (8)"
    )


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """`RECIPE [key=value ...]`."""
    parser.add_argument("recipe", help="a YAML file, a shipped recipe, or a run's folder")
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="such as training.lr=1e-4 or data.prompts.0.count=20"
    )


def recipe_of(arguments: argparse.Namespace, native: Native | None = None) -> Recipe:
    """The recipe of `add_recipe`. Call it first: a mistake in it shows before torch is even imported.

    Args:
        native: what the machine computes in that it is for; default: this one.

    Raises:
        RecipeError: of a run that was moved, or is called from elsewhere: it would begin anew where its recipe points.
    """
    from drafttrain.errors import RecipeError
    from drafttrain.recipe.load import load_recipe
    from drafttrain.recipe.schema import CHECKPOINTS, RESOLVED

    recipe = load_recipe(arguments.recipe, arguments.overrides, native)
    given, own = Path(arguments.recipe).expanduser(), Path(recipe.run_folder)
    trained_here = (given / RESOLVED).is_file() and (given / CHECKPOINTS).is_dir()
    elsewhere = any(word.partition("=")[0].strip() in ("name", "output_dir") for word in arguments.overrides)
    if trained_here and not elsewhere and own.resolve() != given.resolve():
        raise RecipeError(
            f"this run's recipe writes to {own}",
            where=given,
            remedy=f"to go on here add output_dir={given}, for another run name=NAME",
        )
    return recipe


def run_folder(source: str, recipe: Recipe) -> Path:
    """The folder of a run: as given, or where its recipe puts it."""
    return Path(source) if Path(source).is_dir() else Path(recipe.run_folder)


def chat_of(recipe: Recipe) -> ChatRenderer:
    """The chat template of a recipe's target; reads no weights."""
    from drafttrain.corpus.chat import ChatRenderer
    from drafttrain.targets.load import load_stop_ids, load_tokenizer

    tokenizer = load_tokenizer(recipe.target)
    return ChatRenderer(tokenizer, recipe.data.template_kwargs, load_stop_ids(recipe.target))


def target_when_needed(recipe: Recipe, console: Console) -> Callable[[], InProcess]:
    """Loads the target at the first call."""
    loaded: list[InProcess] = []

    def load() -> InProcess:
        if not loaded:
            from drafttrain.recipe.conversations import InProcess
            from drafttrain.targets.load import load_target

            console.print(f"loading the target {recipe.target.model} ({recipe.target.dtype})", markup=False)
            loaded.append(InProcess.of(load_target(recipe.target), recipe.data.answers.batch_size))
        return loaded[0]

    return load


def first_turns(
    target: TargetModel, source: str, limit: int, template_kwargs: dict[str, Any] | None = None
) -> list[list[int]]:
    """Token ids of the first turn of some prompts of a file, over all its categories, as a server would render it."""
    from drafttrain.bench.prompts import load_prompts, select
    from drafttrain.corpus.chat import ChatRenderer

    renderer = ChatRenderer(target.tokenizer, template_kwargs or {}, target.stop_ids)
    chosen = select(load_prompts(source), limit)
    return [renderer.prompt_ids([{"role": "user", "content": prompt.turns[0]}]) for prompt in chosen]


@contextmanager
def progress_bars(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar for each task; told (what, done, all)."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what)
            bars.update(tasks[what], completed=done, total=total)

        yield tell
