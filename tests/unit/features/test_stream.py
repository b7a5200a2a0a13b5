"""A feature server and its clients: the same features, and every way in which the two can fail."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from drafttrain.errors import DataError, FeatureServerError, UserError
from drafttrain.features.client import Wanted
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.server import FeatureServer, ServerLimits
from drafttrain.features.sources import OnlineFeatures
from drafttrain.features.stream import StreamedFeatures
from drafttrain.features.wire import (
    FEATURES_PATH,
    TARGET_PATH,
    TOKEN_VARIABLE,
    FeatureAnswer,
    FeatureRequest,
    find_token,
)
from drafttrain.modeling.taps import FeatureSpec, Tap
from drafttrain.targets.identity import TargetIdentity
from drafttrain.targets.model import TargetModel
from tests.chats import CHATML, chat_tokenizer
from tests.tiny_training import HIDDEN, LAYERS, VOCAB, samples, tiny_target
from tests.unit.features.test_store import CPU, SPEC

IDENTITY = TargetIdentity("tiny", "a" * 64, "b" * 64, "c" * 64, VOCAB, VOCAB, HIDDEN, LAYERS)
LIMITS = ServerLimits(batch_tokens=1)
TOKEN = "a secret"


def target() -> TargetModel:
    return TargetModel(tiny_target().hf, chat_tokenizer(CHATML), IDENTITY)


@contextmanager
def serving(server: FeatureServer | None = None) -> Iterator[FeatureServer]:
    server = server or FeatureServer(target(), TOKEN, limits=LIMITS)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.stop()
        thread.join(30)
        assert not thread.is_alive()


def client(*urls: str, token: str = TOKEN, identity: TargetIdentity = IDENTITY, **values: Any) -> StreamedFeatures:
    said = values.pop("said", [])
    config = FeaturesConfig(source="stream", urls=urls, **values)
    return StreamedFeatures(config, token, Wanted(SPEC, identity, "float32", say=said.append))


def post(server: FeatureServer, body: bytes, token: str = TOKEN) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"}
    return httpx.post(server.url + FEATURES_PATH, content=body, headers=headers, timeout=60)


def request(count: int = 2, taps: tuple[str, ...] = ("0", "final")) -> FeatureRequest:
    return FeatureRequest(samples(count), FeatureSpec.of(taps).taps, [True] * count)


def test_streamed_features_are_the_online_ones_bit_for_bit() -> None:
    data = samples(12)
    online = OnlineFeatures(target(), SPEC, batch_tokens=1)
    small = FeatureServer(target(), TOKEN, limits=replace(LIMITS, request_tokens=40))
    with serving() as first, serving(small) as second:
        streamed = client(first.url, second.url)
        streamed.spot_check(target(), data)
        for rows in ([data[:3], data[3:5]], [data[5:], data[:1]], [data[:3], data[3:5]]):
            ours, theirs = streamed.batch(rows, CPU), online.batch(rows, CPU)
            assert ours.features.keys() == theirs.features.keys()
            assert all(torch.equal(ours.features[tap], value) for tap, value in theirs.features.items())
            assert ours.top1 is not None and theirs.top1 is not None and torch.equal(ours.top1, theirs.top1)
        assert min(first.served, second.served) > 0
        assert streamed.target_s > 0
        streamed.close()


def test_requests_that_wait_are_answered_in_one_forward() -> None:
    forwards: list[int] = []
    model = target()
    model.register_forward_pre_hook(lambda module, arguments: forwards.append(len(arguments[0])))
    server = FeatureServer(model, TOKEN, limits=ServerLimits(batch_tokens=4096, queue=4))
    answers: list[Any] = []
    threads = [threading.Thread(target=lambda: answers.append(server.submit(request()))) for _ in range(4)]
    for thread in threads:
        thread.start()
    while server._queue.qsize() < 4:
        time.sleep(0.01)
    # A full queue turns the next one away, at once.
    assert server.submit(request()) is None
    with serving(server):
        for thread in threads:
            thread.join(30)
    assert forwards == [8]
    assert {job.answer for job in answers} == {answers[0].answer}


def test_a_full_queue_is_waited_for() -> None:
    server = FeatureServer(target(), TOKEN, limits=replace(LIMITS, queue=1))
    data = samples(6)
    with serving(server):
        clients = [client(server.url) for _ in range(4)]
        batches: list[Any] = []
        threads = [
            threading.Thread(target=lambda one=one: batches.extend(one.batch([data], CPU) for _ in range(3)))
            for one in clients
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(batches) == 12
    assert all(torch.equal(b.features[Tap.final], batches[0].features[Tap.final]) for b in batches)


def test_only_who_shows_the_token_is_answered() -> None:
    with serving() as server:
        with pytest.raises(FeatureServerError, match="wrong or missing token"):
            client(server.url, token="guessed")
        assert httpx.get(server.url + TARGET_PATH).status_code == 401
        assert post(server, request().pack(), token="guessed").status_code == 401
        assert server.served == 0


def test_another_target_is_refused() -> None:
    with serving() as server:
        with pytest.raises(FeatureServerError, match="weights_hash"):
            client(server.url, identity=replace(IDENTITY, weights_hash="f" * 64))
        config = FeaturesConfig(source="stream", urls=(server.url,))
        with pytest.raises(FeatureServerError, match=r"dtype \(float32, here bfloat16\)"):
            StreamedFeatures(config, TOKEN, Wanted(SPEC, IDENTITY, "bfloat16"))


def test_a_dead_server_stops_the_run_or_its_share_goes_to_another() -> None:
    data = samples(6)
    with serving() as lasting:
        with serving() as dying:
            streamed = client(lasting.url, dying.url)
            expected = streamed.batch([data], CPU)
        assert torch.equal(streamed.batch([data], CPU).features[Tap.final], expected.features[Tap.final])
    with pytest.raises(FeatureServerError, match="no feature server answers") as caught:
        streamed.batch([data], CPU)
    assert "features.on_loss=wait" in str(caught.value)
    with pytest.raises(FeatureServerError, match="no feature server answers"):
        client(dying.url)


def test_a_dead_server_is_waited_for() -> None:
    data, said = samples(4), []
    with serving() as server:
        streamed = client(server.url, on_loss="wait", said=said)
        expected = streamed.batch([data], CPU)
    port = int(server.url.rpartition(":")[2])
    found: list[Any] = []
    waiting = threading.Thread(target=lambda: found.append(streamed.batch([data], CPU)))
    waiting.start()
    while not said:
        time.sleep(0.02)
    assert "waiting for a feature server" in said[0] and not found
    with serving(FeatureServer(target(), TOKEN, port=port, limits=LIMITS)):
        waiting.join(60)
    assert torch.equal(found[0].features[Tap.final], expected.features[Tap.final])


def test_a_run_that_ends_while_it_waits_does_end() -> None:
    data, said = samples(4), []
    with serving() as server:
        streamed = client(server.url, on_loss="wait", said=said)
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            streamed.batch([data], CPU)
        except FeatureServerError as error:
            errors.append(error)

    waiting = threading.Thread(target=ask)
    waiting.start()
    while not said:
        time.sleep(0.02)
    streamed.close()
    waiting.join(30)
    assert "training ended" in str(errors[0])


class ShortRows(FeatureServer):
    """As a server that caches prefixes does: the first row is missing (case 27 of docs/cases.md)."""

    def _run(self, jobs: list[Any]) -> None:
        super()._run(jobs)
        for job in jobs:
            answer = FeatureAnswer.unpack(job.answer)
            cut = {tap: value[1:] for tap, value in answer.features.items()}
            job.answer = FeatureAnswer(cut, answer.top1[1:], answer.weights_hash).pack()


class ShiftedRows(FeatureServer):
    """The right number of rows, each of the token before."""

    def _run(self, jobs: list[Any]) -> None:
        super()._run(jobs)
        for job in jobs:
            answer = FeatureAnswer.unpack(job.answer)
            rolled = {tap: value.roll(1, 0) for tap, value in answer.features.items()}
            job.answer = FeatureAnswer(rolled, answer.top1, answer.weights_hash).pack()


def test_a_wrong_number_of_rows_and_shifted_ones_stop_the_run() -> None:
    data = samples(4)
    with serving(ShortRows(target(), TOKEN, limits=LIMITS)) as server:
        streamed = client(server.url, on_loss="wait")
        with pytest.raises(DataError, match=r"has \d+ rows for \d+ tokens") as caught:
            streamed.batch([data], CPU)
        assert "s0" in str(caught.value)
    with (
        serving(ShiftedRows(target(), TOKEN, limits=LIMITS)) as server,
        pytest.raises(FeatureServerError, match="differ"),
    ):
        client(server.url).spot_check(target(), data)


def test_nan_features_name_their_sample_and_spoil_no_other_request() -> None:
    model = target()
    data = samples(6)
    poison = int(data[2].ids[1])
    hit = [sample for sample in data if poison in sample.ids]
    clean = [sample for sample in data if poison not in sample.ids]
    model.hf.model.embed_tokens.weight.data[poison] = float("nan")
    server = FeatureServer(model, TOKEN, limits=ServerLimits(batch_tokens=4096))
    jobs: list[Any] = []
    threads = [
        threading.Thread(
            target=lambda part=part: jobs.append(server.submit(FeatureRequest(part, (Tap.final,), [False] * len(part))))
        )
        for part in (hit, clean)
    ]
    for thread in threads:
        thread.start()
    while server._queue.qsize() < 2:
        time.sleep(0.01)
    with serving(server):
        for thread in threads:
            thread.join(30)
        assert sorted(job.error is None for job in jobs) == [False, True]
        with pytest.raises(DataError, match="NaN") as caught:
            client(server.url).batch([hit], CPU)
    assert caught.value.where in {f"sample {sample.id}" for sample in hit}


def test_bad_requests_are_refused_and_the_server_goes_on() -> None:
    good = request()
    outside = replace(good, samples=[replace(good.samples[0], ids=good.samples[0].ids + VOCAB), good.samples[1]])
    long = FeatureRequest(samples(1, shortest=300, longest=301), good.taps, [False])
    with serving() as server:
        for body, status, said in (
            (b"", 400, "not a body"),
            (b"\x80\x04pickled", 400, "not a body"),
            (good.pack()[:-3], 400, "not a body"),
            (request(taps=("9",)).pack(), 400, "tap 9 does not exist"),
            (outside.pack(), 400, "token ids that the target does not have"),
            (long.pack(), 400, "context"),
            (b"x" * (5 << 20), 413, "bytes in one request"),
        ):
            try:
                reply = post(server, body)
            except httpx.WriteError:  # refused before it was read
                assert status == 413
                continue
            assert (reply.status_code, said in reply.json()["error"]) == (status, True), reply.text
        assert post(server, good.pack()).status_code == 200
        headers = {"Authorization": f"Bearer {TOKEN}"}
        assert httpx.get(server.url + "/etc/passwd", headers=headers).status_code == 404


def test_a_port_in_use_is_one_error() -> None:
    first = FeatureServer(target(), TOKEN, limits=LIMITS)
    port = int(first.url.rpartition(":")[2])
    with pytest.raises(FeatureServerError, match="the port is in use"):
        FeatureServer(target(), TOKEN, port=port, limits=LIMITS)
    first._http.server_close()


def test_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path))
    with pytest.raises(UserError, match="token"):
        find_token(None)
    token, where = find_token(None, make=True)
    assert len(token) > 30 and Path(where).stat().st_mode & 0o077 == 0
    assert find_token(None) == find_token(where) == (token, where)
    monkeypatch.setenv(TOKEN_VARIABLE, "from outside")
    assert find_token(None) == ("from outside", TOKEN_VARIABLE)
    assert find_token(where)[0] == token


def test_the_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    model = target()
    model.hf.save_pretrained(tmp_path / "target")
    chat_tokenizer(CHATML).save_pretrained(tmp_path / "target")
    words = ["features", "serve", str(tmp_path / "target"), "--dtype", "float32", "--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "drafttrain", *words, "--token-file", str(tmp_path / "token")],
        cwd=Path(__file__).parents[3],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        text = ""
        while "serving features at" not in text:
            line = process.stdout.readline()
            assert line, text
            text += line
        url = text.split("serving features at ")[1].split(";")[0]
        assert url.startswith("http://127.0.0.1:")
        token = find_token(tmp_path / "token")[0]
        described = httpx.get(url + TARGET_PATH, headers={"Authorization": f"Bearer {token}"}).json()
        assert (described["dtype"], described["target"]["hidden_size"]) == ("float32", HIDDEN)
        process.send_signal(signal.SIGTERM)
        rest, _ = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0
    assert "served 0 tokens" in rest and token not in text + rest
