"""What a draft's forward leaves for its backward, in bytes a slot of a row, counted from the code of the drafts.

EAGLE's layers keep the inputs of norms and of the gated product, and compute both again (`ops/recompute`). H hidden, q
and kv widths of all query and of all key heads, i inner width, K depths, u bytes an element.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.eagle.base import EagleDrafter
from drafttrain.drafters.eagle.eagle1 import Eagle1Drafter
from drafttrain.drafters.lm.model import DraftLM
from drafttrain.drafters.medusa.model import MedusaDrafter
from drafttrain.modeling.blocks import block_config
from drafttrain.training.plan.products import head_dim


@dataclass(frozen=True)
class Widths:
    """Of a decoder layer.

    Attributes:
        hidden, q, kv, inner: H, q, kv, i.
        head: of one head.
        u: bytes an element.
    """

    hidden: int
    q: int
    kv: int
    inner: int
    head: int
    u: int

    @property
    def attention(self) -> int:
        """Rotated q and k, v, what was attended, its log-sum-exp, cos and sin."""
        return self.u * (2 * self.kv + 2 * self.q + self.head) + 4 * self.q // self.head

    @property
    def behind(self) -> int:
        """What follows on the attention: the state that is normed, gate and up."""
        return self.u * (self.hidden + 2 * self.inner)


@dataclass(frozen=True)
class Kept:
    """Bytes a slot.

    Attributes:
        kept: from the forward to the backward.
        readouts: what heads read, until the loss is computed.
        again: of the layer that the backward computes again, with gradient checkpointing.
    """

    kept: int
    readouts: int
    again: int = 0


def widths_of(drafter: Drafter, u: int) -> Widths:
    """Of the layers of an EAGLE draft or a draft LM."""
    if isinstance(drafter, DraftLM):
        text: Any = drafter.lm.config
        dim, heads = head_dim(text), kv_heads_of(text)
        q, inner = text.num_attention_heads * dim, text.intermediate_size
        return Widths(text.hidden_size, q, heads * dim, inner, dim, u)
    assert isinstance(drafter, EagleDrafter)
    arch = drafter.arch
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    return Widths(arch.hidden_size, q, kv, arch.intermediate_size, arch.head_dim, u)


def kept_bytes(drafter: Drafter, u: int, recompute: bool) -> Kept:
    """What a draft keeps of a micro-batch, a slot.

    Args:
        u: bytes an element of the forward.
        recompute: gradient checkpointing.
    """
    if isinstance(drafter, MedusaDrafter):
        heads, layers = drafter.config.num_heads, drafter.config.num_layers
        hidden = u * drafter.arch.target_hidden_size
        return Kept(heads * (2 * layers - 1) * hidden, heads * hidden)
    widths = widths_of(drafter, u)
    if isinstance(drafter, DraftLM):
        return _draft_lm(drafter, widths, recompute)
    assert isinstance(drafter, EagleDrafter)
    depths, hidden, target = drafter.max_depth, u * widths.hidden, u * drafter.arch.target_hidden_size
    readouts = depths * hidden
    if isinstance(drafter, Eagle1Drafter):
        # fc reads the embedding once, and at each depth a state; the layer reads what it gives.
        once, outside = target, hidden
    else:
        taps = len(drafter.feature_spec.taps)
        # fc reads the taps side by side, the layer the embedding and at each depth a state.
        once = (taps * target if taps > 1 else 0) + target
        once += taps * target if drafter.config.fc_norm else 0
        once += u * (widths.q + 2 * widths.kv) if recompute else 0
        # A readout's norm reads the state that the next depth reads, or the next depth reads the readout.
        outside = hidden if drafter.config.norm_output else 0
        once += hidden - outside
        readouts = hidden if drafter.config.norm_output else readouts
        # What is handed from one part that is computed again to the other is kept.
        outside += hidden if recompute and drafter.config.norm_before_residual else 0
    layer = widths.attention + hidden + (0 if recompute else widths.behind)
    # What is gated, too, is kept while a layer is computed again.
    again = widths.behind + 2 * u * widths.inner if recompute else 0
    return Kept(once + depths * (drafter.n_layers * layer + outside), readouts, again)


def _draft_lm(drafter: DraftLM, widths: Widths, recompute: bool) -> Kept:
    u, hidden, norm = widths.u, widths.u * widths.hidden, 8 * widths.hidden
    # Rotated q and k, v, and the log-sum-exp; what was attended is an input of the product behind it.
    attention = u * (widths.q + 2 * widths.kv) + 4 * widths.q // widths.head
    # Under autocast each linear layer has an input of its own.
    inputs = (2 if u == 4 else 5) * hidden + u * widths.q
    whole = 2 * norm + inputs + attention + 4 * u * widths.inner
    layers = drafter.lm.n_layers
    # The states between layers are fp32.
    kept = layers * (4 * widths.hidden if recompute else whole) + norm
    return Kept(kept, hidden, whole if recompute else 0)


def kv_heads_of(text: Any) -> int:
    """Key heads of a Hugging Face text config; of its first block, where they differ."""
    block = block_config(text)
    return int(getattr(block, "num_key_value_heads", None) or block.num_attention_heads)
