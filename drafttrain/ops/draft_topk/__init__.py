"""Expanding the nodes of a tree into a draft's likeliest tokens (EAGLE-2, arXiv 2406.16858)."""

from drafttrain.ops.draft_topk.dispatch import MAX_COUNT, expand, select

__all__ = ["MAX_COUNT", "expand", "select"]
