"""A plan as tables for the terminal, with every assumption spelt out."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from drafttrain.files import size_text
from drafttrain.training.launch import Launch
from drafttrain.training.plan.layout import ALONE, LAUNCHES, PLACEMENTS, Layout
from drafttrain.training.plan.overlap import Overlap
from drafttrain.training.plan.plan import Plan


def plan_tables(plan: Plan) -> Group:
    """Everything that a plan knows."""
    parts: list[RenderableType] = [
        _sizes(plan),
        _flops(plan),
        _memory(plan),
        _layouts(plan),
        _verdict(plan),
        _assumptions(plan),
    ]
    return Group(*parts)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _sizes(plan: Plan) -> Table:
    work = plan.work
    table = _table(f"{plan.recipe.name} on {plan.hardware.name}", "what", "amount")
    table.add_row("target parameters", f"{plan.target_parameters:,}")
    table.add_row(f"draft parameters ({plan.recipe.drafter.family})", f"{plan.draft_parameters:,}")
    table.add_row("of them trained", f"{plan.trained_parameters:,}")
    table.add_row("training samples", f"{work.samples:,}")
    table.add_row("tokens of an epoch", f"{work.tokens:,}")
    table.add_row("optimiser steps", f"{work.steps:,} in {work.epochs:g} epochs")
    table.add_row("features of a token", f"{plan.store_token_bytes:,} bytes in {plan.recipe.features.dtype}")
    would = (
        f"feature store, if it were written (source: {plan.recipe.features.source})" if plan.online else "feature store"
    )
    table.add_row(would, size_text(plan.store_bytes))
    away = plan.layout.placement == "elsewhere" or plan.overlap is Overlap.BESIDE
    where = f", on {plan.hardware.ranks} such devices elsewhere" if away else ""
    table.add_section()
    table.add_row(f"hours of the target{where}", f"{plan.target_hours:,.2f}")
    if plan.gather_hours:
        table.add_row("hours of gathering its blocks", f"{plan.gather_hours:,.2f}")
    table.add_row("hours of the draft", f"{plan.draft_hours:,.2f}")
    shared = plan.overlap is Overlap.SHARED
    table.add_row("hours of the run" + (", one after the other" if shared else ""), f"{plan.hours:,.2f}")
    if shared:
        table.add_row("hours of the run at best, both at once", f"{plan.best_hours:,.2f}")
    table.add_row("CPU-hours" if plan.hardware.is_cpu else "GPU-hours", f"{plan.device_hours:,.2f}")
    return table


def _flops(plan: Plan) -> Table:
    flops, tokens = plan.flops, plan.work.tokens_per_sample
    table = _table("MFLOPs a training token", "part", "forward", "backward")

    def row(name: str, forward: float, backward: float | None) -> None:
        table.add_row(
            name, f"{forward / tokens / 1e6:,.2f}", "" if backward is None else f"{backward / tokens / 1e6:,.2f}"
        )

    row("target", flops.target.total, None)
    if flops.first_time.total:
        row("target's next tokens, first epoch only", flops.first_time.total, None)
    for depth, (ahead, back) in enumerate(zip(flops.forward, flops.backward, strict=True)):
        row(f"draft, depth {depth}", ahead.total, back.total)
    row("draft", sum(f.total for f in flops.forward), sum(f.total for f in flops.backward))
    if flops.merging:
        training = plan.recipe.training
        row("adapters", 0.0, flops.merging / (training.batch_rows * training.row_length) * tokens)
    return table


def _memory(plan: Plan) -> Table:
    table = _table(f"memory of one rank: {layout_name(plan.layout, plan.hardware.ranks)}", "part", "size", "while", "")
    for item in plan.memory:
        table.add_row(item.name, size_text(item.nbytes), item.phase, "exact" if item.exact else "estimate")
    table.add_section()
    table.add_row("at the peak, where all but always take turns", size_text(plan.memory_bytes))
    table.add_row("reserved for libraries and fragmentation", size_text(plan.hardware.reserved), "", "assumed")
    table.add_row("there is", size_text(plan.hardware.memory))
    return table


def _layouts(plan: Plan) -> Table:
    """The peak of a rank in every layout."""
    table = _table("peak of one rank by placement of the target and sharding of the draft", "sharding", *PLACEMENTS)
    room = plan.hardware.memory - plan.hardware.reserved
    for launch in LAUNCHES:
        cells: list[Text] = []
        for placement in PLACEMENTS:
            layout = Layout(placement, launch)
            if layout not in plan.peaks:
                cells.append(Text("-"))
                continue
            needed = plan.peaks[layout]
            mark = " <" if layout == plan.layout else ""
            cells.append(Text(size_text(needed) + mark, style="green" if needed <= room else "red"))
        if any(str(cell) != "-" for cell in cells):
            table.add_row(_sharding(launch), *cells)
    return table


def _verdict(plan: Plan) -> Text:
    fitting, ranks = plan.fitting, plan.hardware.ranks
    if fitting is not None and not fitting.changes:
        return Text(f"It fits: {_launch(plan, fitting.layout)}", style="green")
    needed = size_text(plan.memory_bytes + plan.hardware.reserved)
    if fitting is not None:
        return Text(
            f"It does not fit: {needed} are needed. It would with: {' '.join(fitting.changes)}"
            + (f"\nlaunched as {_launch(plan, fitting.layout)}" if ranks > 1 else ""),
            style="bold red",
        )
    largest = max(plan.memory, key=lambda item: item.nbytes)
    return Text(
        f"It does not fit, and no setting makes it fit: {needed} are needed, of which {size_text(largest.nbytes)} are "
        f"the {largest.name}. Choose more devices, devices with more memory, a smaller target, or a smaller draft.",
        style="bold red",
    )


def _launch(plan: Plan, layout: Layout) -> str:
    """What starts a run of that layout."""
    ranks = plan.hardware.ranks
    if ranks == 1:
        return "in one process"
    nodes = plan.hardware.nodes
    machines = f" --num_machines {nodes}" if nodes > 1 else ""
    command = f"accelerate launch --config_file {layout.config} --num_processes {ranks}{machines} drafttrain/train.py"
    return f"{layout_name(layout, ranks)}:\n    {command} RECIPE"


def layout_name(layout: Layout, ranks: int) -> str:
    """A layout as a person says it."""
    target = {
        "whole": "the target whole on each rank",
        "zero3": "the target in shards",
        "elsewhere": "the target elsewhere",
    }
    if ranks == 1:
        return target[layout.placement]
    return f"{target[layout.placement]}, the draft under {_sharding(layout.launch)}"


def _sharding(launch: Launch) -> str:
    return "DDP" if launch == ALONE else launch.name


def _assumptions(plan: Plan) -> Text:
    hardware, recipe = plan.hardware, plan.recipe
    lines = [
        *plan.work.notes,
        *plan.notes,
        f"the target runs at {hardware.target_use:.0%} of {hardware.peak(recipe.target.dtype) / 1e12:g} TFLOP/s "
        f"({recipe.target.dtype}), the draft at {hardware.draft_use:.0%} of "
        f"{hardware.peak(recipe.training.precision) / 1e12:g} ({recipe.training.precision}): assumed, not measured",
        f"{hardware.ranks} ranks share the samples without loss; exchanging gradients is not counted",
        "hours leave out collecting prompts, answers, measuring acceptance, checkpoints and waiting for data",
        "FLOPs count matrix products and causal attention within each document; all labels are sayable by the draft",
    ]
    if plan.overlap is Overlap.SHARED:
        lines.append(
            "at best a GPU has room for the draft's steps while it computes the target's forwards (training.prefetch), "
            "and the run takes as long as the longer of the two; how near it comes was not measured"
        )
    elif plan.overlap is Overlap.BESIDE:
        lines.append(
            "the target's forwards lie wholly beside the draft's steps (training.prefetch): the run takes as long as "
            "the longer of the two"
        )
    elif plan.overlap is Overlap.BEFORE:
        lines.append("the store is there before the run begins: its hours count for the devices that fill it alone")
    if plan.gather_hours:
        lines.append(
            f"a rank receives {hardware.link / 1e9:,.0f} GB/s of a target in shards; nothing is computed meanwhile, "
            "which prefetching makes better"
        )
    return Text("Assumed:\n" + "\n".join(f"- {line}" for line in lines))
