"""What `accelerate launch drafttrain/train.py recipes/....yaml` starts: `drafttrain train`, from a checkout too."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main() -> int:
    """Make the package importable and train."""
    package = Path(__file__).resolve().parent
    # Python put this folder first: its modules would hide others of the same name (`config`, `files`).
    kept = [entry for entry in sys.path if Path(entry or ".").resolve() != package]
    root = str(package.parent)
    # An installed package is found already, and site-packages must not come before the standard library.
    installed = root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))
    sys.path[:] = kept if installed else [root, *kept]

    from drafttrain.cli.main import main as command_line

    return command_line(["train", *sys.argv[1:]])


if __name__ == "__main__":
    raise SystemExit(main())
