"""Keeps what an evaluation has measured, setting by setting, so that an interrupted one can go on."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from drafttrain.bench.result import AnswerText, DraftResult, Setting
from drafttrain.engine.records import RoundRecord
from drafttrain.errors import UserError
from drafttrain.files import read_json, write_json

UNFINISHED = "unfinished"
"""Folder beside the results; it goes when they are written."""
_KEY = "key.json"


@dataclass(frozen=True)
class SettingRun:
    """What one setting gave.

    Attributes:
        drafts: the baseline first.
        records: of each engine, by draft.
        texts: for the report; of one setting only.
        notes: what a reader has to know.
        finished: when.
    """

    setting: Setting
    drafts: list[DraftResult]
    records: dict[str, list[RoundRecord]]
    texts: list[AnswerText]
    notes: list[str]
    finished: str


_STORED: TypeAdapter[SettingRun] = TypeAdapter(SettingRun)


class Journal:
    """One folder, one file a finished setting.

    Args:
        folder: is made; what an evaluation with another key left in it is removed.
        key: everything that a measurement depends on, in JSON form.
        fresh: begin anew in any case.

    Attributes:
        kept: settings that an evaluation with the same key finished.
        differs: names of the parts of the key in which what was found differs; empty when nothing was there.
    """

    def __init__(self, folder: Path, key: Mapping[str, Any], fresh: bool = False) -> None:
        self.folder = folder
        self.kept: dict[Setting, SettingRun] = {}
        self.differs: list[str] = []
        if folder.exists() and not fresh:
            self._read(dict(key))
        if not self.kept:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / _KEY, dict(key))

    def _read(self, key: dict[str, Any]) -> None:
        files = sorted(path for path in self.folder.glob("*.json") if path.name != _KEY)
        try:
            found = read_json(self.folder / _KEY)
            self.differs = [name for name in key if not isinstance(found, dict) or found.get(name) != key[name]]
            if self.differs or not files:
                self.differs = self.differs if files else []
                return
            runs = [_STORED.validate_python(read_json(path)) for path in files]
        except (UserError, ValidationError):
            self.differs = ["format"]
            return
        self.kept = {run.setting: run for run in runs}

    def add(self, run: SettingRun) -> None:
        """Write a finished setting, whole or not at all."""
        setting = run.setting
        name = f"k{setting.k}-t{setting.temperature:g}-batch{setting.batch}.json"
        write_json(self.folder / name, asdict(run))


def now() -> str:
    """Time for people, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
