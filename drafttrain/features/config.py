"""The `features` section of a recipe."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from drafttrain.config import Config

StoreDtype = Literal["bfloat16", "float32", "fp8"]
_SHORT = {"bf16": "bfloat16", "fp32": "float32"}


def spell_out(name: Any) -> Any:
    """The element type that a short name stands for; other values as they are."""
    return _SHORT.get(name, name) if isinstance(name, str) else name


class FeaturesConfig(Config):
    """Where the target's states come from while a draft trains.

    Attributes:
        source: "online" runs the target beside the draft; "offline" reads a store, building it first where needed;
            "hybrid" reads what a store has, and computes and adds the rest while training.
        path: folder of the store; default `features/` inside the run folder.
        dtype: element type on disk: bf16, fp32, or fp8, which is e4m3 with a scale a token and tap.
        shard_mib: size at which a shard is closed, MiB.
        batch_tokens: tokens (padding included) of one forward of the target.
        verify: "checksum" reads every shard once at start, "size" compares file sizes only.
        workers: threads of a rank that read a store.
    """

    source: Literal["online", "offline", "hybrid"] = "online"
    path: str | None = None
    dtype: Annotated[StoreDtype, BeforeValidator(spell_out)] = "bfloat16"
    shard_mib: int = Field(default=256, ge=1)
    batch_tokens: int = Field(default=4096, ge=1)
    verify: Literal["checksum", "size"] = "checksum"
    workers: int = Field(default=1, ge=1)

    @model_validator(mode="after")
    def _path_needs_a_store(self) -> Self:
        if not self.stores and self.path is not None:
            raise ValueError("path names a store, which only source: offline and hybrid read")
        return self

    @property
    def stores(self) -> bool:
        """Whether there is a store."""
        return self.source in ("offline", "hybrid")
