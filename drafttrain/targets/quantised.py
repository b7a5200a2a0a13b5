"""What a checkpoint's config says of quantised weights, against what its files hold.

transformers leaves out a quantisation that it does not know, de-quantises weights that are plain already, and casts
packed ones whose config names none, without their scales: each with a line in its log at most.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from drafttrain.errors import TargetError

_PLAIN = ("F64", "F32", "F16", "BF16")
_NO_WEIGHT = ("BOOL", "I64")
"""Types in safetensors' headers. All others (8-bit floats, packed integers) are of quantised weights."""
_IN_BLOCK = re.compile(r"\.\d+\.")
_MASKS = ("bias", "position_ids")
_SCALE = re.compile(r"(?:weight_scale(?:_inv)?|\.scales|\.absmax|\.SCB)$")
# Their weights lie plain on the disk and are quantised as they are used.
_QUANTISED_LATER = ("bitnet",)


def check_quantisation(config: Any, files: Sequence[Path], where: str, *, blocks: bool = True) -> None:
    """Refuse a checkpoint whose config and weights contradict each other. Headers of safetensors files are read alone.

    Args:
        config: the Hugging Face config.
        files: that hold the weights; others than safetensors say nothing here.
        blocks: whether the decoder blocks are read, too; who runs them elsewhere may know other quantisations.

    Raises:
        TargetError: quantised weights that nothing says how to read, or plain ones that are said to be quantised.
    """
    method, known = _method(config)
    packed, scaled, plain = _headers(files)
    if not blocks:
        packed = {name: dtype for name, dtype in packed.items() if not _IN_BLOCK.search(name)}
    if packed and method is None:
        raise TargetError(
            f"{_named(packed)} stored as {', '.join(sorted(set(packed.values())))}, and its config.json names no "
            "quantisation: they would be read without their scales",
            where=where,
            remedy="fetch the config.json that belongs to these weights, with its quantization_config",
        )
    if packed and not known:
        raise TargetError(
            f"its weights are quantised by {method!r}, which this transformers does not know: they would be read "
            "without their scales",
            where=where,
            remedy="give the checkpoint in full precision, or install a release of transformers that knows it",
        )
    if blocks and method is not None and method not in _QUANTISED_LATER and plain and not packed and not scaled:
        raise TargetError(
            f"its config.json says that the weights are quantised ({method}), and all of them are plain "
            f"{', '.join(sorted(plain))}",
            where=where,
            remedy="take quantization_config out of its config.json if they were de-quantised, else fetch the weights "
            "that belong to it",
        )


def check_scales(unexpected: Iterable[str], where: str) -> None:
    """Refuse weights whose scales found no place in the model.

    Args:
        unexpected: tensors of the checkpoint that transformers left out.

    Raises:
        TargetError: there are scales of weights among them.
    """
    left = sorted(name for name in unexpected if _SCALE.search(name))
    if left:
        raise TargetError(
            f"the scales of its quantised weights would be left out: {_named(left)} not known to transformers",
            where=where,
            remedy="give the checkpoint in full precision, or in a form of quantisation that transformers reads",
        )


def _method(config: Any) -> tuple[str | None, bool]:
    """What the config names, and whether transformers has it."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    text = config.get_text_config()
    found = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    if not found:
        return None, False
    values = found if isinstance(found, dict) else found.to_dict()
    if values.get("load_in_4bit") or values.get("load_in_8bit"):
        return "bitsandbytes", True
    method = str(values.get("quant_method"))
    return method, method in AUTO_QUANTIZATION_CONFIG_MAPPING


def _headers(files: Sequence[Path]) -> tuple[dict[str, str], bool, set[str]]:
    """(packed matrices and their types, whether there are scales of weights, types of plain matrices)."""
    packed: dict[str, str] = {}
    plain: set[str] = set()
    scaled = False
    for path in files:
        if path.suffix != ".safetensors" or not path.name.startswith("model"):
            continue  # transformers reads no others
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 (is no dict)
                    scaled |= _SCALE.search(name) is not None
                    header = file.get_slice(name)
                    dtype = str(header.get_dtype())
                    if len(header.get_shape()) < 2 or dtype in _NO_WEIGHT or name.endswith(_MASKS):
                        continue
                    if dtype in _PLAIN:
                        plain.add(dtype)
                    else:
                        packed[name] = dtype
        except SafetensorError:
            continue  # damaged: loading says so
    return packed, scaled, plain


def _named(names: Iterable[str]) -> str:
    listed = sorted(names)
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return f"{', '.join(listed[:3])}{more} {'is' if len(listed) == 1 else 'are'}"
