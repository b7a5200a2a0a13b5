"""Parts of a decoder layer whose backward computes again what is cheap, and keeps what matrix products made.

Each equals a line of plain torch, bit for bit in the forward; its gradients are torch's but for the order of rounding.
"""

from drafttrain.ops.recompute.gate import gated_linear
from drafttrain.ops.recompute.norm import normed_linear, rms_norm

__all__ = ["gated_linear", "normed_linear", "rms_norm"]
