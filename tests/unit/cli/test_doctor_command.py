"""`drafttrain doctor`: exit status, JSON, a mended copy, refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from drafttrain.cli.main import main
from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.saving import save_draft
from drafttrain.export.write import export_draft
from drafttrain.files import read_json
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.targets.identity import tokenizer_hash
from drafttrain.targets.load import load_identity
from eval.broken_exports import spoil
from tests.chats import CHATML, chat_tokenizer
from tests.draft_support import new_draft
from tests.foreign_support import target_folder
from tests.support import tiny_hf


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a tokenizer, padded, and a sound export for it."""
    root = tmp_path_factory.mktemp("doctor")
    words = chat_tokenizer(CHATML)
    size = len(words) + 5
    hf = tiny_hf("llama", num_hidden_layers=8, vocab_size=size)
    hf.save_pretrained(root / "target")
    words.save_pretrained(root / "target")
    stops = [words.convert_tokens_to_ids(name) for name in ("<|im_end|>", "</s>")]
    ids = sorted({*range(0, len(words), 3), *stops, words.eos_token_id, 2})
    draft = new_draft(
        Eagle3Config(taps=(1, 3, 6), draft_vocab_size=len(ids)), CausalLM(hf), vocab_map=VocabMap.from_ids(ids, size)
    )
    identity = {
        "name": str(root / "target"),
        "tokenizer_hash": tokenizer_hash(AutoTokenizer.from_pretrained(root / "target")),
        "vocab_size": size,
        "hidden_size": 32,
        "n_layers": 8,
    }
    save_draft(root / "run" / "draft", draft, target=identity)
    export_draft(root / "run", ["vllm"])
    return root


def doctor(place: Path, draft: Path, *more: str) -> int:
    return main(["doctor", str(draft), "--target", str(place / "target"), "--static", *more])


def test_a_sound_export(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor(place, place / "run" / "export" / "vllm") == 0
    assert "no errors" in capsys.readouterr().out


def test_a_broken_one_is_mended(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = spoil(place / "run" / "export" / "vllm", tmp_path / "broken", "shifted-layer-ids")
    assert doctor(place, broken, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert [finding["rule"] for finding in report["findings"]] == ["layer-ids-convention"]
    assert report["family"] == "eagle3" and report["findings"][0]["fixable"]
    assert doctor(place, broken, "--ignore", "layer-ids-convention") == 0
    capsys.readouterr()
    assert doctor(place, broken, "--fix", str(tmp_path / "mended")) == 0
    assert "layer-ids-convention" in capsys.readouterr().out
    sound = read_json(place / "run" / "export" / "vllm" / "config.json")
    assert read_json(tmp_path / "mended" / "config.json") == sound
    assert doctor(place, broken, "--fix", str(tmp_path / "mended")) == 2
    assert "already exists" in capsys.readouterr().err


def test_an_export_for_another_engine_is_judged_as_that(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for engine in ("sglang", "trtllm"):
        (written,) = export_draft(place / "run", [engine], tmp_path)
        assert doctor(place, written.folder, "--json") == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["engine"], report["findings"]) == (engine, [])
    assert doctor(place, written.folder, "--engine", "vllm", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert [finding["rule"] for finding in report["findings"]] == ["layer-ids-convention"]


def test_what_only_a_person_can_mend(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken = spoil(place / "run" / "export" / "vllm", tmp_path / "broken", "nan")
    assert doctor(place, broken, "--fix", str(tmp_path / "mended")) == 1
    assert "no copy was written" in capsys.readouterr().out and not (tmp_path / "mended").exists()


def test_the_trial_of_a_draft_that_was_never_trained(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(i), "turns": [f"Say {i}"]}) + "\n" for i in range(3)))
    arguments = ["doctor", str(place / "run" / "export" / "vllm"), "--target", str(place / "target"), "--json"]
    arguments += ["--prompts", str(prompts), "--max-new-tokens", "12", "--dtype", "float32", "--k", "2"]
    assert main(arguments) == 1
    report = json.loads(capsys.readouterr().out)
    assert {finding["rule"] for finding in report["findings"]} == {"accepts-nothing"}
    trial = report["trial"]
    assert trial["setting"] == {"prompts": 3, "k": 2, "max_new_tokens": 12}
    assert trial["accepted"]["rounds"] > 20 and len(trial["tried"]) > 5
    assert main([*arguments[:-6], "--max-new-tokens", "4", "--ignore", "accepts-nothing,reading"]) == 0


def test_refusals(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    export = place / "run" / "export" / "vllm"
    assert doctor(place, place / "run") == 2
    assert "export it" in capsys.readouterr().err
    assert doctor(place, export, "--ignore", "nothing") == 2
    assert "no rule 'nothing'" in capsys.readouterr().err
    assert main(["doctor", str(export), "--target", str(tmp_path / "none")]) == 2
    said = capsys.readouterr().err
    assert "check the path" in said and "target.model" not in said
    tiny_hf("llama").save_pretrained(tmp_path / "bare")
    capsys.readouterr()
    assert main(["doctor", str(export), "--target", str(tmp_path / "bare")]) == 2
    assert "copy the tokenizer's files" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        doctor(place, export, "--engine", "llama.cpp")


def test_a_gguf_draft(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As the LM that it holds, tried as one; another target's tokens are told."""
    target, about = target_folder(tmp_path / "target")
    draft = build_drafter(DraftLMConfig(layers=tuple(range(8))), target.config)
    init_from_target(draft, target)  # is the target itself
    save_draft(tmp_path / "run" / "draft", draft, target=load_identity(about).to_dict())
    (written,) = export_draft(tmp_path / "run", ["gguf"])
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"id": "a", "turns": ["Say it"]}) + "\n")
    arguments = ["doctor", str(written.folder), "--target", str(tmp_path / "target"), "--json", "--dtype", "float32"]
    arguments += ["--prompts", str(prompts), "--max-new-tokens", "8", "--k", "2"]
    assert main(arguments) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["engine"], report["family"], report["findings"]) == ("llama.cpp", "draft_lm", [])
    assert report["trial"]["accepted"]["mean_length"] == 3.0
    assert main([*arguments, "--fix", str(tmp_path / "mended")]) == 2
    assert "not mended" in capsys.readouterr().err
    target_folder(tmp_path / "other", vocab_size=target.vocab_size + 3)
    assert main([*arguments, "--target", str(tmp_path / "other")]) == 2
    assert "its tokens are not those of" in capsys.readouterr().err
    data = (written.folder / "draft.gguf").read_bytes()
    (written.folder / "draft.gguf").write_bytes(data[: len(data) // 2])
    assert main(arguments) == 2
    assert "damaged or truncated" in capsys.readouterr().err
