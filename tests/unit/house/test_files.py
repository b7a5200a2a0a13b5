"""Folders that are whole or absent, and the lock of what is made once."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from drafttrain import files
from drafttrain.errors import UserError
from drafttrain.files import append_jsonl, atomic_folder, exclusive, locked, read_jsonl, read_object, settled, size_text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1536, "1.5 KiB"),
        (39 * 2**20, "39.0 MiB"),
        (70.6 * 2**30, "70.6 GiB"),
        (1536 * 2**40, "1,536.0 TiB"),
    ],
)
def test_bytes_for_people(nbytes: float, text: str) -> None:
    assert size_text(nbytes) == text


def old(folder: Path) -> Path:
    folder.mkdir()
    (folder / "text").write_text("old")
    (folder / "more").write_text("of it")
    return folder


def test_a_folder_that_exists_is_not_touched(tmp_path: Path) -> None:
    folder = old(tmp_path / "it")
    with pytest.raises(UserError, match="already exists"), atomic_folder(folder):
        pass
    assert (folder / "text").read_text() == "old"


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_folder_is_swapped(in_one_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_one_step:  # as on a system without such a call
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: object())
    folder = old(tmp_path / "it")
    with atomic_folder(folder, replace=True) as partial:
        (partial / "text").write_text("new")
        assert (folder / "text").read_text() == "old"
    assert [(path.name, path.read_text()) for path in folder.iterdir()] == [("text", "new")]
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_replacing_what_is_not_there(tmp_path: Path) -> None:
    with atomic_folder(tmp_path / "it", replace=True) as partial:
        (partial / "text").write_text("new")
    assert (tmp_path / "it" / "text").read_text() == "new"


@pytest.mark.parametrize("in_one_step", [True, False])
def test_a_failure_leaves_the_old_one(in_one_step: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not in_one_step:
        monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: object())
    folder = old(tmp_path / "it")
    with pytest.raises(OSError, match="No space"), atomic_folder(folder, replace=True) as partial:
        (partial / "text").write_text("new")
        raise OSError(28, "No space left on device")
    assert (folder / "text").read_text() == "old"
    real = Path.rename

    def fails(self: Path, to: Path) -> Path:
        if self.suffix == ".part":
            raise OSError(5, "Input/output error")
        return real(self, to)

    if not in_one_step:  # between the two renames
        monkeypatch.setattr(Path, "rename", fails)
        with pytest.raises(OSError, match="Input/output"), atomic_folder(folder, replace=True) as partial:
            (partial / "text").write_text("new")
    assert (folder / "text").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_kill_between_two_renames_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the system cannot exchange names in one step: the old folder is found, and the next write clears up."""
    monkeypatch.setattr(files.ctypes, "CDLL", lambda *_, **__: object())
    folder = old(tmp_path / "it")
    assert settled(folder) == folder
    real = Path.rename

    def killed(self: Path, to: Path) -> Path:
        if self.suffix == ".part":
            raise KeyboardInterrupt
        return real(self, to)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt), atomic_folder(folder, replace=True) as partial:
            (partial / "text").write_text("new")
    assert not folder.exists() and (settled(folder) / "text").read_text() == "old"
    with atomic_folder(folder, replace=True) as partial:
        (partial / "text").write_text("newer")
    assert (settled(folder) / "text").read_text() == "newer"
    assert [path.name for path in tmp_path.iterdir()] == ["it"]


def test_a_lock_is_waited_for(tmp_path: Path) -> None:
    order: list[str] = []
    waits = threading.Event()

    def second() -> None:
        waits.set()
        with locked(tmp_path / "made" / "it.lock"):
            order.append("second")

    thread = threading.Thread(target=second)
    with locked(tmp_path / "made" / "it.lock"):
        thread.start()
        assert waits.wait(20)
        thread.join(0.1)
        order.append("first")
    thread.join(20)
    assert order == ["first", "second"]


def test_a_lock_that_cannot_be_made_names_its_folder(tmp_path: Path) -> None:
    (tmp_path / ".lock").mkdir()
    with pytest.raises(IsADirectoryError) as caught, exclusive(tmp_path / ".lock", "testing"):
        pass
    assert caught.value.filename == str(tmp_path)


def test_a_torn_last_line_is_passed_over_and_another_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    append_jsonl(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')
    assert list(read_jsonl(path)) == [(1, {"step": 1})]
    with path.open("a") as file:
        file.write("\n")
    with pytest.raises(UserError, match=r"metrics\.jsonl: line 2 is not valid JSON"):
        list(read_jsonl(path))


@pytest.mark.parametrize("text", ["[]", "{", "[" * 100_000, "\xff"])
def test_what_is_no_json_object_is_one_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "it.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match=r"it\.json: (holds no JSON object|not valid JSON)"):
        read_object(tmp_path / "it.json")
