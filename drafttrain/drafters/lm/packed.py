"""Rows of packed documents through a Hugging Face model."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import Cache

from drafttrain.modeling.documents import document_mask
from drafttrain.ops.ttt_attention import SegmentLayout


class PackedRows(Cache):
    """Stands where a cache would and keeps nothing: hands each layer its own keys and values back, and
    supplies the mask under which a token sees its own document only.

    Args:
        segments: int64 [B, T], document of each slot, -1 on padding.
        positions: int64 [B, T].
    """

    def __init__(self, segments: Tensor, positions: Tensor) -> None:
        super().__init__(layers=[])
        self._layout, self._positions = SegmentLayout.of(segments), positions
        self._masks: dict[int | None, Tensor] = {}

    def positions(self) -> Tensor:
        """Rotary positions [B, T]."""
        return self._positions

    def mask(self, window: int | None = None) -> Tensor:
        """Causal, within the document, within the window: see `document_mask`. What padding sees is of no meaning."""
        if window not in self._masks:
            self._masks[window] = document_mask(self._layout, window)
        return self._masks[window]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """What came in."""
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Nothing is kept."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(visible keys, offset)."""
        return self._positions.shape[1], 0
