"""`auto` dtypes: of the run that goes on, else of the machine."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.cli.main import main
from drafttrain.recipe.history import changes
from drafttrain.recipe.load import load_recipe, load_target_config, save_recipe
from drafttrain.recipe.settle import settle
from drafttrain.targets import native

MINIMAL = """\
name: tiny
target: {model: smollm2-135m, dtype: auto}
data:
  prompts: [{source: prompts.jsonl}]
drafter: {family: eagle3}
loss: {}
training: {epochs: 1, precision: auto}
"""


@pytest.fixture
def minimal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(MINIMAL, encoding="utf-8")
    return path


@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "bf16"), ("float32", "fp32")])
def test_a_new_run_takes_what_the_machine_computes_in(minimal: Path, dtype: str, precision: str) -> None:
    asked: list[str] = []

    def machine(device: str) -> str:
        asked.append(device)
        return dtype

    recipe = load_recipe(minimal, ["target.device=cpu"], machine)
    assert (recipe.target.dtype, recipe.training.precision) == (dtype, precision)
    assert set(asked) == {"cpu"}
    assert settle(recipe, lambda _: pytest.fail("nothing is left to ask")) is recipe
    folder = minimal.parent / "run"
    folder.mkdir()
    save_recipe(recipe, folder)
    assert load_recipe(folder) == recipe


def test_what_is_said_is_not_asked(minimal: Path) -> None:
    recipe = load_recipe(minimal, ["target.dtype=float16", "training.precision=fp32"], lambda _: pytest.fail("asked"))
    assert (recipe.target.dtype, recipe.training.precision) == ("float16", "fp32")
    half = load_recipe(minimal, ["target.dtype=float32"], lambda _: "bfloat16")
    assert (half.target.dtype, half.training.precision) == ("float32", "bf16")


def test_vllm_computes_elsewhere(minimal: Path) -> None:
    source = ["features.source=vllm", "features.urls=['http://10.0.0.7:8000']", "features.exchange=/dev/shm/states"]
    recipe = load_recipe(minimal, source, lambda _: "float32")
    assert (recipe.target.dtype, recipe.training.precision) == ("bfloat16", "fp32")


def test_a_run_goes_on_as_it_began_whatever_the_machine(minimal: Path) -> None:
    began = load_recipe(minimal, native=lambda _: "bfloat16")
    folder = Path(began.run_folder)
    folder.mkdir(parents=True)
    save_recipe(began, folder)
    again = load_recipe(minimal, native=lambda _: "float32")
    assert again == began and not changes(folder, again)
    elsewhere = load_recipe(minimal, ["name=other"], lambda _: "float32")
    assert elsewhere.target.dtype == "float32"


@pytest.mark.parametrize(
    "content", [b"", b"target: 3\n", b"\xff\xfe", b"a: [", b"target: {dtype: auto}\n", b"target: {dtype: half}\n"]
)
def test_a_run_that_cannot_be_read_settles_nothing(minimal: Path, content: bytes) -> None:
    folder = minimal.parent / "runs" / "tiny"
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_bytes(content)
    assert load_recipe(minimal, native=lambda _: "float32").target.dtype == "float32"


def test_a_target_without_a_recipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "native_dtype", lambda device: "float32")
    assert load_target_config("smollm2-135m").dtype == "float32"
    assert load_target_config("smollm2-135m", ["target.dtype=bfloat16"]).dtype == "bfloat16"


def test_a_plan_for_other_hardware_is_in_the_dtype_of_that(
    minimal: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native, "native_dtype", lambda device: "float32")
    minimal.write_text(MINIMAL.replace("prompts.jsonl", "data/prompts/train.jsonl"), encoding="utf-8")
    main(["plan", str(minimal), "--gpus", "1xH100"])
    assert "(bfloat16)" in capsys.readouterr().out
    main(["plan", str(minimal)])
    assert "(float32)" in capsys.readouterr().out
