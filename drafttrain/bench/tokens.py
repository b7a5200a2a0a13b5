"""Text of single tokens, so that each can be shown with who wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "�"


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; concatenated, they are the decoded sequence.

    A character whose bytes are spread over several tokens belongs to the last of them; the others add "".
    Decoding looks back over one finished token, since many tokenizers drop the space of a word that stands
    alone.

    Args:
        tokenizer: a transformers tokenizer.
        ids: token ids, special ones included (they are shown as they are written).
    """
    texts: list[str] = []
    start, read = 0, 0  # ids[start:read] is finished text that gives ids[read:] its context
    for end in range(1, len(ids) + 1):
        known = _decode(tokenizer, ids[start:read])
        text = _decode(tokenizer, ids[start:end])
        if len(text) > len(known) and not text.endswith(_INCOMPLETE):
            texts.append(text[len(known) :])
            start, read = read, end
        else:
            texts.append("")
    if texts and read < len(ids):
        # The answer was cut inside a character: show that something is there.
        texts[-1] += _decode(tokenizer, ids[start:])[len(_decode(tokenizer, ids[start:read])) :]
    return texts


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    if not ids:
        return ""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
