"""The line a user watches: loss, accuracy by depth, tokens/s, time left."""

from __future__ import annotations

import math
import time
from datetime import timedelta
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


class ProgressLine:
    """A live line on a terminal, plain lines elsewhere.

    Args:
        console: where to write.
        total_steps: steps of the whole run.
        step: steps done already.
    """

    def __init__(self, console: Console, total_steps: int, step: int = 0) -> None:
        self.console = console
        self.total_steps = total_steps
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("[bold]training"),
                BarColumn(bar_width=24),
                MofNCompleteColumn(),
                TextColumn("{task.fields[text]}"),
                TimeElapsedColumn(),
                console=console,
            )
            self._task = self._progress.add_task("training", total=total_steps, completed=step, text="")
            self._progress.start()

    def on_record(self, record: dict[str, Any]) -> None:
        """Show a record of the metrics log."""
        if record["kind"] == "train":
            text = describe(record, self.total_steps)
            if self._progress is None:
                self.console.print(f"step {record['step']}/{self.total_steps}  {text}", highlight=False, soft_wrap=True)
            else:
                self._progress.update(self._task, completed=record["step"], text=text)
        elif record["kind"] == "eval":
            alpha = " ".join(f"{value:.2f}" for value in record["alpha"])
            self.console.print(
                f"step {record['step']}  acceptance length {record['tau']:.3f} at k={record['k']}"
                f" (by depth {alpha}){'  best so far' if record['best'] else ''}",
                highlight=False,
                soft_wrap=True,
            )
        elif record["kind"] == "guard":
            back = "" if record["to_step"] is None else f", back to the draft of step {record['to_step']}"
            self.console.print(
                f"step {record['step']} dropped{back}: {record['what']} (samples {record['samples']})",
                highlight=False,
                soft_wrap=True,
                markup=False,
            )

    def close(self) -> None:
        """Leave the terminal as it was."""
        if self._progress is not None:
            self._progress.stop()


def describe(record: dict[str, Any], total_steps: int) -> str:
    """The text of a training record, with the shares of the time that were spent waiting for data, in the target and in
    the draft; batches that are made ahead take the target's beside the rest."""
    accuracy = " ".join(f"{value:.3f}" if value is not None else "-" for value in record["accuracy"])
    left = (total_steps - record["step"]) * record["seconds_per_step"]
    dropped = f"  {record['dropped']} dropped" if record["dropped"] else ""
    seconds = record["tokens"] / record["tokens_per_s"] if record["tokens_per_s"] else math.inf
    shares = "  ".join(f"{name} {record[f'{name}_s'] / seconds:.0%}" for name in ("data", "target", "draft"))
    return (
        f"loss {record['loss']:.4f}  acc {accuracy}  {record['tokens_per_s']:,.0f} tok/s{dropped}"
        f"  ETA {timedelta(seconds=round(left))}  {shares}  {record['memory_mib']:,.0f} MiB"
    )


class ConsoleReporter:
    """Lines of the stages before training; progress of a long one at most every few seconds.

    Args:
        console: where to write.
        quiet: write nothing (ranks other than the main one).
    """

    def __init__(self, console: Console, *, quiet: bool = False, every_s: float = 5.0) -> None:
        self.console, self.quiet, self.every_s = console, quiet, every_s
        self._began: dict[str, tuple[float, int]] = {}
        self._whole: set[str] = set()
        self._shown = 0.0

    def say(self, message: str) -> None:
        """A line."""
        if not self.quiet:
            self.console.print(message, highlight=False, soft_wrap=True, markup=False)

    def progress(self, task: str, done: int, total: int) -> None:
        """`done` of `total` units of a task."""
        now = time.monotonic()
        began, before = self._began.setdefault(task, (now, done))
        if done < total and now - self._shown < self.every_s:
            return
        if done >= total:
            if task in self._whole:
                return
            self._whole.add(task)
        self._shown = now
        # What an earlier run had done says nothing of this one's pace, nor does the first call.
        pace = (now - began) / (done - before) if done > before else None
        left = "" if pace is None else f"  ETA {timedelta(seconds=round(pace * (total - done)))}"
        self.say(f"{task}: {done}/{total}{left}")
