"""Prints the memory, in bytes, that exports take at their peak, above what the process held before.

    python -m tests.unit.export.export_memory RUN ENGINE...

The draft's first export warms up what is imported and allocated once; its peak is not counted.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from drafttrain.export.write import export_draft


def peak(reset: bool = False) -> int:
    """The process's largest resident size, since the last reset."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024


def main() -> None:
    """Export for each engine alone."""
    warm, run, *engines = sys.argv[1:]
    with tempfile.TemporaryDirectory() as scratch:
        export_draft(warm, engines, Path(scratch) / "warm")
        for engine in engines:
            before = peak(reset=True)
            export_draft(run, [engine], Path(scratch) / "out")
            print(peak() - before)


if __name__ == "__main__":
    main()
