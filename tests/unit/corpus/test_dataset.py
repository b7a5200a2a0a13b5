"""The tokenised corpus: its cache key, its counts, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.config import AnswersConfig, DataConfig, PromptSource
from drafttrain.corpus.dataset import build_corpus, corpus_key, split_held_out, token_counts
from drafttrain.corpus.inspect import corpus_table, inspect_samples, sample_text
from drafttrain.corpus.types import Conversation
from drafttrain.errors import DataError
from tests.chats import CHATML, LLAMA3, QWEN3, assistant, chat_tokenizer, user

VOCAB = 600


def conversations(count: int = 4) -> list[Conversation]:
    made = [Conversation(f"c{n}", [user(f"How are {n}?"), assistant(f"fine 你好 😀 {n}")]) for n in range(count)]
    return [*made, Conversation("none", [user("Hi")])]


@pytest.fixture(scope="module")
def chat() -> ChatRenderer:
    return ChatRenderer(chat_tokenizer(CHATML))


def test_a_corpus_is_read_back_from_its_cache(
    chat: ChatRenderer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = build_corpus(conversations(), chat, max_length=64, vocab_size=VOCAB, cache=tmp_path)
    assert first.conversations == len(first.samples) + len(first.rejects) == 5
    assert [(reject.id, reject.reason) for reject in first.rejects] == [("none", "no assistant turn")]

    def never(*_: object) -> None:
        raise AssertionError("tokenised again")

    monkeypatch.setattr(chat, "samples", never)
    again = build_corpus(conversations(), chat, max_length=64, vocab_size=VOCAB, cache=tmp_path)
    assert [s.id for s in again.samples] == [s.id for s in first.samples]
    for left, right in zip(again.samples, first.samples, strict=True):
        assert np.array_equal(left.ids, right.ids) and left.spans == right.spans
    assert again.rejects == first.rejects
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_key_changes_with_all_that_decides_the_samples(chat: ChatRenderer) -> None:
    data = conversations()
    other_tokenizer = chat_tokenizer(CHATML)
    other_tokenizer.add_tokens(["brand-new"])
    variants = [
        corpus_key(data, chat, max_length=64, vocab_size=VOCAB),
        corpus_key(data, chat, max_length=65, vocab_size=VOCAB),
        corpus_key(data, chat, max_length=64, vocab_size=VOCAB + 1),
        corpus_key(data, ChatRenderer(chat_tokenizer(LLAMA3)), max_length=64, vocab_size=VOCAB),
        corpus_key(data, ChatRenderer(other_tokenizer), max_length=64, vocab_size=VOCAB),
        corpus_key(data[1:], chat, max_length=64, vocab_size=VOCAB),
        corpus_key([replace(data[0], cut=(1,)), *data[1:]], chat, max_length=64, vocab_size=VOCAB),
        corpus_key(data, ChatRenderer(chat_tokenizer(CHATML), {"x": 1}), max_length=64, vocab_size=VOCAB),
        corpus_key(data, ChatRenderer(chat_tokenizer(CHATML), stop_ids=[7]), max_length=64, vocab_size=VOCAB),
    ]
    assert len(set(variants)) == len(variants)
    assert variants[0] == corpus_key(data, ChatRenderer(chat_tokenizer(CHATML)), max_length=64, vocab_size=VOCAB)


def test_a_damaged_cache_is_named(chat: ChatRenderer, tmp_path: Path) -> None:
    build_corpus(conversations(), chat, max_length=64, vocab_size=VOCAB, cache=tmp_path)
    (folder,) = tmp_path.iterdir()
    tokens = folder / "tokens.bin"
    tokens.write_bytes(tokens.read_bytes()[:-8])
    with pytest.raises(DataError, match="damaged") as caught:
        build_corpus(conversations(), chat, max_length=64, vocab_size=VOCAB, cache=tmp_path)
    assert str(folder) in str(caught.value)


def test_empty_and_unlearnable_data_and_foreign_tokenizers_are_errors(chat: ChatRenderer, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="empty"):
        build_corpus([], chat, max_length=64, vocab_size=VOCAB, cache=tmp_path)
    with pytest.raises(DataError, match=r"none of 5 conversations .* leaves no room in a context of 4"):
        build_corpus(conversations(), chat, max_length=4, vocab_size=VOCAB, cache=tmp_path)
    with pytest.raises(DataError, match="outside the target's vocabulary of 100"):
        build_corpus(conversations(), chat, max_length=64, vocab_size=100, cache=tmp_path)
    assert not list(tmp_path.iterdir())


def test_rewritten_turns_become_samples_of_their_own(tmp_path: Path) -> None:
    chat = ChatRenderer(chat_tokenizer(QWEN3))
    talk = Conversation("t", [user("Hi"), assistant("fine thanks"), user("So?"), assistant("good then")])
    corpus = build_corpus([talk], chat, max_length=256, vocab_size=VOCAB, cache=tmp_path)
    assert [sample.id for sample in corpus.samples] == ["t", "t@1"]
    assert corpus.conversations == 1


def test_token_counts_are_over_labels(chat: ChatRenderer, tmp_path: Path) -> None:
    corpus = build_corpus(conversations(), chat, max_length=64, vocab_size=VOCAB, cache=tmp_path)
    counts = token_counts(corpus.samples, VOCAB)
    expected = np.zeros(VOCAB, dtype=np.int64)
    for sample in corpus.samples:
        for first, last in sample.spans:
            for token in sample.ids[first + 1 : last + 1]:
                expected[token] += 1
    assert counts.tolist() == expected.tolist()
    assert counts[chat.end_of_turn] == len(corpus.samples)
    assert token_counts([], VOCAB).tolist() == [0] * VOCAB


def test_a_small_set_may_be_supervised_whole(chat: ChatRenderer, tmp_path: Path) -> None:
    talk = Conversation("t", [user("Hi"), assistant("fine"), user("So?"), assistant("good then")])
    answers = build_corpus([talk], chat, max_length=64, vocab_size=VOCAB, cache=tmp_path)
    whole = build_corpus([talk], chat, max_length=64, vocab_size=VOCAB, supervise="all", cache=tmp_path)
    assert whole.key != answers.key and answers.supervised < answers.tokens
    assert whole.samples[0].ids.tolist() == answers.samples[0].ids.tolist()
    assert whole.samples[0].spans == [(0, whole.tokens - 1)]
    with_text = token_counts(whole.samples, VOCAB) - token_counts(answers.samples, VOCAB)
    assert with_text.sum() == whole.tokens - 1 - (answers.supervised - 2)


def test_a_corpus_is_known_by_what_its_template_is_shown(chat: ChatRenderer, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(arguments: object) -> str:
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        talk = Conversation("t", [user("Add"), {"role": "assistant", "content": "", "tool_calls": [call]}])
        return corpus_key([talk], chat, max_length=64, vocab_size=VOCAB)

    assert key({"a": 1}) == key('{"a": 1}') != key('{"a": 2}')
    before = key("")
    monkeypatch.setattr(chat, "day", "2024-07-26")
    assert key("") != before


def test_held_out_conversations_do_not_depend_on_the_order() -> None:
    data = conversations(20)
    training, held = split_held_out(data, 5, seed=1)
    assert len(held) == 5 and {c.id for c in training} | {c.id for c in held} == {c.id for c in data}
    _, again = split_held_out(data[::-1], 5, seed=1)
    assert {c.id for c in again} == {c.id for c in held}
    with pytest.raises(DataError, match="none is left to train on"):
        split_held_out(data, 21)
    with pytest.raises(DataError, match=f"2 conversations have the id {data[3].id!r}"):
        split_held_out([*data, data[3]], 5)


def test_inspection_colours_exactly_the_supervised_tokens(chat: ChatRenderer, tmp_path: Path) -> None:
    corpus = build_corpus(conversations(), chat, max_length=64, vocab_size=VOCAB, cache=tmp_path)
    sample = corpus.samples[0]
    text = sample_text(sample, chat.tokenizer)
    coloured = "".join(text.plain[span.start : span.end] for span in text.spans if " on " in str(span.style))
    assert coloured == "fine 你好 😀 0<|im_end|>"
    assert text.plain == chat.tokenizer.decode(sample.ids.tolist())
    console = Console(width=100, record=True, file=(tmp_path / "out.txt").open("w"))
    console.print(inspect_samples(corpus.samples, chat.tokenizer), corpus_table(corpus))
    shown = console.export_text()
    assert f"{sample.supervised / len(sample.ids):.1%} supervised" in shown
    assert "no assistant turn" in shown


def test_impossible_data_sections_are_refused() -> None:
    for wrong in (
        lambda: PromptSource(source="self"),
        lambda: AnswersConfig(source="server"),
        lambda: AnswersConfig(repetition_penalty=1.1),
        lambda: DataConfig(),
        lambda: DataConfig(prompts=[PromptSource(source="x.jsonl")], path="y.jsonl"),
    ):
        with pytest.raises(ValueError):
            wrong()
    config = DataConfig(prompts=[PromptSource(source="self", count=4)])
    assert DataConfig(**json.loads(config.model_dump_json())) == config
