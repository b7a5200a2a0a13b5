"""An export is whole or absent, whatever comes between: a full disk, a kill; and the one before it stays until then."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from drafttrain.cli.main import main
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.drafters.saving import save_draft
from drafttrain.errors import UserError
from drafttrain.export.write import ENGINES, export_draft
from drafttrain.files import read_json
from drafttrain.targets.load import load_identity
from tests.draft_support import new_draft
from tests.foreign_support import target_folder

ROOT = Path(__file__).resolve().parents[3]
DRAFTS: dict[str, DrafterConfig] = {
    "vllm": Eagle1Config(),
    "speculators": Eagle3Config(),
    "sglang": Eagle1Config(),
    "trtllm": Eagle3Config(),
    "hf": DraftLMConfig(layers=(0, 3)),
    "gguf": DraftLMConfig(layers=(0, 3)),
}
# Enough for config, card and tokenizer, not for the weights.
ROOM = 24 << 10


@contextmanager
def a_full_disk(room: int = ROOM) -> Iterator[None]:
    """No file can grow beyond `room` bytes: a real write fails half-way, as on a disk that fills up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def trained(folder: Path, config: DrafterConfig, seed: int = 0) -> Path:
    target, about = target_folder(folder / "target")
    draft = new_draft(config, target, seed)
    save_draft(folder / "run" / "draft", draft, target=load_identity(about).to_dict())
    return folder / "run"


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("engine", ENGINES)
def test_a_disk_that_fills_up_in_the_middle(engine: str, tmp_path: Path) -> None:
    run = trained(tmp_path, DRAFTS[engine])
    with a_full_disk(), pytest.raises(UserError, match=rf"export/{engine}: cannot be written: .*File too large"):
        export_draft(run, [engine])
    assert list((run / "export").iterdir()) == []
    (written,) = export_draft(run, [engine])
    before = content(written.folder)
    with a_full_disk(), pytest.raises(UserError, match="File too large"):
        export_draft(run, [engine], overwrite=True)
    assert [path.name for path in (run / "export").iterdir()] == [engine]
    assert content(written.folder) == before


def test_an_export_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = trained(tmp_path, Eagle3Config())
    command = ["export", str(run), "--to", "vllm,sglang"]
    assert main(command) == 0
    folder = run / "export" / "vllm"
    (folder / "proof.json").write_text("{}")  # of the draft before
    before = content(folder)
    assert main([*command, "--dtype", "bfloat16"]) == 2 and content(folder) == before
    assert main([*command, "--dtype", "bfloat16", "--overwrite"]) == 0
    assert sorted(path.name for path in (run / "export").iterdir()) == ["sglang", "vllm"]
    assert set(before) - set(content(folder)) == {"proof.json"}
    assert read_json(folder / "config.json")["dtype"] == "bfloat16"


@pytest.mark.parametrize("moment", ["half of it is written", "it is whole"])
def test_a_kill_loses_neither(moment: str, tmp_path: Path) -> None:
    """SIGKILL: nothing tidies up. Under the name there is the old export, whole."""
    run = trained(tmp_path, MedusaConfig(num_heads=2))
    (written,) = export_draft(run, ["vllm"])
    before = content(written.folder)
    where = "write.write_safetensors" if moment == "half of it is written" else "write.verify_export"
    script = f"""
import os, signal, sys
from pathlib import Path
from drafttrain.export import {where.partition(".")[0]} as module
real = module.{where.partition(".")[2]}
def killed(path, *rest, **more):
    if {where!r}.endswith("safetensors"):
        Path(path).write_bytes(b"half")
    else:
        real(path, *rest, **more)
    os.kill(os.getpid(), signal.SIGKILL)
module.{where.partition(".")[2]} = killed
module.export_draft(sys.argv[1], ["vllm"], overwrite=True, dtype=__import__("torch").bfloat16)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", script, str(run)], env=environment, capture_output=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert content(written.folder) == before
    # What the kill left has a hidden name, and does not stand in the way.
    assert all(path.name == "vllm" or path.name.startswith(".vllm.") for path in (run / "export").iterdir())
    (again,) = export_draft(run, ["vllm"], overwrite=True, dtype=torch.bfloat16)
    assert content(again.folder) != before
