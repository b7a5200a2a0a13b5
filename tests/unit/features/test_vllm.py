"""A client of vLLM's hidden states, against a server that answers as vLLM does and computes real ones.

The same against vLLM itself is in `tests/serving/test_vllm_states.py`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.errors import FeatureServerError
from drafttrain.features import exchange
from drafttrain.features.client import Wanted
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.sources import OnlineFeatures
from drafttrain.features.vllm import VllmFeatures
from drafttrain.features.vllm_serve import command_line, serve_command, served_name, state_ids
from drafttrain.modeling.taps import FeatureSpec, Tap
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.identity import TargetIdentity
from drafttrain.targets.model import TargetModel
from tests.chats import CHATML, chat_tokenizer
from tests.tiny_training import HIDDEN, LAYERS, VOCAB, samples, tiny_target
from tests.vllm_states import StatesServer, serving

pytestmark = pytest.mark.timeout(30)

CPU = torch.device("cpu")
SPEC = FeatureSpec.of([3, 0])
IDS = (0, 3, LAYERS)
IDENTITY = TargetIdentity("models/tiny", "a" * 64, "b" * 64, "c" * 64, VOCAB, VOCAB, HIDDEN, LAYERS)


def target(seed: int = 0) -> TargetModel:
    return TargetModel(tiny_target(seed).hf, chat_tokenizer(CHATML), IDENTITY)


def server(folder: Path, ids: tuple[int, ...] = IDS, seed: int = 0, port: int = 0) -> StatesServer:
    return StatesServer(target(seed), folder, ids, "elsewhere/tiny", port)


def client(
    folder: Path,
    *urls: str,
    spec: FeatureSpec = SPEC,
    token: str | None = None,
    dtype: str = "float32",
    longest: int = 20,
    said: list[str] | None = None,
    **values: Any,
) -> VllmFeatures:
    config = FeaturesConfig(source="vllm", urls=urls, exchange=str(folder), **{"timeout_s": 5.0, **values})
    wanted = Wanted(spec, IDENTITY, dtype, say=(said if said is not None else []).append)
    return VllmFeatures(config, token, wanted, target=target(), model=IDENTITY.name, longest=longest)


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("taps", [(3, 0), (2, "pre_norm"), ("final",), ()])
def test_they_are_the_online_features_and_nothing_is_left_on_disk(tmp_path: Path, taps: tuple[Any, ...]) -> None:
    data, spec = samples(12), FeatureSpec.of(taps)
    online = OnlineFeatures(target(), spec, batch_tokens=1)
    ids = state_ids(spec, LAYERS)
    with serving(server(tmp_path, ids)) as first, serving(server(tmp_path, ids)) as second:
        ours = client(tmp_path, first.url, second.url + "/v1", spec=spec, concurrency=3)
        ours.spot_check(target(), data)
        for rows in ([data[:3], data[3:5]], [data[5:], data[:1]], [data[:3], data[3:5]]):
            got, expected = ours.batch(rows, CPU), online.batch(rows, CPU)
            assert got.features.keys() == expected.features.keys()
            for tap, value in expected.features.items():
                assert torch.allclose(got.features[tap], value, atol=1e-6), tap
            assert got.top1 is not None and expected.top1 is not None and torch.equal(got.top1, expected.top1)
        assert min(len(first.asked), len(second.asked)) > 5
        assert ours.target_s > 0
        ours.close()
    assert left(tmp_path) == []
    assert {(r["max_tokens"], r["temperature"]) for r in first.asked} == {(1, 0.0)}
    assert len({r["request_id"] for r in first.asked + second.asked}) == len(first.asked + second.asked)


def test_a_file_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    data = samples(3)
    with serving(server(tmp_path)) as states:
        ours = client(tmp_path, states.url)
        expected = ours.batch([data], CPU)
        states.delay_s = 0.3
        began = time.monotonic()
        assert torch.equal(ours.batch([data], CPU).features[Tap.final], expected.features[Tap.final])
        assert time.monotonic() - began >= 0.3
        states.delay_s = 2.0
        ours = client(tmp_path, states.url, timeout_s=0.5)
        with pytest.raises(FeatureServerError, match="still being written after 0 s"):
            ours.batch([data[:1]], CPU)


def half(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path)
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize("write", [half, lambda tensors, path: None])
def test_a_file_that_is_cut_or_missing_counts_as_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[..., None]
) -> None:
    monkeypatch.setattr(exchange, "SETTLE_S", 0.05)
    data, said = samples(2), []
    with serving(server(tmp_path)) as states:
        states.write = write
        with pytest.raises(
            FeatureServerError, match=r"no feature server answers: .* was not written whole: is the disk full"
        ):
            client(tmp_path, states.url).batch([data], CPU)
        assert left(tmp_path) == []
        ours = client(tmp_path, states.url, on_loss="wait", said=said)
        found: list[Any] = []
        waiting = threading.Thread(target=lambda: found.append(ours.batch([data], CPU)))
        waiting.start()
        while not said:
            time.sleep(0.01)
        states.write = save_file
        waiting.join(30)
    assert "waiting for a feature server" in said[0] and len(found) == 1


def test_a_folder_that_is_not_the_servers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "SETTLE_S", 0.05)
    (tmp_path / "theirs").mkdir()
    with serving(server(tmp_path / "theirs")) as states:
        ours = client(tmp_path / "ours", states.url, on_loss="wait")
        with pytest.raises(FeatureServerError, match="which is not there") as caught:
            ours.batch([samples(1)], CPU)
    assert "features.exchange" in str(caught.value) and str(tmp_path / "ours") in str(caught.value)
    (tmp_path / "file").touch()
    with pytest.raises(FeatureServerError, match="no folder to exchange"), serving(server(tmp_path)) as states:
        client(tmp_path / "file", states.url)


def changed(**changes: Callable[[Tensor], Tensor]) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {name: changes.get(name, lambda value: value)(value) for name, value in tensors.items()}


def poison(hidden: Tensor) -> Tensor:
    hidden = hidden.clone()
    hidden[2, 1, 3] = torch.nan
    return hidden


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        # As with a cached prefix, or a prefill that was cut (case 27 of docs/cases.md).
        (changed(hidden_states=lambda hidden: hidden[1:]), r"gave \d+ rows for \d+ tokens"),
        (changed(hidden_states=lambda hidden: hidden[1:], token_ids=lambda ids: ids[1:]), "other tokens than were"),
        (changed(token_ids=lambda ids: ids.roll(1)), "states of other tokens than were asked for"),
        (changed(hidden_states=lambda hidden: hidden[..., 1:]), "states of 31 elements, the target's have 32"),
        (
            changed(hidden_states=lambda hidden: hidden[:, 1:]),
            r"gave 2 states a token, not 3 \(of the ids \(0, 3, 4\)\)",
        ),
        (changed(hidden_states=lambda hidden: hidden.bfloat16()), "states in bfloat16, target.dtype is float32"),
        (changed(hidden_states=poison), r"NaN or infinite features at token positions \[2\]"),
        (lambda tensors: {"other": tensors["token_ids"]}, "a file without hidden_states"),
        # States of the token before, or after the norm: only what they mean gives them away.
        (changed(hidden_states=lambda hidden: hidden.roll(1, 0)), "would go on with token"),
        (changed(hidden_states=lambda hidden: hidden.flip(1)), "would go on with token"),
    ],
)
def test_wrong_states_stop_the_run(tmp_path: Path, spoil: Callable[..., dict[str, Tensor]], message: str) -> None:
    """The error names the server, the document and the remedy; the file is removed all the same."""
    with serving(server(tmp_path)) as states:
        states.spoil = spoil
        ours = client(tmp_path, states.url, on_loss="wait")
        with pytest.raises(FeatureServerError, match=message) as caught:
            for sample in samples(6):
                ours.batch([[sample]], CPU)
        ours.close()
    assert states.url in str(caught.value) and "sample s" in str(caught.value)
    assert caught.value.remedy
    assert left(tmp_path) == []


def test_states_of_other_layers_under_the_right_name_are_found_where_the_target_is(tmp_path: Path) -> None:
    with serving(server(tmp_path, (1, 3, LAYERS))) as states:
        states.name = served_name("tiny", IDS)
        ours = client(tmp_path, states.url)
        with pytest.raises(FeatureServerError, match=r"the rows of tap 0 for sample s\d differ"):
            ours.spot_check(target(), samples(4))


def test_another_model_under_the_right_name_is_found(tmp_path: Path) -> None:
    """By the token that it would write, where the target's blocks are not here: one document may agree, not several."""
    with serving(server(tmp_path, seed=1)) as states:
        ours = client(tmp_path, states.url)
        elsewhere = target()
        elsewhere.runs = False  # type: ignore[misc]
        with pytest.raises(FeatureServerError, match="runs another target than the recipe's"):
            ours.spot_check(elsewhere, samples(8), count=8)


def test_a_store_with_taps_that_servers_do_not_give(tmp_path: Path) -> None:
    with serving(server(tmp_path)) as states:
        ours = client(tmp_path, states.url)
        (captured,) = ours.captured(samples(1), [Tap.block(0), Tap.final])
        assert set(captured.features) == {Tap.block(0), Tap.final} and captured.top1 is not None
        with pytest.raises(FeatureServerError, match="the store has tap 1, too"):
            next(ours.captured(samples(1), [Tap.block(0), Tap.block(1)]))


def test_what_a_server_says_at_start(tmp_path: Path) -> None:
    with serving(server(tmp_path, (1, 3, LAYERS))) as states:
        with pytest.raises(FeatureServerError, match="serves tiny-states-1-3-4, not tiny-states-0-3-4") as caught:
            client(tmp_path, states.url)
        assert "drafttrain features vllm RECIPE" in str(caught.value)
        states.name, states.max_model_len = served_name("tiny", IDS), 20
        with pytest.raises(FeatureServerError, match="max_model_len is 20; the longest document has 20 tokens"):
            client(tmp_path, states.url)
        client(tmp_path, states.url, longest=19)
        states.key = "secret"
        with pytest.raises(FeatureServerError, match="Unauthorized"):
            client(tmp_path, states.url, longest=19)
        client(tmp_path, states.url, longest=19, token="secret").batch([samples(2, longest=12)], CPU)
    with pytest.raises(FeatureServerError, match="no feature server answers"):
        client(tmp_path, states.url)


def test_answers_that_are_not_vllms(tmp_path: Path) -> None:
    with serving(server(tmp_path)) as states:
        ours = client(tmp_path, states.url)
        for spoil, message in (
            (lambda said: {**said, "kv_transfer_params": None}, "without the path of hidden states"),
            (lambda said: {**said, "choices": [{"text": ""}]}, "without token ids"),
            # Never read, nor removed.
            (lambda said: {**said, "kv_transfer_params": {"hidden_states_path": "/etc/passwd"}}, "not of request"),
            (lambda said: [], "no JSON object"),
        ):
            states.spoil_answer = spoil
            with pytest.raises(FeatureServerError, match=message):
                ours.batch([samples(1)], CPU)
        states.spoil_answer = lambda said: said
        states.max_model_len = 4
        with pytest.raises(FeatureServerError, match="status 400: This model's maximum context length is 4"):
            ours.batch([samples(1)], CPU)
        # Started again with other layers, meanwhile.
        states.name = "tiny-states-1-3-4"
        with pytest.raises(FeatureServerError, match="status 404: The model `tiny-states-0-3-4` does not exist"):
            ours.batch([samples(1)], CPU)
        assert len(left(tmp_path)) == 8  # of the first four requests, whose paths were hidden
        ours.close()
    assert left(tmp_path) == []


def test_a_server_that_is_gone_is_waited_for_or_another_takes_its_share(tmp_path: Path) -> None:
    data, said = samples(6), []
    with serving(server(tmp_path)) as lasting:
        with serving(server(tmp_path)) as dying:
            ours = client(tmp_path, lasting.url, dying.url, on_loss="wait", said=said)
            expected = ours.batch([data], CPU)
        assert torch.equal(ours.batch([data], CPU).features[Tap.final], expected.features[Tap.final])
        port = lasting.server_address[1]
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(ours.batch([data], CPU)))
    waiting.start()
    while not said:
        time.sleep(0.01)
    with serving(server(tmp_path, port=int(port))):
        waiting.join(60)
        assert torch.equal(found[0].features[Tap.final], expected.features[Tap.final])
    ours.give_up()
    blank = ours.batch([data], CPU)
    assert ours.gave_up and not blank.features[Tap.final].any()


def test_the_command_that_serves_them() -> None:
    config = FeaturesConfig(
        source="vllm", urls=("http://10.0.0.7:8123",), exchange="/dev/shm/my states", token_file="features.token"
    )
    name = "meta-llama/Llama-3.1-8B-Instruct"
    model = TargetConfig(model=name, dtype="bfloat16", revision="main", trust_remote_code=True)
    words = serve_command(model, config, (2, 16, 29, 32), 2049, config.urls[0])
    assert words[:3] == ["vllm", "serve", "meta-llama/Llama-3.1-8B-Instruct"]
    for option, value in (
        ("--served-model-name", "Llama-3.1-8B-Instruct-states-2-16-29-32"),
        ("--host", "10.0.0.7"),
        ("--port", "8123"),
        ("--dtype", "bfloat16"),
        ("--revision", "main"),
        ("--max-model-len", "2049"),
        (
            "--kv-transfer-config",
            '{"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer", '
            '"kv_connector_extra_config": {"shared_storage_path": "/dev/shm/my states"}}',
        ),
    ):
        assert words[words.index(option) + 1] == value
    text = command_line(words, config.token_file)
    first, *options = text.split(" \\\n")
    assert first == 'VLLM_API_KEY="$(cat features.token)" vllm serve meta-llama/Llama-3.1-8B-Instruct'
    assert "    --no-enable-prefix-caching" in options and "    --trust-remote-code" in options
    assert all(option.startswith("    --") for option in options)


def test_ids_are_in_the_order_of_the_layers() -> None:
    assert state_ids(FeatureSpec.of([6, 1]), 8) == (1, 6, 8)
    assert state_ids(FeatureSpec.of(["final", "pre_norm", 0]), 8) == (0, 8)
    assert state_ids(FeatureSpec(), 8) == (8,)
