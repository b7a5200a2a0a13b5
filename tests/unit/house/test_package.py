"""The package as others see it: names, import time, the wheel, the entry points."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "drafttrain"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def python(*arguments: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **environment},
    )


def test_no_module_hides_one_of_the_library_or_of_a_dependency() -> None:
    """`accelerate launch drafttrain/train.py` puts the package's own folder on sys.path."""
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()}
    everything = [
        *PROJECT["dependencies"],
        *(r for extra in PROJECT["optional-dependencies"].values() for r in extra),
    ]
    dependencies = {re.split(r"[^\w.-]", requirement)[0].replace("-", "_").lower() for requirement in everything}
    assert names.isdisjoint(sys.stdlib_module_names)
    assert names.isdisjoint(dependencies)


def test_every_folder_with_modules_is_a_package() -> None:
    missing = [
        folder
        for folder in PACKAGE.rglob("*")
        if folder.is_dir() and any(folder.glob("*.py")) and not (folder / "__init__.py").exists()
    ]
    assert missing == []


def test_the_version_is_the_same_everywhere() -> None:
    from drafttrain import __version__

    assert PROJECT["version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_the_command_line_imports_nothing_heavy() -> None:
    code = (
        "import sys\nfrom drafttrain.cli.main import build_parser\nbuild_parser()\n"
        "heavy = ('torch', 'transformers', 'accelerate', 'pydantic', 'rich', 'httpx')\n"
        "print([m for m in heavy if m in sys.modules])"
    )
    result = python("-c", code)
    assert result.stdout.strip() == "[]", result.stderr


def test_the_package_runs_as_a_program() -> None:
    result = python("-m", "drafttrain", "--version")
    assert (result.returncode, result.stdout.split()[0]) == (0, "drafttrain"), result.stderr


def test_train_py_finds_the_package_from_a_bare_checkout(tmp_path: Path) -> None:
    """Not installed (-S hides site-packages), another working folder, the package's folder first in the path."""
    probe = tmp_path / "probe.py"
    probe.write_text(
        "import runpy, sys\n"
        f"sys.path[0] = {str(PACKAGE)!r}\n"
        f"module = runpy.run_path({str(PACKAGE / 'train.py')!r}, run_name='probe')\n"
        "sys.argv = ['train.py', '--help']\n"
        "try:\n    module['main']()\nexcept SystemExit as done:\n    print('exit', done.code)\n"
        "import drafttrain\n"
        "print(drafttrain.__file__)\nprint(sys.path[0])\n"
        "print(any(p.endswith('drafttrain') for p in sys.path))\n",
        encoding="utf-8",
    )
    result = python("-S", str(probe), cwd=tmp_path, PYTHONPATH="")
    lines = result.stdout.splitlines()
    assert lines[-3:] == [str(PACKAGE / "__init__.py"), str(ROOT), "False"], result.stdout + result.stderr


@pytest.mark.parametrize("command", ["prompts", "regenerate", "inspect", "train"])
def test_a_recipe_is_checked_before_anything_heavy_is_loaded(command: str) -> None:
    code = (
        "import sys\nfrom drafttrain.cli.main import main\n"
        f"status = main([{command!r}, 'recipes/quickstart.yaml', 'a=1'])\n"
        "print(status, [m for m in ('torch', 'transformers', 'accelerate', 'datasets') if m in sys.modules])"
    )
    result = python("-c", code)
    assert result.stdout.strip() == "2 []", result.stdout + result.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = python("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder))
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


def test_the_wheel_brings_recipes_suites_and_prompts(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"drafttrain", f"drafttrain-{PROJECT['version']}.dist-info"}
    for folder in ("data", "recipes", "eval/suites"):
        shipped = [path for path in (ROOT / folder).rglob("*") if path.is_file()]
        assert shipped
        for path in shipped:
            assert f"drafttrain/_bundled/{path.relative_to(ROOT).as_posix()}" in names
    assert not any("leaderboard" in name for name in names if "_bundled" in name)


def test_an_installed_package_finds_what_it_brought(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    code = (
        "from drafttrain.files import find_resource\n"
        "import drafttrain\nprint(drafttrain.__file__)\n"
        "for name in ('recipes/quickstart.yaml', 'eval/suites/core.yaml', 'data/prompts/train.jsonl'):\n"
        "    print(find_resource(name))\n"
    )
    result = python("-c", code, cwd=tmp_path, PYTHONPATH=str(site))
    lines = result.stdout.splitlines()
    assert len(lines) == 4, result.stderr
    assert all(line.startswith(str(site)) for line in lines)


@pytest.mark.slow
def test_an_installed_package_is_launched_as_a_module(wheel: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    launch = ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no"]
    arguments = ["-m", "drafttrain.train", "recipes/quickstart.yaml", "nane=x"]
    result = python(*launch, *arguments, cwd=tmp_path, PYTHONPATH=str(site))
    assert "recipes/quickstart.yaml: 1 problem" in result.stderr, result.stderr
    assert "did you mean 'name'?" in " ".join(result.stderr.split())


def test_the_readme_lists_the_commands() -> None:
    from drafttrain.cli.main import build_parser

    usage = build_parser().format_help()
    documented = set(re.findall(r"^\| `drafttrain (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.M))
    available = set(re.findall(r"^    (\w+)\b", usage, re.M))
    assert documented == available


def test_scripts_are_valid_shell_and_executable() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0


@pytest.mark.parametrize("target", ["quickstart", "test", "lint", "venv", "format"])
def test_make_targets_exist(target: str) -> None:
    result = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def quickstart(*arguments: str) -> str:
    """What `make quickstart` would run, with this interpreter's environment in place of `.venv`."""
    command = ["make", "-n", "quickstart", "GPU=", f"BIN={Path(sys.executable).parent}", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_quickstart_takes_fewer_prompts_where_the_cpu_has_no_bfloat16() -> None:
    from drafttrain.targets.native import native_dtype

    slow = native_dtype("cpu") == "float32"
    commands = quickstart()
    assert ("data.prompts.1.count=440" in commands) == ("limit=8" in commands) == slow
    # What is asked for on the command line is heard last.
    fewer = quickstart("FEWER=yes", "ARGS=data.prompts.1.count=9")
    assert "count=440 data.prompts.1.count=9" in fewer
    # FULL=1 may follow: a folder that holds another run is refused.
    assert "name=quick " in fewer and "eval runs/quick " in fewer


@pytest.mark.parametrize("more", ["FULL=1", "RECIPE=recipes/smollm2/eagle3.yaml", "GPU=yes"])
def test_whoever_asks_for_all_of_a_recipe_gets_it(more: str) -> None:
    commands = quickstart(more)
    assert "data.prompts" not in commands and "runs/quick " not in commands
    assert "limit=16" in commands


def test_the_quickstart_measures_the_run_that_its_arguments_name() -> None:
    assert "eval runs/quickstart " in quickstart("FULL=1")
    assert "eval runs/mine " in quickstart("FEWER=yes", "ARGS=name=other seed=3 name=mine")
    assert "eval /data/mine " in quickstart("ARGS=output_dir=/data/mine name=mine")
