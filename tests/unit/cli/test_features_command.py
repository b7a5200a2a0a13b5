"""`features build|verify|info|convert` on a tiny target: what they write, say, and refuse."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import yaml

from drafttrain.cli.main import main
from drafttrain.features.reader import StoreReader
from drafttrain.features.server import FeatureServer
from drafttrain.features.wire import TOKEN_VARIABLE
from drafttrain.recipe.load import load_recipe
from drafttrain.targets.load import load_target
from tests.tiny_world import save_target
from tests.vllm_states import StatesServer, serving


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny target, a recipe, and its store."""
    folder = tmp_path_factory.mktemp("features")
    save_target(folder / "target", max_position_embeddings=160)
    with (folder / "given.jsonl").open("w") as file:
        for number in range(6):
            messages = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "two " * (3 + number)}]
            file.write(json.dumps({"id": f"c{number}", "messages": messages}) + "\n")
    values = {
        "name": "tiny",
        "output_dir": str(folder / "run"),
        "target": {"model": str(folder / "target"), "dtype": "float32", "device": "cpu"},
        "data": {
            "prompts": [{"source": str(folder / "given.jsonl")}],
            "answers": {"source": "given"},
            "max_length": 100,
            "held_out": 0,
        },
        "features": {"source": "offline", "dtype": "bf16"},
        "drafter": {"family": "eagle3"},
        "loss": {},
        "training": {"epochs": 1},
        "evaluation": {"prompts": 0},
    }
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values), encoding="utf-8")
    return folder


@pytest.fixture(autouse=True)
def own_cache(world: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(world / "cache"))


@pytest.fixture(scope="module")
def store(world: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAFTTRAIN_CACHE", str(world / "cache"))
        assert main(["features", "build", str(world / "tiny.yaml")]) == 0
    return world / "run/features"


def test_build_in_parts(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["features", "build", str(world / "tiny.yaml"), "features.batch_tokens=1", f"features.path={tmp_path}"]
    assert main([*words, "--part", "2/2"]) == 0
    assert "part 2 of 2 is written, other parts are not yet" in capsys.readouterr().out
    assert main([*words, "--part", "1/2"]) == 0
    out = capsys.readouterr().out
    assert "KiB for" in out and f"{tmp_path}: complete" in out
    assert len(StoreReader(tmp_path)) == 6


def test_info_and_verify(world: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["features", "info", str(store)]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "6 documents" in out and "bfloat16" in out and "final of 16 elements" in out
    assert main(["features", "verify", str(store), str(world / "tiny.yaml")]) == 0
    assert "6 samples, rows as the target gives them" in capsys.readouterr().out
    assert main(["features", "verify", str(store), str(world / "tiny.yaml"), "features.dtype=fp8"]) == 2
    assert "dtype (store: bfloat16, here: fp8)" in capsys.readouterr().err
    assert main(["features", "info", str(tmp_path)]) == 2


def test_verify_names_what_is_damaged(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["features", "convert", str(store), str(tmp_path / "copy")]) == 0
    file = tmp_path / "copy/shards/000000/features.bin"
    content = bytearray(file.read_bytes())
    content[3] ^= 1
    file.write_bytes(content)
    capsys.readouterr()
    assert main(["features", "verify", str(tmp_path / "copy")]) == 1
    assert "shards/000000: features.bin is damaged" in capsys.readouterr().out
    assert main(["features", "convert", str(tmp_path / "copy"), str(tmp_path / "other")]) == 2
    assert not (tmp_path / "other").exists()


def test_convert(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "fp8"
    assert main(["features", "convert", str(store), str(out), "--dtype", "fp8", "--taps", "2,final"]) == 0
    identity = StoreReader(out).identity
    assert (identity.dtype, identity.taps) == ("fp8", ("2", "final"))
    assert main(["features", "convert", str(store), str(tmp_path / "x"), "--taps", "9"]) == 2
    assert "has no tap 9" in capsys.readouterr().err
    launches = json.loads((out / "provenance.json").read_text())
    assert launches[0]["target"]["name"] == identity.target and launches[1]["made_from"] == str(store.resolve())


def test_a_store_says_what_it_was_built_from(world: Path, store: Path) -> None:
    assert load_recipe(store / "recipe.yaml") == load_recipe(world / "tiny.yaml")
    (launch,) = json.loads((store / "provenance.json").read_text())
    assert list(launch["data"]) == [str(world / "given.jsonl")]
    # What needs nothing is not written to.
    assert main(["features", "build", str(world / "tiny.yaml")]) == 0
    assert len(json.loads((store / "provenance.json").read_text())) == 1


def test_no_advice_does_harm(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(path.name for path in store.rglob("*"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other/thesis.tex").touch()
    for words, error in (
        (["convert", str(store), str(store.parent / "." / "features")], "onto itself"),
        (["info", str(tmp_path / "other")], "no feature store here"),
        (["info", str(tmp_path / "nowhere")], "no feature store here"),
    ):
        assert main(["features", *words]) == 2
        said = capsys.readouterr().err
        assert error in said and "remove" not in said
    assert sorted(path.name for path in store.rglob("*")) == before


def curve(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


def test_a_run_trains_on_every_source(world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "secret")
    config = load_recipe(world / "tiny.yaml").target
    server = FeatureServer(load_target(config), "secret")
    thread = threading.Thread(target=server.serve)
    thread.start()
    store = f"features.path={tmp_path / 'store'}"
    sources = {
        "online": ["features.source=online"],
        "hybrid": ["features.source=hybrid", "features.dtype=fp32", store],
        "offline": ["features.source=offline", "features.dtype=fp32", store],
        "stream": ["features.source=stream", f"features.urls=[{server.url}]"],
    }
    # Neither needs the target beside the draft.
    for name in ("offline", "stream"):
        sources[f"{name}, elsewhere"] = [*sources[name], "target.placement=elsewhere"]
    for name, words in sources.items():
        words += [f"output_dir={tmp_path / name}", "training.precision=fp32", "training.log_every=1"]
        assert main(["train", str(world / "tiny.yaml"), "training.batch_rows=1", "training.epochs=2", *words]) == 0
    server.stop()
    thread.join()
    # A complete store needs no servers, nor their token.
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert main(["features", "build", str(world / "tiny.yaml"), *sources["offline"][:3], sources["stream"][1]]) == 0
    assert server.served > 0
    assert StoreReader(tmp_path / "store").complete
    online = curve(tmp_path / "online")
    assert len(online) >= 2
    for name in sources:
        assert curve(tmp_path / name) == pytest.approx(online, rel=1e-4), name


def test_a_run_and_a_store_take_features_from_vllm(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that says what vLLM says. The target's blocks are needed neither to train nor to build the store."""
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    recipe = str(world / "tiny.yaml")
    states = StatesServer(load_target(load_recipe(recipe).target), tmp_path / "x", (1, 2, 3, 4), str(world / "target"))
    served = [f"features.urls=[{states.url}]", f"features.exchange={tmp_path / 'x'}"]
    with serving(states):
        runs = {
            "online": ["features.source=online"],
            "vllm": ["features.source=vllm", *served],
            "elsewhere": ["features.source=vllm", "target.placement=elsewhere", *served],
        }
        store = ["features.dtype=fp32", f"features.path={tmp_path / 'store'}", "target.placement=elsewhere"]
        assert main(["features", "build", recipe, *store, *served]) == 0
        asked = len(states.asked)
        assert asked == 6 + 2 and StoreReader(tmp_path / "store").complete
        runs["stored"] = store
        # Built while a run starts, and found complete by the next.
        runs["built"] = [*store, f"features.path={tmp_path / 'other'}", *served]
        for name, words in runs.items():
            words += [f"output_dir={tmp_path / name}", "training.precision=fp32", "training.log_every=1"]
            assert main(["train", recipe, "training.batch_rows=1", "training.epochs=2", *words]) == 0, name
    for name in runs:
        assert curve(tmp_path / name) == pytest.approx(curve(tmp_path / "online"), rel=1e-4), name
    assert list((tmp_path / "x").iterdir()) == []


@pytest.mark.parametrize("kind", ["stream", "vllm"])
def test_a_wrong_token_is_found_before_data(
    world: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """A server that is not there yet is asked when features are wanted."""
    monkeypatch.setenv(TOKEN_VARIABLE, "guessed")
    recipe, exchange, run = str(world / "tiny.yaml"), tmp_path / "x", tmp_path / "run"
    target = load_target(load_recipe(recipe).target)
    words = [f"output_dir={run}", "data.answers={source: target, max_new_tokens: 2}"]
    words += [f"features.source={kind}", *([f"features.exchange={exchange}"] if kind == "vllm" else [])]
    with ExitStack() as open_:
        if kind == "vllm":
            states = open_.enter_context(serving(StatesServer(target, exchange, (1, 2, 3, 4), str(world / "target"))))
            states.key, url = "secret", states.url
        else:
            server = FeatureServer(target, "secret")
            thread = threading.Thread(target=server.serve)
            thread.start()
            open_.callback(thread.join)
            open_.callback(server.stop)
            url = server.url
        assert main(["train", recipe, *words, f"features.urls=[http://127.0.0.1:9, {url}]"]) == 2
        caught = capsys.readouterr()
        assert caught.err.startswith(f"error: {url}: ") and "features.token_file" in caught.err
        assert "loading" not in caught.out and not (run / "data").exists()
    assert main(["train", recipe, *words, f"features.urls=[{url}]", "features.timeout_s=1"]) == 2
    assert "no feature server answers" in capsys.readouterr().err and (run / "data/answers.jsonl").exists()


def test_the_command_for_vllm(world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(world / "tiny.yaml")
    words = ["features.source=vllm", "features.urls=[http://127.0.0.1:8000]", "features.exchange=/dev/shm/x"]
    assert main(["features", "vllm", recipe, *words]) == 0
    out = capsys.readouterr().out
    assert out.startswith(
        f"vllm serve {(world / 'target').resolve()} \\\n    --served-model-name target-states-1-2-3-4 "
    )
    assert '"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]' in out and "--max-model-len 101 " in out
    assert main(["features", "vllm", recipe, *words, "drafter.taps=[pre_norm, 0]", "data.max_length=159"]) == 0
    out = capsys.readouterr().out
    # No more than the target's context.
    assert '"eagle_aux_hidden_state_layer_ids": [0, 4]' in out and "--max-model-len 160 " in out
    # Each request asks for one token behind its document.
    for command in (["features", "vllm"], ["features", "build"], ["train"]):
        own = [f"output_dir={tmp_path / 'run'}", "features.source=offline", *words[1:]]
        assert main([*command, recipe, *own, "data.max_length=200"]) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert said.startswith("error: data.max_length: documents may be as long as the target's context, 160 tokens")
        assert said.endswith("data.max_length=159")
    assert main(["features", "vllm", recipe]) == 2
    assert "features.exchange: there is none (features.source is 'offline')" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["0/2", "3/2", "x", "1/"])
def test_a_part_that_is_none(part: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["features", "build", "any.yaml", "--part", part])
    assert "K from 1 to N" in capsys.readouterr().err
