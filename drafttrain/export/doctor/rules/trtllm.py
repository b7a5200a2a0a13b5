"""What TensorRT-LLM reads beside the layout that it shares with other engines: the options of its server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.finding import Finding, Mend, error, warning
from drafttrain.export.doctor.rules.rule import Rule
from drafttrain.export.trtllm import CAPTURED, DECODING, OPTIONS

_HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+$")


def dtype_key(case: Case) -> Iterator[Finding]:
    """The older name of a key."""
    flat = case.draft.flat
    if case.engine != "trtllm" or not case.draft.config or flat.get("torch_dtype"):
        return
    dtype = flat.get("dtype")
    yield warning(
        "torch_dtype is missing",
        "TensorRT-LLM's modules take the type of the weights from this key, the older name of dtype",
        f"set it to {dtype!r}" if dtype else "set it to the type of the weights",
        Mend(keys={"torch_dtype": dtype}) if dtype else None,
    )


def options(case: Case) -> Iterator[Finding]:
    """Another way of drafting, no tokens a round, layers that are no list of numbers."""
    said, family = case.speculative, str(case.draft.family)
    if case.engine != "trtllm" or case.draft.options is None:
        return
    kind = DECODING.get(family)
    if kind is not None and said.get("decoding_type") != kind:
        yield error(
            f"decoding_type in {OPTIONS} is {said.get('decoding_type')!r}, the draft's family is {family}",
            "the server builds another kind of draft of these weights, or refuses them",
            f"set it to {kind!r}",
            Mend(options={"decoding_type": kind}),
        )
    length = said.get("max_draft_len")
    if type(length) is not int or length < 1:
        yield error(
            f"max_draft_len in {OPTIONS} is {length!r}",
            "it is the number of draft tokens a round: the server does not start, or drafts nothing",
            "set it to a positive number",
        )
    if said.get(CAPTURED) and case.captured is None:
        yield error(
            f"{CAPTURED} in {OPTIONS} is {said[CAPTURED]!r}, not a list of integers",
            "the server does not start",
            "list the layers whose outputs the draft reads",
        )


def place(case: Case) -> Iterator[Finding]:
    """The options name the folder from which the draft is loaded."""
    if case.engine != "trtllm" or case.draft.options is None:
        return
    named, here = str(case.speculative.get("speculative_model") or ""), case.draft.folder.resolve()
    is_here = bool(named) and Path(named).expanduser().resolve() == here
    if is_here or (_HUB_NAME.match(named) and not Path(named).exists()):
        return
    yield error(
        f"speculative_model in {OPTIONS} is {named!r}, and this folder lies at {here}",
        "the server loads the draft from there, whatever lies beside these options: another one, or none",
        f"set it to {str(here)!r}",
        Mend(options={"speculative_model": str(here)}),
    )


RULES = (
    Rule("torch-dtype", dtype_key, ("eagle3", "draft_lm")),
    Rule("options", options),
    Rule("options-place", place),
)
