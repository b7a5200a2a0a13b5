"""Other ways in which a folder may have been meant: each a change that is tried."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from drafttrain.export.doctor.case import EAGLE, Case
from drafttrain.export.doctor.finding import Finding, Mend
from drafttrain.export.doctor.layer_ids import default_inputs, ids_mend, inputs_read
from drafttrain.export.doctor.rules.rotary import rope_mend
from drafttrain.export.doctor.rules.vocabulary import as_offsets


@dataclass(frozen=True)
class Reading:
    """A change to try.

    Attributes:
        what: it does, in words.
        mend: the change.
        rule: id of the rule that proposes it; "" for those that are only tried.
    """

    what: str
    mend: Mend
    rule: str = ""


def readings(case: Case, findings: Iterable[Finding]) -> Iterator[Reading]:
    """The mends of the findings, then what the family allows beyond them; made one by one, since some hold matrices."""
    for finding in findings:
        if finding.mend is not None:
            yield Reading(finding.remedy, finding.mend, finding.rule)
    if case.draft.family == "eagle3":
        for kind in (_other_taps, _other_maps, _switches, _norms, _order):
            yield from kind(case)
    if case.draft.family in EAGLE:
        yield from _rotary(case)
    if case.draft.family == "eagle1":
        yield from _eagle1(case)
    if case.draft.family == "medusa":
        yield from _later_heads(case)


def _other_taps(case: Case) -> Iterator[Reading]:
    n, now = case.facts.n_layers, inputs_read(case)
    count = case.taps_in_fc
    default = default_inputs(n)
    wanted = {
        "states one block later (the ids are SGLang's, outputs of layers)": [i + 1 for i in now],
        "states one block earlier (the ids are vLLM's, inputs of layers)": [i - 1 for i in now],
        "the engines' default states": default,
    }
    for what, ids in wanted.items():
        if len(ids) == count and sorted(ids) != sorted(now) and all(0 <= i <= n for i in ids):
            yield Reading(f"read {what}: {ids}", ids_mend(case, ids))


def _order(case: Case) -> Iterator[Reading]:
    """Halves and thirds that are concatenated the other way round."""
    draft, width, count = case.draft, case.tap_width, case.taps_in_fc
    if width and count in (2, 3) and not {"input_norm.weight", "fc_norm.0.weight"} & set(draft.tensors):
        parts = draft.tensor("fc.weight").split(width, dim=1)
        turned = torch.cat(parts[::-1], dim=1)
        yield Reading("concatenate the states from late to early", Mend(tensors={draft.names["fc.weight"]: turned}))
    names = [f"midlayer.self_attn.{name}_proj.weight" for name in "qkv"]
    if all(name in draft.tensors for name in names):
        swapped = {draft.names[name]: _swap(draft.tensor(name)) for name in names}
        yield Reading("let attention read (state, embedding) instead of (embedding, state)", Mend(tensors=swapped))


def _swap(weight: torch.Tensor) -> torch.Tensor:
    half = weight.shape[1] // 2
    return torch.cat([weight[:, half:], weight[:, :half]], dim=1)


def _other_maps(case: Case) -> Iterator[Reading]:
    d2t, t2d, draft = case.d2t, case.t2d, case.draft
    if d2t is None:
        return
    maps = {"read d2t as absolute ids": as_offsets(d2t)}
    if t2d is not None and int(t2d.sum()) == d2t.numel():
        maps["take the map from t2d"] = as_offsets(t2d.nonzero().flatten())
    for what, offsets in maps.items():
        if not torch.equal(offsets, d2t):
            yield Reading(what, Mend(tensors={draft.names["d2t"]: offsets}))


def _switches(case: Case) -> Iterator[Reading]:
    flat = case.draft.flat
    for key in ("norm_output", "norm_before_residual"):
        if key == "norm_before_residual" and case.engine != "vllm":
            continue
        yield Reading(f"{key}: {str(not flat.get(key)).lower()}", Mend(keys={key: not flat.get(key)}))


def _norms(case: Case) -> Iterator[Reading]:
    names = [name for name, info in case.draft.tensors.items() if "norm" in name and info.is_float]
    if names:
        more = {
            case.draft.names[name]: (case.draft.tensor(name).float() + 1).to(case.draft.tensor(name)) for name in names
        }
        yield Reading("add 1 to the norms' weights", Mend(tensors=more))


def _rotary(case: Case) -> Iterator[Reading]:
    wanted = case.facts.rope
    if case.rope != wanted:
        yield Reading("the target's rotary parameters", rope_mend(case, wanted))
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    if case.rope != plain and wanted != plain:
        yield Reading("a rotary base of 10000 without scaling", rope_mend(case, plain))


def _eagle1(case: Case) -> Iterator[Reading]:
    draft = case.draft
    if "fc.weight" in draft.tensors:
        swapped = _swap(draft.tensor("fc.weight"))
        yield Reading(
            "let fc read (state, embedding) instead of (embedding, state)",
            Mend(tensors={draft.names["fc.weight"]: swapped}),
        )
    if "layers.0.input_layernorm.weight" in draft.tensors:
        yield Reading(
            "take layers.0.input_layernorm out",
            Mend(drop_tensors=(draft.names["layers.0.input_layernorm.weight"],)),
        )


def _later_heads(case: Case) -> Iterator[Reading]:
    """Heads that count from the next token, which the target says itself."""
    draft, heads = case.draft, case.draft.number("num_heads") or 5
    if heads < 2 or draft.flat.get("original_lm_head"):
        return
    moved, dropped = {}, []
    for name, stored in draft.names.items():
        kind, _, rest = name.partition(".")
        index, _, rest = rest.partition(".")
        if kind not in ("blocks", "lm_heads") or not index.isdigit():
            continue
        before = f"{kind}.{int(index) + 1}.{rest}"
        if before in draft.names:
            moved[stored] = draft.tensor(before)
        else:
            dropped.append(stored)
    key = "num_heads" if "num_heads" in draft.config else "medusa_num_heads"
    yield Reading(
        "leave the first head out: it predicts what the target says itself",
        Mend(keys={key: heads - 1}, tensors=moved, drop_tensors=tuple(dropped)),
    )
