"""Rows of packed documents through a Hugging Face model."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache


class PackedRows(Cache):
    """Stands where a cache would and keeps nothing: hands each layer its own keys and values back, and
    supplies the mask under which a token sees its own document only.

    Args:
        segments: int64 [B, T], document of each slot, -1 on padding.
        positions: int64 [B, T].
    """

    def __init__(self, segments: Tensor, positions: Tensor) -> None:
        super().__init__(layers=[])
        self._segments, self._positions = segments, positions
        self._masks: dict[int | None, Tensor] = {}

    def positions(self) -> Tensor:
        """Rotary positions [B, T]."""
        return self._positions

    def mask(self, window: int | None = None) -> Tensor:
        """bool [B, 1, T, T]: causal, within the document (padding sees padding), within the window."""
        if window not in self._masks:
            segments = self._segments
            index = torch.arange(segments.shape[1], device=segments.device)
            seen = (segments[:, :, None] == segments[:, None, :]) & (index <= index[:, None])
            if window is not None:
                seen = seen & (index > index[:, None] - window)
            self._masks[window] = seen[:, None]
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
        return self._segments.shape[1], 0
