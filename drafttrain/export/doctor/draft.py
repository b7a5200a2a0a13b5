"""A draft's folder in whatever layout, as it lies there: nothing is converted, nothing is refused."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import Tensor

from drafttrain.errors import UserError
from drafttrain.export.doctor.finding import Mend
from drafttrain.export.doctor.layouts import canonical_names, family_of, flat_config, typed
from drafttrain.export.doctor.weights import TensorInfo, WeightFiles, read_headers, read_tensor
from drafttrain.export.trtllm import SPECULATIVE, read_options
from drafttrain.files import read_json

CONFIG = "config.json"
LAYER_CONFIG = "transformer_layer_config"


@dataclass(frozen=True)
class RawDraft:
    """A folder, perhaps with changes that are not written yet.

    Attributes:
        folder: where it lies.
        config: config.json as stored; empty where there is none.
        weights: headers of the weight files.
        changed: stored name -> tensor that replaces or joins those in the files.
        dropped: stored names that are taken out.
        problems: why config.json, or the options, could not be read.
        options: of TensorRT-LLM's server, beside a draft for it; None where there are none.
    """

    folder: Path
    config: dict[str, Any]
    weights: WeightFiles
    changed: Mapping[str, Tensor] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    problems: tuple[str, ...] = ()
    options: Mapping[str, Any] | None = None

    @cached_property
    def stored(self) -> dict[str, TensorInfo]:
        """Stored name -> header, changes included."""
        found = {name: info for name, info in self.weights.tensors.items() if name not in self.dropped}
        return found | {name: TensorInfo.of(tensor) for name, tensor in self.changed.items()}

    @property
    def is_speculators(self) -> bool:
        """Whether the config is of the kind that the library speculators writes."""
        return "speculators_model_type" in self.config

    @cached_property
    def family(self) -> str | None:
        """Name in drafttrain's registry; None for what is no draft, or of a family that the doctor does not know."""
        return family_of(typed(self.config), self.stored)

    @cached_property
    def names(self) -> dict[str, str]:
        """Canonical name (that of vLLM's raw layout) -> stored name."""
        return canonical_names(self.family, self.stored)

    @cached_property
    def tensors(self) -> dict[str, TensorInfo]:
        """Canonical name -> header."""
        return {name: self.stored[stored] for name, stored in self.names.items()}

    @cached_property
    def flat(self) -> dict[str, Any]:
        """The config as an engine sees it, speculators' nesting undone."""
        return flat_config(self.config)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """Of the tensor with this canonical name, or None."""
        info = self.tensors.get(name)
        return None if info is None else info.shape

    def tensor(self, name: str) -> Tensor:
        """The tensor with this canonical name, on the CPU."""
        stored = self.names[name]
        return self.changed[stored] if stored in self.changed else read_tensor(self.stored[stored], stored)

    def key(self, name: str) -> str:
        """Where config.json has a key of the flat config, dotted; where it would belong if it is not there."""
        inner = self.config.get(LAYER_CONFIG)
        if isinstance(inner, dict) and name not in self.config:
            return f"{LAYER_CONFIG}.{name}"
        return name

    def beside(self, there: str, name: str) -> str:
        """The stored name for a new tensor, prefixed as the one with the canonical name `there` is."""
        stored = self.names[there]
        return stored.removesuffix(there) + name if stored.endswith(there) else name

    def number(self, name: str) -> int | None:
        """An integer of the flat config, or None."""
        value = self.flat.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    def mended(self, mend: Mend) -> RawDraft:
        """The same draft with a change."""
        config = copy.deepcopy(self.config)
        for key in mend.drop_keys:
            parent, last = _walk(config, key)
            parent.pop(last, None)
        for key, value in mend.keys.items():
            parent, last = _walk(config, key)
            parent[last] = copy.deepcopy(value)
        dropped = (self.dropped | set(mend.drop_tensors)) - set(mend.tensors)
        changed = {name: tensor for name, tensor in self.changed.items() if name not in mend.drop_tensors}
        options = self.options
        if mend.options:
            options = {**(options or {}), SPECULATIVE: {**(options or {}).get(SPECULATIVE, {}), **mend.options}}
        return replace(self, config=config, changed={**changed, **mend.tensors}, dropped=dropped, options=options)


def _walk(config: dict[str, Any], key: str) -> tuple[dict[str, Any], str]:
    *outer, last = key.split(".")
    for part in outer:
        inner = config.get(part)
        config[part] = config = dict(inner) if isinstance(inner, dict) else {}
    return config, last


def open_draft(folder: str | Path) -> RawDraft:
    """Read the config and the headers of a draft's folder. What is damaged is kept for the rules to name.

    Raises:
        UserError: no such folder, or one that is no export: a run, or a draft as drafttrain saves it.
    """
    path = Path(folder)
    if not path.is_dir():
        raise UserError("no such folder", where=path, remedy="give the folder of a draft as a serving engine loads it")
    ours = next((place for place in (path, path / "best", path / "draft") if (place / "draft.json").is_file()), None)
    if ours is not None:
        raise UserError(
            "is a run or a saved draft of drafttrain, which no engine loads",
            where=path,
            remedy="export it (`drafttrain export RUN --to vllm`) and give the export's folder",
        )
    if not (path / CONFIG).exists() and any(path.glob("*.gguf")):
        raise UserError(
            "holds a GGUF file, whose tokens must be compared with the target's",
            where=path,
            remedy="use `drafttrain doctor`, which reads such a file with its target",
        )
    config: dict[str, Any] = {}
    problems: list[str] = []
    if not (path / CONFIG).is_file():
        problems.append(f"there is no {CONFIG}")
    else:
        try:
            read = read_json(path / CONFIG)
            if isinstance(read, dict):
                config = read
            else:
                problems.append(f"{CONFIG} holds no object")
        except UserError as raised:
            problems.append(f"{CONFIG}: {raised.what}")
    options = None
    try:
        options = read_options(path)
    except ValueError as raised:
        problems.append(str(raised))
    return RawDraft(path, config, read_headers(path), problems=tuple(problems), options=options)
