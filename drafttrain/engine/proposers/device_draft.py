"""Drafting without the host: what a round proposes stays on the device, in shapes that do not change."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from torch import Tensor

from drafttrain.modeling.taps import FeatureSpec, Tap


class Drafted(NamedTuple):
    """Chains or trees of n rows, all on the device.

    Attributes:
        tokens: int64 [n, N], target ids.
        counts: int64 [n], how many of them count: the first ones.
        parents, depths: int64 [n or 1, N], the place of each node's parent, 0 = the root, and its depth, from 1.
        sees: bool [n or 1, N + 1, N + 1] over places, the root and the ancestors of each; None = chains.
    """

    tokens: Tensor
    counts: Tensor
    parents: Tensor
    depths: Tensor
    sees: Tensor | None


class DeviceDraft(ABC):
    """A greedy draft whose rounds do not synchronise. It shares its state with the proposer it came from.

    Attributes:
        feature_spec: what it reads of the target.
        reach: depth of the deepest node it proposes.
    """

    feature_spec: FeatureSpec
    reach: int

    @abstractmethod
    def draft(self, lengths: Tensor, room: Tensor) -> Drafted:
        """Propose for rows 0 .. n - 1.

        Args:
            lengths: int64 [n], tokens before each row's root.
            room: int64 [n], the deepest node that a row can keep.
        """

    @abstractmethod
    def observe(self, lengths: Tensor, following: Tensor, features: dict[Tap, Tensor], accepted: Tensor) -> None:
        """After a round.

        Args:
            lengths: as for `draft`.
            following: int64 [n, reach + 1], the kept tokens and the new root behind them.
            features: [n, reach + 1, H] a tap, at the old root and along the path that was kept.
            accepted: int64 [n], kept tokens.
        """

    @abstractmethod
    def commit(self, accepted: Tensor) -> None:
        """The host has read what was kept of rows 0 .. n - 1 (int64 [n] on the CPU)."""
