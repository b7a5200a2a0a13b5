"""The `target:` section of a recipe."""

from __future__ import annotations

from typing import Final, Literal

from pydantic import Field

from drafttrain.config import Config

AUTO: Final = "auto"


class TargetConfig(Config):
    """Which model is drafted for.

    Attributes:
        model: `smollm2-135m` (the embedded default), a local folder, a GGUF file, or a hub name.
        dtype: of the weights and of the features. "auto" is bfloat16 where the device computes in it, else float32
            (`targets.native`); a run that exists keeps what it had.
        device: "auto" takes the rank's GPU if there is one.
        revision: hub revision, or None.
        gguf_file: name of a GGUF file inside `model`, or None.
        tokenizer: another place for the tokenizer, or None for the model's own.
        trust_remote_code: run code that the checkpoint brings. Off unless you say so.
        placement: where the target lies while a draft trains: "whole" on each rank; its blocks in shards over the
            ranks ("zero3", with DeepSpeed), gathered one by one as a forward comes to them; or "elsewhere": servers
            or a store give its states, and a rank loads embedding, final norm and head alone.
    """

    model: str = Field(min_length=1)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = AUTO
    device: str = "auto"
    revision: str | None = None
    gguf_file: str | None = None
    tokenizer: str | None = None
    trust_remote_code: bool = False
    placement: Literal["whole", "zero3", "elsewhere"] = "whole"
