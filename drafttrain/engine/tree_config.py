"""Trees in a suite's YAML."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from drafttrain.config import Config
from drafttrain.engine.calibration_file import read_tree
from drafttrain.engine.tree import MAX_NODES, DynamicTree, TreeShape
from drafttrain.errors import UserError

_KINDS = ("branching", "parents", "dynamic", "file")


class DynamicTreeConfig(Config):
    """EAGLE-2 trees (arXiv 2406.16858); see `DynamicTree`."""

    depth: int = Field(6, ge=1)
    top_k: int = Field(10, ge=1)
    nodes: int = Field(60, ge=1, le=MAX_NODES)


class TreeConfig(Config):
    """A tree to propose: one of the first four.

    Attributes:
        branching: children of every node, by depth.
        parents: of each node, -1 = the root.
        dynamic: sizes of a tree that follows the draft's confidence.
        file: what `drafttrain calibrate` wrote; it says itself whether children are sampled.
        sampled: at temperatures above 0, draw the children of a static tree without replacement from the draft's
            distribution instead of taking its best tokens.
    """

    branching: list[Annotated[int, Field(ge=1)]] | None = None
    parents: list[Annotated[int, Field(ge=-1)]] | None = None
    dynamic: DynamicTreeConfig | None = None
    file: str | None = None
    sampled: bool = False

    @model_validator(mode="after")
    def _is_one_tree(self) -> TreeConfig:
        given = [name for name in _KINDS if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(_KINDS)}, not {' and '.join(given) or 'none'}")
        if self.sampled and self.dynamic is not None:
            raise ValueError("children are sampled in static trees only")
        try:
            self.build()
        except UserError as error:
            raise ValueError(str(error)) from error
        return self

    def build(self) -> TreeShape | DynamicTree:
        """The tree."""
        if self.dynamic is not None:
            return DynamicTree(self.dynamic.depth, self.dynamic.top_k, self.dynamic.nodes)
        if self.branching is not None:
            return TreeShape.from_branching(self.branching)
        if self.file is not None:
            return read_tree(self.file).shape
        assert self.parents is not None
        return TreeShape.from_parents(self.parents)

    @property
    def samples(self) -> bool:
        """Whether children are drawn in rows that are sampled."""
        return self.sampled or (self.file is not None and read_tree(self.file).sampled)

    def __str__(self) -> str:
        tree = self.build()
        if isinstance(tree, DynamicTree):
            return f"dynamic {tree.nodes} (depth {tree.depth}, top-k {tree.top_k})"
        if self.file is not None:
            return f"{read_tree(self.file).kind} {tree.nodes} (depth {tree.depth})"
        shape = f"{tree.nodes} nodes" if self.branching is None else "x".join(map(str, self.branching))
        return f"static {shape}{', sampled' if self.sampled else ''}"
