"""What becomes of results and errors: messages, exit statuses."""

from __future__ import annotations

import argparse
import errno
import io
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drafttrain.cli import main as command_line
from drafttrain.errors import RecipeError
from drafttrain.files import CACHE_REMEDY, atomic_file, cache_dir, write_json
from tests.launching import ROOT, finish, free_port, start_ranks


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int | None]], int]:
    """Run `main` with a parser whose only command does what the test says."""

    def call(body: Callable[[], int | None]) -> int:
        def parser() -> argparse.ArgumentParser:
            made = argparse.ArgumentParser()
            made.set_defaults(run=lambda arguments: body())
            return made

        monkeypatch.setattr(command_line, "build_parser", parser)
        return command_line.main([])

    return call


def test_success_is_zero(run: Callable[[Callable[[], int | None]], int]) -> None:
    assert run(lambda: None) == 0
    assert run(lambda: 3) == 3


def test_a_users_error_is_printed_without_a_traceback(
    run: Callable[[Callable[[], int | None]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise RecipeError("two [red]problems[/red]", where="recipes/x.yaml", remedy="mend [them]")

    assert run(fails) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "error: recipes/x.yaml: two [red]problems[/red]\n  mend [them]\n"


def test_a_launcher_ends_with_the_users_error_and_not_with_a_hint_about_tracebacks(
    run: Callable[[Callable[[], int | None]], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def fails() -> None:
        raise RecipeError("two problems", where="recipes/x.yaml", remedy="mend them")

    def ends_with() -> str:
        return str(ChildFailedError("train.py", {0: ProcessFailure(0, os.getpid(), 2, str(tmp_path / "error.json"))}))

    assert "recipes/x.yaml" not in ends_with()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert run(fails) == 2
    assert "recipes/x.yaml: two problems\n    mend them" in ends_with() and "To enable traceback" not in ends_with()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "gone/error.json"))
    assert run(fails) == 2


def said(tmp_path: Path, ranks: int, port: int, **options: Any) -> str:
    """What ranks that all fail say together; before torch is imported, so before they could join."""
    environment = {"DRAFTTRAIN_CACHE": str(tmp_path / "cache"), "MASTER_PORT": str(port), "PYTHONPATH": str(ROOT)}
    ends = finish(start_ranks(["-m", "drafttrain", "train", "x.yaml"], ranks, environment, **options))
    assert [status for status, _ in ends] == [2] * ranks
    return "".join(output for _, output in ends)


def test_what_all_ranks_of_a_host_meet_is_shown_once_a_launch(tmp_path: Path) -> None:
    port = free_port()
    for _ in range(2):  # the launch that follows shows it again
        output = said(tmp_path, 2, port, cwd=tmp_path)
        assert output.count("error: ") == 1 and output.count("x.yaml: no such file") == 1


def test_what_one_rank_alone_meets_is_shown(tmp_path: Path) -> None:
    """Its file is another, or missing: no other rank says so in its place."""
    folders = [tmp_path / str(rank) for rank in range(3)]
    for folder in folders:
        folder.mkdir()
    (folders[0] / "x.yaml").write_text("name: x\nseed: -1\n")
    (folders[1] / "x.yaml").write_text("name: x\nseed: -2\n")
    output = said(tmp_path, 3, free_port(), own_cwd=dict(enumerate(folders)))
    assert output.count("error: ") == 3
    for own in ("seed (line 2): got -1", "seed (line 2): got -2", "x.yaml: no such file"):
        assert output.count(own) == 1


def test_without_a_place_for_notes_every_rank_shows_its_errors(
    run: Callable[[Callable[[], int | None]], int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def fails() -> None:
        raise RecipeError("wrong")

    monkeypatch.setenv("RANK", "1")
    for cache, shown in ((tmp_path, ["error: wrong\n", ""]), (Path("/proc/nowhere"), ["error: wrong\n"] * 2)):
        monkeypatch.setenv("DRAFTTRAIN_CACHE", str(cache))
        for expected in shown:
            assert run(fails) == 2
            assert capsys.readouterr().err == expected


def test_an_interrupt_is_130(
    run: Callable[[Callable[[], int | None]], int], capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    assert run(interrupted) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_a_disk_that_is_full_or_closed_is_one_error(
    run: Callable[[Callable[[], int | None]], int], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def full() -> None:
        with atomic_file(tmp_path / "x.json") as partial, partial.open("w"):
            raise OSError(errno.ENOSPC, "No space left on device")

    assert run(full) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path}/x.json: No space left on device\n  free some space")
    (tmp_path / "file").touch()

    def in_the_way() -> None:
        write_json(tmp_path / "file/x.json", {})

    assert run(in_the_way) == 2
    assert "error: " in capsys.readouterr().err

    def vanished() -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory", "x")

    with pytest.raises(FileNotFoundError):
        run(vanished)


def test_a_cache_that_cannot_be_written_says_which_variable_moves_it(
    run: Callable[[Callable[[], int | None]], int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))

    def closed(path: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    for path, remedy in ((cache_dir() / "corpus", CACHE_REMEDY), (tmp_path, CACHE_REMEDY), (tmp_path / "x", "change")):
        assert run(partial(closed, path)) == 2
        assert capsys.readouterr().err.startswith(f"error: {path}: Permission denied\n  {remedy}")
    monkeypatch.delenv("DRAFTTRAIN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def homeless(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert run(lambda: cache_dir() and None) == 2
    assert capsys.readouterr().err == f"error: ~: this user has no home folder\n  {CACHE_REMEDY}\n"


PLAIN = """
import argparse
from drafttrain.cli import main
parser = argparse.ArgumentParser()
parser.set_defaults(run=lambda arguments: print("words " * 100_000))
main.build_parser = lambda: parser
raise SystemExit(main.main([]))
"""


@pytest.mark.parametrize(
    "command", [["-c", PLAIN], ["-m", "drafttrain", "eval", "--leaderboard", "--leaderboard-dir", "nowhere"]]
)
def test_a_reader_that_has_gone(command: list[str]) -> None:
    """As `yes | head` ends: 128 + SIGPIPE, and nothing on the error stream."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([sys.executable, *command], cwd=ROOT, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_character_that_the_terminal_lacks(
    run: Callable[[Callable[[], int | None]], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", out)
    assert run(lambda: print("ä 你")) == 0
    assert out.buffer.getvalue() == b"\xe4 \\u4f60\n"


OVERRIDDEN = {
    # Command: what it is given first, and an option with its value.
    "plan": (["recipe.yaml"], ["--nodes", "2"]),
    "prompts": (["recipe.yaml"], ["--out", "a=b.jsonl"]),
    "regenerate": (["recipe.yaml"], []),
    "inspect": (["recipe.yaml"], ["--seed", "1"]),
    "features build": (["recipe.yaml"], ["--part", "1/2"]),
    "features verify": (["store", "recipe.yaml"], []),
    "features serve": (["recipe.yaml"], ["--port", "0"]),
    "features vllm": (["recipe.yaml"], []),
    "train": (["runs/lr=1"], ["--resume", "never"]),
    "calibrate": (["runs/lr=1"], ["--kind", "skip"]),
    "eval": (["runs/lr=1"], ["--out", "a=b"]),
}
WORDS = ["data.template_kwargs.a-b=1", "trees=[{branching: [2, 2]}, {file: a=b}]", "seed=-1"]


def parse(words: list[str]) -> argparse.Namespace:
    return command_line.build_parser().parse_args(words)


def commands_with_overrides(parser: argparse.ArgumentParser, name: str = "") -> Iterator[str]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, below in action.choices.items():
                yield from commands_with_overrides(below, f"{name} {word}".strip())
        elif action.dest == "overrides":
            yield name


def test_every_command_with_overrides_is_tried() -> None:
    assert set(commands_with_overrides(command_line.build_parser())) == set(OVERRIDDEN)


@pytest.mark.parametrize("command", OVERRIDDEN)
def test_overrides_may_stand_anywhere(command: str) -> None:
    first, option = OVERRIDDEN[command]
    plain = vars(parse([*command.split(), *first, *option]))
    one, two, three = WORDS
    for words in (
        [*first, *WORDS, *option],
        [*first, *option, *WORDS],
        [*first, one, *option, two, three],
        [*option, *first, *WORDS],
        [*option, *WORDS, *first],
        [*WORDS, *first, *option],
        [one, *option, two, *first, three],
    ):
        found = vars(parse([*command.split(), *words]))
        assert found["overrides"] == WORDS, words
        assert {**found, "overrides": []} == {**plain, "overrides": []}, words


def test_overrides_behind_the_suite_of_an_eval() -> None:
    found = parse(["eval", "run", "--suite", "core.yaml", "limit=1", "--out", "there", "k=[2]", "--fresh", "seed=1"])
    assert (found.run_folder, found.overrides) == ("run", ["limit=1", "k=[2]", "seed=1"])
    assert (found.suite, str(found.out), found.fresh) == ("core.yaml", "there", True)


def test_what_is_no_override_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.yaml").write_text("name: x")
    assert command_line.main(["train", str(tmp_path / "x.yaml"), "name=y", "--resume", "never", "seed=-1"]) == 2
    assert "seed (override seed=-1): got -1" in capsys.readouterr().err
    for wrong in (
        ["train", "x.yaml", "--resum3", "never", "a=1"],
        ["train", "x.yaml", "--resume", "never", "word"],
        ["export", "run", "--to", "vllm", "k=3"],
    ):
        with pytest.raises(SystemExit):
            command_line.main(wrong)
        assert "unrecognized arguments" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command_line.main(["features", "serve", "x.yaml", "--port", "99999"])
    assert "--port: must be from 0 to 65535" in capsys.readouterr().err


def test_what_is_an_override_is_told_from_values_and_paths() -> None:
    for words, overrides in (
        (["train", "a=1", "x.yaml", "--resume", "b=2"], ["a=1"]),  # the value of an option
        (["train", "x.yaml", "--res", "b=2", "a=1"], ["a=1"]),  # the same of one that is cut short
        (["train", "x.yaml", "--resume=never", "a=1"], ["a=1"]),
        (["eval", "x.yaml", "--no-leaderboard", "a=1", "--suite", "s"], ["a=1"]),  # a flag has no value
        (["train", "x.yaml", "prompts[0]=1"], ["prompts[0]=1"]),  # wrong, and the recipe says why
        (["train", "x.yaml", "--", "a=1"], ["a=1"]),
    ):
        assert parse(words).overrides == overrides, words
    assert parse(["features", "verify", "runs/a=1", "recipes/b=2.yaml"]).recipe == "recipes/b=2.yaml"


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["train", "x.yaml", "word"], "x.yaml: no such file"),
        (["train", "recipes/quickstart.yaml", "word"], "word: an override is written key=value"),
        (["train", "recipes/quickstart.yaml", "--resume", "never", "seed[0]=1"], "seed[0]"),
        (["features", "verify", "store", "seed=1"], "seed=1: overrides are of a recipe"),
        (["eval", "run", "other", "--suite", "s.yaml"], "got 2 runs"),
        (["eval", "--suite", "s.yaml", "limit=1"], "got no run"),
        (["eval", "run", "limit=1"], "got no --suite"),
    ],
)
def test_words_that_are_out_of_place(words: list[str], error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(words) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize("value", ["1e-45", "-1", "nan", "inf"])
def test_a_temperature_that_cannot_be_sampled_at(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command_line.main(["calibrate", "nowhere", "--kind", "skip", f"--temperature={value}"]) == 2
    assert capsys.readouterr().err.startswith("error: --temperature: is ")


def test_a_fault_of_ours_keeps_its_traceback(run: Callable[[Callable[[], int | None]], int]) -> None:
    def fails() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(fails)


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _parsers(child)


def test_every_option_is_explained_and_prose_fits_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "90")
    for parser in _parsers(command_line.build_parser()):
        for action in parser._actions:
            commands = isinstance(action, argparse._SubParsersAction)
            assert action.help or commands, f"{parser.prog}: {action.dest}"
        # Examples are commands, which nobody wants to be broken.
        prose = parser.format_help().partition("\nexamples:")[0]
        assert max(map(len, prose.splitlines())) <= 120, parser.prog
        assert parser.description and max(map(len, prose.partition("positional arguments:")[0].splitlines())) <= 90


def test_no_command_and_unknown_commands_are_usage_errors(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["trane"]):
        with pytest.raises(SystemExit) as stopped:
            command_line.main(arguments)
        assert stopped.value.code == 2
    assert "usage: drafttrain" in capsys.readouterr().err
