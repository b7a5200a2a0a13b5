"""The plan of a recipe: parameters, operations, disk, memory, hours. Models are built on the meta device only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.build import build_drafter
from drafttrain.drafters.lm.hf import new_model
from drafttrain.drafters.lora import add_lora
from drafttrain.drafters.saving import draft_shape
from drafttrain.errors import RecipeError, TargetError
from drafttrain.features.sources import taps_with_final
from drafttrain.features.store import StoreIdentity
from drafttrain.modeling.causal_lm import context_of
from drafttrain.recipe.schema import Recipe
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import load_text_config
from drafttrain.training.launch import Launch
from drafttrain.training.plan.fitting import Fitting, find_fitting
from drafttrain.training.plan.flops import StepFlops, step_flops
from drafttrain.training.plan.hardware import Hardware
from drafttrain.training.plan.layout import LAUNCHES, PLACEMENTS, Layout
from drafttrain.training.plan.memory import Item, gathered_bytes, memory_items, peak
from drafttrain.training.plan.overlap import Overlap, overlap_of, run_hours
from drafttrain.training.plan.workload import Workload, workload


@dataclass(frozen=True)
class Plan:
    """What a recipe will take.

    Attributes:
        target_parameters, draft_parameters, trained_parameters: exact.
        work: samples, tokens, steps.
        flops: of one sample in one epoch.
        store_bytes: of the feature store over all training tokens; store_token_bytes: of one token.
        online: whether features are computed while training, so that no store is written.
        layout: the plainest in which the recipe fits as it stands, else the leanest of its placement.
        memory: of one rank in that layout.
        peaks: bytes of one rank at the peak, in every layout that exists.
        target_hours, draft_hours: on the hardware, at its assumed use; without prompts, answers, measuring.
        gather_hours: of moving the blocks of a target in shards, as if nothing else went on meanwhile.
        overlap: where the target's forwards lie beside the draft's steps.
        hours: of the ranks that train, to count on.
        best_hours: the same if all that may go on at once does; less than `hours` on a GPU that both share.
        fitting: layout and overrides that make it fit, None when none do; no overrides when it fits as it is.
        notes: what was assumed about the draft, and where samples are cut.
    """

    recipe: Recipe
    hardware: Hardware
    target_parameters: int
    draft_parameters: int
    trained_parameters: int
    work: Workload
    flops: StepFlops
    store_bytes: int
    store_token_bytes: int
    online: bool
    layout: Layout
    memory: list[Item]
    peaks: dict[Layout, int]
    target_hours: float
    draft_hours: float
    gather_hours: float
    overlap: Overlap
    hours: float
    best_hours: float
    fitting: Fitting | None
    notes: list[str]

    @property
    def memory_bytes(self) -> int:
        """At the peak of one rank, without what is reserved."""
        return peak(self.memory)

    @property
    def fits(self) -> bool:
        """Whether the recipe fits as it stands, in some way of launching it."""
        return self.fitting is not None and not self.fitting.changes

    @property
    def device_hours(self) -> float:
        """In which some device computes for one of the two; those that run a target elsewhere are as many again."""
        return (self.target_hours + self.gather_hours + self.draft_hours) * self.hardware.ranks


def target_config(recipe: Recipe, path: str | Path | None = None) -> Any:
    """The target's text config, from a file where the target cannot be reached.

    Raises:
        TargetError: neither can be read.
    """
    source = recipe.target
    if path is not None:
        folder = Path(path).expanduser()
        if not folder.exists():
            raise TargetError("no such file", where=path, remedy="--target-config takes the target's config.json")
        source = TargetConfig(model=str(folder.parent if folder.is_file() else folder))
        if folder.is_file() and folder.name != "config.json":
            raise TargetError("is not called config.json", where=path, remedy="give it that name, as checkpoints do")
    try:
        return load_text_config(source)
    except TargetError as error:
        if path is not None:
            raise
        raise TargetError(
            error.what, where=error.where, remedy="pass the target's config: --target-config path/to/config.json"
        ) from None


def make_plan(
    recipe: Recipe, text: Any, hardware: Hardware, *, samples: int | None = None, tokens: int | None = None
) -> Plan:
    """Plan a run. No weights are loaded or allocated.

    Args:
        text: the target's Hugging Face text config.
        samples, tokens: training samples and their mean length, where the user knows better.

    Raises:
        RecipeError: a draft that does not fit the target.
    """
    target = new_model(text, "meta")
    drafter, notes = _drafter(recipe, text)
    context, _ = context_of(text)
    if cut := recipe.data.cut_note(context):
        notes.insert(0, cut)
    ranks = hardware.ranks

    def within(one: Recipe) -> Recipe:
        return one.model_copy(update={"data": one.data.within(context)})

    def memory(changed: Recipe, layout: Layout) -> list[Item]:
        return memory_items(within(changed), drafter, target, layout, ranks, hardware.is_cpu)

    def fits(changed: Recipe, layout: Layout) -> bool:
        return peak(memory(changed, layout)) + hardware.reserved <= hardware.memory

    work = workload(within(recipe), ranks, samples, tokens)
    recompute, next_tokens = recipe.training.gradient_checkpointing, _next_tokens(recipe, drafter, work)
    flops = step_flops(drafter, target, recipe.loss, work, recompute=recompute, next_tokens=next_tokens)
    token_bytes = _store_identity(recipe, drafter, text).bytes_per_token
    fitting = find_fitting(recipe, ranks, fits, hardware.is_cpu, context)
    layouts = [layout for p in PLACEMENTS for launch in LAUNCHES if (layout := Layout(p, launch)).exists(ranks)]
    peaks = {layout: peak(memory(recipe, layout)) for layout in layouts}
    layout = _shown(recipe, fitting, peaks)
    hours = _hours(recipe, hardware, work, flops, gathered_bytes(recipe, target, layout, ranks))
    overlap = overlap_of(recipe, layout, hardware.is_cpu)
    computed = 1.0 if not recipe.features.stores else min(1.0, 1 / work.epochs)
    run, best = run_hours(overlap, hours.states, hours.steps, computed)
    return Plan(
        recipe=recipe,
        hardware=hardware,
        target_parameters=sum(p.numel() for p in target.parameters()),
        draft_parameters=sum(p.numel() for p in drafter.parameters()),
        trained_parameters=sum(p.numel() for p in drafter.parameters() if p.requires_grad),
        work=work,
        flops=flops,
        store_bytes=token_bytes * work.tokens,
        store_token_bytes=token_bytes,
        online=not recipe.features.stores,
        layout=layout,
        memory=memory(recipe, layout),
        peaks=peaks,
        target_hours=hours.states + hours.head,
        draft_hours=hours.draft,
        gather_hours=hours.gather,
        overlap=overlap,
        hours=run,
        best_hours=best,
        fitting=fitting,
        notes=notes,
    )


def _shown(recipe: Recipe, fitting: Fitting | None, peaks: Mapping[Layout, int]) -> Layout:
    """The layout whose memory is shown: where the recipe fits as it stands, else the leanest of its placement."""
    placement = recipe.target.placement
    if fitting is not None and fitting.layout.placement == placement:
        return fitting.layout
    own = [layout for layout in peaks if layout.placement == placement]
    return min(own, key=peaks.__getitem__, default=Layout(placement, Launch("zero", 2)))


@dataclass(frozen=True)
class _Hours:
    """Of all ranks, each as if nothing else went on.

    Attributes:
        states: of the target's forwards.
        head: of the rows of its head that labels need; a step has the labels, so they belong to it.
        draft: of the draft's steps.
        gather: of moving a target in shards.
    """

    states: float
    head: float
    draft: float
    gather: float

    @property
    def steps(self) -> float:
        """Of everything that a step computes after the target's forward."""
        return self.gather + self.head + self.draft


def _hours(recipe: Recipe, hardware: Hardware, work: Workload, flops: StepFlops, gathered: float) -> _Hours:
    """At the hardware's assumed use; `gathered`: bytes that a rank receives in a forward of a target in shards."""
    ranks, features = hardware.ranks, recipe.features
    # Online features are computed in each epoch, those of a store once, and recorded ones with the answers. A store
    # that is built beforehand holds samples that less than an epoch does not reach.
    once = work.samples if features.source == "offline" else min(work.seen, work.samples)
    forwards = work.seen if not features.stores else 0 if features.record else once
    states = (flops.target.total - flops.target.head) * forwards + flops.first_time.total * once
    steps = flops.draft * work.seen + flops.merging * work.steps * recipe.training.accumulation * ranks
    target_rate = hardware.peak(recipe.target.dtype) * hardware.target_use * ranks * 3600
    draft_rate = hardware.peak(recipe.training.precision) * hardware.draft_use * ranks * 3600
    return _Hours(
        states=states / target_rate,
        head=flops.target.head * work.seen / target_rate,
        draft=steps / draft_rate,
        gather=_gathers(recipe, work) * gathered / hardware.link / 3600,
    )


def _next_tokens(recipe: Recipe, drafter: Drafter, work: Workload) -> int:
    """Those of a sample that the target's head is asked for: a store holds them, a smaller vocabulary needs them, and
    of greedy answers whose states are recorded they are known."""
    data, features = recipe.data, recipe.features
    if not features.stores and drafter.vocab_map.is_full:
        return 0
    if features.record and data.answers.temperature == 0:
        return max(work.answer_tokens - data.answers.max_new_tokens, 0)
    return work.answer_tokens


def _drafter(recipe: Recipe, text: Any) -> tuple[Drafter, list[str]]:
    """The draft on the meta device, as it trains, and what was assumed about it."""
    notes: list[str] = []
    drafter: Drafter | None = None
    start = recipe.drafter.warm_start
    try:
        if start is not None:
            drafter = draft_shape(recipe.drafter, start)
            if drafter is None:
                notes.append(f"drafter.warm_start {start} is not here: a draft of the recipe's sizes is counted")
        if drafter is None:
            drafter = build_drafter(recipe.drafter, text, device="meta")
        if recipe.drafter.lora is not None:
            add_lora(drafter, recipe.drafter.lora)
    except ValueError as error:
        raise RecipeError(str(error), where="drafter") from None
    return drafter, notes


def _gathers(recipe: Recipe, work: Workload) -> int:
    """Forwards of a target in shards over the whole run."""
    training = recipe.training
    each = -(-training.batch_rows * training.row_length // recipe.features.batch_tokens)
    return work.steps * training.accumulation * each


def _store_identity(recipe: Recipe, drafter: Drafter, text: Any) -> StoreIdentity:
    return StoreIdentity(
        target=recipe.target.model,
        weights_hash="",
        tokenizer_hash="",
        template_hash="",
        taps=tuple(str(tap) for tap in taps_with_final(drafter.feature_spec)),
        hidden_size=text.hidden_size,
        dtype=recipe.features.dtype,
        compute_dtype=recipe.target.dtype,
    )
