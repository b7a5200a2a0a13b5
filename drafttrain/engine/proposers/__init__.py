"""Drafts as the engine sees them."""

from __future__ import annotations

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.eagle.base import EagleDrafter
from drafttrain.drafters.lm.model import DraftLM
from drafttrain.drafters.medusa.model import MedusaDrafter
from drafttrain.engine.proposers.base import Proposer, Row
from drafttrain.engine.proposers.draft_lm import DraftLMProposer
from drafttrain.engine.proposers.eagle import EagleProposer
from drafttrain.engine.proposers.medusa import MedusaProposer
from drafttrain.engine.proposers.ngram import NGramProposer
from drafttrain.engine.proposers.oracle import OracleProposer

__all__ = [
    "DraftLMProposer",
    "EagleProposer",
    "MedusaProposer",
    "NGramProposer",
    "OracleProposer",
    "Proposer",
    "Row",
    "build_proposer",
]


def build_proposer(drafter: Drafter, name: str | None = None) -> Proposer:
    """The proposer of a trained draft. The draft is put into eval mode and keeps its dtype and device."""
    if isinstance(drafter, EagleDrafter):
        return EagleProposer(drafter, name)
    if isinstance(drafter, MedusaDrafter):
        return MedusaProposer(drafter, name)
    if isinstance(drafter, DraftLM):
        return DraftLMProposer(drafter, name)
    raise TypeError(f"no proposer for drafts of type {type(drafter).__name__}")
