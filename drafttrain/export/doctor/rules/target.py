"""The target itself: the one that the draft was trained for, with the same tokenizer, in full precision."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from drafttrain.errors import TargetError
from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.finding import Finding, Mend, error, warning
from drafttrain.export.doctor.rules.rule import Rule
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.identity import tokenizer_hash
from drafttrain.targets.load import load_tokenizer

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def tokenizer(case: Case) -> Iterator[Finding]:
    """Case 15 of docs/cases.md: compared by vocabulary, not by name."""
    facts, recorded = case.facts, _recorded(case).get("tokenizer_hash")
    why = "a token id means another text to the draft than to the target: nothing is accepted"
    if recorded and facts.tokenizer_hash and recorded != facts.tokenizer_hash:
        yield error(
            "the draft was trained with another vocabulary than the target's",
            why,
            "serve it with the target that it was trained for",
        )
        return
    folder = case.draft.folder
    if not facts.tokenizer_hash or not any((folder / name).is_file() for name in _FILES):
        return
    try:
        theirs = tokenizer_hash(load_tokenizer(TargetConfig(model=str(folder))))
    except TargetError as raised:
        yield warning(
            f"the tokenizer in the draft's folder cannot be read: {raised.what}",
            "so it cannot be compared with the target's",
            "take it out, or copy the target's",
        )
        return
    if theirs != facts.tokenizer_hash:
        yield error(
            "the tokenizer in the draft's folder has another vocabulary than the target's",
            why,
            "train a draft for this target, or one with its tokenizer",
        )


def _recorded(case: Case) -> Mapping[str, Any]:
    """Identity of the target that drafttrain trained it for; empty for drafts made elsewhere."""
    return (case.about or {}).get("target") or {}


def other_target(case: Case) -> Iterator[Finding]:
    """What drafttrain recorded, or speculators names."""
    facts = case.facts
    said = _recorded(case)
    if said:
        differing = [
            f"{key} {said[key]} (this target: {found})"
            for key, found in (
                ("hidden_size", facts.hidden_size),
                ("n_layers", facts.n_layers),
                ("vocab_size", facts.vocab_size),
            )
            if said.get(key) not in (None, found) and not (case.draft.family == "draft_lm" and key != "vocab_size")
        ]
        if differing:
            yield error(
                f"the draft was trained for {said.get('name')}: {', '.join(differing)}",
                "it reads states of another model",
                "serve it with the target that it was trained for",
            )
    outer = case.draft.config.get("speculators_config")
    verifier: Any = outer.get("verifier") if isinstance(outer, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if name and Path(str(name)).name != Path(facts.name).name:
        yield warning(
            f"its config names the target {name}, not {facts.name}",
            "`vllm serve DRAFT` loads that one",
            "check that they are the same model",
        )


def quantised(case: Case) -> Iterator[Finding]:
    """States of a quantised target differ from those that the draft learnt."""
    if case.facts.quantisation:
        yield warning(
            f"the target is quantised ({case.facts.quantisation})",
            "a draft that was trained on the full-precision target reads states that differ a little, and a shared "
            "embedding or head may be packed",
            "train on the quantised target's features, and measure",
        )


def wrong_vocabulary(case: Case) -> Iterator[Finding]:
    """A draft LM with rows of its own."""
    names = [name for name in case.draft.tensors if name.endswith(("embed_tokens.weight", "wte.weight"))]
    rows = case.draft.tensors[names[0]].shape[0] if names else None
    if rows is not None and rows != case.facts.vocab_size:
        yield error(
            f"the draft's embedding has {rows} rows, the target {case.facts.vocab_size} tokens",
            "draft and target must have the same vocabulary, padding included",
            "take a draft of the target's family, or pad its embedding",
        )


def tied_lm(case: Case) -> Iterator[Finding]:
    """A draft LM's head."""
    draft = case.draft
    has = any(name.endswith("lm_head.weight") for name in draft.tensors)
    tied = draft.flat.get("tie_word_embeddings")
    if not has and tied is False:
        yield error(
            "lm_head.weight is missing, and tie_word_embeddings is false",
            "the head stays as memory happens to be: nothing is accepted",
            "set tie_word_embeddings to true if the head is the embedding",
            _tie(True),
        )
    if has and tied:
        head = next(name for name in draft.tensors if name.endswith("lm_head.weight"))
        embedding = next((name for name in draft.tensors if name.endswith("embed_tokens.weight")), None)
        if embedding is not None and not _equal(case, head, embedding):
            yield error(
                "tie_word_embeddings is true, and the stored head is not the embedding",
                "the head that the draft was trained with is dropped",
                "set it to false",
                _tie(False),
            )


def _equal(case: Case, one: str, two: str) -> bool:
    return torch.equal(case.draft.tensor(one), case.draft.tensor(two))


def _tie(on: bool) -> Mend:
    return Mend(keys={"tie_word_embeddings": on})


RULES = (
    Rule("tokenizer", tokenizer, needs_target=True),
    Rule("other-target", other_target, needs_target=True),
    Rule("quantised-target", quantised, needs_target=True),
    Rule("lm-vocabulary", wrong_vocabulary, ("draft_lm",), needs_target=True),
    Rule("lm-head", tied_lm, ("draft_lm",)),
)
