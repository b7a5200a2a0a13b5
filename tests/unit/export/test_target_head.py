"""Medusa drafts that read the target's head: vLLM is given a copy of that one tensor, and of that alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafttrain.cli.main import main
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.saving import save_draft
from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.draft import open_draft
from drafttrain.export.doctor.registry import lint
from drafttrain.export.doctor.target import TargetFacts
from drafttrain.export.foreign.read import read_foreign
from drafttrain.export.ir import ExportError
from drafttrain.export.prove.prove import check_export
from drafttrain.export.target_head import NAME
from drafttrain.export.write import export_draft
from drafttrain.files import read_json
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import load_identity
from tests.draft_support import new_draft
from tests.foreign_support import target_folder


def trained(run: Path, target: CausalLM, folder: Path) -> Path:
    """A run whose draft was made for the target in that folder, as it lies there now."""
    draft = new_draft(MedusaConfig(num_heads=2, head="target"), target)
    save_draft(run / "draft", draft, target=load_identity(TargetConfig(model=str(folder))).to_dict())
    return run


def made(folder: Path, kind: str = "llama", **changes: Any) -> tuple[CausalLM, Path]:
    """A target, and a run for it."""
    target, _ = target_folder(folder / "target", kind, **changes)
    return target, trained(folder / "run", target, folder / "target")


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_head_is_the_targets(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    target, run = made(tmp_path, kind)
    (written,) = export_draft(run, ["vllm"], dtype=dtype)
    tensors, config = load_file(written.folder / "model.safetensors"), read_json(written.folder / "config.json")
    assert torch.equal(tensors[NAME], target.head().weight.to(dtype))
    assert [name for name in tensors if "lm_head" in name] == [NAME]
    assert config["original_lm_head"] is True and config["num_heads"] == 2
    assert any("copy of the target's head" in note for note in written.notes)
    assert check_export(written.folder, run).target_head is not None
    # Taken in again it is no part of the draft.
    back = read_foreign(written.folder)
    assert not any("lm_head" in name for name in back.ir.tensors)
    assert any("all heads read the target's" in note for note in back.notes)
    facts = TargetFacts.of_config(str(tmp_path / "target"), target.config)
    assert lint(Case(open_draft(written.folder), facts)) == []


def test_a_target_in_shards(tmp_path: Path) -> None:
    """The head is found in whichever file holds it."""
    target, run = made(tmp_path)
    folder = tmp_path / "target"
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    for i, names in enumerate(({"lm_head.weight"}, set(tensors) - {"lm_head.weight"})):
        save_file({name: tensors[name] for name in names}, folder / f"model-{i}.safetensors", {"format": "pt"})
    (written,) = export_draft(trained(tmp_path / "again", target, folder), ["vllm"])
    assert torch.equal(load_file(written.folder / "model.safetensors")[NAME], target.head().weight)
    with pytest.raises(ExportError, match="its weight files are not those"):
        export_draft(run, ["vllm"])  # the files as they were are its identity


def test_another_target_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, run = made(tmp_path)
    target_folder(tmp_path / "target", seed=5)  # other weights under the same name
    assert main(["export", str(run), "--to", "vllm"]) == 2
    said = capsys.readouterr().err
    assert "not those that it was trained for" in said and "drafter.head=own" in said
    assert not (run / "export").exists()


def test_heads_that_cannot_be_had(tmp_path: Path) -> None:
    refusal = r"drafter.head target\): {}[\s\S]*drafter.head=own"
    _, run = made(tmp_path / "bias", "phi")
    with pytest.raises(ExportError, match=refusal.format("its output head has a bias")):
        export_draft(run, ["vllm"])
    target, _ = made(tmp_path / "bin")
    weights = tmp_path / "bin" / "target" / "model.safetensors"
    torch.save(load_file(weights), weights.with_name("pytorch_model.bin"))
    weights.unlink()
    run = trained(tmp_path / "bin" / "again", target, weights.parent)
    with pytest.raises(ExportError, match=refusal.format(r"no output head \(.*\) in safetensors")):
        export_draft(run, ["vllm"])
    with pytest.raises(ExportError, match=r"drafter\.family medusa"):  # the same refusal as of any Medusa draft
        export_draft(run, ["sglang"])
