"""Export, import, export: the same bytes for every family and writer; and the command that does it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from drafttrain.cli.main import main
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import FAMILIES, DrafterConfig
from drafttrain.drafters.saving import read_meta, save_draft, warm_start
from drafttrain.errors import CheckpointError
from drafttrain.export.foreign.read import read_foreign
from drafttrain.export.foreign.to_run import write_run
from drafttrain.export.ir import ExportError, read_ir
from drafttrain.export.sidecar import SIDECAR
from drafttrain.export.write import ENGINES, export_draft
from drafttrain.files import read_json, write_json
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.recipe.load import load_recipe
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import load_identity
from tests.draft_support import new_draft
from tests.foreign_support import target_folder

CONFIGS: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(draft_vocab_size=30, depth=3),
    "eagle3-full": Eagle3Config(),
    "eagle3-3.1": Eagle3Config(fc_norm=True, norm_output=True),
    "eagle3-taps": Eagle3Config(taps=(5, 1), norm_before_fc=True),
    "eagle3-layers": Eagle3Config(taps=(1, 3, "pre_norm"), num_layers=2, norm_before_residual=True),
    "eagle1": Eagle1Config(depth=3),
    "eagle1-bias": Eagle1Config(fc_bias=True),
    "medusa": MedusaConfig(num_heads=2, num_layers=2),
    "medusa-bias": MedusaConfig(num_heads=3, bias=True),
    "draft_lm": DraftLMConfig(layers=(0, 3)),
}


@dataclass(frozen=True)
class World:
    """A target and its folder."""

    target: CausalLM
    config: TargetConfig


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(*target_folder(tmp_path_factory.mktemp("trip") / "target"))


def saved(folder: Path, name: str, world: World, dtype: torch.dtype = torch.float32) -> Path:
    config, vocab = CONFIGS[name], world.target.vocab_size
    size = getattr(config, "draft_vocab_size", None)
    small = None if size is None else VocabMap.from_ids(range(1, 2 * size, 2), vocab)
    draft = new_draft(config, world.target, vocab_map=small)
    identity = load_identity(world.config).to_dict()
    save_draft(folder / "draft", draft, target=identity, dtype=dtype, provenance={"recipe": "tiny", "step": 7})
    return folder


def content(folder: Path) -> dict[str, bytes]:
    """All files but the card and what stands beside; the folder's own name is not content."""
    names = sorted(path.name for path in folder.iterdir() if path.name not in ("README.md", SIDECAR))
    return {name: (folder / name).read_bytes().replace(str(folder).encode(), b"HERE") for name in names}


def test_every_family_is_tried() -> None:
    assert {config.family for config in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_bytes_come_back(name: str, world: World, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if name == "eagle3-taps" else torch.float32
    run = saved(tmp_path / "run", name, world, dtype)
    tried = []
    for engine in ENGINES:
        try:
            (first,) = export_draft(run, [engine])
        except ExportError:  # what an engine lacks is tested elsewhere
            continue
        tried.append(engine)
        imported = write_run(read_foreign(first.folder, world.config), world.config, tmp_path / f"in-{engine}")
        (second,) = export_draft(imported.folder, [engine])
        assert content(second.folder) == content(first.folder)
        again = read_ir(imported.folder)
        assert (again.depth, again.target) == (read_ir(run).depth, read_ir(run).target)
    assert tried and (name.endswith(("bias", "layers")) or "vllm" in tried)


def test_an_import_of_another_targets_export(world: World, tmp_path: Path) -> None:
    """Case 15 of docs/cases.md: the same shapes and vocabulary, other weights."""
    (written,) = export_draft(saved(tmp_path / "run", "eagle3", world), ["vllm"])
    _, other = target_folder(tmp_path / "other", seed=5)
    with pytest.raises(CheckpointError, match=r"differs from .*other in weights_hash"):
        read_foreign(written.folder, other)
    (written.folder / SIDECAR).unlink()
    read_foreign(written.folder, other)  # then nothing tells


def test_the_command(world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The folder that it writes goes to eval, train and export."""
    run = saved(tmp_path / "run", "eagle3", world)
    (written,) = export_draft(run, ["vllm"], k=4)
    arguments = ["import", str(written.folder), "--target", world.config.model, "-o", str(tmp_path / "my draft")]
    assert main(arguments) == 0
    out = capsys.readouterr().out
    assert "eagle3 for" in out and "taps: the default of all engines" in out
    recipe = load_recipe(tmp_path / "my draft")
    assert (recipe.name, recipe.target.dtype, recipe.drafter.family) == ("my-draft", "float32", "eagle3")
    assert recipe.run_folder == f"{tmp_path / 'my draft'}-tuned"
    started, meta = warm_start(recipe.drafter, str(recipe.drafter.warm_start))
    assert started.vocab_map == read_ir(run).vocab_map and meta.provenance["recipe"] == "my-draft"
    assert meta.provenance["imported"]["trained"]["step"] == 7
    assert main(["export", str(tmp_path / "my draft"), "--to", "vllm"]) == 0
    assert content(tmp_path / "my draft" / "export" / "vllm") == content(written.folder)
    capsys.readouterr()
    before = read_meta(tmp_path / "my draft" / "draft")
    assert main(arguments) == 2
    assert "already exists" in capsys.readouterr().err
    assert read_meta(tmp_path / "my draft" / "draft") == before


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (["--format", "medusa"], "is not in format medusa"),
        (["--taps", "2,99"], "tap 99 does not exist"),
        (["--target", "/no/such/target"], "no such target folder"),
    ],
)
def test_bad_input_leaves_nothing(
    extra: list[str], said: str, world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (written,) = export_draft(saved(tmp_path / "run", "eagle3", world), ["vllm"])
    where = ["--target", world.config.model, "-o", str(tmp_path / "out" / "in")]
    assert main(["import", str(written.folder), *where, *extra]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_full_disk_leaves_nothing(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (written,) = export_draft(saved(tmp_path / "run", "eagle1", world), ["vllm"])
    found = read_foreign(written.folder, world.config)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("drafttrain.drafters.saving.save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        write_run(found, world.config, tmp_path / "out" / "in")
    assert list((tmp_path / "out").iterdir()) == []


def test_a_folder_that_is_no_export_of_ours(world: World, tmp_path: Path) -> None:
    (written,) = export_draft(saved(tmp_path / "run", "eagle3", world), ["vllm"])
    about = read_json(written.folder / SIDECAR)
    assert about["taps"] == ["2", "4", "5"] and about["depth"] == 3 and about["forecast"] is None
    write_json(written.folder / SIDECAR, {**about, "format": 99})
    assert read_foreign(written.folder, world.config).ir.depth == 7  # of a format that is not known, nothing is taken
