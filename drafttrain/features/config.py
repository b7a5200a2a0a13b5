"""The `features` section of a recipe."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from drafttrain.config import Config


class FeaturesConfig(Config):
    """Where the target's states come from while a draft trains.

    Attributes:
        source: "online" runs the target beside the draft; "offline" reads a store, building it first where needed.
        path: folder of the store; default `features/` inside the run folder.
        dtype: element type on disk.
        shard_mib: size at which a shard is closed, MiB.
        batch_tokens: tokens (padding included) of one forward of the target.
        verify: "checksum" reads every shard once at start, "size" compares file sizes only.
    """

    source: Literal["online", "offline"] = "online"
    path: str | None = None
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    shard_mib: int = Field(default=256, ge=1)
    batch_tokens: int = Field(default=4096, ge=1)
    verify: Literal["checksum", "size"] = "checksum"

    @model_validator(mode="after")
    def _path_needs_a_store(self) -> Self:
        if self.source == "online" and self.path is not None:
            raise ValueError("path names a store, which only source: offline reads")
        return self
