"""What `drafttrain calibrate` writes and a suite refers to: a tree, or the sub-layers to skip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from drafttrain.engine.tree import TreeShape
from drafttrain.errors import EngineError
from drafttrain.files import read_json, write_json

SCHEMA = 1


@dataclass(frozen=True)
class TreeFile:
    """A tree for a draft.

    Attributes:
        kind: "medusa-tree" or "sequoia".
        parents: of each node, -1 = the root, in level order.
        sampled: whether its children are drawn without replacement in rows that are sampled.
        measured: what it was made from.
    """

    kind: str
    parents: Sequence[int]
    sampled: bool = False
    measured: Mapping[str, Any] = field(default_factory=dict)

    @property
    def shape(self) -> TreeShape:
        """The tree."""
        return TreeShape.from_parents(self.parents)


@dataclass(frozen=True)
class SkipFile:
    """Sub-layers that a target leaves out when it drafts for itself.

    Attributes:
        attention, mlp: blocks without one.
        target: identity of the target.
        measured: what was found on the calibration set.
    """

    attention: Sequence[int]
    mlp: Sequence[int]
    target: Mapping[str, Any]
    measured: Mapping[str, Any] = field(default_factory=dict)
    kind: str = "skip"


def write_calibration(path: Path, found: TreeFile | SkipFile) -> None:
    """Write it whole or not at all."""
    write_json(path, {"schema": SCHEMA, **asdict(found)})


def read_tree(path: str | Path) -> TreeFile:
    """Read a tree. Raises EngineError of anything else."""
    values = _read(path, ("medusa-tree", "sequoia"), "a tree")
    found = TreeFile(values["kind"], tuple(values["parents"]), bool(values["sampled"]), values["measured"])
    found.shape  # noqa: B018 (refuses parents that are no tree)
    return found


def read_skip(path: str | Path, target: Mapping[str, Any]) -> SkipFile:
    """Read which sub-layers to skip.

    Raises:
        EngineError: the file holds something else, or was made for another target.
    """
    values = _read(path, ("skip",), "sub-layers to skip")
    if values["target"]["weights_hash"] != target["weights_hash"]:
        raise EngineError(
            f"was made for the target {values['target']['name']}, whose weights are others",
            where=path,
            remedy="run drafttrain calibrate --kind skip for this target",
        )
    return SkipFile(tuple(values["attention"]), tuple(values["mlp"]), values["target"], values["measured"])


def _read(path: str | Path, kinds: tuple[str, ...], what: str) -> dict[str, Any]:
    remedy = f"write one by drafttrain calibrate --kind {kinds[-1]}"
    if not Path(path).is_file():
        raise EngineError("there is no such file", where=path, remedy=remedy)
    values = read_json(path)
    if not isinstance(values, dict) or values.get("kind") not in kinds or values.get("schema") != SCHEMA:
        raise EngineError(f"does not hold {what}", where=path, remedy=remedy)
    return values
