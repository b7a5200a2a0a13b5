"""`drafttrain export`: a run's best draft, in the target's dtype, with its recipe in the card."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafttrain.cli.main import main
from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.saving import save_draft
from drafttrain.files import read_json
from drafttrain.recipe.load import load_recipe, save_recipe
from tests.draft_support import new_draft
from tests.support import VOCAB, tiny_target

IDENTITY = {"name": "some/target", "vocab_size": VOCAB, "hidden_size": 32, "n_layers": 8}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished run with a best and a last draft."""
    save_recipe(load_recipe("recipes/smollm2/eagle3.yaml", ["target.dtype=bfloat16", "evaluation.k=3"]), tmp_path)
    for seed, name in enumerate(("best", "draft")):
        draft = new_draft(Eagle3Config(), tiny_target(num_hidden_layers=8), seed)
        save_draft(tmp_path / name, draft, target=IDENTITY, provenance={"recipe": "tiny", "step": seed})
    return tmp_path


def test_the_best_draft_of_a_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(run), "--to", "vllm,sglang"]) == 0
    out = capsys.readouterr().out
    assert "vllm serve some/target" in out and "--speculative-algorithm EAGLE3" in out
    assert "no layer ids are written" in out
    best = load_file(run / "best" / "model.safetensors")
    for engine in ("vllm", "sglang"):
        folder = run / "export" / engine
        assert read_json(folder / "config.json")["dtype"] == "bfloat16"
        written = load_file(folder / "model.safetensors")
        assert torch.equal(written["fc.weight"], best["fc.weight"].bfloat16())
        card = (folder / "README.md").read_text(encoding="utf-8")
        assert "name: smollm2-eagle3" in card and "optimiser steps" not in card.split("## Recipe")[1]
    assert '"num_speculative_tokens": 3' in out


def test_a_draft_of_the_run_exports_beside_it(run: Path) -> None:
    assert main(["export", str(run / "draft"), "--to", "vllm", "--dtype", "float32"]) == 0
    last = load_file(run / "draft" / "model.safetensors")
    written = load_file(run / "export" / "vllm" / "model.safetensors")
    assert all(torch.equal(last[name], value) for name, value in written.items())


def test_a_second_export_does_not_overwrite(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["export", str(run), "--to", "vllm"]
    assert main(arguments) == 0
    before = (run / "export" / "vllm" / "config.json").read_bytes()
    capsys.readouterr()
    assert main([*arguments, "--k", "7"]) == 2
    assert "already exists" in capsys.readouterr().err
    assert (run / "export" / "vllm" / "config.json").read_bytes() == before
    with pytest.raises(SystemExit):
        main([*arguments, "--k", "0"])
