"""A draft, the target it is to serve and the engine: what a rule looks at."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from drafttrain.export.doctor.draft import RawDraft
from drafttrain.export.doctor.target import TargetFacts
from drafttrain.export.tap_ids import KEY
from drafttrain.export.trtllm import CAPTURED, SPECULATIVE
from drafttrain.modeling.blocks import rope_parameters_of

ENGINES = {"vllm": "vLLM", "sglang": "SGLang", "trtllm": "TensorRT-LLM"}
"""Those that the doctor judges for, by the names that users give -> their own."""
EAGLE = ("eagle1", "eagle3")


class View:
    """A JSON config with attributes, as transformers' configs have them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)


@dataclass(frozen=True)
class Case:
    """What a rule looks at.

    Attributes:
        draft: the folder.
        target: None where it is not known; rules that need it are left out then.
        engine: name of the engine that is to serve it.
        about: what drafttrain wrote beside its own export (`drafttrain.json`), else None.
    """

    draft: RawDraft
    target: TargetFacts | None
    engine: str = "vllm"
    about: Mapping[str, Any] | None = None

    @property
    def facts(self) -> TargetFacts:
        """The target, in rules that are only called with one."""
        assert self.target is not None
        return self.target

    @property
    def engine_name(self) -> str:
        """As its makers write it."""
        return ENGINES.get(self.engine, self.engine)

    @cached_property
    def hidden(self) -> int | None:
        """Width of the draft: that of its config, else of its tensors."""
        shape = self.draft.shape("fc.weight") or self.draft.shape("norm.weight")
        return self.draft.number("hidden_size") or (shape[0] if shape else None)

    @cached_property
    def tap_width(self) -> int | None:
        """Width of one of the target's states, as the engine takes it."""
        return self.draft.number("target_hidden_size") or (self.target.hidden_size if self.target else self.hidden)

    @cached_property
    def top_ids(self) -> list[int] | None:
        """Layer ids at the top level."""
        return _ids(self.draft.flat.get(KEY))

    @cached_property
    def nested_ids(self) -> list[int] | None:
        """Layer ids inside `eagle_config`."""
        nested = self.draft.flat.get("eagle_config")
        return _ids(nested.get(KEY)) if isinstance(nested, dict) else None

    @property
    def speculative(self) -> Mapping[str, Any]:
        """What the options beside a draft for TensorRT-LLM say of it; empty without such options."""
        found: Mapping[str, Any] = (self.draft.options or {}).get(SPECULATIVE, {})
        return found

    @cached_property
    def captured(self) -> list[int] | None:
        """Layer ids in those options."""
        return _ids(self.speculative.get(CAPTURED))

    @cached_property
    def taps_in_fc(self) -> float | None:
        """States that fc was trained on, by its width."""
        shape, width = self.draft.shape("fc.weight"), self.tap_width
        return None if shape is None or len(shape) != 2 or not width else shape[1] / width

    @cached_property
    def rows(self) -> int | None:
        """Rows of the draft's own head."""
        shape = self.draft.shape("lm_head.weight")
        return shape[0] if shape else None

    @cached_property
    def vocab_size(self) -> int | None:
        """Of the target; by the draft's config where the target is not known."""
        return self.target.vocab_size if self.target else self.draft.number("vocab_size")

    @cached_property
    def d2t(self) -> Tensor | None:
        """int64 [Vd], as stored."""
        return self._map("d2t")

    @cached_property
    def t2d(self) -> Tensor | None:
        """bool [V], as stored."""
        found = self._map("t2d")
        return None if found is None else found.to(torch.bool)

    def _map(self, name: str) -> Tensor | None:
        info = self.draft.tensors.get(name)
        if info is None or len(info.shape) != 1 or info.dtype not in ("I64", "I32", "BOOL"):
            return None
        found = self.draft.tensor(name)
        return found.to(torch.int64) if found.dtype != torch.bool else found

    @cached_property
    def rope(self) -> dict[str, Any]:
        """Rotary parameters that a reader of both styles of keys finds."""
        return rope_parameters_of(View(self.draft.flat))

    def layer_prefixes(self) -> list[str]:
        """Of the decoder layers that are stored, such as `midlayer`."""
        found = {
            ".".join(parts[: 1 if parts[0] == "midlayer" else 2])
            for parts in (name.split(".") for name in self.draft.tensors)
            if parts[0] in ("midlayer", "layers") and len(parts) > 2
        }
        return sorted(found, key=lambda prefix: (prefix != "midlayer", prefix))


def engine_for(draft: RawDraft, about: Mapping[str, Any] | None) -> str:
    """The engine that a folder was made for, as far as it says so; else vLLM."""
    if draft.options is not None:
        return "trtllm"
    named = str((about or {}).get("engine"))
    return named if named in ENGINES else "vllm"


def _ids(value: Any) -> list[int] | None:
    is_list = isinstance(value, list) and all(type(item) is int for item in value)
    return list(value) if value and is_list else None


def listed(values: Iterable[Any], limit: int = 6) -> str:
    """Some values in a sentence."""
    texts = [str(value) for value in values]
    return ", ".join(texts[:limit]) + (f" and {len(texts) - limit} more" if len(texts) > limit else "")


def floats(case: Case) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors, one in memory at a time."""
    for name, info in case.draft.tensors.items():
        if info.is_float:
            yield name, case.draft.tensor(name)
