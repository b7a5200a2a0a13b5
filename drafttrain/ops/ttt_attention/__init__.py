"""Attention of an unrolled (training-time-test) draft, EAGLE-3 (arXiv 2503.01840)."""

from drafttrain.ops.ttt_attention.dispatch import ttt_attention
from drafttrain.ops.ttt_attention.flash import supported
from drafttrain.ops.ttt_attention.layout import SegmentLayout

__all__ = ["SegmentLayout", "supported", "ttt_attention"]
