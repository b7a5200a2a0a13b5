"""The loss mask: exact on tokens, for every style of template, with and without generation marks."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.types import Conversation, Reject, Sample
from drafttrain.errors import DataError
from tests.chats import (
    CHATML,
    CHATML_MARKS,
    CHATML_WIDE_MARKS,
    GEMMA,
    LLAMA3,
    LLAMA3_MARKS,
    MISTRAL,
    QWEN3,
    QWEN3_MARKS,
    R1,
    assistant,
    chat_tokenizer,
    user,
)


@cache
def renderer(template: str, trim_offsets: bool = False, **template_kwargs: Any) -> ChatRenderer:
    return ChatRenderer(chat_tokenizer(template, trim_offsets=trim_offsets), template_kwargs)


def sample_of(chat: ChatRenderer, messages: list[dict[str, Any]], cut: tuple[int, ...] = ()) -> Sample:
    outcome = chat.sample(Conversation("c", messages, cut=cut), 10_000)
    assert isinstance(outcome, Sample), outcome
    return outcome


def said(chat: ChatRenderer, sample: Sample) -> list[str]:
    """Text of the supervised spans."""
    return [chat.tokenizer.decode(sample.ids[a : b + 1].tolist()) for a, b in sample.spans]


def marked_tokens(chat: ChatRenderer, messages: list[dict[str, Any]]) -> list[int]:
    encoded = chat.tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    return [index for index, mark in enumerate(encoded["assistant_masks"]) if mark]


# Turns as they are spoken: any letters, some white space at the ends, never a special token of the templates.
TEXT = st.text(alphabet=st.sampled_from("ab yz\n\t.,!?19你好é😀مر"), min_size=1, max_size=12).filter(
    lambda text: bool(text.strip())
)
EXCHANGES = st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4)


def conversation(exchanges: list[tuple[str, str]]) -> list[dict[str, Any]]:
    return [message for ask, answer in exchanges for message in (user(ask), assistant(answer))]


@pytest.mark.parametrize(
    ("template", "end"),
    [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (GEMMA, "<end_of_turn>"), (MISTRAL, "</s>")],
)
def test_spans_are_the_answers_and_their_end_of_turn(template: str, end: str) -> None:
    chat = renderer(template)
    messages = conversation([("How are you?", "I am fine."), ("And 你?", "مرحبا 😀\nfine")])
    answers = [text.strip() for text in said(chat, sample_of(chat, messages))]
    assert answers == [f"I am fine.{end}", f"مرحبا 😀\nfine{end}"]


@settings(max_examples=60, deadline=None)
@given(EXCHANGES, st.sampled_from([CHATML, LLAMA3, GEMMA, MISTRAL]), st.booleans())
def test_a_token_is_supervised_exactly_if_it_lies_inside_an_answer(
    exchanges: list[tuple[str, str]], template: str, trim_offsets: bool
) -> None:
    chat = renderer(template, trim_offsets)
    messages = conversation(exchanges)
    sample = sample_of(chat, messages)
    end = chat.tokenizer.convert_ids_to_tokens(chat.end_of_turn)

    # Independently: each answer is rendered behind what came before it.
    text = chat.render(messages)
    ranges = []
    for index in range(1, len(messages), 2):
        start = len(chat.render(messages[:index], generation_prompt=True))
        ranges.append((start, text.index(end, start) + len(end)))
    encoding = renderer(template).tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    expected = {
        index
        for index, (begin, stop) in enumerate(encoding["offset_mapping"])
        if any(first <= begin and stop <= last for first, last in ranges)
    }
    assert sample.ids.tolist() == encoding["input_ids"]
    # A span of one token has no label and is left out.
    alone = {index for index in expected if not {index - 1, index + 1} & expected}
    assert {i for a, b in sample.spans for i in range(a, b + 1)} == expected - alone
    assert all(sample.ids[last] == chat.end_of_turn for _, last in sample.spans)


@settings(max_examples=40, deadline=None)
@given(EXCHANGES, st.sampled_from([(CHATML, CHATML_MARKS), (LLAMA3, LLAMA3_MARKS)]), st.booleans())
def test_the_mask_equals_the_one_from_generation_marks(
    exchanges: list[tuple[str, str]], templates: tuple[str, str], trim_offsets: bool
) -> None:
    plain, marked = (renderer(template, trim_offsets) for template in templates)
    messages = conversation(exchanges)
    sample = sample_of(marked, messages)
    assert sample.spans == sample_of(plain, messages).spans
    ours = [index for first, last in sample.spans for index in range(first, last + 1)]
    theirs = marked_tokens(renderer(templates[1]), messages)
    # Transformers also marks a token that the answer's first newline shares with the header: never emitted.
    encoding = renderer(templates[1]).tokenizer(
        marked.render(messages), add_special_tokens=False, return_offsets_mapping=True
    )
    offsets = encoding["offset_mapping"]
    starts = {len(marked.render(messages[:index], generation_prompt=True)) for index in range(1, len(messages), 2)}
    shared = {i for i in theirs if any(offsets[i][0] < start < offsets[i][1] for start in starts)}
    lone = {i for i in theirs if not {i - 1, i + 1} & (set(theirs) - shared)}
    assert ours == [index for index in theirs if index not in shared | lone]


def test_marks_that_hold_header_and_trailing_newline_are_narrowed() -> None:
    messages = conversation([("Hi", "Yes, fine."), ("So?", "Good.")])
    wide = sample_of(renderer(CHATML_WIDE_MARKS), messages)
    assert wide.spans == sample_of(renderer(CHATML), messages).spans
    assert len(marked_tokens(renderer(CHATML_WIDE_MARKS), messages)) > wide.supervised


def test_a_newline_merged_into_the_header_is_not_supervised() -> None:
    chat = renderer(CHATML)
    merged = chat.encode("\n\n")
    assert len(merged) == 1
    sample = sample_of(chat, [user("Hi"), assistant("\nfine, thank you")])
    first, _ = sample.spans[0]
    assert sample.ids[first - 1] == merged[0]
    assert said(chat, sample) == ["fine, thank you<|im_end|>"]


def test_trimmed_offsets_give_the_same_spans() -> None:
    messages = conversation([("Hi", "  fine"), ("So?", " good")])
    text = renderer(MISTRAL).render(messages)
    trimmed, plain = (
        renderer(MISTRAL, trim).tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        for trim in (True, False)
    )
    assert trimmed["offset_mapping"] != plain["offset_mapping"], "the tokenizer of this test does trim"
    assert sample_of(renderer(MISTRAL, True), messages).spans == sample_of(renderer(MISTRAL), messages).spans


def test_the_prompt_is_a_prefix_of_the_sample() -> None:
    for template in (CHATML, LLAMA3, GEMMA, MISTRAL, QWEN3):
        chat = renderer(template)
        messages = conversation([("Hi", "fine"), ("So?", "good")])
        sample = sample_of(chat, messages)
        prompt = chat.prompt_ids(messages[:3])
        assert sample.ids[: len(prompt)].tolist() == prompt


# --- reasoning -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [QWEN3, QWEN3_MARKS])
def test_an_empty_think_block_from_the_template_is_prompt(template: str) -> None:
    chat = renderer(template)
    sample = sample_of(chat, [user("Hi"), assistant("fine, thanks")])
    assert "<think>\n\n</think>" in chat.tokenizer.decode(sample.ids.tolist())
    assert said(chat, sample) == ["fine, thanks<|im_end|>"]
    off = renderer(template, enable_thinking=False)
    prompt = off.prompt_ids([user("Hi")])
    assert off.tokenizer.decode(prompt).endswith("<think>\n\n</think>\n\n")
    assert sample_of(off, [user("Hi"), assistant("fine, thanks")]).spans[0][0] == len(prompt)


@pytest.mark.parametrize("template", [QWEN3, QWEN3_MARKS])
def test_an_empty_block_that_the_model_wrote_is_supervised(template: str) -> None:
    chat = renderer(template)
    answer = "<think>\n\n</think>\n\nfine"
    assert said(chat, sample_of(chat, [user("Hi"), assistant(answer)])) == [answer + "<|im_end|>"]


@pytest.mark.parametrize("template", [QWEN3, QWEN3_MARKS])
def test_reasoning_stripped_from_history_is_not_supervised_there(template: str) -> None:
    chat = renderer(template)
    first, second = "<think>\nwell\n</think>\n\nfine", "<think>\nhm\n</think>\n\ngood"
    messages = [user("Hi"), assistant(first), user("So?"), assistant(second)]
    assert said(chat, sample_of(chat, messages)) == [second + "<|im_end|>"]

    outcome = chat.samples(Conversation("c", messages), 10_000)
    assert isinstance(outcome, list)
    assert [said(chat, sample) for sample in outcome] == [[second + "<|im_end|>"], [first + "<|im_end|>"]]
    assert [sample.id for sample in outcome] == ["c", "c@1"]
    prompt = chat.prompt_ids(messages[:1])
    assert outcome[1].ids[: len(prompt)].tolist() == prompt


def test_reasoning_in_a_field_of_its_own() -> None:
    chat = renderer(QWEN3)
    sample = sample_of(chat, [user("Hi"), assistant("good", reasoning_content="hm")])
    assert said(chat, sample) == ["<think>\nhm\n</think>\n\ngood<|im_end|>"]


def test_a_template_that_hides_all_reasoning_is_trained_as_emitted() -> None:
    chat = renderer(R1)
    answer = "well\n</think>\n\nfine"
    messages = [user("Hi"), assistant(answer), user("So?"), assistant("hm\n</think>good")]
    assert said(chat, sample_of(chat, messages)) == ["hm\n</think>good</s>"]
    outcome = chat.samples(Conversation("c", messages), 10_000)
    assert isinstance(outcome, list)
    assert [said(chat, sample) for sample in outcome] == [["hm\n</think>good</s>"], [answer + "</s>"]]
    bare = chat.sample(Conversation("c", [user("Hi"), assistant("fine")]), 1000)
    assert isinstance(bare, Reject) and "all-0 mask" in bare.reason and "tiny-chat" in bare.reason


def test_tool_messages_between_two_answers_are_not_supervised() -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    messages = [
        user("Add"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "the sum is 42"},
        assistant("It is 42."),
    ]
    chat = renderer(QWEN3)
    outcome = chat.samples(Conversation("c", messages), 10_000)
    assert isinstance(outcome, list)
    spoken = [text for sample in outcome for text in said(chat, sample)]
    assert sum("It is 42." in text for text in spoken) == 1
    assert any('"name": "add"' in text and text.endswith("</tool_call><|im_end|>") for text in spoken)
    assert not any("the sum" in text for text in spoken)


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({"a": 1}, '{"a": 1}'),
        ('{"a": 1}', '{"a": 1}'),  # as OpenAI's API has it, and as servers answer
        ("", "{}"),
        (None, "{}"),
        ("a = 1", '"a = 1"'),
        ("[1]", '"[1]"'),
    ],
)
def test_arguments_of_a_tool_call_are_shown_as_the_object_that_they_are(given: object, shown: str) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": given}}
    messages = [user("Add"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    chat = renderer(QWEN3)
    (text,) = said(chat, sample_of(chat, messages))
    assert f'"arguments": {shown}}}' in text and text.endswith("</tool_call><|im_end|>")
    assert call["function"]["arguments"] is given  # type: ignore[index]


def test_an_empty_list_of_tool_calls_is_none() -> None:
    """Llama 3.1's template looks whether a message has the key."""
    chat = renderer(
        "{% for m in messages if 'tool_calls' in m %}{{ raise_exception('one call') }}{% endfor %}" + CHATML
    )
    sample = sample_of(chat, [user("Hi"), {**assistant("fine"), "tool_calls": []}])
    assert said(chat, sample) == ["fine<|im_end|>"]


def test_the_date_in_a_template_is_one_and_the_same() -> None:
    """A run that goes on tomorrow must find its samples."""
    dated = "{{ '<|im_start|>system\n' + strftime_now('%d %b %Y') + '<|im_end|>\n' }}" + CHATML
    chat, plain = renderer(dated), renderer(CHATML)
    assert chat.render([user("Hi")]).startswith("<|im_start|>system\n26 Jul 2024<|im_end|>")
    assert "26 Jul" not in plain.render([user("Hi")])
    asked = "{% set date_string = strftime_now('%A, %-d %b %Y %H:%M') %}"
    of_llama = "\n{% if date_string is not defined %}" + asked + "{% endif %}{{ date_string }}"
    tokenizer = chat_tokenizer(of_llama + CHATML)
    assert ChatRenderer(tokenizer).render([user("Hi")]).startswith("\nFriday, 26 Jul 2024 00:00<|im_start|>")
    assert ChatRenderer(tokenizer, {"date_string": "1 May 2026"}).render([user("Hi")]).startswith("\n1 May 2026<")
    tokenizer.chat_template = {"default": CHATML, "tool_use": dated}
    tools = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}]
    assert "26 Jul 2024" in ChatRenderer(tokenizer).render([user("Hi")], tools)
    assert "26 Jul 2024" not in ChatRenderer(tokenizer).render([user("Hi")])


def test_tool_messages_are_not_supervised_where_one_sample_holds_all_turns() -> None:
    """The turns before and behind the tool's are in one text: each ends at its own end of turn."""
    messages = [user("Add"), assistant("Let me see."), {"role": "tool", "content": "the sum is 42"}, assistant("42.")]
    chat = renderer(CHATML)
    (sample,) = chat.samples(Conversation("c", messages), 10_000)  # type: ignore[misc]
    assert said(chat, sample) == ["Let me see.<|im_end|>", "42.<|im_end|>"]


# --- cut answers, lengths, refusals ----------------------------------------------------------------------------


def test_an_answer_cut_at_the_token_limit_has_no_end_of_turn() -> None:
    chat = renderer(CHATML)
    messages = conversation([("Hi", "I am fi"), ("So?", "all go")])
    sample = sample_of(chat, messages, cut=(1, 3))
    assert said(chat, sample) == ["I am fi", "all go"]
    thinking = sample_of(renderer(QWEN3), [user("Hi"), assistant("<think>\nwell, I")], cut=(1,))
    assert said(renderer(QWEN3), thinking) == ["<think>\nwell, I"]


def test_max_length_cuts_spans_and_refuses_long_prompts() -> None:
    chat = renderer(CHATML)
    conv = Conversation("c", conversation([("Hi", "I am fine, thank you."), ("So?", "All is good.")]))
    whole = chat.sample(conv, 10_000)
    assert isinstance(whole, Sample)
    (first, last), (second, _) = whole.spans
    short = chat.sample(conv, last)
    assert isinstance(short, Sample)
    assert short.spans == [(first, last - 1)] and len(short.ids) == last
    between = chat.sample(conv, second)
    assert isinstance(between, Sample) and between.spans == [(first, last)]
    refused = chat.sample(conv, first)
    assert isinstance(refused, Reject)
    assert refused.reason == f"the prompt has {first} tokens, which leaves no room in a context of {first}"


def test_conversations_without_something_to_learn_are_named() -> None:
    chat = renderer(CHATML)
    outcomes = [
        chat.samples(Conversation("c", messages, cut=cut), 100)
        for messages, cut in (
            ([user("Hi")], ()),
            ([user("Hi"), assistant("")], ()),
            ([user("Hi"), assistant("")], (1,)),
        )
    ]
    assert [outcome.reason for outcome in outcomes if isinstance(outcome, Reject)] == [
        "no assistant turn",
        "no answer has a token to learn after its first",
        "no answer has a token to learn after its first",
    ]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}</s>{% endif %}{% endfor %}", "all 0"),
        ("{% for m in messages %}{% if m.role != 'user' %}{{ m.content }}</s>{% endif %}{% endfor %}", "all 1"),
        ("{% for m in messages %}{{ m.role + ': ' + m.content }}{% endfor %}", "could not stop"),
        ("{{ raise_exception('no chats') }}", "no chats"),
        (None, "no chat template"),
    ],
)
def test_unusable_templates_are_named(template: str | None, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        ChatRenderer(chat_tokenizer(template or ""))
    assert "tiny-chat" in str(caught.value)


def test_the_stop_token_is_found_even_where_eos_is_another() -> None:
    chat = renderer(GEMMA)
    vocabulary = chat.tokenizer
    assert vocabulary.convert_ids_to_tokens(chat.end_of_turn) == "<end_of_turn>"
    assert {vocabulary.convert_ids_to_tokens(token) for token in chat.stop_ids} == {"<end_of_turn>", "</s>"}


def test_a_truncation_left_in_the_tokenizer_does_not_reach_the_corpus() -> None:
    chat = renderer(CHATML)
    messages = conversation([("Hi", "I am fine, thank you.")])
    before = sample_of(chat, messages)
    chat.tokenizer("one two three four five", truncation=True, max_length=2)
    assert sample_of(chat, messages).ids.tolist() == before.ids.tolist()


def test_masking_renders_and_encodes_once_however_many_turns() -> None:
    """Cost is linear in tokens: two renderings and one encoding of the whole, no prefixes (case 8 of docs/cases.md)."""
    tokenizer = chat_tokenizer(CHATML)
    chat = ChatRenderer(tokenizer)
    rendered: list[int] = []
    encoded: list[int] = []
    original, encoder = tokenizer.apply_chat_template, chat._encoder

    class Counting:
        def encode(self, text: str, **kwargs: Any) -> Any:
            encoded.append(len(text))
            return encoder.encode(text, **kwargs)

    chat._encoder = Counting()  # type: ignore[assignment]

    def counting(messages: Any, **kwargs: Any) -> Any:
        rendered.append(len(messages))
        return original(messages, **kwargs)

    tokenizer.apply_chat_template = counting
    for turns in (2, 64):
        rendered.clear()
        encoded.clear()
        messages = conversation([("Hi", "fine, thanks")] * turns)
        assert len(sample_of(chat, messages).spans) == turns
        assert rendered == [2 * turns] * 2
        assert encoded == [len(chat.render(messages))]


# --- the tokens that were emitted ------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(EXCHANGES, st.sampled_from([CHATML, LLAMA3, GEMMA]), st.data())
def test_emitted_tokens_stand_in_the_sample_where_they_are_known(
    exchanges: list[tuple[str, str]], template: str, data: st.DataObject
) -> None:
    """Tokens that another encoding of the same text would not give: split to single bytes."""
    chat = renderer(template)
    messages = conversation([(ask, answer.strip()) for ask, answer in exchanges])
    tokens = {}
    for index in range(1, len(messages), 2):
        pieces = [chat.encode(character) for character in messages[index]["content"]]
        if data.draw(st.booleans()):
            tokens[index] = [token for piece in pieces for token in piece]
            if data.draw(st.booleans()):
                tokens[index].append(chat.end_of_turn)
    plain = sample_of(chat, messages)
    outcome = chat.sample(Conversation("c", messages, tokens=tokens), 10_000)
    assert isinstance(outcome, Sample)
    assert chat.tokenizer.decode(outcome.ids.tolist()) == chat.tokenizer.decode(plain.ids.tolist())
    known = [
        [*ids, chat.end_of_turn] if ids[-1] != chat.end_of_turn else ids for ids in tokens.values() if len(ids) > 1
    ]
    spans = [outcome.ids[first : last + 1].tolist() for first, last in outcome.spans]
    assert all(ids in spans for ids in known)
    assert all(outcome.ids[last] == chat.end_of_turn for _, last in outcome.spans)


def test_emitted_tokens_of_an_edited_answer_are_not_used() -> None:
    chat = renderer(CHATML)
    messages = conversation([("Hi", "I am fine.")])
    stale = Conversation("c", messages, tokens={1: [*chat.encode("I am not."), chat.end_of_turn]})
    outcome = chat.sample(stale, 100)
    assert isinstance(outcome, Sample)
    assert outcome.ids.tolist() == sample_of(chat, messages).ids.tolist()


def test_emitted_tokens_of_a_cut_answer_end_without_end_of_turn() -> None:
    chat = renderer(CHATML)
    messages = conversation([("Hi", "go"), ("So", "on")])
    tokens = {index: [chat.encode(c)[0] for c in messages[index]["content"]] for index in (1, 3)}
    outcome = chat.sample(Conversation("c", messages, cut=(1, 3), tokens=tokens), 100)
    assert isinstance(outcome, Sample)
    assert [outcome.ids[a : b + 1].tolist() for a, b in outcome.spans] == [tokens[1], tokens[3]]
    short = chat.sample(Conversation("c", messages, cut=(1, 3), tokens=tokens), outcome.spans[1][0] + 1)
    assert isinstance(short, Sample) and short.spans == outcome.spans[:1]
