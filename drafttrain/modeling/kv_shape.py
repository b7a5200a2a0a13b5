"""What the layers of a body hand to a key/value cache, found by running it."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from transformers import Cache


class KVShape(NamedTuple):
    """Key heads and the widths of a key and of a value, of each layer; 0 where a layer caches nothing of its own."""

    heads: list[int]
    keys: list[int]
    values: list[int]

    @property
    def width(self) -> int:
        """Elements that all layers together keep of a token."""
        return sum(heads * (key + value) for heads, key, value in zip(*self, strict=True))

    @property
    def widths(self) -> set[tuple[int, int]]:
        """Those of a key and of a value that layers have that cache something."""
        return {(key, value) for heads, key, value in zip(*self, strict=True) if heads}


class MeasuringCache(Cache):
    """Stands where a cache would, keeps nothing, and notes the shapes.

    Attributes:
        found: layer -> (Hkv, width of a key, width of a value).
    """

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.found: dict[int, tuple[int, int, int]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """What came in, [B, Hkv, T, D] each."""
        self.found[layer_idx] = (key_states.shape[1], key_states.shape[-1], value_states.shape[-1])
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing is kept."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(visible keys, offset)."""
        return query_length, 0

    def shape(self, n_layers: int) -> KVShape:
        """Of the layers 0 .. n_layers - 1."""
        each = [self.found.get(layer, (0, 0, 0)) for layer in range(n_layers)]
        return KVShape(*(list(column) for column in zip(*each, strict=True)))
