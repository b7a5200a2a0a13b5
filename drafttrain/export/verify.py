"""Re-reading an export: what lies on disk must be the draft, as the engine will build it from config.json alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from drafttrain.drafters.lm.hf import new_model, text_config_from
from drafttrain.errors import UserError
from drafttrain.export.ir import DraftIR, ExportError
from drafttrain.export.layout import Layout
from drafttrain.export.stream import differing
from drafttrain.files import read_json
from drafttrain.modeling.blocks import rope_parameters_of
from drafttrain.modeling.vocab_map import VocabMap

WEIGHTS, CONFIG = "model.safetensors", "config.json"
_LAYER = "transformer_layer_config"
Shapes = dict[str, tuple[int, ...]]


def verify_export(folder: Path, ir: DraftIR, layout: Layout, shown: Path | None = None) -> None:
    """Compare a written folder with what was to be written, bit by bit, and with the engine's expectations.

    Args:
        shown: the folder's name in messages.

    Raises:
        ExportError: naming everything that differs.
    """
    try:
        problems = list(_problems(folder, ir, layout))
    except (OSError, SafetensorError, UserError, KeyError, ValueError) as error:
        problems = [f"cannot be read back: {error}"]
    if problems:
        raise ExportError(
            f"the export is not what was to be written: {'; '.join(problems)}",
            where=shown or folder,
            remedy="check the disk, and please report it if it happens again",
        )


def _problems(folder: Path, ir: DraftIR, layout: Layout) -> Iterator[str]:
    config = read_json(folder / CONFIG)
    if config != layout.config:
        yield "config.json differs"
    expected = engine_shapes(ir.family, config)
    with safe_open(folder / WEIGHTS, framework="pt") as file:
        names = set(file.keys())
        for name in sorted(names ^ set(layout.tensors)):
            yield f"tensor {name} is {'extra' if name in names else 'missing'}"
        for name in sorted(names & set(layout.tensors)):
            shape = tuple(file.get_slice(name).get_shape())
            if shape != expected.get(name):
                yield f"tensor {name} is {shape}, the engine expects {expected.get(name)}"
        for name in sorted(set(expected) - names):
            yield f"tensor {name}, which the engine expects, is missing"
        if "d2t" in names:
            VocabMap(file.get_tensor("d2t"), file.get_tensor("t2d"))  # offsets, in range, each id once
    for name in differing(
        folder / WEIGHTS, {name: layout.tensors[name] for name in sorted(names & set(layout.tensors))}
    ):
        yield f"tensor {name} differs"
    if ir.arch is not None and ir.family != "medusa":
        yield from _rotary_problems(config.get(_LAYER, config), ir.arch.rope_parameters)


def _rotary_problems(config: Mapping[str, Any], wanted: Mapping[str, Any]) -> Iterator[str]:
    """Both styles of keys, each read alone, must give the parameters that the draft was trained with."""
    old = {"rope_theta", "rope_scaling", "partial_rotary_factor"}
    for style, left_out in (("rope_parameters", old), ("rope_theta", {"rope_parameters"})):
        view = ConfigView({key: value for key, value in config.items() if key not in left_out})
        if rope_parameters_of(view) != wanted:
            yield f"the rotary parameters under {style} differ from those trained with"


class ConfigView:
    """A JSON config with attributes, as transformers' configs have them."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)


def engine_shapes(family: str, config: Mapping[str, Any]) -> Shapes:
    """Names and shapes of the tensors of the modules that an engine builds for a family from a config alone."""
    match family:
        case "eagle3":
            return _eagle3_shapes(config)
        case "eagle1":
            return _eagle1_shapes(config)
        case "medusa":
            return _medusa_shapes(config)
    return _lm_shapes(config)


def _medusa_shapes(config: Mapping[str, Any]) -> Shapes:
    h, v = config["hidden_size"], config["truncated_vocab_size"]
    heads, layers = range(config["num_heads"]), range(config["num_hidden_layers"])
    shapes: Shapes = {f"blocks.{i}.layers.{j}.weight": (h, h) for i in heads for j in layers}
    if config.get("medusa_fc_bias"):
        shapes |= {f"blocks.{i}.layers.{j}.bias": (h,) for i in heads for j in layers}
    # One head that stands for all is stored as the first.
    own = range(1) if config.get("original_lm_head") else heads
    return shapes | {f"lm_heads.{i}.weight": (v, h) for i in own}


def _lm_shapes(config: Mapping[str, Any]) -> Shapes:
    """Of transformers' own model; a tied head is the embedding and has no tensor."""
    model = new_model(text_config_from(dict(config)), "meta")
    shapes: Shapes = {}
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            shapes[name] = tuple(tensor.shape)
        seen.add(id(tensor))
    return shapes


def _eagle1_shapes(config: Mapping[str, Any]) -> Shapes:
    h = config["hidden_size"]
    shapes: Shapes = {
        "fc.weight": (h, 2 * h),
        "layers.0.post_attention_layernorm.weight": (h,),
        **_layer("layers.0", config, h),
    }
    if config["architectures"] == ["LlamaForCausalLMEagle"]:  # SGLang's
        shapes["fc.bias"] = (h,)
    return shapes


def _eagle3_shapes(config: Mapping[str, Any]) -> Shapes:
    """Of the raw layout, and of speculators', whose first layer has a number."""
    if _LAYER in config:
        flat = {**config[_LAYER], **{key: value for key, value in config.items() if key != _LAYER}}
        return {name.replace("midlayer.", "layers.0."): shape for name, shape in _eagle3_shapes(flat).items()}
    h, vd, v = config["hidden_size"], config["draft_vocab_size"], config["vocab_size"]
    taps = config.get("num_aux_hidden_states", 3)
    options = {**config, **(config.get("eagle_config") or {})}
    shapes: Shapes = {
        "fc.weight": (h, taps * h),
        "norm.weight": (h,),
        "lm_head.weight": (vd, h),
        **_layer("midlayer", config, 2 * h),
    }
    if vd != v:
        shapes |= {"d2t": (vd,), "t2d": (v,)}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"midlayer.{name}.weight"] = (h,)
    for i in range(1, config["num_hidden_layers"]):
        shapes |= _layer(f"layers.{i}", config, h)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"layers.{i}.{name}.weight"] = (h,)
    if options.get("norm_before_fc"):
        shapes["input_norm.weight"] = (taps * h,)
    if config.get("fc_norm"):
        shapes |= {f"fc_norm.{i}.weight": (h,) for i in range(taps)}
    return shapes


def _layer(prefix: str, config: Mapping[str, Any], width: int) -> Shapes:
    """The matrices of a Llama layer whose q, k and v read `width` features."""
    h, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        f"{prefix}.self_attn.q_proj.weight": (q, width),
        f"{prefix}.self_attn.k_proj.weight": (kv, width),
        f"{prefix}.self_attn.v_proj.weight": (kv, width),
        f"{prefix}.self_attn.o_proj.weight": (h, q),
        f"{prefix}.mlp.gate_proj.weight": (inner, h),
        f"{prefix}.mlp.up_proj.weight": (inner, h),
        f"{prefix}.mlp.down_proj.weight": (h, inner),
    }
