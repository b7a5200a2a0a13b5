"""Medusa's own keys."""

from __future__ import annotations

from collections.abc import Iterator

from drafttrain.export.doctor.case import Case, listed
from drafttrain.export.doctor.finding import Finding, Mend, error
from drafttrain.export.doctor.rules.rule import Rule
from drafttrain.export.doctor.shapes import medusa_counts

_MEDUSA = ("medusa",)


def heads(case: Case) -> Iterator[Finding]:
    """Heads and layers that are said against those that are stored."""
    draft = case.draft
    stored = dict(zip(("num_heads", "num_hidden_layers"), medusa_counts(case), strict=True))
    for key, default in (("num_heads", 5), ("num_hidden_layers", 1)):
        said = draft.number(key)
        if stored[key] and (said if said is not None else default) != stored[key]:
            old = {"num_heads": "medusa_num_heads", "num_hidden_layers": "medusa_num_layers"}[key]
            place = old if old in draft.config and key not in draft.config else key
            yield error(
                f"{place} is {f'missing (vLLM takes {default})' if said is None else said}, {stored[key]} are stored",
                "heads without weights draft at random, weights without a head are dropped",
                f"set it to {stored[key]}",
                Mend(keys={place: stored[key]}),
            )


def confused_keys(case: Case) -> Iterator[Finding]:
    """vLLM takes any key with "num" and "heads", or "num" and "layers", for Medusa's."""
    for word, own in (("heads", "num_heads"), ("layers", "num_hidden_layers")):
        keys = [key for key in case.draft.config if "num" in key and word in key]
        if len(keys) > 1 and len({str(case.draft.config[key]) for key in keys}) > 1:
            others = tuple(key for key in keys if key not in (own, f"medusa_{own}", "medusa_num_layers"))
            yield error(
                f"{listed(keys)} stand in one config with different values",
                f"vLLM takes each of them for {own}, and the last one wins",
                f"keep {own} alone",
                Mend(drop_keys=others) if len(keys) - len(others) == 1 else None,
            )


def biases(case: Case) -> Iterator[Finding]:
    """FORMATS: dropped in silence."""
    draft = case.draft
    stored = [name for name in draft.tensors if name.startswith("blocks.") and name.endswith(".bias")]
    if stored and not draft.flat.get("medusa_fc_bias"):
        yield error(
            f"{len(stored)} biases of blocks are stored, and medusa_fc_bias is not true",
            "vLLM drops them in silence: the heads read another state than in training",
            "set medusa_fc_bias to true",
            Mend(keys={"medusa_fc_bias": True}),
        )
    if draft.flat.get("medusa_fc_bias") and not stored:
        yield error(
            "medusa_fc_bias is true, and no bias is stored",
            "the biases stay as memory happens to be",
            "set it to false",
            Mend(keys={"medusa_fc_bias": False}),
        )


def own_heads(case: Case) -> Iterator[Finding]:
    """Medusa brings its heads."""
    draft = case.draft
    count, _ = medusa_counts(case)
    stored = [i for i in range(count) if f"lm_heads.{i}.weight" in draft.tensors]
    if draft.flat.get("original_lm_head"):
        if stored != [0]:
            yield error(
                f"original_lm_head is true, and the heads {stored} are stored",
                "vLLM reads lm_heads.0 alone then, for all depths",
                "store that one, a copy of the target's head, or set original_lm_head to false",
                Mend(keys={"original_lm_head": False}) if len(stored) == count else None,
            )
    elif len(stored) != count:
        yield error(
            f"{count} heads have blocks, and {len(stored)} of them lm_heads",
            "vLLM does not take the target's head: those without one draft at random",
            "store the heads, or one as lm_heads.0 with original_lm_head: true",
            Mend(keys={"original_lm_head": True}) if stored == [0] else None,
        )


def truncated(case: Case) -> Iterator[Finding]:
    """A reduced vocabulary, which vLLM's Medusa fails on."""
    said, size = case.draft.number("truncated_vocab_size"), case.vocab_size
    if "token_map" in case.draft.tensors or (said is not None and size is not None and said != size):
        yield error(
            f"a reduced vocabulary (truncated_vocab_size {said}, the target has {size} tokens)",
            "vLLM 0.32 fails on a Medusa draft with a token map",
            "train heads over the whole vocabulary",
        )


RULES = (
    Rule("medusa-heads", heads, _MEDUSA),
    Rule("medusa-keys", confused_keys, _MEDUSA),
    Rule("medusa-bias", biases, _MEDUSA),
    Rule("medusa-lm-heads", own_heads, _MEDUSA),
    Rule("truncated-vocab", truncated, _MEDUSA),
)
