"""Which states of the target an EAGLE-3 draft gets: three numberings, and fc's width."""

from __future__ import annotations

from collections.abc import Iterator

from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.finding import Finding, Mend, error, warning
from drafttrain.export.doctor.layer_ids import NESTED, default_inputs, ids_given, ids_mend, inputs_read
from drafttrain.export.doctor.rules.rule import Rule, unfilled_norm
from drafttrain.export.tap_ids import KEY
from drafttrain.export.trtllm import CAPTURED

_EAGLE3 = ("eagle3",)


def fc_width(case: Case) -> Iterator[Finding]:
    """fc's columns against the states that the engine hands over."""
    shape, count = case.draft.shape("fc.weight"), case.taps_in_fc
    if shape is None or count is None:
        return
    if count != int(count):
        yield error(
            f"fc.weight has {shape[1]} columns, no multiple of the target's width {case.tap_width}",
            "the engine concatenates whole states of the target: the draft is of another target",
            "serve it with the target that it was trained for",
        )
        return
    said, source = _taps_said(case)
    if said == count:
        return
    listing = case.top_ids or case.nested_ids
    mend = Mend(keys={"num_aux_hidden_states": int(count)}) if listing and len(listing) == count else None
    yield error(
        f"fc.weight reads {int(count)} states ({shape[1]} columns), and {source}",
        "the engine takes fc's width from the config: it fails when it loads, or at the first token",
        "give the layer ids that it was trained on and num_aux_hidden_states"
        if mend is None
        else f"set num_aux_hidden_states to {int(count)}",
        mend,
    )


def _taps_said(case: Case) -> tuple[int, str]:
    """States that vLLM's Llama class takes fc to read, or that another engine hands over, and why."""
    if case.engine == "trtllm":
        ids, place, _ = ids_given(case)
        if ids is None:
            return 3, f"without {place} TensorRT-LLM hands over 3"
        return len(set(ids)), f"{place} names {len(set(ids))} layers"
    said = case.draft.number("num_aux_hidden_states")
    if case.engine == "sglang":
        said = None
        if case.nested_ids is None:
            return 3, "without nested layer ids SGLang hands over 3"
    if said is not None:
        return said, f"num_aux_hidden_states is {said}"
    if case.nested_ids is not None:
        return len(case.nested_ids), f"eagle_config names {len(case.nested_ids)} layers"
    hint = f" ({KEY} at the top level names {len(case.top_ids)} but does not count here)" if case.top_ids else ""
    return 3, f"vLLM takes 3 where num_aux_hidden_states is missing{hint}"


def ids_out_of_range(case: Case) -> Iterator[Finding]:
    """Ids of states that the target does not have, or that are named twice."""
    n = case.facts.n_layers
    for ids, place, first, last in (
        (case.top_ids, KEY, 0, n),
        (case.nested_ids, NESTED, -1, n),
        (case.captured, CAPTURED, 0, n - 1),
    ):
        if ids is None:
            continue
        wrong = [i for i in ids if not first <= i <= last]
        if wrong:
            yield error(
                f"{place} {ids}: {wrong} are no layers of a target with {n} blocks",
                "such a state is never captured: fewer reach fc than it reads",
                "serve the draft with the target that it was trained for, or correct the ids",
            )
        if len(set(ids)) != len(ids):
            yield error(
                f"{place} {ids} names a layer twice",
                "an engine captures a state once: fewer reach fc than it reads",
                "name distinct layers",
            )


def id_convention(case: Case) -> Iterator[Finding]:
    """Ids in the wrong engine's numbering: one block off, and the draft reads states that it never saw."""
    n, top, nested = case.facts.n_layers, case.top_ids, case.nested_ids
    default = default_inputs(n)
    lower = [i - 1 for i in default]
    # TensorRT-LLM reads none of config.json's ids: where they are vLLM's, they say what the draft was trained on.
    trained = _recorded(case) or (sorted(top or []) if case.engine == "trtllm" else [])
    if trained:
        yield from _against_record(case, trained)
        return
    if case.engine == "trtllm":
        if sorted(case.captured or []) == default:
            yield error(
                f"{CAPTURED} {case.captured} is the default of the engines, counted as inputs of layers",
                f"TensorRT-LLM counts outputs, its default is {lower}: it reads states one block late and accepts less",
                f"write {lower}, or leave the key out",
                ids_mend(case, default),
            )
        return
    if top is not None and sorted(top) == lower and lower != default:
        yield error(
            f"{KEY} {top} is the default of the engines, counted as outputs of layers",
            f"vLLM counts inputs, its default is {default}: it reads states one block early and accepts less",
            f"write {default}, or leave the key out",
            Mend(keys={KEY: default}),
        )
        return
    if top is not None and nested is not None and [i - 1 for i in top] != nested:
        same = top == nested
        yield error(
            f"{KEY} is {top} at the top and {nested} in eagle_config",
            ("vLLM counts inputs of layers there and SGLang outputs here, so one of them reads states one block off")
            if same
            else "the two do not mean the same states, and engines read one or the other",
            f"write {[i - 1 for i in top]} in eagle_config if the top is right",
            Mend(keys={f"eagle_config.{KEY}": [i - 1 for i in top]}) if same else None,
        )
    elif nested is not None and top is None and sorted(nested) not in (default, lower):
        yield warning(
            f"layer ids stand in eagle_config alone ({nested})",
            "vLLM counts inputs of layers there and SGLang outputs: the same folder means other states to each",
            f"write {KEY} at the top in vLLM's numbering, one higher than SGLang's; the trial tries both",
        )
    elif nested is not None and top is None and sorted(nested) == (lower if case.engine == "vllm" else default):
        right = default if case.engine == "vllm" else lower
        yield error(
            f"eagle_config.{KEY} {nested} is the engines' default in the other's numbering",
            f"{case.engine} reads states one block off; in silence, less is accepted",
            f"write {right}, or leave the ids out",
            Mend(keys={f"eagle_config.{KEY}": right}),
        )
    elif case.engine == "sglang" and top is not None and nested is None and sorted(top) != default:
        yield error(
            f"{KEY} {top} stands at the top level alone",
            "SGLang reads the ids in eagle_config only: it takes its default states",
            f"write {[i - 1 for i in top]} in eagle_config",
            Mend(keys={f"eagle_config.{KEY}": [i - 1 for i in top], "eagle_config.use_aux_hidden_state": True}),
        )


def _recorded(case: Case) -> list[int]:
    """The states of drafttrain's own record in vLLM's numbering, in the order in which an engine concatenates them."""
    n, names = case.facts.n_layers, (case.about or {}).get("taps") or []
    return sorted(n if name == "pre_norm" else int(name) for name in names if name == "pre_norm" or name.isdigit())


def _against_record(case: Case, trained: list[int]) -> Iterator[Finding]:
    meant = sorted(inputs_read(case))
    if meant == trained:
        return
    ids, place, more = ids_given(case)
    said = f"{place}: no layer ids are given" if ids is None else f"{place} is {ids}"
    yield error(
        f"{said}, so {case.engine_name} reads states {meant}; the draft was trained on {trained} (inputs of layers)",
        "the draft reads states that it never saw; in silence, less is accepted, or nothing",
        f"write {[i - more for i in trained]}",
        ids_mend(case, trained),
    )


def norm_before_fc(case: Case) -> bool:
    """Whether the engine norms what goes into fc: TensorRT-LLM by `eagle_config` alone, the others by either."""
    nested = case.draft.flat.get("eagle_config")
    inside = nested.get("norm_before_fc") if isinstance(nested, dict) else None
    outside = None if case.engine == "trtllm" else case.draft.flat.get("norm_before_fc")
    return bool(outside if inside is None else inside)


def norm_switches(case: Case) -> Iterator[Finding]:
    """Norms of fc's input: a switch without tensors, or tensors without a switch."""
    draft = case.draft
    inner = isinstance(draft.flat.get("eagle_config"), dict) and "norm_before_fc" in draft.flat["eagle_config"]
    before_fc = "eagle_config.norm_before_fc" if inner or case.engine == "trtllm" else "norm_before_fc"
    for key, said, prefix in (
        (before_fc, norm_before_fc(case), "input_norm."),
        ("fc_norm", bool(draft.flat.get("fc_norm")), "fc_norm."),
    ):
        stored = any(name.startswith(prefix) for name in draft.tensors)
        if said and not stored:
            yield error(
                f"{key} is on, and no {prefix}* is stored",
                f"{unfilled_norm(case)}: the draft reads states of another size",
                f"take {key} out",
                Mend(keys={key: False}),
            )
        if stored and not said:
            yield error(
                f"{prefix}* is stored, and {key} is not on",
                "the norm is dropped or refused: fc reads states as it was not trained",
                f"set {key} to true",
                Mend(keys={key: True}),
            )


RULES = (
    Rule("fc-width", fc_width, _EAGLE3),
    Rule("layer-ids-range", ids_out_of_range, _EAGLE3, needs_target=True),
    Rule("layer-ids-convention", id_convention, _EAGLE3, needs_target=True),
    Rule("norm-switches", norm_switches, _EAGLE3),
)
