"""Config and weights that say different things of a quantisation: refused in one sentence, never trained on in silence.

What transformers 5.24 does of itself, on a CPU: see the docstrings.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafttrain.errors import TargetError
from drafttrain.files import read_json, write_json
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.ends import load_ends
from drafttrain.targets.load import load_target
from tests.chats import CHATML, chat_tokenizer
from tests.support import tiny_hf

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
Tensors = dict[str, Tensor]


def packed(tensors: Tensors, scale: str) -> Tensors:
    """Matrices of the blocks as 8-bit floats, with a scale for each block of 16 x 16, under a name."""
    found: Tensors = {}
    for name, weight in tensors.items():
        if not name.endswith("_proj.weight"):
            found[name] = weight
            continue
        rows, columns = weight.shape
        scales = torch.full((rows // 16, columns // 16), float(weight.abs().max()) / 448)
        found[name] = (weight.float() / scales[0, 0]).to(torch.float8_e4m3fn)
        found[name.removesuffix("weight") + scale] = scales
    return found


def saved(
    folder: Path, quantisation: dict[str, Any] | None = None, change: Callable[[Tensors], Tensors] = lambda t: t
) -> TargetConfig:
    tokenizer = chat_tokenizer(CHATML)
    tiny_hf("llama", vocab_size=len(tokenizer)).to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if quantisation is not None:
        values = read_json(folder / "config.json")
        write_json(folder / "config.json", {**values, "quantization_config": quantisation})
    file = folder / "model.safetensors"
    save_file(change(load_file(file)), file, metadata={"format": "pt"})
    return TargetConfig(model=str(folder), dtype="float32", device="cpu")


def refused(config: TargetConfig) -> str:
    with pytest.raises(TargetError) as refusal:
        load_target(config)
    assert refusal.value.remedy
    return str(refusal.value)


@pytest.mark.parametrize("method", ["fp8", "modelopt", "mxfp4", "gptq"])
def test_plain_weights_that_are_said_to_be_quantised(method: str, tmp_path: Path) -> None:
    """De-quantised in vain, or loaded as they are with a line in the log."""
    said = refused(saved(tmp_path / "target", {**FP8, "quant_method": method}))
    assert f"says that the weights are quantised ({method}), and all of them are plain BF16" in said
    assert "take quantization_config out" in said


def test_packed_weights_whose_config_says_nothing(tmp_path: Path) -> None:
    """Cast to the dtype asked for, their scales left out: the states of another model."""
    said = refused(saved(tmp_path / "target", None, lambda t: packed(t, "weight_scale_inv")))
    assert "and 25 more are stored as F8_E4M3, and its config.json names no quantisation" in said


def test_integers_whose_config_says_nothing(tmp_path: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    said = refused(saved(tmp_path / "target", None, lambda t: {**t, name: t[name].to(torch.int8)}))
    assert f"{name} is stored as I8" in said


def test_a_quantisation_that_transformers_does_not_know(tmp_path: Path) -> None:
    """It leaves the quantisation out and goes on."""
    config = saved(tmp_path / "target", {"quant_method": "modelopt"}, lambda t: packed(t, "weight_scale"))
    assert "quantised by 'modelopt', which this transformers does not know" in refused(config)


def test_blocks_that_run_elsewhere_may_be_quantised_in_any_way(tmp_path: Path) -> None:
    """By vLLM, say: what is read here is embedding, norm and head."""
    config = saved(tmp_path / "target", {"quant_method": "modelopt"}, lambda t: packed(t, "weight_scale"))
    assert torch.equal(load_ends(config).head().weight, load_target(saved(tmp_path / "plain")).head().weight)
    head = saved(
        tmp_path / "head", None, lambda t: {**t, "lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}
    )
    with pytest.raises(TargetError, match=r"lm_head\.weight is stored as F8_E4M3"):
        load_ends(head)


def test_scales_under_a_name_that_transformers_does_not_read(tmp_path: Path) -> None:
    """As other tools write them: the weights would be read without."""
    config = saved(tmp_path / "target", FP8, lambda t: packed(t, "weight_scale"))
    with pytest.raises(TargetError, match=r"scales of its quantised weights would be left out: model\.layers\.0"):
        load_target(config)


def test_what_belongs_together_is_loaded(tmp_path: Path) -> None:
    """Without a GPU that computes in fp8, transformers de-quantises."""
    plain = load_target(saved(tmp_path / "plain"))
    target = load_target(saved(tmp_path / "target", FP8, lambda t: packed(t, "weight_scale_inv")))
    name = "model.layers.1.mlp.gate_proj.weight"
    ours, theirs = (model.hf.get_parameter(name) for model in (target, plain))
    torch.testing.assert_close(ours, theirs, rtol=0.07, atol=0.02)
    assert not torch.equal(ours, theirs)


def test_weights_that_are_quantised_as_they_are_used_may_be_plain(tmp_path: Path) -> None:
    from drafttrain.targets.quantised import check_quantisation

    config = saved(tmp_path / "target").model
    hf = tiny_hf("llama").config
    hf.quantization_config = {"quant_method": "bitnet", "quantization_mode": "online"}
    check_quantisation(hf, [Path(config) / "model.safetensors"], config)
    hf.quantization_config = {"quant_method": "aqlm"}
    with pytest.raises(TargetError, match="plain BF16"):
        check_quantisation(hf, [Path(config) / "model.safetensors"], config)
