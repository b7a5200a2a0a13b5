"""TensorRT-LLM cannot run here: its folder is held against rules read in its sources.

TensorRT-LLM 1.4 (2026-11), `_torch/models/modeling_auto.py`, `_torch/models/modeling_speculative.py` and
`llmapi/llm_args.py`. Each rule below says what the source does with a key or a tensor.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.export.ir import ExportError
from drafttrain.export.trtllm import OPTIONS
from drafttrain.export.write import export_draft
from drafttrain.files import read_json
from tests.unit.export.test_export import LAYERS, saved

HIDDEN = 32


def exported(tmp_path: Path, config: DrafterConfig) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any], Path]:
    (written,) = export_draft(saved(tmp_path, config), ["trtllm"], k=3)
    options = yaml.safe_load((written.folder / OPTIONS).read_text())["speculative_config"]
    return (
        read_json(written.folder / "config.json"),
        load_file(written.folder / "model.safetensors"),
        options,
        written.folder,
    )


def resolved_class(config: dict[str, Any]) -> str:
    """modeling_auto: a config with draft_vocab_size is EAGLE-3; the registered name begins with EAGLE3."""
    name = str(config["architectures"][0])
    return "EAGLE3" + name.replace("Eagle3", "") if "draft_vocab_size" in config else name


def modules(config: dict[str, Any], captured: int) -> dict[str, tuple[int, ...]]:
    """Parameters of Eagle3ForCausalLM with one layer, under the names after its own renaming."""
    h, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    nested = config.get("eagle_config", {})
    found: dict[str, tuple[int, ...]] = {
        "model.fc.weight": (h, captured * h),  # only with more than one captured layer
        "model.midlayer.self_attn.q_proj.weight": (q, 2 * h),
        "model.midlayer.self_attn.k_proj.weight": (kv, 2 * h),
        "model.midlayer.self_attn.v_proj.weight": (kv, 2 * h),
        "model.midlayer.self_attn.o_proj.weight": (h, q),
        "model.midlayer.mlp.gate_proj.weight": (inner, h),
        "model.midlayer.mlp.up_proj.weight": (inner, h),
        "model.midlayer.mlp.down_proj.weight": (h, inner),
        "model.midlayer.input_layernorm.weight": (h,),
        "model.midlayer.hidden_norm.weight": (h,),
        "model.midlayer.post_attention_layernorm.weight": (h,),
        "model.norm.weight": (h,),
        "lm_head.weight": (config["draft_vocab_size"], h),
    }
    if config["draft_vocab_size"] != config["vocab_size"]:
        found["model.d2t"] = (config["draft_vocab_size"],)
    if nested.get("norm_before_fc"):  # read from eagle_config, not from the top
        found["model.input_norm.weight"] = (captured * h,)
    if config.get("fc_norm"):
        found |= {f"model.fc_norm.{i}.weight": (h,) for i in range(captured)}
    return found


@pytest.mark.parametrize(
    ("config", "capture"),
    [
        (Eagle3Config(draft_vocab_size=30), None),
        (Eagle3Config(), None),
        (Eagle3Config(fc_norm=True, norm_output=True), None),
        (Eagle3Config(taps=(5, 1), norm_before_fc=True), [0, 4]),
        (Eagle3Config(taps=(1, 3, "pre_norm")), [0, 2, LAYERS - 1]),
    ],
)
def test_eagle3(config: Eagle3Config, capture: list[int] | None, tmp_path: Path) -> None:
    written, tensors, options, folder = exported(tmp_path, config)
    assert resolved_class(written) == "EAGLE3LlamaForCausalLM"
    # Read as attributes, without a default.
    assert {"torch_dtype", "attention_bias", "num_hidden_layers", "max_position_embeddings"} <= set(written)
    # Both are strict models: other keys are errors. Captured layers are a set, sorted when it is read.
    assert options["decoding_type"] == "Eagle3" and options["max_draft_len"] == 3
    assert options["speculative_model"] == str(folder)
    assert options.get("eagle3_layers_to_capture") == capture
    assert set(options) <= {"decoding_type", "max_draft_len", "speculative_model", "eagle3_layers_to_capture"}
    renamed = {
        name if "lm_head" in name else "model." + re.sub(r"^layers\.0\.", "midlayer.", name): tuple(tensor.shape)
        for name, tensor in tensors.items()
        if name != "t2d"
    }
    assert renamed == modules(written, len(capture) if capture else 3)
    assert written.get("norm_output", False) == config.norm_output
    assert "norm_before_fc" not in written and written["hidden_size"] == HIDDEN


def test_a_draft_lm_is_a_draft_target(tmp_path: Path) -> None:
    written, _, options, folder = exported(tmp_path, DraftLMConfig(layers=(0, 3)))
    assert options == {"decoding_type": "Draft_Target", "max_draft_len": 3, "speculative_model": str(folder)}
    assert resolved_class(written) == "LlamaForCausalLM" and written["torch_dtype"] == written["dtype"]
    assert f"--extra_llm_api_options {folder / OPTIONS}" in (folder / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (MedusaConfig(num_heads=3), "drafter.family medusa"),
        (Eagle1Config(), "drafter.family eagle1"),
        (Eagle3Config(norm_before_residual=True), "drafter.norm_before_residual"),
        (Eagle3Config(num_layers=2), "drafter.num_layers 2"),
        (Eagle3Config(taps=(4,)), "drafter.taps 4: with a single state it has no fc"),
        (Eagle3Config(taps=(0, 4, 5)), "drafter.taps 0: it counts outputs"),
    ],
)
def test_what_it_lacks(config: DrafterConfig, named: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=f"trtllm cannot serve this draft: {named}"):
        exported(tmp_path, config)
