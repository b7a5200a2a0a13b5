"""Running a part of a body: some of its blocks, or all without some sub-layers. Weights are shared, not copied."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from drafttrain.errors import TargetError


@dataclass(frozen=True)
class Course:
    """What a forward runs of a body; the final norm always.

    Attributes:
        first: first block; those before it are passed, and the caller gives the states that come out of them.
        end: one behind the last block; None = all.
        no_attention, no_mlp: blocks whose attention or MLP is left out, so that it adds nothing to the residual.
    """

    first: int = 0
    end: int | None = None
    no_attention: frozenset[int] = frozenset()
    no_mlp: frozenset[int] = frozenset()


class _Pass(nn.Module):
    """A block that is not run."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        # Some architectures choose a block's mask by this.
        self.attention_type = getattr(block, "attention_type", None)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_states


class _Start(_Pass):
    """The last block that is not run: gives the states that it would have given."""

    states: Tensor | None = None

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        assert self.states is not None
        return self.states


class _NoAttention(nn.Module):
    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        return torch.zeros_like(hidden_states), None


class _NoMLP(nn.Module):
    def forward(self, hidden_states: Tensor) -> Tensor:
        return torch.zeros_like(hidden_states)


class Courses:
    """The courses of one body, each laid out once.

    Args:
        body: a transformers model with `layers`.
    """

    def __init__(self, body: nn.Module) -> None:
        self._body = body
        self._blocks: list[nn.Module] = list(body.layers)  # type: ignore[arg-type]
        self._laid_out: dict[Course, nn.ModuleList] = {}

    @contextmanager
    def on(self, course: Course | None, states: Tensor | None) -> Iterator[None]:
        """The body runs this course inside the context.

        Args:
            course: None = all of it.
            states: [B, T, H] after block `course.first` - 1 where that is not 0.
        """
        if course is None:
            yield
            return
        if course not in self._laid_out:
            self._laid_out[course] = self._lay_out(course)
        blocks = self._laid_out[course]
        start = blocks[course.first - 1] if course.first else None
        whole = self._body._modules["layers"]
        self._body._modules["layers"] = blocks
        if isinstance(start, _Start):
            start.states = states
        try:
            yield
        finally:
            self._body._modules["layers"] = whole
            if isinstance(start, _Start):
                start.states = None

    def _lay_out(self, course: Course) -> nn.ModuleList:
        end = len(self._blocks) if course.end is None else course.end
        blocks: list[nn.Module] = []
        for index, block in enumerate(self._blocks):
            if index == course.first - 1:
                blocks.append(_Start(block))
            elif not course.first <= index < end or index in course.no_attention & course.no_mlp:
                blocks.append(_Pass(block))
            else:
                blocks.append(_thinned(block, index in course.no_attention, index in course.no_mlp))
        return nn.ModuleList(blocks)


def _thinned(block: nn.Module, no_attention: bool, no_mlp: bool) -> nn.Module:
    """The block, or a second one with the same parameters and without a sub-layer."""
    if not (no_attention or no_mlp):
        return block
    thin = copy.copy(block)
    thin.__dict__.pop("forward", None)  # a fused one runs all of the block
    modules = dict(block._modules)
    for name, leave_out, nothing in (("self_attn", no_attention, _NoAttention()), ("mlp", no_mlp, _NoMLP())):
        if leave_out:
            if name not in modules:
                raise TargetError(
                    f"{type(block).__name__} has no sub-layer called {name}, so it cannot be skipped",
                    remedy="draft with an early exit, or with a draft of its own",
                )
            modules[name] = nothing
    thin.__dict__["_modules"] = modules
    return thin
