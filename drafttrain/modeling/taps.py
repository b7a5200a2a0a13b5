"""Where a feature is read in the target. One numbering inside the project; engines' own are made in `export/`, but for
vLLM's, which also gives features."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, order=True)
class Tap:
    """A point of the residual stream.

    `Tap.block(i)` is `hidden_states[i]` of transformers: the input of block i (0 = the embeddings), which is the
    output of block i-1. `Tap.pre_norm` is the output of the last block before the final norm, `Tap.final` the state
    after it. transformers' own last entry is `final`; vLLM's id n_layers is `pre_norm`.
    """

    kind: str
    index: int = -1

    pre_norm: ClassVar[Tap]
    final: ClassVar[Tap]

    @staticmethod
    def block(index: int) -> Tap:
        """The input of block `index`, from 0."""
        if index < 0:
            raise ValueError(f"a block tap counts from 0, got {index}")
        return Tap("block", index)

    @staticmethod
    def parse(value: int | str | Tap) -> Tap:
        """Read the form used in recipes: a block number, "pre_norm" or "final"."""
        if isinstance(value, Tap):
            return value
        if isinstance(value, int):
            return Tap.block(value)
        if value in ("pre_norm", "final"):
            return Tap(value)
        if value.isdigit():
            return Tap.block(int(value))
        raise ValueError(f"{value!r} is no tap: use a block number from 0, 'pre_norm' or 'final'")

    def __str__(self) -> str:
        return str(self.index) if self.kind == "block" else self.kind


Tap.pre_norm = Tap("pre_norm")
Tap.final = Tap("final")


def vllm_id(tap: Tap, n_layers: int) -> int:
    """vLLM's number: the input of that layer; n_layers is the last block's output, before the final norm. There is none
    for the state after it: that of `Tap.final` is n_layers, too."""
    return tap.index if tap.kind == "block" else n_layers


@dataclass(frozen=True)
class FeatureSpec:
    """The taps a draft reads, in the order in which it concatenates them."""

    taps: tuple[Tap, ...] = ()

    @staticmethod
    def of(values: Iterable[int | str | Tap]) -> FeatureSpec:
        """Build from the recipe's form."""
        return FeatureSpec(tuple(Tap.parse(value) for value in values))

    def check(self, n_layers: int) -> None:
        """Raise ValueError if a tap does not exist in a target of `n_layers` blocks."""
        for tap in self.taps:
            if tap.kind == "block" and tap.index >= n_layers:
                raise ValueError(
                    f"tap {tap} does not exist: the target has blocks 0..{n_layers - 1}; "
                    "the output of the last block is 'pre_norm'"
                )
