"""A byte-level BPE tokenizer as llama.cpp keeps it: inside the GGUF file."""

from __future__ import annotations

import json
from typing import Any

from gguf import TokenType

from drafttrain.export.layout import refuse

Fields = dict[str, Any]
_PREFIX = "tokenizer.ggml."
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# How text is split before merging, by the name that llama.cpp knows it under.
_SPLITS = {
    _WORDS + r"|\p{N}{1,3}" + _REST: "llama-bpe",
    _WORDS + r"|\p{N}" + _REST: "qwen2",
}


def tokenizer_fields(tokenizer: Any, vocab_size: int) -> Fields:
    """The fields of a tokenizer.

    Args:
        tokenizer: of transformers.
        vocab_size: rows of the embedding; ids without a token are padding.

    Raises:
        ExportError: a tokenizer that llama.cpp would split otherwise, or more tokens than rows.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refuse("it has no tokenizer.json")
    spec = json.loads(backend.to_str())
    if spec["model"]["type"] != "BPE" or spec["model"].get("byte_fallback"):
        raise _refuse("only byte-level BPE is written, not SentencePiece, WordPiece or Unigram")
    tokens, kinds = tokens_of(tokenizer, vocab_size)
    fields: Fields = {
        "model": "gpt2",
        "pre": _split_name(spec),
        "tokens": tokens,
        "token_type": kinds,
        "merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in spec["model"]["merges"]],
        "add_bos_token": _adds_bos(tokenizer),
    }
    for name, ours in (("bos", "bos"), ("eos", "eos"), ("padding", "pad"), ("unknown", "unk")):
        value = getattr(tokenizer, f"{ours}_token_id", None)
        if value is not None:
            fields[f"{name}_token_id"] = int(value)
    named = {_PREFIX + name: value for name, value in fields.items()}
    template = getattr(tokenizer, "chat_template", None)
    return named | ({"tokenizer.chat_template": template} if isinstance(template, str) else {})


def tokens_of(tokenizer: Any, vocab_size: int) -> tuple[list[str], list[int]]:
    """Text and kind of each id."""
    added = {index: (token.content, token.special) for index, token in tokenizer.added_tokens_decoder.items()}
    known = {index: text for text, index in tokenizer.get_vocab().items()}
    beyond = [index for index in known if index >= vocab_size]
    if beyond:
        raise _refuse(f"it has ids up to {max(beyond)}, the draft {vocab_size} rows")
    tokens, kinds = [], []
    for index in range(vocab_size):
        if index in added:
            text, special = added[index]
            kind = TokenType.CONTROL if special else TokenType.USER_DEFINED
        elif index in known:
            text, kind = known[index], TokenType.NORMAL
        else:
            text, kind = f"[PAD{index}]", TokenType.UNUSED
        tokens.append(text)
        kinds.append(int(kind))
    return tokens, kinds


def _split_name(spec: dict[str, Any]) -> str:
    normalizer = spec.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":
        raise _refuse(f"llama.cpp does not normalise text ({normalizer.get('type')})")
    outer = spec.get("pre_tokenizer") or {}
    parts = outer["pretokenizers"] if outer.get("type") == "Sequence" else [outer]
    kinds = [part.get("type") for part in parts]
    if kinds and kinds[-1] == "ByteLevel" and not parts[-1].get("add_prefix_space"):
        if kinds == ["ByteLevel"] and parts[0].get("use_regex", True):
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits") and parts[1].get("use_regex", True):
            return "smollm"
        if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex", True):
            name = _SPLITS.get(parts[0]["pattern"].get("Regex", ""))
            if name is not None:
                return name
    raise _refuse(f"it is not known to llama.cpp how it splits text ({', '.join(map(str, kinds))})")


def _adds_bos(tokenizer: Any) -> bool:
    ids = tokenizer("a")["input_ids"]
    return bool(ids) and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id


def _refuse(why: str) -> Exception:
    return refuse("gguf", "the target's tokenizer", why, "convert the draft --to hf with llama.cpp's own script")
