"""The draft's vocabulary: d2t holds offsets, t2d a mask, and both mean the same tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from drafttrain.export.doctor.case import Case, listed
from drafttrain.export.doctor.finding import Finding, Mend, error, note, warning
from drafttrain.export.doctor.rules.rule import Rule
from drafttrain.modeling.vocab_map import looks_absolute

_EAGLE3 = ("eagle3",)


def as_offsets(absolute: Tensor) -> Tensor:
    """Absolute target ids [Vd] -> the offsets that d2t holds."""
    return absolute.to(torch.int64) - torch.arange(absolute.numel())


def target_ids(case: Case) -> Tensor | None:
    """int64 [Vd] target ids that the engine makes of d2t, or None without one."""
    return None if case.d2t is None else case.d2t + torch.arange(case.d2t.numel())


def is_absolute(case: Case) -> bool:
    """Whether d2t holds target ids where offsets belong."""
    d2t, ids, size = case.d2t, target_ids(case), case.vocab_size
    if d2t is None or ids is None or size is None or not d2t.numel():
        return False
    if case.t2d is not None and looks_absolute(d2t, case.t2d):
        return True
    fits = int(ids.min()) >= 0 and int(ids.max()) < size and torch.unique(ids).numel() == ids.numel()
    rising = bool((d2t.diff() > 0).all()) and int(d2t.min()) >= 0 and int(d2t.max()) < size
    return rising and not fits


def absolute(case: Case) -> Iterator[Finding]:
    """Case 13 of docs/cases.md."""
    if is_absolute(case) and case.d2t is not None:
        yield error(
            "d2t holds absolute target ids, not offsets",
            "an engine adds the draft's id to each: it proposes other tokens than the draft means, or crashes on ids "
            "beyond the vocabulary",
            "subtract 0, 1, 2, ... from it",
            Mend(tensors={case.draft.names["d2t"]: as_offsets(case.d2t)}),
        )


def missing(case: Case) -> Iterator[Finding]:
    """A reduced vocabulary without a map."""
    rows, size = case.rows, case.vocab_size
    if "d2t" in case.draft.tensors or rows is None or size is None or rows == size:
        return
    mend = None
    if case.t2d is not None and int(case.t2d.sum()) == rows:
        mend = Mend(tensors={case.draft.beside("t2d", "d2t"): as_offsets(case.t2d.nonzero().flatten())})
    yield error(
        f"the head has {rows} rows, the target {size} tokens, and there is no d2t",
        "an engine loads it without a word and takes the draft's ids for the target's first ones: almost all proposals "
        "are wrong",
        "put the map that the draft was trained with into the safetensors"
        + (": t2d gives it back" if mend else "; SpecForge and EAGLE keep it beside the draft"),
        mend,
    )


def sizes(case: Case) -> Iterator[Finding]:
    """Vd in the config, in the head, in the map."""
    draft, rows, d2t = case.draft, case.rows, case.draft.shape("d2t")
    said = draft.number("draft_vocab_size")
    if rows is None:
        return
    key = "draft_vocab_size" if draft.is_speculators else draft.key("draft_vocab_size")
    if said != rows:
        # TensorRT-LLM knows an EAGLE-3 draft by this key.
        full = said is None and rows == case.vocab_size and case.engine != "trtllm"
        make = note if full else error
        yield make(
            f"draft_vocab_size is {'missing' if said is None else said}, the head has {rows} rows",
            "an engine makes room for as many rows as the config says, for all tokens where it says nothing",
            f"set it to {rows}",
            Mend(keys={key: rows}),
        )
    if d2t is not None and d2t[0] != rows:
        yield error(
            f"d2t has {d2t[0]} entries, the head {rows} rows",
            "rows without an entry have no token: the engine fails, or maps them wrongly",
            "store the map that the head was trained with",
        )


def out_of_range(case: Case) -> Iterator[Finding]:
    """Ids beyond the vocabulary, or two rows for one token."""
    ids, size = target_ids(case), case.vocab_size
    if ids is None or size is None or not ids.numel() or is_absolute(case):
        return
    outside = int(((ids < 0) | (ids >= size)).sum())
    repeated = ids.numel() - torch.unique(ids).numel()
    if outside or repeated:
        yield error(
            f"d2t maps {outside} of {ids.numel()} rows outside the target's {size} tokens, {repeated} to a token that "
            "another row has already",
            "the engine crashes on the first, and drafts the second wrongly",
            "store the map that the draft was trained with",
        )


def disagree(case: Case) -> Iterator[Finding]:
    """d2t and t2d."""
    ids, t2d, size = target_ids(case), case.t2d, case.vocab_size
    if ids is None or t2d is None or size is None or is_absolute(case):
        return
    inside = ids[(ids >= 0) & (ids < t2d.numel())]
    mask = torch.zeros_like(t2d)
    mask[inside] = True
    if t2d.numel() == size and torch.equal(mask, t2d):
        return
    clean = inside.numel() == ids.numel() == torch.unique(ids).numel() and int(ids.max()) < size
    whole = torch.zeros(size, dtype=torch.bool)
    if clean:
        whole[ids] = True
    yield error(
        f"t2d marks {int(t2d.sum())} of {t2d.numel()} tokens, d2t means {torch.unique(inside).numel()} of {size}, "
        "and not the same",
        "serving reads d2t alone, training t2d too: one of them is not what the head was trained with",
        "make t2d from d2t" if clean else "store the map that the draft was trained with",
        Mend(tensors={case.draft.names["t2d"]: whole}) if clean else None,
    )


def full_map(case: Case) -> Iterator[Finding]:
    """A map where none is needed."""
    stored = [case.draft.names[name] for name in ("d2t", "t2d") if name in case.draft.tensors]
    if case.engine == "vllm" and "d2t" in case.draft.tensors and case.rows == case.vocab_size:
        ids = target_ids(case)
        plain = ids is not None and torch.equal(ids, torch.arange(ids.numel()))
        yield error(
            "a vocabulary map is stored with a full draft vocabulary",
            "vLLM has no parameter for it then and refuses the folder",
            "take d2t and t2d out" if plain else "sort the head's rows by target id, then take d2t and t2d out",
            Mend(drop_tensors=tuple(stored)) if plain else None,
        )


def padding(case: Case) -> Iterator[Finding]:
    """Case 14 of docs/cases.md: ids that the tokenizer does not know."""
    ids, known = target_ids(case), case.facts.tokenizer_size
    if ids is None or known is None or is_absolute(case):
        return
    beyond = int(((ids >= known) & (ids < case.facts.vocab_size)).sum())
    if beyond:
        yield warning(
            f"{beyond} of {ids.numel()} tokens that the draft can say are padding of the target's vocabulary "
            f"(ids from {known} on)",
            "the target never says them: each takes the place of a token that it does say",
            "train with a map that stops at the tokenizer's size",
        )


def stop_tokens(case: Case) -> Iterator[Finding]:
    """Case 11 of docs/cases.md."""
    ids = target_ids(case)
    if ids is None or is_absolute(case) or not case.facts.stop_ids:
        return
    left_out = sorted(case.facts.stop_ids - set(ids.tolist()))
    if left_out:
        yield warning(
            f"the draft cannot say the target's stop tokens {listed(left_out)}",
            "the end of every answer is drafted wrongly",
            "train with a map that holds the special tokens",
        )


def vocab_size(case: Case) -> Iterator[Finding]:
    """The target's vocabulary in the draft's config and embedding."""
    draft, size = case.draft, case.facts.vocab_size
    said = draft.number("vocab_size")
    if said is not None and said != size:
        ours = draft.shape("embed_tokens.weight")
        copied = case.facts.tokenizer_size == said
        unused = draft.family in ("eagle1", "eagle3") and (ours is None or ours[0] == size)
        yield error(
            f"vocab_size is {said}, the target has {size} tokens"
            + (f" (its tokenizer knows {said}; the rest is padding)" if copied else ""),
            "embedding, head and logits of draft and target must have the same rows",
            f"set it to {size}" if unused else "serve the draft with a target of its vocabulary",
            Mend(keys={draft.key("vocab_size"): size}) if unused else None,
        )


RULES = (
    Rule("d2t-absolute", absolute, _EAGLE3),
    Rule("d2t-missing", missing, _EAGLE3),
    Rule("draft-vocab-size", sizes, _EAGLE3),
    Rule("d2t-range", out_of_range, _EAGLE3),
    Rule("d2t-t2d", disagree, _EAGLE3),
    Rule("full-map", full_map, _EAGLE3),
    Rule("padded-vocabulary", padding, _EAGLE3, needs_target=True),
    Rule("stop-tokens", stop_tokens, _EAGLE3, needs_target=True),
    Rule("vocab-size", vocab_size, needs_target=True),
)
