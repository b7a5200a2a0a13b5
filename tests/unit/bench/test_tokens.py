from __future__ import annotations

import pytest

from drafttrain.bench.tokens import token_texts
from tests.chats import CHATML, chat_tokenizer


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world.\n\nHow are you?",
        "def f(a):\n    return a",
        "你好，世界 😀🎉",
        "مرحبا بالعالم",
        "<|im_end|>\n",
        "",
    ],
)
def test_pieces_concatenate_to_the_text(text: str) -> None:
    tokenizer = chat_tokenizer(CHATML)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    pieces = token_texts(tokenizer, ids)
    assert len(pieces) == len(ids)
    assert "".join(pieces) == text


def test_a_character_of_several_tokens_belongs_to_its_last() -> None:
    tokenizer = chat_tokenizer(CHATML)
    ids = tokenizer("ж", add_special_tokens=False)["input_ids"]
    assert len(ids) == 2
    assert token_texts(tokenizer, ids) == ["", "ж"]


def test_a_cut_character_is_shown_as_such() -> None:
    tokenizer = chat_tokenizer(CHATML)
    ids = tokenizer("aж", add_special_tokens=False)["input_ids"]
    assert token_texts(tokenizer, ids[:-1]) == ["a", "�"]
