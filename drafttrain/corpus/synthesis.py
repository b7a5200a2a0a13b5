"""Prompts that the target writes itself, from its template's opening of a user turn (arXiv:2406.08464)."""

from __future__ import annotations

import logging
import re
import zlib
from collections import Counter
from collections.abc import Callable

from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.types import Prompt, TokenGenerator
from drafttrain.errors import DataError

logger = logging.getLogger(__name__)

_MARK = "\ue000drafttrain\ue001"
_MIN_CHARACTERS = 8
_MAX_COMPRESSION = 4.0
_MIN_YIELD, _PATIENCE = 0.02, 64
"""A model is given up if fewer than this share of at least so many draws are new."""


def user_turn_opening(chat: ChatRenderer) -> list[int]:
    """Token ids up to where the user's text begins, the template's default system prompt included."""
    text = chat.render([{"role": "user", "content": _MARK}])
    if _MARK not in text:
        raise DataError("the template does not show the user's text", where=chat.name)
    return chat.encode(text[: text.index(_MARK)])


def synthesise(
    generator: TokenGenerator,
    chat: ChatRenderer,
    count: int,
    *,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 0.95,
    max_new_tokens: int = 96,
    progress: Callable[[int, int], None] | None = None,
) -> list[Prompt]:
    """Let the model write `count` distinct user turns.

    Turns that are unfinished, too short, without a letter, repetitive, or seen before are replaced by
    further draws. The result depends on the arguments and the generator alone.

    Args:
        progress: told (turns drawn, at most `count`, and `count`).

    Raises:
        DataError: the model gives next to nothing new, long before `count` is reached.
    """
    opening = user_turn_opening(chat)
    prompts: list[Prompt] = []
    seen: set[str] = set()
    dropped: Counter[str] = Counter()
    draw = drawn_of_late = new_of_late = 0
    while len(prompts) < count:
        missing = count - len(prompts)
        wanted = missing + missing // 8 + 4
        before = len(prompts)
        drawn: dict[int, list[int]] = {}
        for index, tokens, _ in generator.generate(
            [opening] * wanted,
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=0,
            seed=seed + draw,
            stop=chat.stop_ids,
        ):
            drawn[index] = tokens
            if progress is not None:
                progress(min(before + len(drawn), count), count)
        for index in range(wanted):
            tokens = drawn[index]
            text, finished = chat.answer_text(tokens, max_new_tokens)
            text = text.strip()
            key = " ".join(text.casefold().split())
            reason = _why_not(text, finished) or ("duplicate" if key in seen else None)
            if reason:
                dropped[reason] += 1
            elif len(prompts) < count:
                seen.add(key)
                meta = {"source": "self", "seed": seed}
                prompts.append(Prompt(f"self-{seed}-{len(prompts)}", [{"role": "user", "content": text}], meta=meta))
        draw += 1
        drawn_of_late += wanted
        new_of_late += len(prompts) - before
        if drawn_of_late < _PATIENCE:
            continue
        if len(prompts) < count and new_of_late < _MIN_YIELD * drawn_of_late:
            raise DataError(
                f"the target wrote {len(prompts)} distinct prompts of {count} (dropped: {dict(dropped)})",
                where=chat.name,
                remedy="ask for fewer, raise the temperature, or give a file of prompts",
            )
        drawn_of_late = new_of_late = 0
    logger.info("synthesised %d prompts in %d draws; dropped %s", count, draw, dict(dropped))
    return prompts


def _why_not(text: str, finished: bool) -> str | None:
    if not finished:
        return "unfinished"
    if len(text) < _MIN_CHARACTERS or not re.search(r"[^\W\d_]", text):
        return "too short"
    raw = text.encode()
    if len(raw) > 200 and len(raw) / len(zlib.compress(raw)) > _MAX_COMPRESSION:
        return "repetitive"
    return None
