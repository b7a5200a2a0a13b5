"""What a draft is shaped by, measured on prompts that results are not reported on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.config import PromptSource
from drafttrain.corpus.readers import read_prompts
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.medusa.model import MedusaDrafter
from drafttrain.engine.calibrate import head_accuracies
from drafttrain.engine.calibration_file import SkipFile, TreeFile
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import build_proposer
from drafttrain.engine.records import Request
from drafttrain.engine.sampling import SamplingParams
from drafttrain.engine.sequoia import BestTree, RankCounter, comb, fastest, verify_seconds
from drafttrain.engine.skip_search import search_skips
from drafttrain.engine.tree import MAX_NODES, TreeShape
from drafttrain.errors import DataError, EngineError
from drafttrain.targets.model import TargetModel

Kind = Literal["skip", "medusa-tree", "sequoia"]
Progress = Callable[[str, int, int], None]

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, MAX_NODES)


@dataclass(frozen=True)
class CalibrationOptions:
    """How to measure.

    Attributes:
        temperature: of the rounds that Sequoia's acceptance is counted in.
        batch: requests side by side, for which the tree is to be the fastest.
        nodes: size of the tree; None = the fastest on this machine.
        depth: deepest level tried.
        evaluations: of the search for sub-layers; four a block of the target at least.
        seed: of sampling and search.
    """

    temperature: float = 0.0
    batch: int = 1
    nodes: int | None = None
    depth: int = 6
    evaluations: int = 200
    seed: int = 0


def calibration_requests(
    target: TargetModel, source: str, limit: int, max_new_tokens: int, template_kwargs: dict[str, Any] | None = None
) -> list[Request]:
    """`limit` prompts of a file, spread over it.

    Raises:
        DataError: no prompt of the file fits the target's context.
    """
    chat = ChatRenderer(target.tokenizer, template_kwargs, target.stop_ids)
    prompts = read_prompts(PromptSource(source=source)).items
    step = max(1, len(prompts) // limit)
    requests = [
        Request(prompt.id, chat.prompt_ids(prompt.messages), max_new_tokens, stop_ids=target.stop_ids)
        for prompt in prompts[::step][:limit]
    ]
    requests = [r for r in requests if len(r.prompt_ids) + max_new_tokens <= target.context]
    if not requests:
        raise DataError("no prompt fits the target's context", where=source, remedy="give shorter prompts")
    return requests


def calibrate(
    target: TargetModel,
    kind: Kind,
    drafter: Drafter | None,
    requests: Sequence[Request],
    options: CalibrationOptions,
    progress: Progress | None = None,
) -> TreeFile | SkipFile:
    """Measure, and find what fits.

    Args:
        target: prepared by an engine.
        kind: "skip" needs no draft, "medusa-tree" Medusa heads, "sequoia" any draft that is trained.
        drafter: bound to the target.
        requests: the calibration set.
        options: how.
        progress: told (what, done, all).

    Raises:
        EngineError: the draft is not one of that kind, or the answers are too short.
    """
    if kind == "skip":
        return _skip(target, _answers(target, requests, progress), options, progress)
    assert drafter is not None
    if kind == "medusa-tree":
        if not isinstance(drafter, MedusaDrafter):
            raise EngineError(
                f"a medusa-tree is for Medusa heads, the draft is {drafter.family}", remedy="use --kind sequoia"
            )
        accuracies = head_accuracies(target, drafter, _answers(target, requests, progress))
        verify_s = _verify_seconds(target, options)
        best = _best_medusa(accuracies, verify_s, options)
        measured = {"accuracies": accuracies, "tokens": best.tokens, "verify_s": verify_s, **_where(target, options)}
        return TreeFile(kind, best.shape.parents, False, measured)
    return _sequoia(target, drafter, requests, options, progress)


def _answers(
    target: TargetModel, requests: Sequence[Request], progress: Progress | None
) -> list[tuple[list[int], list[int]]]:
    length = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    engine = Engine(target, max_batch=min(8, len(requests)), max_length=length)
    prompts = {request.id: request.prompt_ids for request in requests}
    answers = []
    for done in engine.stream(requests):
        if done.error is not None:
            raise done.error
        answers.append((prompts[done.id], done.tokens))
        if progress is not None:
            progress("answers", len(answers), len(requests))
    return answers


def _skip(
    target: TargetModel,
    answers: Sequence[tuple[list[int], list[int]]],
    options: CalibrationOptions,
    progress: Progress | None,
) -> SkipFile:
    def tell(done: int, of: int) -> None:
        if progress is not None:
            progress("sets of sub-layers", done, of)

    found = search_skips(target, answers, max(options.evaluations, 4 * target.n_layers), options.seed, tell)
    measured = {name: value for name, value in asdict(found).items() if name not in ("attention", "mlp")}
    return SkipFile(found.attention, found.mlp, target.identity.to_dict(), measured)


def _sequoia(
    target: TargetModel,
    drafter: Drafter,
    requests: Sequence[Request],
    options: CalibrationOptions,
    progress: Progress | None,
) -> TreeFile:
    depth = min(options.depth, drafter.max_depth) if isinstance(drafter, MedusaDrafter) else options.depth
    shape = comb(min(8, MAX_NODES // depth), depth)
    sampled = options.temperature > 0
    proposer = build_proposer(drafter, None, shape, sampled)
    length = max(len(r.prompt_ids) + r.max_new_tokens for r in requests)
    engine = RankCounter(target, proposer, max_batch=min(options.batch, len(requests)), max_length=length)
    engine.count(shape)
    asked = [
        Request(
            r.id,
            r.prompt_ids,
            r.max_new_tokens,
            SamplingParams(temperature=options.temperature, seed=options.seed),
            r.stop_ids,
        )
        for r in requests
    ]
    for count, done in enumerate(engine.stream(asked), 1):
        if done.error is not None:
            raise done.error
        if progress is not None:
            progress("requests", count, len(asked))
    acceptance = engine.acceptance()
    level_s = sum(r.draft_s / r.batch for r in engine.records) / sum(r.levels / r.batch for r in engine.records)
    verify_s = _verify_seconds(target, options)
    sizes = verify_s if options.nodes is None else {options.nodes: verify_s[options.nodes]}
    best = fastest(acceptance, sizes, level_s, range(1, depth + 1))
    measured = {
        "acceptance": acceptance,
        "tokens": best.tokens,
        "verify_s": verify_s,
        "level_s": level_s,
        "temperature": options.temperature,
        "draft": drafter.family,
        **_where(target, options),
    }
    return TreeFile("sequoia", best.shape.parents, sampled, measured)


def _best_medusa(
    accuracies: Sequence[Sequence[float]], verify_s: dict[int, float], options: CalibrationOptions
) -> BestTree:
    """The heads are read whatever the depth, so time is the verification's alone."""
    sizes = sorted(verify_s) if options.nodes is None else [options.nodes]
    trees = [TreeShape.from_accuracies(accuracies, size) for size in sizes]
    tried = [BestTree(shape, _expected(shape, accuracies)) for shape in trees]
    return max(tried, key=lambda best: best.tokens / verify_s.get(best.shape.nodes, verify_s[max(verify_s)]))


def _expected(shape: TreeShape, accuracies: Sequence[Sequence[float]]) -> float:
    chances: list[float] = []
    for node, parent in enumerate(shape.parents):
        own = accuracies[shape.depths[node] - 1][shape.ranks[node]]
        chances.append(own * (1.0 if parent < 0 else chances[parent]))
    return 1 + sum(chances)


def _verify_seconds(target: TargetModel, options: CalibrationOptions) -> dict[int, float]:
    sizes = sorted({*SIZES, *([] if options.nodes is None else [options.nodes])})
    return verify_seconds(target, sizes, options.batch)


def _where(target: TargetModel, options: CalibrationOptions) -> dict[str, Any]:
    return {"target": target.identity.to_dict(), "batch": options.batch, "dtype": str(target.dtype)[6:]}
