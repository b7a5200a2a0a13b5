"""SGLang cannot run here: its folder is held against rules read in its sources.

SGLang 0.5.23 (2026-11), `srt/models/llama_eagle3.py`, `llama_eagle.py`, `llama.py`, `srt/speculative/spec_info.py` and
`srt/model_executor/model_runner_components/spec_aux_hidden_state.py`. Each rule below says what the source does with a
key or a tensor. None of these modules can be imported without its GPU kernels.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.export.ir import ExportError
from drafttrain.export.write import export_draft
from drafttrain.files import read_json
from tests.unit.export.test_export import LAYERS, saved

HIDDEN = 32
ALGORITHMS = {"DFLASH", "UNO", "DSPARK", "EAGLE", "EAGLE3", "FROZEN_KV_MTP", "STANDALONE", "NGRAM", "NONE"}
Shapes = dict[str, tuple[int, ...]]


def exported(tmp_path: Path, config: DrafterConfig) -> tuple[dict[str, Any], Shapes, str]:
    (written,) = export_draft(saved(tmp_path, config), ["sglang"], k=3)
    tensors = load_file(written.folder / "model.safetensors")
    return (
        read_json(written.folder / "config.json"),
        {name: tuple(tensor.shape) for name, tensor in tensors.items()},
        written.command,
    )


def layer(config: dict[str, Any], width: int) -> Shapes:
    """LlamaDecoderLayer: q, k and v of a width, biases where attention_bias or bias is true."""
    assert not config.get("attention_bias", False) and not config.get("bias", False)
    h, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "self_attn.q_proj.weight": (q, width),
        "self_attn.k_proj.weight": (kv, width),
        "self_attn.v_proj.weight": (kv, width),
        "self_attn.o_proj.weight": (h, q),
        "mlp.gate_proj.weight": (inner, h),
        "mlp.up_proj.weight": (inner, h),
        "mlp.down_proj.weight": (h, inner),
        "post_attention_layernorm.weight": (h,),
    }


def states_read(config: dict[str, Any]) -> int:
    """llama_eagle3: num_aux_hidden_states, else the nested ids, else three."""
    nested = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    return int(config.get("num_aux_hidden_states") or (len(nested) if nested else 3))


def captured(config: dict[str, Any], n_layers: int) -> list[int]:
    """spec_aux_hidden_state reads the nested ids alone; llama captures at the input of the layer behind each."""
    nested = config.get("eagle_config")
    if nested is None or "eagle_aux_hidden_state_layer_ids" not in nested:
        return [2, n_layers // 2, n_layers - 3]
    assert nested.get("use_aux_hidden_state", True)
    return [i + 1 for i in nested["eagle_aux_hidden_state_layer_ids"]]


def eagle3_parameters(config: dict[str, Any]) -> Shapes:
    """LlamaForCausalLMEagle3, under its names; the embedding is the target's."""
    h, states = config["hidden_size"], states_read(config)
    found: Shapes = {
        "model.fc.weight": (h, states * h),
        "model.norm.weight": (h,),
        # draft_vocab_size is read without a default; without a tied head there is always one of its own.
        "lm_head.weight": (config["draft_vocab_size"], h),
        **{f"model.layers.0.{name}": shape for name, shape in layer(config, 2 * h).items()},
        "model.layers.0.input_layernorm.weight": (h,),
        "model.layers.0.hidden_norm.weight": (h,),
    }
    nested = config.get("eagle_config") or {}
    if nested.get("norm_before_fc", config.get("norm_before_fc", False)):
        found["model.input_norm.weight"] = (states * h,)
    if config.get("fc_norm"):
        found |= {f"model.fc_norm.{i}.weight": (h,) for i in range(states)}
    return found


@pytest.mark.parametrize(
    ("config", "inputs"),
    [
        (Eagle3Config(draft_vocab_size=30), [2, 4, 5]),
        (Eagle3Config(), [2, 4, 5]),
        (Eagle3Config(fc_norm=True, norm_output=True), [2, 4, 5]),
        (Eagle3Config(taps=(5, 1), norm_before_fc=True), [1, 5]),
    ],
)
def test_eagle3(config: Eagle3Config, inputs: list[int], tmp_path: Path) -> None:
    written, shapes, command = exported(tmp_path, config)
    assert written["architectures"] == ["LlamaForCausalLMEagle3"] and written["tie_word_embeddings"] is False
    assert captured(written, LAYERS) == inputs and states_read(written) == len(inputs)
    # Its loader renames midlayer, reads d2t as offsets and leaves t2d out.
    renamed = {re.sub(r"^midlayer\.", "layers.0.", name): shape for name, shape in shapes.items()}
    assert ("d2t" in renamed) == (config.draft_vocab_size is not None)
    renamed = {
        name if name == "lm_head.weight" else f"model.{name}": shape
        for name, shape in renamed.items()
        if name not in ("d2t", "t2d")
    }
    assert renamed == eagle3_parameters(written)
    assert bool(written.get("norm_output", False)) == config.norm_output
    # EAGLE would skip fc: the algorithm must be the third one's.
    assert re.search(r"--speculative-algorithm (\w+)", command).group(1) == "EAGLE3"  # type: ignore[union-attr]


def test_eagle1(tmp_path: Path) -> None:
    """llama_eagle: two layers' worth of input, a bias always, no first norm; a head is thrown away."""
    written, shapes, command = exported(tmp_path, Eagle1Config())
    h = written["hidden_size"]
    assert written["architectures"] == ["LlamaForCausalLMEagle"]
    assert shapes == {
        "fc.weight": (h, 2 * h),
        "fc.bias": (h,),
        **{f"layers.0.{name}": shape for name, shape in layer(written, h).items()},
    }
    assert "--speculative-algorithm EAGLE " in command


def test_a_draft_lm_stands_alone(tmp_path: Path) -> None:
    written, _, command = exported(tmp_path, DraftLMConfig(layers=(0, 3)))
    assert written["architectures"] == ["LlamaForCausalLM"]
    assert "--speculative-algorithm STANDALONE " in command


def test_the_command_is_one_of_chains(tmp_path: Path) -> None:
    """spec_info: the algorithms by name; chains of k tokens are k steps of one branch, root included in the count."""
    for i, config in enumerate((Eagle3Config(), Eagle1Config(), DraftLMConfig(layers=(0,)))):
        _, _, command = exported(tmp_path / str(i), config)
        options = dict(re.findall(r"--speculative-(\S+) (\S+)", command))
        assert options["algorithm"] in ALGORITHMS
        assert (options["num-steps"], options["eagle-topk"], options["num-draft-tokens"]) == ("3", "1", "4")


def test_a_single_state_goes_past_fc(tmp_path: Path) -> None:
    """llama_eagle3: fc is left out, without a word, where the states are as wide as an embedding."""
    with pytest.raises(ExportError, match=r"sglang cannot serve this draft: drafter.taps 4: states as wide"):
        exported(tmp_path, Eagle3Config(taps=(4,)))
