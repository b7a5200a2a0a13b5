"""What vLLM and SGLang have in common: EAGLE drafts as layers of Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafttrain.export.ir import DraftIR
from drafttrain.export.layout import named_like, refuse
from drafttrain.export.tap_ids import ordered_taps
from drafttrain.modeling.taps import Tap

_PARTIAL = "partial_rotary_factor"


def rope_keys(parameters: dict[str, Any]) -> dict[str, Any]:
    """Rotary parameters in transformers 5 form and under the older keys: engines read one or the other.

    An engine takes them from the draft's own config; what is missing silently becomes 10000.
    """
    theta = parameters["rope_theta"]
    scaling = {key: value for key, value in parameters.items() if key not in ("rope_theta", _PARTIAL)}
    keys: dict[str, Any] = {
        "rope_parameters": dict(parameters),
        "rope_theta": theta,
        "rope_scaling": None if parameters["rope_type"] == "default" else scaling,
    }
    if _PARTIAL in parameters:
        keys[_PARTIAL] = parameters[_PARTIAL]
    return keys


def llama_config(ir: DraftIR, architecture: str) -> dict[str, Any]:
    """`config.json` of an EAGLE draft."""
    arch = ir.sizes
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "dtype": str(ir.dtype).removeprefix("torch."),
        "hidden_size": arch.hidden_size,
        "intermediate_size": arch.intermediate_size,
        "num_hidden_layers": ir.layers,
        "num_attention_heads": arch.num_heads,
        "num_key_value_heads": arch.num_kv_heads,
        "head_dim": arch.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": arch.rms_norm_eps,
        "vocab_size": arch.vocab_size,
        "max_position_embeddings": arch.max_position_embeddings,
        "tie_word_embeddings": False,
        **rope_keys(arch.rope_parameters),
    }


def eagle1_tensors(ir: DraftIR) -> dict[str, Tensor]:
    """fc and layers.0.*, and nothing else: a head or a first norm would be rejected."""
    return named_like(ir.tensors, {})


def eagle3_options(ir: DraftIR) -> dict[str, Any]:
    """The keys of the switches that are on; `draft_vocab_size` always."""
    norms = ir.norms
    switches = {"norm_before_fc": norms.before_fc, "fc_norm": norms.per_tap, "norm_output": norms.output}
    return {"draft_vocab_size": ir.vocab_map.size, **{key: True for key, on in switches.items() if on}}


def eagle3_tensors(ir: DraftIR) -> dict[str, Tensor]:
    """The weights with fc in layer order, and the vocabulary map of a draft that says fewer tokens than its target.

    A full map must not be there: vLLM has no parameter for it then, and refuses the folder.
    """
    return named_like(_in_layer_order(ir), {} if ir.vocab_map.is_full else ir.vocab_map.state())


def check_eagle3(engine: str, ir: DraftIR) -> None:
    """Refuse what neither engine has."""
    arch = ir.sizes
    if arch.hidden_size != arch.target_hidden_size:
        raise refuse(
            engine,
            f"drafter.hidden_size {arch.hidden_size}",
            f"the draft must be as wide as the target ({arch.target_hidden_size}), whose embedding it reads",
            "train without drafter.hidden_size",
        )
    if Tap.final in ir.taps:
        raise refuse(
            engine,
            "drafter.taps 'final'",
            "the state after the final norm cannot be captured",
            "train on 'pre_norm', the last block's output before that norm",
        )
    if len(set(ir.taps)) != len(ir.taps):
        raise refuse(
            engine,
            f"drafter.taps {[str(tap) for tap in ir.taps]}",
            "a state is captured once, however often it is named",
            "train on distinct taps",
        )


def _in_layer_order(ir: DraftIR) -> dict[str, Tensor]:
    order = [ir.taps.index(tap) for tap in ordered_taps(ir)]
    if order == list(range(len(order))):
        return ir.tensors
    tensors = dict(ir.tensors)
    width = ir.sizes.target_hidden_size
    columns = torch.cat([torch.arange(i * width, (i + 1) * width) for i in order])
    tensors["fc.weight"] = ir.tensors["fc.weight"][:, columns].contiguous()
    if ir.norms.before_fc:
        tensors["input_norm.weight"] = ir.tensors["input_norm.weight"][columns].contiguous()
    if ir.norms.per_tap:
        for place, i in enumerate(order):
            tensors[f"fc_norm.{place}.weight"] = ir.tensors[f"fc_norm.{i}.weight"]
    return tensors
