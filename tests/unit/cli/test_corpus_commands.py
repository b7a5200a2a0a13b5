"""`prompts`, `regenerate` and `inspect` on a tiny target: what they write, keep, resume and refuse."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from safetensors.torch import load_file, save_file

from drafttrain.cli.common import chat_of, target_when_needed
from drafttrain.cli.main import main
from drafttrain.corpus.answers import TargetAnswers
from drafttrain.errors import DataError
from drafttrain.files import read_json, write_json
from drafttrain.recipe.conversations import prepare_conversations, what_was_left_out
from drafttrain.recipe.load import load_recipe
from tests.tiny_world import save_target


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), num_hidden_layers=2, max_position_embeddings=160)


@pytest.fixture
def recipe(target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A recipe with two prompts and one row that is none, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    rows = [{"prompt": "How are you?"}, {"nothing": 1}, {"turns": ["Why?", "And then? 你好 😀"], "id": "two"}]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    values = {
        "name": "tiny",
        "target": {"model": str(target), "dtype": "float32", "device": "cpu"},
        "data": {
            "prompts": [{"source": "prompts.jsonl"}],
            "answers": {"max_new_tokens": 6},
            "max_length": 150,
            "held_out": 0,
        },
        "drafter": {"family": "eagle3"},
        "loss": {},
        "training": {"epochs": 1},
        "evaluation": {"prompts": 0},
    }
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(values), encoding="utf-8")
    return path


def lines(path: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


def test_prompts_are_collected_into_the_run_or_a_file(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prompts", str(recipe), "--out", "mine.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "2 prompts in mine.jsonl" in out
    assert "refused 1:" in out
    assert not Path("runs").exists()
    assert main(["prompts", str(recipe)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "1 row(s) refused, the first: has none of the known columns" in out
    assert "listed in runs/tiny/data/rejects.jsonl" in out
    assert lines("runs/tiny/data/prompts.jsonl") == lines("mine.jsonl")
    assert [reject["id"] for reject in lines("runs/tiny/data/rejects.jsonl")] == ["prompts-1"]


def test_answers_are_written_once_and_kept(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["regenerate", str(recipe)]) == 0
    assert "2 answers written, 0 kept" in capsys.readouterr().out
    answered = lines("runs/tiny/data/answers.jsonl")
    roles = {str(row["id"]): [message["role"] for message in row["messages"]] for row in answered}  # type: ignore[attr-defined]
    assert roles == {"prompts-0": ["user", "assistant"], "two": ["user", "assistant"] * 2}
    assert main(["regenerate", str(recipe)]) == 0
    assert "0 answers written, 2 kept" in capsys.readouterr().out
    assert lines("runs/tiny/data/answers.jsonl") == answered


def test_a_prompt_that_does_not_fit_is_listed_and_the_rest_answered(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("prompts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"id": "long", "prompt": "word " * 200}) + "\n")
    assert main(["regenerate", str(recipe)]) == 1
    out = capsys.readouterr().out
    assert "2 answers written" in out
    assert [reject["id"] for reject in lines("runs/tiny/data/unanswered.jsonl")] == ["long"]


def test_what_is_left_out_is_said_and_nothing_left_is_an_error(recipe: Path) -> None:
    """As in a training run, which reads the same files."""
    run = load_recipe(recipe)
    chat, load = chat_of(run), target_when_needed(run, Console())
    prepare_conversations(run, chat, load)
    assert len(what_was_left_out(run)) == 1
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "word " * 200}) + "\n", encoding="utf-8")
    run = load_recipe(recipe, ["output_dir=runs/other"])
    with pytest.raises(DataError, match=r"none of the 1 prompts got an answer; the first: the prompt has"):
        prepare_conversations(run, chat, load)
    assert "1 prompt(s) without an answer, the first: the prompt has" in what_was_left_out(run)[0]


def test_settled_data_is_what_is_there(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has trained on it, or a rank for which another wrote it, asks no prompt again."""
    with Path("prompts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"id": "long", "prompt": "word " * 200}) + "\n")
    run = load_recipe(recipe)
    chat, load = chat_of(run), target_when_needed(run, Console())
    answered = {item.id for item in prepare_conversations(run, chat, load)}
    assert answered == {"prompts-0", "two"}
    with monkeypatch.context() as patched:
        patched.setattr(TargetAnswers, "answer", lambda *_: pytest.fail("asked again"))
        assert {item.id for item in prepare_conversations(run, chat, load, settled=True)} == answered
        other = load_recipe(recipe, ["data.answers.temperature=0.5"])
        with pytest.raises(DataError, match=r"other settings \(temperature"):
            prepare_conversations(other, chat, load, settled=True)
    Path("runs/tiny/data/answers.jsonl").unlink()
    assert {item.id for item in prepare_conversations(run, chat, load, settled=True)} == answered


def test_prompts_of_a_folder_are_collected_again_when_its_files_changed(
    recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("set").mkdir()
    Path("set/a.jsonl").write_text(json.dumps({"prompt": "One?"}) + "\n", encoding="utf-8")
    words = (str(recipe), "data.prompts=[{source: set}]")
    assert main(["prompts", *words]) == 0 and "1 prompts in" in capsys.readouterr().out
    Path("set/notes.md").write_text("no data", encoding="utf-8")
    origin = Path("runs/tiny/data/prompts.origin.json")
    before = origin.read_text("utf-8")
    assert main(["prompts", *words]) == 0 and origin.read_text("utf-8") == before
    Path("set/b.jsonl").write_text(json.dumps({"prompt": "Two?"}) + "\n", encoding="utf-8")
    assert main(["prompts", *words]) == 0 and "2 prompts in" in capsys.readouterr().out
    assert main(["regenerate", *words]) == 0
    Path("set/b.jsonl").unlink()
    assert main(["regenerate", *words]) == 2
    assert "answers to prompts from other sources" in " ".join(capsys.readouterr().err.split())


def test_an_origin_from_before_folders_were_hashed_still_stands(recipe: Path) -> None:
    Path("set").mkdir()
    Path("set/a.jsonl").write_text(json.dumps({"prompt": "One?"}) + "\n", encoding="utf-8")
    words = (str(recipe), "data.prompts=[{source: set}]")
    assert main(["regenerate", *words]) == 0
    origin = Path("runs/tiny/data/prompts.origin.json")
    value = json.loads(origin.read_text("utf-8"))
    assert len(value["sources"][0].pop("folder_sha256")) == 64
    origin.write_text(json.dumps(value), "utf-8")
    assert main(["regenerate", *words]) == 0


def test_answers_to_other_prompts_are_refused_and_stay(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["regenerate", str(recipe)]) == 0
    before = Path("runs/tiny/data/answers.jsonl").read_bytes()
    Path("prompts.jsonl").write_text(json.dumps({"prompt": "Something else?"}) + "\n", encoding="utf-8")
    assert main(["regenerate", str(recipe)]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "answers to prompts from other sources" in error
    assert "choose another output_dir" in error
    assert Path("runs/tiny/data/answers.jsonl").read_bytes() == before
    assert main(["regenerate", str(recipe), "output_dir=runs/other"]) == 0


def test_what_lies_elsewhere_now_is_the_same_and_other_weights_are_not(
    recipe: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Answers take hours: a target and prompts under another path keep them, other weights at the old one do not."""
    own = tmp_path / "own"
    shutil.copytree(target, own)
    assert main(["regenerate", str(recipe), f"target.model={own}"]) == 0
    before = Path("runs/tiny/data/answers.jsonl").read_bytes()
    Path("elsewhere").mkdir()
    Path("prompts.jsonl").rename("elsewhere/prompts.jsonl")
    own.rename("elsewhere/own")
    words = ["regenerate", str(recipe), "data.prompts.0.source=elsewhere/prompts.jsonl"]
    capsys.readouterr()
    assert main([*words, "target.model=elsewhere/own"]) == 0
    assert "0 answers written, 2 kept" in capsys.readouterr().out
    weights = Path("elsewhere/own/model.safetensors")
    tuned = {name: tensor * 1.5 for name, tensor in load_file(weights).items()}
    save_file(tuned, weights, metadata={"format": "pt"})
    assert main([*words, "target.model=elsewhere/own"]) == 2
    assert "or by another target" in " ".join(capsys.readouterr().err.split())
    assert Path("runs/tiny/data/answers.jsonl").read_bytes() == before


def test_a_folder_of_prompts_may_move_and_not_change(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("set").mkdir()
    Path("set/a.jsonl").write_text(json.dumps({"prompt": "One?"}) + "\n", encoding="utf-8")
    assert main(["regenerate", str(recipe), "data.prompts=[{source: set}]"]) == 0
    Path("elsewhere").mkdir()
    Path("set").rename("elsewhere/set")
    words = ["regenerate", str(recipe), "data.prompts=[{source: elsewhere/set}]"]
    capsys.readouterr()
    assert main(words) == 0 and "0 answers written, 1 kept" in capsys.readouterr().out
    Path("elsewhere/set/a.jsonl").write_text(json.dumps({"prompt": "Two?"}) + "\n", encoding="utf-8")
    assert main(words) == 2


def test_runs_from_before_weights_were_noted_go_on(recipe: Path) -> None:
    assert main(["regenerate", str(recipe)]) == 0
    path = Path("runs/tiny/data/prompts.origin.json")
    origin = read_json(path)
    del origin["target"]["weights"]
    write_json(path, origin)
    assert main(["regenerate", str(recipe)]) == 0
    origin["target"]["model"] += "-other"
    write_json(path, origin)
    assert main(["regenerate", str(recipe)]) == 2


def test_a_run_that_was_moved_does_not_begin_anew_elsewhere(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "moved" / "checkpoints").mkdir(parents=True)
    recipe.rename(tmp_path / "moved" / "recipe.yaml")
    assert main(["prompts", "moved"]) == 2
    remedy = "to go on here add output_dir=moved, for another run name=NAME"
    assert f"moved: this run's recipe writes to runs/tiny\n  {remedy}" in capsys.readouterr().err
    assert not Path("runs").exists()
    assert main(["prompts", "moved", "output_dir=moved"]) == 0
    assert Path("moved/data/prompts.jsonl").exists()


def test_samples_are_shown_with_their_share(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(recipe)]) == 2
    assert "drafttrain regenerate" in capsys.readouterr().err
    assert main(["regenerate", str(recipe)]) == 0
    capsys.readouterr()
    assert main(["inspect", str(recipe), "--samples", "9"]) == 0
    out = capsys.readouterr().out
    assert "How are you?" in out
    assert "你好 😀" in out
    assert "% supervised" in out and ", 1 span, " in out
    assert "\x1b[" not in out
    assert main(["inspect", str(recipe), "--color"]) == 0
    assert "\x1b[" in capsys.readouterr().out


def test_given_answers_need_no_target(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": "How are you?", "completion": "I am fine, thank you."}
    Path("prompts.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    assert main(["inspect", str(recipe), "data.answers.source=given"]) == 0
    assert "I am fine" in capsys.readouterr().out.replace("\n", " ")
    assert main(["regenerate", str(recipe), "data.answers.source=given"]) == 2
    assert "nothing to regenerate" in capsys.readouterr().err


def test_a_bad_recipe_is_one_error(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["regenerate", str(recipe), "data.anwsers.seed=1", "training.lr=x"]) == 2
    captured = capsys.readouterr()
    assert "2 problems" in captured.err
    assert "Traceback" not in captured.err
    assert main(["prompts", "nowhere.yaml"]) == 2
    assert "no such file" in capsys.readouterr().err
