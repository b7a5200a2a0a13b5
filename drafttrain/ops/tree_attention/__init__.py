"""Attention of draft trees: a text, and behind it up to 64 nodes that see their ancestors alone."""

from drafttrain.ops.tree_attention.dispatch import tree_attention
from drafttrain.ops.tree_attention.packed import MAX_TAIL, is_packed, pack, unpack

__all__ = ["MAX_TAIL", "is_packed", "pack", "tree_attention", "unpack"]
