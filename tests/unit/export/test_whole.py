"""An export is whole or absent, whatever comes between: a full disk, a kill; and the one before it stays until then."""

from __future__ import annotations

import os
import resource
import signal
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
    # numpy, which writes GGUF's tensors, counts instead of saying why.
    said = r"\d+ requested and \d+ written" if engine == "gguf" else "File too large"
    with a_full_disk(), pytest.raises(UserError, match=rf"export/{engine}: cannot be written: .*{said}"):
        export_draft(run, [engine])
    assert list((run / "export").iterdir()) == []
    (written,) = export_draft(run, [engine])
    before = content(written.folder)
    with a_full_disk(), pytest.raises(UserError, match=said):
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
def test_a_kill_loses_neither(moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGKILL: nothing tidies up. Under the name there is the old export, whole."""
    run = trained(tmp_path, MedusaConfig(num_heads=2))
    (written,) = export_draft(run, ["vllm"])
    before = content(written.folder)

    def half(path: Path, *_: object) -> None:
        path.write_bytes(b"half")
        os.kill(os.getpid(), signal.SIGKILL)

    def whole(*_: object, **__: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if moment == "it is whole":  # and was to be read back
        monkeypatch.setattr("drafttrain.export.write.verify_export", whole)
    else:
        monkeypatch.setattr("drafttrain.export.write.write_safetensors", half)
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)  # those of the parent did not come along
        export_draft(run, ["vllm"], dtype=torch.bfloat16, overwrite=True)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    monkeypatch.undo()
    assert content(written.folder) == before
    # What the kill left has a hidden name, and does not stand in the way.
    names = sorted(path.name for path in (run / "export").iterdir())
    assert len(names) == 2 and names[0].startswith(".vllm.") and names[1] == "vllm"
    (again,) = export_draft(run, ["vllm"], overwrite=True, dtype=torch.bfloat16)
    assert content(again.folder) != before
