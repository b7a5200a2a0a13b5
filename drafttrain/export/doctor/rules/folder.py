"""The folder itself: whole, loadable, a draft."""

from __future__ import annotations

from collections.abc import Iterator

from drafttrain.export.doctor.case import Case, listed
from drafttrain.export.doctor.finding import Finding, Mend, error, warning
from drafttrain.export.doctor.rules.rule import Rule


def incomplete(case: Case) -> Iterator[Finding]:
    """Half-written: no config, no weights, weights that are cut off, or a shard that is missing."""
    for problem in (*case.draft.problems, *case.draft.weights.problems):
        yield error(
            problem,
            "the folder was written or copied in part; an engine fails on it, or serves what is there",
            "export or download it again",
        )


def pickled(case: Case) -> Iterator[Finding]:
    """Weights in .bin files."""
    if case.draft.weights.pickled:
        yield warning(
            f"the weights are pickled ({listed(file.name for file in case.draft.weights.files)})",
            "loading a pickled file can run code; engines and hubs turn away from them",
            "store them as safetensors",
            Mend(),  # a mended copy is written so
        )


def no_draft(case: Case) -> Iterator[Finding]:
    """Neither config nor tensors say what it is."""
    if case.draft.family is None and case.draft.stored and case.draft.config:
        kind = case.draft.config.get("speculators_model_type") or case.draft.config.get("model_type")
        yield warning(
            f"not recognised as a draft that the doctor knows (model_type {kind!r}, "
            f"architectures {case.draft.config.get('architectures')})",
            "it knows EAGLE-1, EAGLE-3, Medusa and draft LMs; only the general rules were applied",
            "check that this is the draft's folder",
        )


RULES = (
    Rule("incomplete", incomplete),
    Rule("pickled-weights", pickled),
    Rule("not-a-draft", no_draft),
)
