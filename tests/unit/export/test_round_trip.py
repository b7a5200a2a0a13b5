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
    "medusa-shared": MedusaConfig(num_heads=2, head="target"),
    "draft_lm": DraftLMConfig(layers=(0, 3)),
}
EAGLE3 = {"vllm", "speculators", "sglang", "trtllm"}
# Which writers take them; that the others refuse them by name is tested elsewhere.
WRITTEN = {
    "eagle3": EAGLE3,
    "eagle3-full": EAGLE3,
    "eagle3-3.1": EAGLE3,
    "eagle3-taps": EAGLE3,
    "eagle3-layers": {"vllm", "speculators"},
    "eagle1": {"vllm", "sglang"},
    "eagle1-bias": {"sglang"},
    "medusa": {"vllm"},
    "medusa-bias": {"vllm"},
    "medusa-shared": {"vllm"},
    "draft_lm": {"vllm", "sglang", "trtllm", "hf", "gguf"},
}
TRIPS = [(name, engine) for name, engines in WRITTEN.items() for engine in ENGINES if engine in engines]


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


def test_every_family_and_writer_is_tried(world: World, tmp_path: Path) -> None:
    assert {config.family for config in CONFIGS.values()} == set(FAMILIES)
    assert set(WRITTEN) == set(CONFIGS) and set().union(*WRITTEN.values()) == set(ENGINES)
    for name, engines in WRITTEN.items():
        run = saved(tmp_path / name, name, world)
        for engine in set(ENGINES) - engines:
            with pytest.raises(ExportError):
                export_draft(run, [engine])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "engine"), TRIPS)
def test_the_same_bytes_come_back(name: str, engine: str, dtype: torch.dtype, world: World, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", name, world, dtype)
    (first,) = export_draft(run, [engine])
    # Which target it was made for stands in the folder.
    imported = write_run(read_foreign(first.folder), world.config, tmp_path / "in")
    (second,) = export_draft(imported.folder, [engine])
    assert content(second.folder) == content(first.folder)
    again = read_ir(imported.folder)
    assert (again.depth, again.target) == (read_ir(run).depth, read_ir(run).target)


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
    arguments = ["import", str(written.folder), "-o", str(tmp_path / "my draft")]
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


def test_a_run_is_never_called_like_a_reference(world: World, tmp_path: Path) -> None:
    (written,) = export_draft(saved(tmp_path / "run", "eagle1", world), ["vllm"])
    imported = write_run(read_foreign(written.folder), world.config, tmp_path / "suffix")
    assert imported.recipe.name == "imported-suffix"


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
    write_json(written.folder / SIDECAR, {**about, "target": {**about["target"], "name": str(tmp_path / "moved")}})
    with pytest.raises(CheckpointError, match=r"was made for .*moved, which is not there[\s\S]*--target"):
        read_foreign(written.folder)
    assert read_foreign(written.folder, world.config).ir.depth == 3
    write_json(written.folder / SIDECAR, {**about, "format": 99})
    assert read_foreign(written.folder, world.config).ir.depth == 7  # of a format that is not known, nothing is taken
    with pytest.raises(CheckpointError, match=r"does not say which target[\s\S]*--target"):
        read_foreign(written.folder)
    write_json(written.folder / SIDECAR, {**about, "target": None, "depth": "3"})
    with pytest.raises(CheckpointError, match=r"drafttrain\.json: target, depth: not as an export writes it"):
        read_foreign(written.folder, world.config)
