"""What a draft is. One primitive, `step`: training unrolls it, the engine's proposers call it.

Shapes: B rows, T slots, H hidden, V target vocabulary, Vd draft vocabulary.

Positions (the contract of the whole project): tokens x_0 .. x_{L-1}, feature f_t is what the target computed
at position t. Slot t of a feature-level draft at depth 0 holds (f_t, x_{t+1}), sits at rotary position t and
predicts x_{t+2}. At depth k it holds x_{t+1+k}, predicts x_{t+2+k} and sits at rotary position t+k.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.head import Head
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import FeatureSpec, Tap
from drafttrain.modeling.vocab_map import VocabMap


class DraftCache(Protocol):
    """Keys and values of a draft, and the attention over them.

    The draft's layers only ever call `attend`; what a query may see is decided by the cache: causal with
    per-row lengths when serving, the unrolled pattern when training.
    """

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Store k, v [B, Hkv, T, D] and attend with q [B, Hq, T, D] -> [B, Hq, T, D]."""
        ...


@dataclass
class DraftInputs:
    """One call of `step`.

    Attributes:
        tokens: int64 [B, T], the token in each slot (x_{t+1+k} for a feature-level draft, x_t for a draft
            LM).
        positions: int64 [B, T], rotary positions.
        features: depth 0: the target's taps concatenated [B, T, n*H_target]; deeper: `DraftOutput.hidden` of
            the step before [B, T, H]. None for drafts that read tokens alone.
        depth: 0 when `features` are the target's, k at the k-th recurrent step.
    """

    tokens: Tensor
    positions: Tensor
    features: Tensor | None = None
    depth: int = 0


@dataclass
class DraftOutput:
    """Result of `step`. Logits are `head(depth)(readout)`, computed only for the rows that are wanted.

    Attributes:
        hidden: [B, T, H] state fed to the next step, or None for drafts without recurrence.
        readout: [B, T, H] state the head reads.
    """

    hidden: Tensor | None
    readout: Tensor


@dataclass
class DraftBatch:
    """Training rows: documents packed or padded to T.

    Attributes:
        tokens: int64 [B, T]; padding holds any valid id.
        positions: int64 [B, T], counted from 0 in each document.
        segments: int64 [B, T], document number within the row, -1 on padding.
        spans: int64 [B, T], 0 outside assistant spans, else a number unique in the row for each span.
        features: tap -> [B, T, H_target]; `Tap.final` is always there when training.
        top1: int64 [B, T], argmax of the target's logits after position t, or None if unknown.
        sample_ids: for messages, the documents of each row in order.
    """

    tokens: Tensor
    positions: Tensor
    segments: Tensor
    spans: Tensor
    features: dict[Tap, Tensor] = field(default_factory=dict)
    top1: Tensor | None = None
    sample_ids: list[list[str]] = field(default_factory=list)

    def tensors(self) -> Iterator[Tensor]:
        """All that it holds."""
        yield from (self.tokens, self.positions, self.segments, self.spans, *self.features.values())
        if self.top1 is not None:
            yield self.top1


@dataclass
class DepthOutput:
    """One depth of an unrolled draft.

    Attributes:
        depth: k from 0.
        offset: `readout[:, t]` predicts x_{t+offset}.
        readout: [B, T, H].
        hidden: [B, T, H] predicted feature f_{t+1+k} for losses on features, or None.
    """

    depth: int
    offset: int
    readout: Tensor
    hidden: Tensor | None = None


class Drafter(nn.Module, ABC):
    """A trainable draft.

    Frozen weights of the target that a family reads (embedding, head) are handed over by `bind` and are
    neither parameters nor part of the state dict: `state_dict()` is exactly what is saved and exported.
    """

    family: ClassVar[str]
    config: Any
    feature_spec: FeatureSpec
    vocab_map: VocabMap
    max_depth: int
    """Number of depths `unroll` can give."""
    bound: tuple[Tensor, Head] | None = None
    """What `bind` handed over."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass. Families without much to recompute ignore it."""

    @classmethod
    @abstractmethod
    def from_text_config(
        cls, config: Any, text: Any, vocab_map: VocabMap | None, device: torch.device | str | None
    ) -> Drafter:
        """Build for a target from the family's config and the target's Hugging Face text config.

        `vocab_map` None means the target's whole vocabulary. Weights are fresh.
        """

    @classmethod
    @abstractmethod
    def from_saved(
        cls, config: Any, arch: dict[str, Any], vocab_map: VocabMap, device: torch.device | str | None
    ) -> Drafter:
        """Build from what `saved_arch` gave, without the target."""

    @abstractmethod
    def saved_arch(self) -> dict[str, Any]:
        """The resolved sizes, as JSON."""

    @abstractmethod
    def init_from_target(self, target: CausalLM) -> None:
        """Copy from the target what the config says; does not bind."""

    def check_start(self, target: CausalLM) -> None:
        """Refuse a target that `init_from_target` would refuse; for a draft on the meta device, which nothing fills.

        Raises:
            ValueError: blocks that do not fit the draft.
        """

    @staticmethod
    def saved_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The state dict under the names in which it is stored."""
        return state

    @staticmethod
    def loaded_names(state: dict[str, Tensor]) -> dict[str, Tensor]:
        """The inverse of `saved_names`."""
        return state

    def bind(self, embedding: Tensor, head: Head) -> None:
        """Hand over the target's frozen input embedding [V, H_target] and its head.

        Raises:
            ValueError: of a target with other sizes.
        """
        # Detached, they are plain attributes: neither parameters nor in the state dict.
        bias = None if head.bias is None else head.bias.detach()
        self.bound = (embedding.detach(), Head(head.weight.detach(), bias, head.softcap, head.scale))

    @property
    def target_head(self) -> Head:
        """The head handed over by `bind`."""
        if self.bound is None:
            raise RuntimeError(f"{self.family} reads the target's embedding or head: call bind() first")
        return self.bound[1]

    @abstractmethod
    def compile_training(self) -> None:
        """Have `torch.compile` fuse what lies between the attentions of `unroll`, for good.

        Weights keep their names: functions are compiled, no module is wrapped.
        """

    @abstractmethod
    def step(self, inputs: DraftInputs, cache: DraftCache) -> DraftOutput:
        """One forward of the draft; pure but for the cache."""

    @abstractmethod
    def head(self, depth: int) -> Head:
        """The head read at `depth`, over the draft vocabulary."""

    @abstractmethod
    def unroll(self, batch: DraftBatch, depths: int) -> list[DepthOutput]:
        """Run `depths` steps over all slots at once, as training does."""

    def new_cache(self, rows: int, length: int) -> StaticKVCache | None:
        """A serving cache for `rows` rows of up to `length` slots, or None for drafts that keep nothing."""
        return None

    def prepare_for_inference(self) -> None:
        """Get ready to serve: eval mode, and what a family packs. Call again after weights change."""
        self.eval()
