"""`python -m drafttrain`."""

from __future__ import annotations

from drafttrain.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
