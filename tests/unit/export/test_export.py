"""Exports: keys, shapes and configs that engines load, checked by building what they build; refusals by name."""

from __future__ import annotations

import json
import os
import shlex
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.drafters.saving import save_draft
from drafttrain.errors import CheckpointError
from drafttrain.export.ir import DraftIR, ExportError, read_ir
from drafttrain.export.layout import Layout
from drafttrain.export.sglang import SGLANG
from drafttrain.export.tap_ids import KEY
from drafttrain.export.verify import verify_export
from drafttrain.export.vllm import VLLM
from drafttrain.export.write import ENGINES, export_draft
from drafttrain.files import read_json, sha256_file, write_json
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.vocab_map import VocabMap
from tests.draft_support import new_draft
from tests.support import VOCAB, tiny_hf, tiny_target

LAYERS = 8
TARGET = {
    "name": "some/target",
    "weights_hash": "w" * 64,
    "tokenizer_hash": "t" * 64,
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "n_layers": LAYERS,
}
CONFIGS: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(draft_vocab_size=30),
    "eagle3-full": Eagle3Config(),
    "eagle3-3.1": Eagle3Config(fc_norm=True, norm_output=True),
    "eagle3-taps": Eagle3Config(taps=(5, 1), norm_before_fc=True),
    "eagle1": Eagle1Config(depth=3),
    "medusa": MedusaConfig(num_heads=2, num_layers=2),
    "draft_lm": DraftLMConfig(layers=(0, 3)),
}
SERVED = {
    "eagle3": {"vllm", "speculators", "sglang", "trtllm"},
    "eagle1": {"vllm", "sglang"},
    "medusa": {"vllm"},
    "draft_lm": {"vllm", "sglang", "trtllm", "hf"},
}
FORMS = [(name, engine) for name in CONFIGS for engine in ENGINES if engine in SERVED[CONFIGS[name].family]]


def target(kind: str = "llama", **changes: Any) -> CausalLM:
    return tiny_target(kind, num_hidden_layers=LAYERS, **changes)


def saved(folder: Path, config: DrafterConfig, model: CausalLM | None = None) -> Path:
    """A draft in a run's folder, without a recipe."""
    small = VocabMap.from_ids(range(1, 60, 2), VOCAB) if getattr(config, "draft_vocab_size", None) else None
    draft = new_draft(config, model or target(), vocab_map=small)
    save_draft(folder / "draft", draft, target=TARGET, provenance={"recipe": "tiny", "step": 7, "coverage": 0.875})
    return folder


def exported(folder: Path, engine: str, **options: Any) -> tuple[dict[str, Any], dict[str, torch.Tensor], str]:
    (written,) = export_draft(folder, [engine], **options)
    card = (written.folder / "README.md").read_text(encoding="utf-8")
    return read_json(written.folder / "config.json"), load_file(written.folder / "model.safetensors"), card


def ir_of(tmp_path: Path, config: DrafterConfig, model: CausalLM | None = None) -> DraftIR:
    return read_ir(saved(tmp_path, config, model))


@pytest.mark.parametrize(("name", "engine"), FORMS)
def test_an_export_holds_the_draft_and_nothing_else(name: str, engine: str, tmp_path: Path) -> None:
    run = saved(tmp_path, CONFIGS[name])
    config, tensors, card = exported(run, engine)
    assert sorted(path.name for path in (run / "export" / engine).iterdir()) == [
        "README.md",
        "config.json",
        "drafttrain.json",
        *(["llm_api_options.yaml"] if engine == "trtllm" else []),
        "model.safetensors",
    ]
    stored = load_file(run / "draft" / "model.safetensors")
    extra = {"fc.bias"} if (name, engine) == ("eagle1", "sglang") else set()
    if engine == "speculators":
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    # A full map is left out: vLLM has no parameter for it.
    left_out = {"d2t", "t2d"} if name.startswith("eagle3") and name != "eagle3" else set()
    assert set(tensors) == (set(stored) | extra) - left_out
    assert config["tie_word_embeddings"] is False
    assert config.get("bias") is None
    if name != "eagle3-taps":  # its fc is put in layer order
        assert all(torch.equal(tensors[key], stored[key]) for key in set(stored) - left_out)
    assert "some/target" in card and "optimiser steps: 7" in card and "87.50%" in card and "Not measured yet" in card


@pytest.mark.parametrize("name", ["eagle3", "eagle3-full", "eagle3-3.1"])
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_eagle3_config(name: str, engine: str, tmp_path: Path) -> None:
    config, tensors, _ = exported(saved(tmp_path, CONFIGS[name]), engine)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"] and config["model_type"] == "llama"
    assert config["draft_vocab_size"] == tensors["lm_head.weight"].shape[0] == (30 if name == "eagle3" else VOCAB)
    assert config["vocab_size"] == VOCAB and config["num_hidden_layers"] == 1
    if name == "eagle3":
        assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
        ids = torch.arange(config["draft_vocab_size"]) + tensors["d2t"]
        assert torch.equal(ids, tensors["t2d"].nonzero().flatten())
    assert tensors["fc.weight"].shape == (32, 96) and "fc.bias" not in tensors
    switches = {key for key in ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual") if config.get(key)}
    assert switches == ({"fc_norm", "norm_output"} if name == "eagle3-3.1" else set())
    # Default taps: no runner of either engine needs to be told.
    assert not {"num_aux_hidden_states", KEY, "eagle_config"} & set(config)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_explicit_taps_are_written_in_each_convention_and_in_layer_order(engine: str, tmp_path: Path) -> None:
    run = saved(tmp_path, CONFIGS["eagle3-taps"])
    config, tensors, card = exported(run, engine)
    assert config["num_aux_hidden_states"] == 2
    assert config[KEY] == [1, 5]
    assert config["eagle_config"][KEY] == [0, 4]
    stored = load_file(run / "draft" / "model.safetensors")
    # Trained on (5, 1); an engine concatenates state 1 before state 5.
    for name in ("fc.weight", "input_norm.weight"):
        first, second = stored[name].chunk(2, dim=-1)
        assert torch.equal(tensors[name], torch.cat([second, first], dim=-1))
    assert "one lower" in card
    features = torch.randn(3, 64)
    five, one = features.chunk(2, dim=-1)
    swapped = torch.cat([one, five], dim=-1)
    assert torch.allclose(features @ stored["fc.weight"].T, swapped @ tensors["fc.weight"].T, atol=1e-5)


def test_norms_of_single_taps_follow_their_taps(tmp_path: Path) -> None:
    run = saved(tmp_path, Eagle3Config(taps=(7, 2, 4), fc_norm=True))
    config, tensors, _ = exported(run, "vllm")
    stored = load_file(run / "draft" / "model.safetensors")
    assert config[KEY] == [2, 4, 7]
    for place, trained in enumerate((1, 2, 0)):
        assert torch.equal(tensors[f"fc_norm.{place}.weight"], stored[f"fc_norm.{trained}.weight"])


def test_states_that_only_vllm_can_capture(tmp_path: Path) -> None:
    ir = ir_of(tmp_path, Eagle3Config(taps=(0, 4, "pre_norm")))
    layout = VLLM.layout(ir)
    assert layout.config[KEY] == [0, 4, LAYERS]
    assert "eagle_config" not in layout.config and layout.config["num_aux_hidden_states"] == 3
    with pytest.raises(ExportError, match=r"sglang cannot serve.*drafter.taps 0, pre_norm"):
        SGLANG.layout(ir)


def test_the_default_is_known_in_any_order(tmp_path: Path) -> None:
    layout = VLLM.layout(ir_of(tmp_path, Eagle3Config(taps=(5, 2, 4))))
    assert KEY not in layout.config and "default" in layout.notes[0]


def test_eagle1_ships_neither_head_nor_first_norm(tmp_path: Path) -> None:
    run = saved(tmp_path, CONFIGS["eagle1"])
    config, tensors, _ = exported(run, "vllm")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert not {"lm_head.weight", "layers.0.input_layernorm.weight", "fc.bias", "norm.weight"} & set(tensors)
    assert tensors["fc.weight"].shape == (32, 64)
    config, tensors, _ = exported(run, "sglang")
    assert config["architectures"] == ["LlamaForCausalLMEagle"]
    assert torch.equal(tensors["fc.bias"], torch.zeros(32))


def test_medusa_keys(tmp_path: Path) -> None:
    config, tensors, _ = exported(saved(tmp_path, CONFIGS["medusa"]), "vllm")
    assert config["architectures"] == ["MedusaModel"] and config["model_type"] == "medusa"
    assert (config["num_heads"], config["num_hidden_layers"]) == (2, 2)
    assert config["vocab_size"] == config["truncated_vocab_size"] == VOCAB
    assert config["original_lm_head"] is False and config["medusa_fc_bias"] is False
    # vLLM takes any key with "num" and "heads" or "layers" for one of these two.
    assert {key for key in config if "num" in key} == {"num_heads", "num_hidden_layers"}
    assert tensors["blocks.1.layers.0.weight"].shape == (32, 32)
    assert tensors["lm_heads.1.weight"].shape == (VOCAB, 32)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3", "gemma"])
def test_a_draft_lm_loads_in_transformers_and_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    model = target(kind)
    draft = new_draft(CONFIGS["draft_lm"], model)
    save_draft(tmp_path / "draft", draft, target=TARGET)
    (written,) = export_draft(tmp_path, ["hf"])
    loaded, info = AutoModelForCausalLM.from_pretrained(written.folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    ids = torch.tensor([[5, 9, 13, 4]])
    with torch.no_grad():
        ours = draft.lm.lm_head(draft.lm(ids).final)  # type: ignore[union-attr, operator]
        assert torch.allclose(loaded.float()(ids).logits, ours, atol=1e-5)


def test_assisted_generation_takes_it(tmp_path: Path) -> None:
    """transformers drafts with the export, and says what the target says alone."""
    hf = tiny_hf("llama", num_hidden_layers=LAYERS)  # the same weights
    save_draft(tmp_path / "draft", new_draft(CONFIGS["draft_lm"], target()), target=TARGET)
    (written,) = export_draft(tmp_path, ["hf"])
    draft = AutoModelForCausalLM.from_pretrained(written.folder, dtype=torch.float32)
    draft.generation_config.num_assistant_tokens = 4
    draft.generation_config.assistant_confidence_threshold = 0.0
    ids, calls = torch.tensor([[5, 9, 13, 4]]), []
    draft.register_forward_hook(lambda *_: calls.append(1))
    options: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    plain = hf.generate(ids, **options)
    assert torch.equal(hf.generate(ids, assistant_model=draft, **options), plain)
    assert len(calls) > 3  # it was asked


@pytest.mark.parametrize("kind", ["llama", "llama3-rope", "phi"])
@pytest.mark.parametrize("name", ["eagle3", "eagle1"])
def test_rotary_parameters_are_read_the_same_from_both_styles(kind: str, name: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {}
    if kind == "llama":
        changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 250000.0}}
    model = target(kind, **changes)
    config, _, _ = exported(saved(tmp_path, CONFIGS[name], model), "vllm")
    wanted = dict(config["rope_parameters"])
    assert wanted["rope_theta"] == config["rope_theta"] == {"llama": 250000.0, "llama3-rope": 5000.0}.get(kind, 10000.0)
    assert config.get("partial_rotary_factor") == (0.5 if kind == "phi" else None)
    old = ("rope_theta", "rope_scaling", "partial_rotary_factor")
    for left_out in (old, ("rope_parameters",), ()):
        values = {key: value for key, value in config.items() if key not in left_out and key != "model_type"}
        read = dict(AutoConfig.for_model("llama", **values).rope_parameters)
        assert {key: read[key] for key in wanted if key in read} == {key: wanted[key] for key in wanted if key in read}
        assert read["rope_theta"] == wanted["rope_theta"] and read["rope_type"] == wanted["rope_type"]
    assert config["max_position_embeddings"] >= model.config.max_position_embeddings


@pytest.mark.parametrize(
    ("config", "engine", "named"),
    [
        (CONFIGS["medusa"], "sglang", "drafter.family medusa"),
        (CONFIGS["medusa"], "hf", "drafter.family medusa"),
        (CONFIGS["eagle3"], "hf", "drafter.family eagle3"),
        (MedusaConfig(num_heads=2, head="target"), "vllm", "drafter.head target"),
        (Eagle3Config(norm_before_residual=True), "sglang", "drafter.norm_before_residual"),
        (Eagle3Config(num_layers=2), "sglang", "drafter.num_layers 2"),
        (Eagle3Config(hidden_size=16, num_heads=4, init_head="random"), "vllm", "drafter.hidden_size 16"),
        (Eagle3Config(taps=(2, "final")), "vllm", "drafter.taps 'final'"),
        (Eagle3Config(taps=(2, 2, 3)), "vllm", "drafter.taps"),
    ],
)
def test_what_an_engine_lacks_is_refused_by_name(
    config: DrafterConfig, engine: str, named: str, tmp_path: Path
) -> None:
    run = saved(tmp_path, config)
    with pytest.raises(ExportError, match=named) as refused:
        export_draft(run, [engine])
    assert refused.value.remedy
    assert not (run / "export").exists()


def test_vllm_has_what_sglang_lacks(tmp_path: Path) -> None:
    layout = VLLM.layout(ir_of(tmp_path, Eagle3Config(norm_before_residual=True, num_layers=2)))
    assert layout.config["norm_before_residual"] is True and layout.config["num_hidden_layers"] == 2
    assert "layers.1.input_layernorm.weight" in layout.tensors


def test_a_version_that_is_known(tmp_path: Path) -> None:
    (written,) = export_draft(saved(tmp_path, CONFIGS["eagle3"]), ["vllm@0.32.1"])
    assert written.folder.name == "vllm"


def test_one_refusal_stops_all_engines(tmp_path: Path) -> None:
    run = saved(tmp_path, CONFIGS["medusa"])
    with pytest.raises(ExportError):
        export_draft(run, ["vllm", "sglang"])
    assert not (run / "export").exists()


def test_unknown_engines_and_existing_folders_are_refused(tmp_path: Path) -> None:
    run = saved(tmp_path, CONFIGS["eagle3"])
    with pytest.raises(ExportError, match=r"no engine 'vlm'[\s\S]*vllm, speculators, sglang, trtllm, hf, gguf"):
        export_draft(run, ["vlm"])
    with pytest.raises(
        ExportError, match=r"vllm@0.9.1: what it loads is not known[\s\S]*vLLM 0.32[\s\S]*prove the export"
    ):
        export_draft(run, ["vllm@0.9.1"])
    with pytest.raises(ExportError, match="no engine is named"):
        export_draft(run, [])
    (tmp_path / "mine" / "sglang").mkdir(parents=True)
    (tmp_path / "mine" / "sglang" / "keep").write_text("x")
    with pytest.raises(ExportError, match=r"already exists[\s\S]*--out[\s\S]*--overwrite"):
        export_draft(run, ["vllm", "sglang"], tmp_path / "mine")
    # A folder that is no export is not replaced either, and stops all.
    with pytest.raises(ExportError, match=r"holds no drafttrain.json\): not replaced"):
        export_draft(run, ["vllm", "sglang"], tmp_path / "mine", overwrite=True)
    assert [path.name for path in (tmp_path / "mine").rglob("*") if path.is_file()] == ["keep"]


def test_a_run_without_a_finished_draft(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no draft is saved here[\s\S]*finished run"):
        export_draft(tmp_path, ["vllm"])
    with pytest.raises(CheckpointError, match="no such folder"):
        export_draft(tmp_path / "nowhere", ["vllm"])


def test_a_server_of_another_user_can_read_it(tmp_path: Path) -> None:
    run = saved(tmp_path, CONFIGS["eagle1"])
    before = os.umask(0o022)
    try:
        (written,) = export_draft(run, ["vllm"])
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in written.folder.iterdir()} == {0o644}


def test_commands_name_the_method_and_the_folder(tmp_path: Path) -> None:
    run = saved(tmp_path, CONFIGS["eagle3"])
    vllm, sglang = export_draft(run, ["vllm", "sglang"], tmp_path / "an out", k=6)
    words = shlex.split(vllm.command)
    assert words[:4] == ["vllm", "serve", "some/target", "--speculative-config"]
    assert json.loads(words[4]) == {"method": "eagle3", "model": str(vllm.folder), "num_speculative_tokens": 6}
    words = shlex.split(sglang.command)
    assert words[words.index("--speculative-algorithm") + 1] == "EAGLE3"
    assert words[words.index("--speculative-draft-model-path") + 1] == str(sglang.folder)
    assert words[-1] == "7"
    assert vllm.command in (vllm.folder / "README.md").read_text(encoding="utf-8")


def test_more_draft_tokens_than_medusa_heads(tmp_path: Path) -> None:
    run = saved(tmp_path, CONFIGS["medusa"])
    with pytest.raises(ExportError, match="this draft has 2"):
        export_draft(run, ["vllm"], k=3)
    (written,) = export_draft(run, ["vllm"])
    assert '"num_speculative_tokens": 2' in written.command


def test_the_dtype_asked_for(tmp_path: Path) -> None:
    run = saved(tmp_path, CONFIGS["eagle3"])
    config, tensors, _ = exported(run, "vllm", dtype=torch.bfloat16)
    assert config["dtype"] == "bfloat16"
    assert {str(t.dtype) for t in tensors.values()} == {"torch.bfloat16", "torch.int64", "torch.bool"}


def test_measurements_of_the_run_are_in_the_card(tmp_path: Path) -> None:
    run = saved(tmp_path, CONFIGS["eagle3"])
    row = {
        "draft": "tiny",
        "setting": {"k": 4, "temperature": 0.0, "batch": 1},
        "acceptance": {
            "tau": 2.345,
            "tau_ci": [2.2, 2.5],
            "alpha": [0.7, 0.571, None],
            "per_position": [0.7, 0.4, None],
            "acceptance_rate": 0.34,
        },
        "speed": {"speedup": 1.5, "speedup_ci": [1.4, 1.6]},
    }
    other = {**row, "draft": "ngram"}
    result = {"suite": {"name": "core"}, "drafts": [row, other], "hardware": "CPU x", "date": "2026-11-03T10:00:00"}
    (run / "eval" / "core").mkdir(parents=True)
    write_json(run / "eval" / "core" / "result.json", result)
    (run / "metrics.jsonl").write_text(
        "".join(json.dumps({"kind": "eval", "step": s, "tau": t, "k": 4}) + "\n" for s, t in ((5, 1.9), (7, 2.1)))
    )
    _, _, card = exported(run, "vllm")
    assert "| core | 4 | 0 | 1 | 2.35 [2.20, 2.50] | 0.70 / 0.40 / - | 0.34 | 1.50 [1.40, 1.60] |" in card
    assert card.count("| core |") == 1
    assert "CPU x, 2026-11-03" in card and "tau 2.10 at step 7" in card


def test_what_was_measured_of_other_drafts_of_the_run_is_no_claim_of_this_one(tmp_path: Path) -> None:
    """A run is evaluated, trained on and exported: the forecast must not be that of the draft before."""
    run = saved(tmp_path, CONFIGS["eagle3"])
    row = {"draft": "tiny", "setting": {"k": 4, "temperature": 0.0, "batch": 1}, "speed": None}
    row["acceptance"] = {"tau": 2.3, "tau_ci": None, "alpha": [0.7], "per_position": [0.7], "acceptance_rate": 0.3}
    weights = sha256_file(run / "draft" / "model.safetensors")
    for suite, measured in (("before", "0" * 64), ("now", weights), ("unknown", "")):
        (run / "eval" / suite).mkdir(parents=True)
        result = {"suite": {"name": suite}, "drafts": [row], "hardware": "CPU x", "date": "2026", "weights": measured}
        write_json(run / "eval" / suite / "result.json", result)
    log = ({"kind": "eval", "step": step, "tau": tau, "k": 4} for step, tau in ((5, 2.1), (7, 1.9)))
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in log))
    (written,) = export_draft(run, ["vllm"])
    card = (written.folder / "README.md").read_text("utf-8")
    assert "| now |" in card and "| unknown |" in card and "| before |" not in card
    assert written.notes[-1] == "eval/before is of another draft of this run: measure again"
    assert "tau 1.90 at step 7" in card  # the draft of step 7 is exported, and not the best one, of step 5


def broken(layout: Layout, folder: Path, what: str) -> None:
    """A folder with one fault, as a bad disk or a bad writer leaves it."""
    tensors, config = dict(layout.tensors), dict(layout.config)
    match what:
        case "tensor lm_head.weight differs":
            tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1
        case "config.json differs":
            config["rope_theta"] = 10001.0
        case "tensor norm.weight is missing":
            del tensors["norm.weight"]
        case "tensor fc.bias is extra":
            tensors["fc.bias"] = torch.zeros(32)
    save_file(tensors, folder / "model.safetensors")
    write_json(folder / "config.json", config)
    if what == "cannot be read back":
        data = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


@pytest.mark.parametrize(
    "what",
    [
        "tensor lm_head.weight differs",
        "config.json differs",
        "tensor norm.weight is missing",
        "tensor fc.bias is extra",
        "cannot be read back",
    ],
)
def test_what_is_written_is_read_back(what: str, tmp_path: Path) -> None:
    ir = ir_of(tmp_path, CONFIGS["eagle3"])
    layout = VLLM.layout(ir)
    folder = tmp_path / "broken"
    folder.mkdir()
    broken(layout, folder, what)
    with pytest.raises(ExportError, match=what):
        verify_export(folder, ir, layout)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"num_aux_hidden_states": 4}, r"fc.weight is \(32, 96\), the engine expects \(32, 128\)"),
        ({"draft_vocab_size": VOCAB}, "lm_head.weight is"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0}}, "rotary parameters under rope_parameters"),
        ({"fc_norm": True}, "fc_norm.0.weight, which the engine expects, is missing"),
    ],
)
def test_a_config_that_does_not_describe_the_weights_is_found(
    change: dict[str, Any], found: str, tmp_path: Path
) -> None:
    """Even when it is what a writer meant to write."""
    ir = ir_of(tmp_path, CONFIGS["eagle3"])
    good = VLLM.layout(ir)
    layout = replace(good, config={**good.config, **change})
    folder = tmp_path / "wrong"
    folder.mkdir()
    save_file(layout.tensors, folder / "model.safetensors")
    write_json(folder / "config.json", layout.config)
    with pytest.raises(ExportError, match=found):
        verify_export(folder, ir, layout)
