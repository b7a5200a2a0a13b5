"""A static key/value cache for rows of different length.

Rows 0 .. n-1 are in use; a row that leaves is replaced by the last one (`move_row`), so that every forward reads a
contiguous slice and nothing is gathered. Entries behind a row's length are garbage that the mask hides: dropping
rejected tokens is a change of `lengths` alone. A tree's accepted path is first moved to the front (`compact`).

A forward is announced by `begin`, with lengths that the host knows, or by `begin_on_device`, with lengths that the
device alone knows: then nothing synchronises, and masks alone bound what is read, so that a CUDA graph can hold it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from drafttrain.modeling.attention import attend
from drafttrain.modeling.kv_shape import KVShape
from drafttrain.ops.backend import use_triton
from drafttrain.ops.decode_attention import fits, shapes_for
from drafttrain.ops.kv_compact import kv_compact
from drafttrain.ops.tree_attention import MAX_TAIL, pack


class StaticKVCache(Cache):
    """Keys and values [layers][rows, Hkv, length, D], allocated once. Hkv and D may differ by layer, D between the two.

    A forward is announced by `begin` (how many rows, how many new tokens, which of them see which), then each layer
    calls `update` (transformers' modules) or `attend` (our own drafts), then `commit` keeps some of the new tokens.
    It is a `transformers.Cache`, so any architecture that takes one writes into it.

    Attributes:
        lengths: int64 [rows] on the CPU, the committed tokens of each row.
        packed: masks of up to 64 new tokens are packed ones, for the tree attention kernel: on CUDA, where Triton is
            installed.
    """

    def __init__(
        self,
        n_layers: int,
        kv_heads: int | list[int],
        head_dim: int | list[int],
        rows: int,
        length: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        value_dim: int | list[int] | None = None,
    ) -> None:
        heads = [kv_heads] * n_layers if isinstance(kv_heads, int) else kv_heads
        dims = [head_dim] * n_layers if isinstance(head_dim, int) else head_dim
        values = dims if value_dim is None else [value_dim] * n_layers if isinstance(value_dim, int) else value_dim
        super().__init__(layers=[])
        self.rows, self.length = rows, length
        self.device = torch.device(device)
        # Layers of one shape share a tensor [layers, 2, rows, Hkv, length, D]: tokens move in one copy for all. Where
        # keys and values differ in width (a latent and its rotary part), either have one [layers, 1, ...] of their own.
        shapes = list(zip(heads, dims, values, strict=True))
        self._stores: list[Tensor] = []
        place: dict[int, tuple[Tensor, Tensor]] = {}
        for shape in dict.fromkeys(shapes):
            layers = [layer for layer, other in enumerate(shapes) if other == shape]
            h, d, dv = shape
            widths = [(d, 2)] if d == dv else [(d, 1), (dv, 1)]
            made = [torch.zeros(len(layers), n, rows, h, length, w, dtype=dtype, device=device) for w, n in widths]
            self._stores += [store for store in made if store.numel()]
            place |= {layer: (made[0][i, 0], made[-1][i, -1]) for i, layer in enumerate(layers)}
        self.k = [place[layer][0] for layer in range(n_layers)]
        self.v = [place[layer][1] for layer in range(n_layers)]
        self.lengths = torch.zeros(rows, dtype=torch.int64)
        self.packed = use_triton("tree_attention", "auto", self.device, dtype)
        on_cpu = self.device.type == "cpu"
        self._shapes = shapes_for(KVShape(heads, dims, values).widths, dtype) if on_cpu else None
        self._before, self._on_device = self.lengths, False
        self._n_rows = self._n_new = self._first = self._visible = 0
        self._masked = False
        self._slots: Tensor | None = None
        self._masks: dict[int | None, Tensor | None] = {}
        self._tail: Tensor | None = None
        self._offset = 0

    def bytes(self) -> int:
        """Memory held, in bytes."""
        return sum(store.numel() * store.element_size() for store in self._stores)

    def begin(
        self, n_rows: int, n_new: int, tail_mask: Tensor | None = None, first_row: int = 0, offset: int = 0
    ) -> None:
        """Announce a forward of `n_new` tokens on each of rows first_row .. first_row + n_rows - 1.

        Args:
            n_rows: rows taking part.
            n_new: new tokens a row, written at lengths[b] + offset.
            tail_mask: bool [n_new, offset + n_new], or one a row: which uncommitted tokens each new one sees, itself
                included (its ancestors in a tree, in the order of their slots); None = all up to itself.
            first_row: first of the rows.
            offset: uncommitted tokens already written behind each row's length.
        """
        lengths = self.lengths[first_row : first_row + n_rows] + offset
        longest = int(lengths.max()) + n_new
        if longest > self.length:
            raise ValueError(f"the cache holds {self.length} tokens a row, {longest} were asked for")
        self._announce(self.lengths[first_row : first_row + n_rows], n_new, tail_mask, first_row, offset)
        # As many as `decode_attention` takes, where there are so many.
        keys = longest if self._shapes is None else self._shapes.keys(longest)
        self._masked = self._shapes is not None and keys <= self.length and fits(n_rows, n_new, keys)
        self._visible = keys if self._masked else longest
        if bool((lengths == lengths[0]).all()):
            self._slots = None
            self._start = int(lengths[0])
        else:
            self._slots = (lengths[:, None] + torch.arange(n_new)).to(self.device)
            self._rows = torch.arange(n_rows, device=self.device)[:, None]

    def begin_on_device(
        self, lengths: Tensor, n_new: int, tail_mask: Tensor | None = None, first_row: int = 0, offset: int = 0
    ) -> None:
        """Announce a forward as `begin` does, without synchronising; `self.lengths` is neither read nor checked.

        Args:
            lengths: int64 [n_rows] on the cache's device, the committed tokens of the rows that take part.
            n_new, tail_mask, first_row, offset: as `begin` takes them; offset + n_new is at most 64, or 65 where
                offset is 0 and all see the first.

        Raises:
            ValueError: more uncommitted tokens than that.
        """
        self._announce(lengths, n_new, tail_mask, first_row, offset, on_device=True)
        if not self._fits_packed():
            raise ValueError(f"{offset + n_new} uncommitted tokens a row; on the device there are at most {MAX_TAIL}")
        self._visible = self.length
        self._slots = lengths[:, None] + torch.arange(offset, offset + n_new, device=self.device)
        self._rows = torch.arange(len(lengths), device=self.device)[:, None]

    def _announce(
        self,
        lengths: Tensor,
        n_new: int,
        tail_mask: Tensor | None,
        first_row: int,
        offset: int,
        on_device: bool = False,
    ) -> None:
        self._before, self._on_device = lengths, on_device
        self._n_rows, self._n_new, self._first, self._offset = len(lengths), n_new, first_row, offset
        self._tail = None
        if tail_mask is not None:
            self._tail = (tail_mask if tail_mask.dim() == 3 else tail_mask[None]).to(self.device)
        self._masks = {}

    def positions(self) -> Tensor:
        """int64 [n_rows, n_new]: each new token's place in its text: along the cache, or along its path in a tree."""
        lengths = self._before
        if self._tail is None:
            own = torch.arange(self._offset, self._offset + self._n_new, device=lengths.device)
            return (lengths[:, None] + own).to(self.device)
        return lengths.to(self.device)[:, None] + self._tail.sum(-1) - 1

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values [n_rows, Hkv, n_new, D]; return all that may be visible [n_rows, Hkv, S, D]."""
        rows = slice(self._first, self._first + self._n_rows)
        k, v = self.k[layer_idx][rows], self.v[layer_idx][rows]
        if self._slots is None:
            span = slice(self._start, self._start + self._n_new)
            k[:, :, span] = key_states
            v[:, :, span] = value_states
        else:
            # Indexed assignment; scatter_ takes milliseconds for bf16 on a CPU.
            k[self._rows, :, self._slots] = key_states.transpose(1, 2)
            v[self._rows, :, self._slots] = value_states.transpose(1, 2)
        return k[:, :, : self._visible], v[:, :, : self._visible]

    def mask(self, window: int | None = None) -> Tensor | None:
        """bool [n_rows, 1, n_new, S] for the announced forward, or a packed one; None if every query sees everything.

        Args:
            window: sliding window in tokens, the query included, or None.
        """
        if window not in self._masks:
            self._masks[window] = self._build_mask(window)
        return self._masks[window]

    def _build_mask(self, window: int | None) -> Tensor | None:
        if (self.packed or self._on_device) and self._fits_packed():
            return self._build_packed_mask(window)
        plain = self._slots is None and self._tail is None and (window is None or self._visible <= window)
        # One new token sees all; a prefill from the start is plain causal, which SDPA does without a mask.
        if plain and not self._masked and (self._n_new == 1 or self._start == 0):
            return None
        if self._tail is not None:
            return self._build_tree_mask(self._tail, window)
        lengths = self.lengths[self._first : self._first + self._n_rows] + self._offset
        column = torch.arange(self._visible)
        own = lengths[:, None] + torch.arange(self._n_new)
        seen = column <= own[..., None]
        if window is not None:
            seen = seen & (column > own[..., None] - window)
        return seen[:, None].to(self.device)

    def _fits_packed(self) -> bool:
        # One more than the bits there are: a full tree and its root, which all of it sees.
        return self._offset + self._n_new <= MAX_TAIL or (self._offset, self._n_new) == (0, MAX_TAIL + 1)

    def _build_packed_mask(self, window: int | None) -> Tensor:
        sees, before = self._tail, self._before.to(self.device)
        width = self._offset + self._n_new
        if sees is None:
            sees = torch.ones(self._n_new, width, dtype=torch.bool, device=self.device).tril(self._offset)[None]
        if width == MAX_TAIL + 1:
            # The root counts among the committed.
            sees, before = sees[..., 1:], before + 1
        return pack(sees, before, window)

    def _build_tree_mask(self, tail: Tensor, window: int | None) -> Tensor:
        own = self.positions()[..., None]
        if window is not None:
            # The ancestors that a token sees lie at consecutive positions, the last of them being itself.
            tail = tail & (tail.sum(-1, keepdim=True) - tail.cumsum(-1) < window)
        width = self._offset + self._n_new
        if self._slots is None:
            first = self._start - self._offset
            column = torch.arange(self._visible, device=self.device)
            seen = (column < first).expand(len(tail), self._n_new, -1).clone()
            seen[:, :, first : first + width] = tail
        else:
            lengths = self.lengths[self._first : self._first + self._n_rows].to(self.device)
            column = torch.arange(self._visible, device=self.device)
            relative = column - lengths[:, None]
            index = relative.clamp(0, width - 1)[:, None].expand(-1, self._n_new, -1)
            inside = tail.expand(self._n_rows, -1, -1).gather(2, index) & (relative < width)[:, None]
            seen = inside | (relative < 0)[:, None]
        if window is not None:
            # A token of the tail sits at its position's slot or behind it: this hides committed ones alone.
            seen = seen & (column > own - window)
        return seen[:, None]

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store k, v [n_rows, Hkv, n_new, D] and attend with q [n_rows, Hq, n_new, D]."""
        keys, values = self.update(k, v, layer)
        return attend(q, keys, values, self.mask(), scale)

    def commit(self, counts: Tensor) -> None:
        """Keep the first counts[b] of the announced forward's tokens in each of its rows (int64 [n_rows])."""
        self.lengths[self._first : self._first + self._n_rows] += counts.cpu()

    def compact(self, source: Tensor) -> None:
        """Bring uncommitted tokens of the announced forward's rows to the front, in all layers at once.

        Args:
            source: int64 [n_rows, m]: the token that becomes the j-th behind a row's length is now the
                source[b, j]-th, source[b, j] >= j.
        """
        if use_triton("kv_compact", "auto", self.device):
            rows = slice(self._first, self._first + len(source))
            self.compact_on_device(self.lengths[rows].to(self.device), source.to(self.device))
            return
        moved = (source.cpu() != torch.arange(source.shape[1])).nonzero()
        if not len(moved):
            return
        # From the first to the last entry that moves, in the rows in which any does.
        rows = moved[:, 0].unique_consecutive()
        first, last = int(moved[:, 1].min()), int(moved[:, 1].max()) + 1
        lengths = self.lengths[self._first + rows]
        if len(rows) == 1:
            row, start = int(self._first + rows[0]), int(lengths[0])
            old = (start + source[int(rows[0]), first:last]).to(self.device)
            for store in self._stores:
                store[:, :, row, :, start + first : start + last] = store[:, :, row].index_select(3, old)
            return
        old = (lengths[:, None] + source.cpu()[rows, first:last]).to(self.device)
        new = (lengths[:, None] + torch.arange(first, last)).to(self.device)
        index = (self._first + rows).to(self.device)[:, None]
        for store in self._stores:
            store[:, :, index, :, new] = store[:, :, index, :, old]

    def compact_on_device(self, lengths: Tensor, source: Tensor) -> None:
        """As `compact`, with all on the device (int64 [n_rows], [n_rows, m]) and without synchronising."""
        for store in self._stores:
            kv_compact(store, lengths, source, self._first)

    def set_lengths(self, lengths: Tensor, first_row: int = 0) -> None:
        """Set the committed lengths of rows first_row .. (int64 [n]); shorter drops what is behind."""
        self.lengths[first_row : first_row + len(lengths)] = lengths.cpu()

    def move_row(self, source: int, destination: int) -> None:
        """Copy one row over another and empty the source."""
        if source != destination:
            used = int(self.lengths[source])
            for store in self._stores:
                store[:, :, destination, :, :used] = store[:, :, source, :, :used]
            self.lengths[destination] = used
        self.lengths[source] = 0

    def wipe(self, row: int) -> None:
        """Zero a row: the mask hides what is behind a length, but nothing hides a NaN."""
        for store in self._stores:
            store[:, :, row] = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Committed tokens of the longest row."""
        return int(self.lengths.max())

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """(visible keys, offset), for architectures that size their own masks."""
        return self._visible, 0
