"""Regeneration: turn by turn, resumable after a kill, with no duplicates and no losses."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from drafttrain.corpus.answers import Answer, Failure, Question, TargetAnswers, read_answers, regenerate
from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.config import AnswersConfig
from drafttrain.corpus.synthesis import synthesise, user_turn_opening
from drafttrain.corpus.types import Continuation, Prompt, Sample
from drafttrain.engine.generation import TargetGenerator
from drafttrain.errors import DataError
from tests.chats import CHATML, chat_tokenizer, user
from tests.support import tiny_target


class Echo:
    """Answers each question with its history's last words; refuses those that say `no`."""

    def __init__(self, name: str = "echo") -> None:
        self.identity: dict[str, Any] = {"source": name}
        self.settings = self.identity
        self.asked: list[str] = []

    def answer(self, questions: Sequence[Question]) -> Iterator[tuple[int, Answer | Failure]]:
        for index in reversed(range(len(questions))):
            text = questions[index].messages[-1]["content"]
            self.asked.append(text)
            if text == "no":
                yield index, Failure("would not")
            else:
                yield index, Answer({"role": "assistant", "content": f"re: {text}"}, finished="cut" not in text)


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{n}", [user(f"ask {n}")], turns=[f"more {n}"] * (n % 3)) for n in range(count)]


def test_each_turn_is_answered_with_the_answers_before_it(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    report = regenerate([Prompt("a", [user("one")], turns=["cut two", "three"])], Echo(), path)
    assert (report.written, report.resumed, report.rejects) == (1, 0, [])
    (conversation,) = read_answers(path)
    assert [message["content"] for message in conversation.messages] == [
        "one",
        "re: one",
        "cut two",
        "re: cut two",
        "three",
        "re: three",
    ]
    assert conversation.cut == (3,)


def test_refused_prompts_are_named_and_asked_again_on_resume(tmp_path: Path) -> None:
    path, asked = tmp_path / "out.jsonl", [*prompts(2), Prompt("bad", [user("no")])]
    report = regenerate(asked, Echo(), path)
    assert report.written == 2 and [(r.id, r.reason) for r in report.rejects] == [("bad", "would not")]
    again = Echo()
    report = regenerate(asked, again, path)
    assert (report.resumed, report.written, again.asked) == (2, 0, ["no"])


@pytest.mark.parametrize("kept", range(0, 400, 7))
def test_a_file_torn_anywhere_is_mended(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "out.jsonl"
    regenerate(prompts(5), Echo(), path)
    whole = sorted(path.read_text().splitlines())
    path.write_bytes(path.read_bytes()[:kept])
    report = regenerate(prompts(5), Echo(), path)
    assert report.resumed + report.written == 5
    assert sorted(path.read_text().splitlines()) == whole


def test_kill_9_again_and_again_loses_and_doubles_nothing(tmp_path: Path) -> None:
    path, script = tmp_path / "out.jsonl", tmp_path / "slow.py"
    script.write_text(
        "import sys, time\n"
        "from drafttrain.corpus.answers import Answer, regenerate\n"
        "from drafttrain.corpus.types import Prompt\n"
        "class Slow:\n"
        "    identity = settings = {'source': 'slow'}\n"
        "    def answer(self, questions):\n"
        "        for index, question in enumerate(questions):\n"
        "            time.sleep(0.002)\n"
        "            text = question.messages[-1]['content']\n"
        "            yield index, Answer({'role': 'assistant', 'content': f're: {text} 😀' * 400}, True)\n"
        "def ask(n):\n"
        "    return Prompt(f'p{n}', [{'role': 'user', 'content': f'ask {n}'}], ['more'] * (n % 2))\n"
        "regenerate([ask(n) for n in range(300)], Slow(), sys.argv[1])\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    sizes = []
    for _ in range(20):
        process = subprocess.Popen([sys.executable, str(script), str(path)], env=environment)
        before = path.stat().st_size if path.exists() else 0
        while process.poll() is None and (not path.exists() or path.stat().st_size < before + 500_000):
            time.sleep(0.002)
        killed = process.poll() is None
        if killed:
            process.send_signal(signal.SIGKILL)
        process.wait()
        sizes.append(path.stat().st_size)
        if not killed:
            assert process.returncode == 0
            break
    assert len(sizes) > 2, "the test killed at least twice"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert sorted(record["id"] for record in records) == sorted(f"p{n}" for n in range(300))
    assert all(len(record["messages"]) == 2 + 2 * (int(record["id"][1:]) % 2) for record in records)


def test_a_torn_last_line_is_passed_over_when_reading(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    regenerate(prompts(3), Echo(), path)
    path.write_bytes(path.read_bytes()[:-20])
    assert len(read_answers(path)) == 2
    damaged = path.read_text().splitlines()
    path.write_text("\n".join(["{half", *damaged]) + "\n")
    with pytest.raises(DataError, match="line 1"):
        read_answers(path)


def test_files_of_another_source_or_prompt_set_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    regenerate(prompts(3), Echo(), path)
    before = path.read_bytes()
    with pytest.raises(DataError, match="source: 'echo' -> 'other'"):
        regenerate(prompts(3), Echo("other"), path)
    with pytest.raises(DataError, match="no prompt asks for"):
        regenerate(prompts(2), Echo(), path)
    with pytest.raises(DataError, match="occurs twice"):
        regenerate(prompts(2) + prompts(1), Echo(), path)
    with pytest.raises(DataError, match="no prompts"):
        regenerate([], Echo(), path)
    assert path.read_bytes() == before
    assert regenerate(prompts(2), Echo("other"), path, resume=False).written == 2
    foreign = tmp_path / "foreign.jsonl"
    foreign.write_text("{}\n")
    with pytest.raises(DataError, match="not written by regenerate"):
        regenerate(prompts(2), Echo(), foreign)


def test_two_runs_cannot_write_to_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"

    class Nested(Echo):
        def answer(self, questions: Sequence[Question]) -> Iterator[tuple[int, Answer | Failure]]:
            with pytest.raises(DataError, match="another run"):
                regenerate(prompts(2), Echo(), path)
            return super().answer(questions)

    assert regenerate(prompts(2), Nested(), path).written == 2


def test_a_complete_file_is_read_beside_another_reader_or_writer(tmp_path: Path) -> None:
    """Ranks look at it at once."""
    path = tmp_path / "out.jsonl"
    regenerate(prompts(3), Echo(), path)
    before = path.read_bytes()
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert regenerate(prompts(3), Echo(), path).resumed == 3
        with pytest.raises(DataError, match="another run"):
            regenerate(prompts(4), Echo(), path)
        with pytest.raises(DataError, match="other settings"):
            regenerate(prompts(3), Echo("other"), path)
    assert path.read_bytes() == before


def test_a_full_disk_is_one_error_and_what_stands_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(DataError, match="cannot be written") as caught:
            regenerate(prompts(30), Echo(), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "what stands is kept" in str(caught.value)
    kept = len(read_answers(path))
    assert kept > 1
    report = regenerate(prompts(30), Echo(), path)
    assert (report.resumed, report.written) == (kept, 30 - kept)


# --- a real model in this process ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> tuple[TargetGenerator, ChatRenderer]:
    chat = ChatRenderer(chat_tokenizer(CHATML))
    vocabulary = len(chat.tokenizer.get_vocab())  # type: ignore[attr-defined]
    # A flat random model seldom repeats itself.
    target = tiny_target(vocab_size=vocabulary, max_position_embeddings=512, initializer_range=0.02)
    return TargetGenerator(target, batch_size=8), chat


def test_answers_of_a_model_are_what_it_generates(tmp_path: Path, model: tuple[TargetGenerator, ChatRenderer]) -> None:
    generator, chat = model
    config = AnswersConfig(max_new_tokens=12, temperature=1.0, seed=3)
    asked = [
        Prompt("a", [user("Hi")], turns=["So 你好?"]),
        Prompt("b", [user("😀")]),
        Prompt("long", [user("x " * 900)]),
    ]
    source = TargetAnswers(generator, chat, config, context_length=512)
    report = regenerate(asked, source, tmp_path / "out.jsonl")
    assert report.written == 2
    assert [reject.id for reject in report.rejects] == ["long"]
    assert "exceeds the context of 512" in report.rejects[0].reason
    answers = {conversation.id: conversation for conversation in read_answers(tmp_path / "out.jsonl")}
    (said,) = generator.generate(
        [chat.prompt_ids([user("Hi")])],
        max_new_tokens=12,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        seed=3,
        stop=chat.stop_ids,
    )
    text, finished = chat.answer_text(said.tokens, 12)
    assert answers["a"].messages[1]["content"] == text
    assert (1 in answers["a"].cut) == (not finished)
    assert answers["a"].tokens[1] == said.tokens
    sample = chat.sample(answers["b"], 512)
    prompt = chat.prompt_ids([user("😀")])
    assert isinstance(sample, Sample)
    assert sample.ids.tolist() == prompt + answers["b"].tokens[1]
    assert len(answers["a"].messages) == 4


def test_synthesised_prompts_are_distinct_and_seeded(model: tuple[TargetGenerator, ChatRenderer]) -> None:
    generator, plain = model
    # So many tokens end a turn that even a random model ends it soon.
    chat = ChatRenderer(plain.tokenizer, stop_ids=range(60))
    assert chat.tokenizer.decode(user_turn_opening(chat), skip_special_tokens=False) == "<|im_start|>user\n"
    settings = {"temperature": 1.5, "top_p": 1.0, "max_new_tokens": 32}
    first = synthesise(generator, chat, 6, seed=1, **settings)  # type: ignore[arg-type]
    texts = [prompt.messages[0]["content"] for prompt in first]
    assert len(set(texts)) == 6 and all(len(text) >= 8 for text in texts)
    assert first == synthesise(generator, chat, 6, seed=1, **settings)  # type: ignore[arg-type]
    assert texts != [p.messages[0]["content"] for p in synthesise(generator, chat, 6, seed=2, **settings)]  # type: ignore[arg-type]


def test_a_model_that_repeats_itself_is_an_error() -> None:
    chat = ChatRenderer(chat_tokenizer(CHATML))

    class Parrot:
        def generate(self, prompts: Sequence[list[int]], **_: Any) -> Iterator[Continuation]:
            for index in range(len(prompts)):
                yield Continuation(index, [*chat.encode("How are you today?"), chat.end_of_turn])

    with pytest.raises(DataError, match="1 distinct prompts of 5"):
        synthesise(Parrot(), chat, 5)
