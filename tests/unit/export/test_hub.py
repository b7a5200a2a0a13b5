"""Push and pull: what is sent, what is refused, and the real client against a hub on this machine."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from drafttrain.cli.main import main
from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.saving import save_draft
from drafttrain.errors import UserError
from drafttrain.export.hub.inspect import local_paths, secrets
from drafttrain.export.hub.pull import pull
from drafttrain.export.hub.push import plan_push, push
from drafttrain.export.write import export_draft
from drafttrain.files import read_json, write_json
from eval.broken_exports import spoil
from tests.draft_support import new_draft
from tests.support import VOCAB, tiny_target
from tests.unit.export import fake_hub

REPO = "someone/tiny-eagle3"


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a draft whose target has a name that a hub knows."""
    run = tmp_path_factory.mktemp("hub") / "run"
    identity = {"name": "some/target", "vocab_size": VOCAB, "hidden_size": 32, "n_layers": 8}
    save_draft(run / "draft", new_draft(Eagle3Config(), tiny_target(num_hidden_layers=8)), target=identity)
    (written,) = export_draft(run, ["vllm"])
    return written.folder


@pytest.fixture
def copy(export: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(export, tmp_path / "export"))


def test_what_is_sent(export: Path) -> None:
    plan = plan_push(export, REPO)
    assert [file.name for file in plan.files] == ["README.md", "config.json", "drafttrain.json", "model.safetensors"]
    assert plan.left_out == [] and plan.warnings == []
    card = plan.files[0].text
    assert card is not None
    assert card.startswith(
        "---\nlibrary_name: drafttrain\nbase_model: some/target\ntags:\n- speculative-decoding\n- eagle3\n- vllm\n"
    )
    # The folder's path in the serving command is the repository now; nothing of this machine is left.
    assert str(export) not in card and f'"model": "{REPO}"' in card
    assert all(file.text is None for file in plan.files[1:])
    assert plan.size == sum(file.size for file in plan.files)


def test_options_of_tensorrt_llm_name_the_repository(export: Path, tmp_path: Path) -> None:
    """Wherever the export lay when it was written."""
    (written,) = export_draft(export.parent.parent, ["trtllm"], tmp_path / "before")
    plan = plan_push(shutil.copytree(written.folder, tmp_path / "now"), REPO)
    texts = {file.name: file.text or "" for file in plan.files}
    assert f"speculative_model: {REPO}\n" in texts["llm_api_options.yaml"]
    assert f"--extra_llm_api_options {REPO}/llm_api_options.yaml" in texts["README.md"]
    assert str(tmp_path) not in "".join(texts.values())


def test_a_target_in_a_folder_needs_a_name(copy: Path) -> None:
    for name in ("README.md", "drafttrain.json"):
        text = (copy / name).read_text()
        (copy / name).write_text(text.replace("some/target", "/home/me/models/target"))
    with pytest.raises(UserError, match=r"README.md, line \d+: /home/me/models/target[\s\S]*--base-model"):
        plan_push(copy, REPO)
    text = (copy / "README.md").read_text()
    (copy / "README.md").write_text(text.replace("\n", "\n" * 7))
    with pytest.raises(UserError) as refused:
        plan_push(copy, REPO)
    numbers = [int(number) for number in re.findall(r"README.md, line (\d+):", refused.value.what)]
    assert len(numbers) > 2 and numbers == sorted(numbers)  # as they stand there, not as text is sorted
    (copy / "README.md").write_text(text)
    plan = plan_push(copy, REPO, base_model="some/target")
    assert all("/home/me" not in (file.text or "") for file in plan.files)
    assert {file.name for file in plan.files if file.text is not None} == {"README.md", "drafttrain.json"}
    forced = plan_push(copy, REPO, force=True)
    assert any("/home/me/models/target" in warning for warning in forced.warnings)


def test_a_run_says_neither_where_it_lay_nor_where_its_program_did(export: Path, tmp_path: Path) -> None:
    """Every program is called by a path of its environment, and `output_dir` may be one, too."""
    folder = Path(shutil.copytree(export, tmp_path / "mine" / "export" / "vllm"))
    (tmp_path / "mine" / "recipe.yaml").touch()
    about = read_json(folder / "drafttrain.json")
    command = ["/home/me/.venv/bin/drafttrain", "train", "mine.yaml"]
    write_json(folder / "drafttrain.json", {**about, "provenance": {"command": command}})
    with (folder / "README.md").open("a") as card:
        card.write(f"output_dir: {tmp_path / 'mine'}\n")
    sent = {file.name: file.text or "" for file in plan_push(folder, REPO).files}
    assert '"drafttrain",' in sent["drafttrain.json"] and "output_dir: runs/mine\n" in sent["README.md"]


def test_another_target_than_the_exports_own_is_refused(
    export: Path, copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"--base-model other/model: the export was made for some/target"):
        plan_push(export, REPO, base_model="other/model")
    assert plan_push(export, REPO, base_model="Some/Target").warnings == []
    assert "was made for" in plan_push(export, REPO, base_model="other/model", force=True).warnings[0]
    with pytest.raises(UserError, match="--base-model: is no name on a hub"):
        plan_push(export, REPO, base_model="/models/target")
    # The embedded target has a name there, too; of one in a folder the sizes tell, where the model named is cached.
    about = read_json(copy / "drafttrain.json")
    write_json(copy / "drafttrain.json", {**about, "target": {**about["target"], "name": "smollm2-135m"}})
    with pytest.raises(UserError, match="was made for HuggingFaceTB/SmolLM2-135M-Instruct"):
        plan_push(copy, REPO, base_model="HuggingFaceTB/SmolLM2-360M-Instruct")
    write_json(copy / "drafttrain.json", {**about, "target": {**about["target"], "name": str(tmp_path / "target")}})
    assert plan_push(copy, REPO, base_model="other/model")
    cached = tmp_path / "hub" / "models--other--model"
    (cached / "snapshots" / "abc").mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    write_json(cached / "snapshots" / "abc" / "config.json", {"hidden_size": 64, "vocab_size": VOCAB})
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(UserError, match=r"whose hidden_size is 32, not 64"):
        plan_push(copy, REPO, base_model="other/model")


@pytest.mark.parametrize(
    "line",
    [
        "token: hf_abcdefghijklmnopqrstuvwxyzABCD",
        "OPENAI sk-abcdefghijklmnop1234567890",
        '"api_key": "0123456789"',
        "https://me:hunter22@host/x",
        "-----BEGIN RSA PRIVATE KEY-----",
    ],
)
def test_secrets_are_never_sent(line: str, copy: Path) -> None:
    (copy / "notes.txt").write_text(f"fine\n{line}\n")
    for force in (False, True):
        with pytest.raises(UserError, match=r"notes\.txt, line 2") as refused:
            plan_push(copy, REPO, force=force)
        assert line not in str(refused.value)


def test_what_is_no_secret_and_no_path(export: Path) -> None:
    texts = {
        "a.md": "tokens/s, the token of a turn, 5/home runs, https://host/home/x, key: value, api/v1, some/target, "
        "tokenizer_hash: 0123456789abcdef, /, ~10, w/o, a/tmp/b"
    }
    assert list(secrets(texts)) == [] and list(local_paths(texts)) == []
    found = list(local_paths({"b.md": 'x "/root/a" ~/models/b C:\\Users\\me\\c (/tmp/d)'}))
    assert [line.split(": ", 1)[1] for line in found] == [
        "/root/a",
        "~/models/b",
        "C:\\Users\\me\\c",
        "/tmp/d",
    ]


def test_a_draft_with_errors_is_refused(export: Path, tmp_path: Path) -> None:
    broken = spoil(export, tmp_path / "broken", "nan")
    with pytest.raises(UserError, match=r"not-finite[\s\S]*drafttrain doctor"):
        plan_push(broken, REPO)
    assert any("not-finite" in warning for warning in plan_push(broken, REPO, force=True).warnings)


def test_code_pickles_and_hidden_files_stay(copy: Path) -> None:
    for name in ("model.py", "old.bin", ".cache/x.json"):
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).write_text("{}")
    assert plan_push(copy, REPO).left_out == [".cache/x.json", "model.py", "old.bin"]


def test_what_is_not_ours(tmp_path: Path, export: Path) -> None:
    (tmp_path / "theirs").mkdir()
    with pytest.raises(UserError, match="not an export of this version of drafttrain"):
        plan_push(tmp_path / "theirs", REPO)
    for repo in ("name", "a/b/c", "../x", "a/..", "a b/c", "a/b.git"):
        with pytest.raises(UserError, match="no name of a repository"):
            plan_push(export, repo)


def test_without_a_token(export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(UserError, match="HF_TOKEN: there is no token"):
        push(plan_push(export, REPO))


def test_a_dry_run_sends_nothing_and_says_all(
    export: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert main(["push", str(export), REPO, "--dry-run", "--private"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("4 files") and "private" in out and out.endswith("nothing was sent\n")
    weights = hashlib.sha256((export / "model.safetensors").read_bytes()).hexdigest()
    assert f"sha256 {weights}" in out and "+library_name: drafttrain" in out
    assert main(["push", str(export), REPO]) == 2
    assert "there is no token" in capsys.readouterr().err


def test_there_and_back(
    export: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What arrives is what the dry run said, byte by byte; what is pulled is the draft."""
    main(["push", str(export), REPO, "--dry-run"])
    said = dict(re.findall(r"^  (\S+)  .*sha256 (\w+)", capsys.readouterr().out, re.M))
    with fake_hub.running() as hub:
        # Tests are offline, which the client reads when it is imported.
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_TOKEN", "hf_test")
        assert main(["push", str(export), REPO, "--private"]) == 0
        assert "hf_test" not in "".join(capsys.readouterr())
        held = hub.files[REPO]
        assert {name: hashlib.sha256(data).hexdigest() for name, data in held.items()} == said
        made = hub.made[0]  # releases of the client say it in two ways
        assert (made.get("visibility") == "private" or made.get("private") is True) and hub.tokens == {"Bearer hf_test"}
        hub.files["someone/other"] = {"config.json": b"{}"}
        held["model.py"] = b"raise SystemExit"
        hub.tokens.clear()
        monkeypatch.delenv("HF_TOKEN")
        assert main(["pull", REPO, "--out", str(tmp_path / "pulled")]) == 0
        assert hub.tokens == {None} and "eagle3 for some/target" in capsys.readouterr().out
        with pytest.raises(UserError, match="drafttrain import"):
            pull("someone/other", tmp_path / "other")
        with pytest.raises(UserError, match="no such repository"):
            pull("someone/nothing", tmp_path / "nothing")
    assert sorted(path.name for path in (tmp_path / "pulled").iterdir()) == sorted(said)
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (export, tmp_path / "pulled"))
    assert set(ours) == set(theirs) and all(bool((ours[name] == theirs[name]).all()) for name in ours)
    assert [path.name for path in tmp_path.iterdir()] == ["pulled"]


def test_no_hub(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="already exists"):
        pull(REPO, tmp_path / "there")
    with pytest.raises(UserError, match="cannot be reached"):  # tests are offline
        pull(REPO, tmp_path / "new")
    assert not (tmp_path / "new").exists()
