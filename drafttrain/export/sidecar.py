"""`drafttrain.json` beside an export: what an engine's own config does not hold, for who takes the draft in again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drafttrain import __version__
from drafttrain.errors import CheckpointError
from drafttrain.export.forecast import Forecast
from drafttrain.export.ir import DraftIR
from drafttrain.export.layout import Engine
from drafttrain.files import read_object

SIDECAR, FORMAT = "drafttrain.json", 1


def sidecar(ir: DraftIR, engine: Engine, expected: Forecast | None) -> dict[str, Any]:
    """Content of the file.

    Args:
        expected: what the draft claims to reach.
    """
    return {
        "format": FORMAT,
        "drafttrain": __version__,
        "engine": engine.name,
        "written_for": engine.versions,
        "family": ir.family,
        "taps": [str(tap) for tap in ir.taps],
        "depth": ir.depth,
        "target": ir.target,
        "provenance": ir.provenance,
        "forecast": None if expected is None else {**expected.to_json(), "counters": expected.counters(engine.name)},
    }


def read_sidecar(folder: str | Path) -> dict[str, Any] | None:
    """The file of an export of ours, or None in a folder made elsewhere.

    Raises:
        UserError: it is damaged.
    """
    path = Path(folder) / SIDECAR
    if not path.is_file():
        return None
    found = read_object(path)
    if found.get("format") != FORMAT:
        return None
    wrong = [key for key in ("target", "provenance") if not isinstance(found.get(key), dict)]
    wrong += [] if isinstance(found.get("forecast") or {}, dict) else ["forecast"]
    wrong += [] if isinstance(found.get("depth"), int) else ["depth"]
    if wrong:
        raise CheckpointError(
            f"{', '.join(wrong)}: not as an export writes it", where=path, remedy="copy it again, or remove it"
        )
    return found
