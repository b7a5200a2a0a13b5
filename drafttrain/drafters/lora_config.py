"""The `lora` key of a draft."""

from __future__ import annotations

from pydantic import Field

from drafttrain.config import Config


class LoraConfig(Config):
    """Train low-rank adapters on a draft that is good already, for a domain; the rest of it stays as it is.

    Attributes:
        rank: of each adapter.
        alpha: the adapter is scaled by alpha / rank.
        modules: linear layers that get one, by the last part of their names. A draft LM's are those of its
            architecture.
    """

    rank: int = Field(default=16, ge=1)
    alpha: float = Field(default=32.0, gt=0)
    modules: tuple[str, ...] = Field(
        default=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), min_length=1
    )
