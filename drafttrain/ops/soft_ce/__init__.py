"""Softmax of draft and target, their cross-entropy or divergence, and its gradient, in two readings of the logits."""

from drafttrain.ops.soft_ce.dispatch import soft_ce

__all__ = ["soft_ce"]
