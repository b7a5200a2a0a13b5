"""The client against a real HTTP server on the loopback which answers, fails and hangs."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from drafttrain.corpus.answers import Answer, Failure, Question, read_answers, regenerate
from drafttrain.corpus.config import AnswersConfig
from drafttrain.corpus.openai_server import ServerAnswers
from drafttrain.corpus.types import Prompt
from drafttrain.errors import DataError
from tests.chats import user


class Server(ThreadingHTTPServer):
    """Echoes the last message. `script` holds what to do instead with the first requests for a text."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script: dict[str, list[Any]] = {}
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.attempts: Counter[str] = Counter()
        self.open = self.most_open = 0
        self.lock = threading.Lock()
        self.release = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def reply(self, status: int, value: Any, **headers: str) -> None:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        self.send_response(status)
        for name, content in headers.items():
            self.send_header(name.replace("_", "-"), content)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "listed-model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.keys.append(self.headers.get("Authorization"))
            self.server.attempts[text] += 1
            self.server.open += 1
            self.server.most_open = max(self.server.most_open, self.server.open)
            script = self.server.script.get(text)
            action = script.pop(0) if script else None
        time.sleep(0.01)
        with self.server.lock:
            self.server.open -= 1
        if action == "hang":
            self.server.release.wait(10)
        elif action == "drop":
            self.close_connection = True
        elif isinstance(action, bytes):
            self.reply(200, action)
        elif isinstance(action, dict):
            self.reply(200, {"choices": [action]})
        elif action is not None:
            self.reply(action, {"error": f"scripted {action}"}, Retry_After="0")
        else:
            choice = {"message": {"role": "assistant", "content": f"re: {text}"}, "finish_reason": "stop"}
            self.reply(200, {"choices": [choice]})


@pytest.fixture
def server() -> Iterator[Server]:
    running = Server()
    thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield running
    running.release.set()
    running.shutdown()
    running.server_close()
    thread.join()


def source(server: Server, **changes: Any) -> ServerAnswers:
    config = {
        "source": "server",
        "base_url": server.url,
        "model": "m",
        "concurrency": 4,
        "retries": 3,
        "timeout_s": 5.0,
    }
    return ServerAnswers(AnswersConfig(**{**config, **changes}), first_wait_s=0.01)


def ask(answers: ServerAnswers, *texts: str) -> dict[str, Answer | Failure]:
    found = list(answers.answer([Question([user(text)]) for text in texts]))
    assert len(found) == len(texts)
    return {texts[index]: outcome for index, outcome in found}


def content(outcome: Answer | Failure) -> str:
    assert isinstance(outcome, Answer), outcome
    return str(outcome.message["content"])


def test_passing_faults_are_repeated_and_every_question_is_answered_once(server: Server) -> None:
    texts = [f"q{n} 你好" for n in range(24)]
    server.script = {
        texts[1]: [500, 503],
        texts[2]: [429, 429, 429],
        texts[3]: ["drop"],
        texts[4]: ["hang"],
        texts[5]: [502],
    }
    outcomes = ask(source(server, timeout_s=0.5), *texts)
    assert {text: content(outcome) for text, outcome in outcomes.items()} == {t: f"re: {t}" for t in texts}
    assert [server.attempts[text] for text in texts[:7]] == [1, 3, 4, 2, 2, 2, 1]
    assert 2 <= server.most_open <= 4


def test_a_question_that_keeps_failing_is_given_up_and_the_others_go_on(server: Server) -> None:
    server.script = {"bad": [500] * 9, "long": [400] * 9, "odd": [b"<html>"], "empty": [b"{}"]}
    outcomes = ask(source(server), "bad", "long", "odd", "empty", "good")
    assert content(outcomes["good"]) == "re: good"
    reasons = {text: outcome.reason for text, outcome in outcomes.items() if isinstance(outcome, Failure)}
    assert reasons["bad"].startswith("given up after 4 attempts: HTTP 500")
    assert reasons["long"].startswith("HTTP 400") and server.attempts["long"] == 1
    assert "not JSON" in reasons["odd"] and "no chat completion" in reasons["empty"]


@pytest.mark.parametrize("status", [401, 404])
def test_an_error_that_all_requests_share_stops_the_run(server: Server, status: int) -> None:
    server.script = {"q": [status] * 9}
    with pytest.raises(DataError, match=f"HTTP {status}"):
        ask(source(server), "q", *(f"other {n}" for n in range(50)))
    assert sum(server.attempts.values()) < 50


def test_nobody_listening_is_an_error(server: Server) -> None:
    with pytest.raises(DataError, match="no server answers"):
        ask(source(server, base_url="http://127.0.0.1:9/v1", retries=1), "q")


def test_only_what_is_configured_is_sent(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEST_KEY", "secret")
    ask(source(server, api_key_env="TEST_KEY_UNSET"), "q")
    ask(source(server, temperature=0.7, top_k=20, repetition_penalty=1.2, api_key_env="TEST_KEY"), "q")
    plain, full = server.bodies
    assert plain == {
        "model": "m",
        "messages": [user("q")],
        "max_tokens": 128,
        "temperature": 0.0,
        "top_p": 1.0,
        "seed": 0,
    }
    assert (full["top_k"], full["repetition_penalty"]) == (20, 1.2)
    assert "presence_penalty" not in full and "frequency_penalty" not in full
    assert server.keys == [None, "Bearer secret"]


def test_the_template_is_given_its_variables(server: Server) -> None:
    """A target drafted for without thinking must not think when it answers."""
    config = source(server).config
    quiet = ServerAnswers(config, {"enable_thinking": False}, first_wait_s=0.01)
    ask(quiet, "q")
    assert server.bodies[-1]["chat_template_kwargs"] == {"enable_thinking": False}
    assert quiet.identity != source(server).identity


def test_finish_reasons_reasoning_and_tool_calls_are_kept(server: Server) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    server.script = {
        "cut": [{"message": {"content": "half"}, "finish_reason": "length"}],
        "think": [{"message": {"content": "yes", "reasoning_content": "hm"}, "finish_reason": "stop"}],
        "tool": [{"message": {"content": None, "tool_calls": calls}, "finish_reason": "tool_calls"}],
        "filter": [{"message": {"content": ""}, "finish_reason": "content_filter"}],
    }
    outcomes = ask(source(server), "cut", "think", "tool", "filter")
    assert outcomes["cut"] == Answer({"role": "assistant", "content": "half"}, finished=False)
    thought = {"role": "assistant", "content": "yes", "reasoning_content": "hm"}
    assert outcomes["think"] == Answer(thought, finished=True)
    called = {"role": "assistant", "content": "", "tool_calls": calls}
    assert outcomes["tool"] == Answer(called, finished=True)
    assert isinstance(outcomes["filter"], Failure)


@pytest.mark.parametrize("given", [{"a": 1}, '{"a": 1}'])
def test_arguments_of_tool_calls_are_sent_as_text(server: Server, given: object) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": given}}
    history = [user("Add"), {"role": "assistant", "content": "", "tool_calls": [call]}, user("So?")]
    list(source(server).answer([Question(history)]))
    assert server.bodies[0]["messages"][1]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}


def test_the_first_listed_model_is_asked_where_none_is_named(server: Server) -> None:
    answers = source(server, model=None)
    ask(answers, "q")
    assert server.bodies[0]["model"] == "listed-model" == answers.identity["model"]


def test_closing_early_cancels_what_is_under_way(server: Server) -> None:
    server.script = {"slow": ["hang"]}
    found = source(server).answer([Question([user("quick")]), Question([user("slow")])])
    began = time.monotonic()
    assert next(found)[0] == 0
    found.close()  # type: ignore[attr-defined]
    assert time.monotonic() - began < 3


def test_regeneration_resumes_after_the_server_died(server: Server, tmp_path: Path) -> None:
    prompts = [Prompt(f"p{n}", [user(f"q{n}")], turns=["more"] * (n % 2)) for n in range(30)]
    server.script = {"q17": [401]}
    path = tmp_path / "out.jsonl"
    with pytest.raises(DataError):
        regenerate(prompts, source(server), path)
    kept = len(path.read_bytes().splitlines())
    report = regenerate(prompts, source(server), path)
    assert report.resumed == kept and report.resumed + report.written == 30
    answers = read_answers(path)
    assert sorted(item.id for item in answers) == sorted(prompt.id for prompt in prompts)
    assert all(item.messages[-1]["content"].startswith("re: ") for item in answers)


def test_a_complete_file_needs_no_server(server: Server, tmp_path: Path) -> None:
    prompts, path = [Prompt("p", [user("q")])], tmp_path / "out.jsonl"
    regenerate(prompts, source(server, model=None), path)
    gone = source(server, model=None, base_url="http://127.0.0.1:9/v1", retries=0)
    assert regenerate(prompts, gone, path).resumed == 1
    with pytest.raises(DataError, match="no server answers"):
        regenerate([*prompts, Prompt("more", [user("q")])], gone, path)
    with pytest.raises(DataError, match=r"other settings .*temperature"):
        regenerate(prompts, source(server, model=None, temperature=0.5), path)
    assert regenerate(prompts, source(server, model="listed-model"), path).resumed == 1
    with pytest.raises(DataError, match="model: 'listed-model' -> 'another'"):
        regenerate(prompts, source(server, model="another"), path)
