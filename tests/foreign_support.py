"""A target's folder for tests of importers, with a tokenizer as large as its vocabulary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import pre_tokenizers

from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.targets.config import TargetConfig
from tests.chats import CHATML, chat_tokenizer
from tests.support import tiny_hf

LAYERS = 8


def target_folder(folder: Path, kind: str = "llama", **changes: Any) -> tuple[CausalLM, TargetConfig]:
    """A tiny target with eight blocks, saved in fp32 with its tokenizer; and how a recipe names it."""
    tokenizer = chat_tokenizer(CHATML)
    # Split as GPT-2 does, which every engine knows.
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    changes = {"vocab_size": len(tokenizer), "num_hidden_layers": LAYERS, **changes}
    hf = tiny_hf(kind, **changes)
    hf.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return CausalLM(hf).requires_grad_(False).eval(), TargetConfig(model=str(folder), dtype="float32")
