from __future__ import annotations

import socket
from pathlib import Path

import pytest
from accelerate.utils import DistributedType

from drafttrain.errors import UserError
from drafttrain.training.distributed import check_as_asked, make_accelerator, processes_asked
from drafttrain.training.launch import Launch

LAUNCH = ["/venv/bin/python3", "/venv/bin/accelerate", "launch"]


@pytest.mark.parametrize(
    ("command", "asked"),
    [
        ([*LAUNCH, "--cpu", "--num_processes", "2", "drafttrain/train.py", "r.yaml"], 2),
        ([*LAUNCH, "--num_processes=3", "drafttrain/train.py"], 3),
        (["python", "-m", "accelerate.commands.launch", "--num_processes", "4", "t.py"], 4),
        ([*LAUNCH, "drafttrain/train.py", "--num_processes", "2"], 1),
        ([*LAUNCH, "drafttrain/train.py"], 1),
        (["bash"], 1),
        ([], 1),
    ],
)
def test_the_launchers_command_line_is_read(command: list[str], asked: int) -> None:
    assert processes_asked(command) == asked


def test_the_launch_config_is_read(tmp_path: Path) -> None:
    config = tmp_path / "cpu.yaml"
    config.write_text("distributed_type: MULTI_CPU\nnum_processes: 2\n")
    assert processes_asked([*LAUNCH, "--config_file", str(config), "train.py"]) == 2
    assert processes_asked([*LAUNCH, "--config_file", str(config), "--num_processes", "5", "train.py"]) == 5


def test_what_was_not_got_is_an_error() -> None:
    check_as_asked(1, 1, DistributedType.NO)
    check_as_asked(2, 2, DistributedType.MULTI_CPU)
    for asked, got, kind in (
        (2, 1, DistributedType.NO),
        (2, 2, DistributedType.NO),
        (2, 2, DistributedType.DEEPSPEED),
    ):
        with pytest.raises(UserError, match=rf"asked for {asked} processes"):
            check_as_asked(asked, got, kind)


@pytest.mark.parametrize("kind", [DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU])
def test_zero_that_was_not_got_is_an_error(kind: DistributedType) -> None:
    """Case 38 of docs/cases.md."""
    check_as_asked(2, 2, DistributedType.DEEPSPEED, Launch("zero", 2))
    with pytest.raises(UserError, match=rf"ZeRO-2 was asked for, accelerate set up {kind.value}"):
        check_as_asked(2, 2, kind, Launch("zero", 2))


def test_a_port_in_use_is_an_error_before_anything_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": port}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
        with pytest.raises(UserError, match=f"port {port} is in use"):
            make_accelerator()
