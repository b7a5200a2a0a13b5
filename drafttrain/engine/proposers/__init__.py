"""Drafts as the engine sees them."""

from __future__ import annotations

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.eagle.base import EagleDrafter
from drafttrain.drafters.lm.model import DraftLM
from drafttrain.drafters.medusa.model import MedusaDrafter
from drafttrain.engine.proposers.base import Proposer, Row
from drafttrain.engine.proposers.cascade import CascadeProposer
from drafttrain.engine.proposers.draft_lm import DraftLMProposer, ReaderProposer
from drafttrain.engine.proposers.eagle import EagleProposer
from drafttrain.engine.proposers.itself import EarlyExit, SkippedLayers
from drafttrain.engine.proposers.medusa import MedusaProposer
from drafttrain.engine.proposers.ngram import NGramProposer
from drafttrain.engine.proposers.oracle import OracleProposer
from drafttrain.engine.proposers.readers import ModelReader, Reader
from drafttrain.engine.proposers.router import RouterProposer
from drafttrain.engine.proposers.suffix import SuffixProposer
from drafttrain.engine.proposers.synthetic import SyntheticProposer
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.errors import EngineError

__all__ = [
    "CascadeProposer",
    "DraftLMProposer",
    "EagleProposer",
    "EarlyExit",
    "MedusaProposer",
    "ModelReader",
    "NGramProposer",
    "OracleProposer",
    "Proposer",
    "Reader",
    "ReaderProposer",
    "RouterProposer",
    "Row",
    "SkippedLayers",
    "SuffixProposer",
    "SyntheticProposer",
    "build_proposer",
]


def build_proposer(
    drafter: Drafter,
    name: str | None = None,
    tree: TreeShape | DynamicTree | None = None,
    sampled: bool = False,
) -> Proposer:
    """The proposer of a trained draft. The draft is put into eval mode and keeps its dtype and device.

    Args:
        drafter: the draft, bound to its target.
        name: as reports show it; None = its family.
        tree: what to propose; None = chains.
        sampled: in sampled rows, draw a static tree's children without replacement instead of taking the best tokens.

    Raises:
        EngineError: the draft cannot propose this tree.
    """
    if sampled and not isinstance(tree, TreeShape):
        raise EngineError(
            "children are sampled in static trees only", remedy="give a TreeShape, or leave out `sampled`"
        )
    if isinstance(drafter, EagleDrafter):
        return EagleProposer(drafter, name, tree, sampled)
    if isinstance(drafter, MedusaDrafter):
        if isinstance(tree, DynamicTree):
            raise EngineError(
                "Medusa heads do not see each other's tokens: a dynamic tree has nothing to follow",
                remedy="give a static tree",
            )
        return MedusaProposer(drafter, name, tree, sampled)
    if isinstance(drafter, DraftLM):
        return DraftLMProposer(drafter, name, tree, sampled)
    raise TypeError(f"no proposer for drafts of type {type(drafter).__name__}")
