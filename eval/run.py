"""`python eval/run.py RUN --suite SUITE`: `drafttrain eval` from a checkout that is not installed."""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from drafttrain.cli.main import main

    sys.exit(main(["eval", *sys.argv[1:]]))
