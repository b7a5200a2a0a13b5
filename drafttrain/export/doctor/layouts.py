"""Which family a folder holds, and its tensors under one set of names: those of vLLM's raw layouts.

Known are drafttrain's own exports, EAGLE's original checkpoints, SpecForge, speculators, and Medusa in the old and in
vLLM's layout.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from drafttrain.export.doctor.weights import TensorInfo

_PREFIXES = ("draft_model.", "model.")
_OLD_BLOCK = re.compile(r"^(?:medusa_heads\.|medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)$")
_OLD_HEAD = re.compile(r"^(?:medusa_heads\.|medusa_head\.)?(\d+)\.(\d+)\.weight$")
_BLOCK = re.compile(r"^(?:medusa_heads\.)?(blocks\.\d+\.layers\.\d+\.(?:weight|bias)|lm_heads?\.\d+\.weight)$")
_SPECULATORS = {"eagle3": "eagle3", "eagle": "eagle1", "peagle": "eagle3"}
_FLASH = ("dflash", "DFlash", "dspark", "DSpark", "mtp", "MTP", "mlp_speculator")


def family_of(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str | None:
    """Family of a folder, by its config where that says it, else by its tensors.

    A config that says EAGLE-1 of the tensors of an EAGLE-3 draft is not believed: the tensors are what was trained.
    """
    names = [str(name) for name in (config.get("architectures") or [])]
    kind = str(config.get("speculators_model_type") or config.get("model_type") or "")
    if any(mark in text for mark in _FLASH for text in (*names, kind)):
        return None
    if kind in _SPECULATORS:
        return _SPECULATORS[kind]
    if kind == "medusa" or "MedusaModel" in names or any(_OLD_BLOCK.match(n) or _BLOCK.match(n) for n in tensors):
        return "medusa"
    bare = {_bare(name) for name in tensors}
    if "fc.weight" in bare:
        eagle3 = any("hidden_norm" in name or name in ("d2t", "midlayer.mlp.down_proj.weight") for name in bare)
        return "eagle3" if eagle3 or any("Eagle3" in name for name in names) else "eagle1"
    if any("Eagle3" in name for name in names):
        return "eagle3"
    if any("Eagle" in name for name in names):
        return "eagle1"
    layers = any(re.search(r"(^|\.)(layers|h)\.\d+\.", name) for name in tensors)
    return "draft_lm" if layers and any("embed" in name or "wte" in name for name in tensors) else None


def _bare(name: str) -> str:
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    return name


def canonical_names(family: str | None, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Canonical name -> stored name."""
    if family in ("eagle1", "eagle3"):
        return {_eagle_name(family, name): name for name in tensors}
    if family == "medusa":
        return {_medusa_name(name): name for name in tensors}
    return {name: name for name in tensors}


def _eagle_name(family: str, name: str) -> str:
    name = _bare(name)
    return name.replace("layers.0.", "midlayer.", 1) if family == "eagle3" and name.startswith("layers.0.") else name


def _medusa_name(name: str) -> str:
    if match := _OLD_BLOCK.match(name):
        return f"blocks.{match[1]}.layers.{match[2]}.{match[3]}"
    if match := _OLD_HEAD.match(name):
        return f"lm_heads.{match[1]}.weight"
    return name.removeprefix("medusa_heads.")


_COUNTS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "truncated_vocab_size",
    "target_hidden_size",
    "max_position_embeddings",
    "num_aux_hidden_states",
    "num_heads",
    "medusa_num_heads",
    "medusa_num_layers",
)
_OBJECTS = (
    "eagle_config",
    "rope_parameters",
    "rope_scaling",
    "transformer_layer_config",
    "speculators_config",
    "quantization_config",
)
_TEXTS = ("model_type", "hidden_act", "speculators_model_type")
_LISTS = {"architectures": str, "eagle_aux_hidden_state_layer_ids": int}
_NUMBERS = ("rope_theta", "partial_rotary_factor")


def wrong_type(key: str, value: Any) -> str | None:
    """What a key of a config must hold, if it does not hold that."""
    if value is None:
        return None
    if key in _COUNTS and not (_is_int(value) and value > 0):
        return "a positive integer"
    if key in _OBJECTS and not isinstance(value, dict):
        return "an object"
    if key in _TEXTS and not isinstance(value, str):
        return "a string"
    if key in _NUMBERS and not (_is_int(value) or isinstance(value, float)):
        return "a number"
    if key in _LISTS and not (isinstance(value, list) and all(type(item) is _LISTS[key] for item in value)):
        return f"a list of {'strings' if _LISTS[key] is str else 'integers'}"
    if key in ("rope_parameters", "rope_scaling"):
        inner = [part for part in value.values() if isinstance(part, dict)] or [value]
        if any(wrong_type("rope_theta", part.get("rope_theta")) for part in inner):
            return "an object whose rope_theta is a number"
    return None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def typed(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config, nested ones too, whose values have the type that an engine expects."""
    return {
        key: typed(value) if isinstance(value, dict) and key in ("eagle_config", "transformer_layer_config") else value
        for key, value in config.items()
        if wrong_type(key, value) is None
    }


def mistyped(config: Mapping[str, Any], inside: str = "") -> list[str]:
    """What `typed` leaves out, as sentences."""
    found = []
    for key, value in config.items():
        wanted = wrong_type(key, value)
        if wanted is not None:
            found.append(f"{inside}{key} is {value!r}, not {wanted}")
        elif isinstance(value, dict) and key in ("eagle_config", "transformer_layer_config"):
            found += mistyped(value, f"{inside}{key}.")
    return found


# What vLLM takes from beside `transformer_layer_config`, with its own defaults (vLLM 0.32).
_OUTER: dict[str, Any] = {
    "draft_vocab_size": None,
    "target_hidden_size": None,
    "norm_before_residual": True,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "eagle_aux_hidden_state_layer_ids": None,
}


def flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config as an engine sees it: of speculators' nesting, the inner one with the outer's switches; of an old Medusa
    checkpoint, `medusa_num_heads` under its present name."""
    config = typed(config)
    inner = config.get("transformer_layer_config")
    if "speculators_model_type" in config:
        flat = dict(inner) if isinstance(inner, dict) else {}
        outer = {key: config.get(key, default) for key, default in _OUTER.items()}
        flat.update({key: value for key, value in outer.items() if value is not None})
        return flat
    flat = dict(config)
    for old, new in (("medusa_num_heads", "num_heads"), ("medusa_num_layers", "num_hidden_layers")):
        if old in flat:
            flat.setdefault(new, flat[old])
    return flat
