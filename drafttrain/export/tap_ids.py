"""Layer ids in an engine's own numbering. Nowhere else does the project leave its canonical taps."""

from __future__ import annotations

from typing import Any

from drafttrain.export.ir import DraftIR
from drafttrain.export.layout import refuse
from drafttrain.modeling.taps import Tap, vllm_id

KEY = "eagle_aux_hidden_state_layer_ids"


def sglang_id(tap: Tap, n_layers: int) -> int:
    """The output of that layer, so one lower."""
    return vllm_id(tap, n_layers) - 1


def trtllm_id(tap: Tap, n_layers: int) -> int:
    """The output of that layer, as in SGLang; here the last layer's can be captured, too."""
    return vllm_id(tap, n_layers) - 1


def ordered_taps(ir: DraftIR) -> list[Tap]:
    """The taps in the order in which the target computes them: engines concatenate in that order."""
    return sorted(ir.taps, key=lambda tap: vllm_id(tap, ir.sizes.target_layers))


def is_default(ir: DraftIR) -> bool:
    """Whether the engines read these states when no ids are given."""
    n = ir.sizes.target_layers
    return len(ir.taps) == 3 and {vllm_id(tap, n) for tap in ir.taps} == {2, n // 2, n - 3}


def tap_keys(ir: DraftIR, engine: str) -> tuple[dict[str, Any], list[str]]:
    """Keys of config.json that say what the target hands over, and notes on the conversion.

    Left out for the default states, which every runner of both engines finds by itself. Otherwise the
    top-level ids, which only vLLM reads, are in vLLM's numbering and the nested ones in SGLang's: a folder
    that is given to the other engine still means the same states.

    Raises:
        ExportError: states that have no id in SGLang, which captures at the inputs of blocks after the first.
    """
    n = ir.sizes.target_layers
    names = ", ".join(str(tap) for tap in ordered_taps(ir))
    if is_default(ir):
        return {}, [f"taps {names} are the default of the engine: no layer ids are written"]
    unknown = [str(tap) for tap in ir.taps if not 0 <= sglang_id(tap, n) < n - 1]
    if unknown and engine == "sglang":
        raise refuse(
            engine,
            f"drafter.taps {', '.join(unknown)}",
            "neither the embedding nor the output of the last block can be captured",
            "train on inputs of later blocks, or export it --to vllm",
        )
    top = [vllm_id(tap, n) for tap in ordered_taps(ir)]
    keys: dict[str, Any] = {"num_aux_hidden_states": len(top), KEY: top}
    notes = [f"taps {names} -> {KEY} {top} (vLLM: the input of that layer)"]
    if not unknown:
        nested = [sglang_id(tap, n) for tap in ordered_taps(ir)]
        keys["eagle_config"] = {"use_aux_hidden_state": True, KEY: nested}
        notes.append(f"taps {names} -> eagle_config.{KEY} {nested} (SGLang: the output of that layer, one lower)")
    return keys, notes
