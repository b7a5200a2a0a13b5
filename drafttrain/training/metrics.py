"""metrics.jsonl: one JSON object a line, for programs and for people without a tracker."""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path
from typing import Any

import torch

from drafttrain.files import append_jsonl, atomic_file


class MetricsLog:
    """Appends records; on resume, what a killed run logged after its last checkpoint is cut off.

    Args:
        path: the file.
        step: steps done when the run starts or resumes.
    """

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        if path.exists():
            self._cut(step)

    def _cut(self, step: int) -> None:
        kept = []
        # Not splitlines: a sample's id may hold other marks of a line's end.
        for line in self.path.read_text(encoding="utf-8").split("\n"):
            try:
                if json.loads(line)["step"] <= step:
                    kept.append(line)
            except (json.JSONDecodeError, KeyError, TypeError):
                continue  # a kill tore this line
        with atomic_file(self.path) as partial:
            partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def on_record(self, record: dict[str, Any]) -> None:
        """Append one record."""
        append_jsonl(self.path, record)

    def close(self) -> None:
        """Nothing is held open."""


def peak_memory_mib(device: torch.device) -> float:
    """Peak memory of this process: allocated on the GPU, resident on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10
