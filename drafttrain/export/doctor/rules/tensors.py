"""Names, shapes and dtypes against what the engine makes room for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from drafttrain.export.doctor.case import EAGLE, Case, listed
from drafttrain.export.doctor.finding import Finding, Mend, error, note, warning
from drafttrain.export.doctor.rules.rule import Rule, unfilled_norm
from drafttrain.export.doctor.shapes import HARMLESS, expected_shapes

# Have rules of their own.
_ELSEWHERE = ("fc.weight", "fc.bias", "lm_head.weight", "norm.weight", "d2t", "t2d")


def missing_norm(case: Case) -> Iterator[Finding]:
    """Norms that a layer needs."""
    shapes = expected_shapes(case) or {}
    absent = [name for name in shapes if "norm" in name and name not in case.draft.tensors]
    absent = [name for name in absent if not name.startswith(("fc_norm.", "input_norm."))]
    if absent and case.draft.family in EAGLE:
        yield error(
            f"{listed(absent)} is missing",
            f"{unfilled_norm(case)}: states have another size than in training, less is accepted",
            "store the norm that the draft was trained with",
        )


def missing(case: Case) -> Iterator[Finding]:
    """Matrices that the engine needs."""
    shapes, draft = expected_shapes(case), case.draft
    if shapes is None or draft.family not in EAGLE:
        return
    absent = [name for name in shapes if name not in draft.tensors and "norm" not in name and name not in _ELSEWHERE]
    if "fc.weight" not in draft.tensors:
        absent.insert(0, "fc.weight")
    if absent:
        yield error(
            f"{listed(absent)} {'is' if len(absent) == 1 else 'are'} missing",
            "the engine leaves them as memory happens to be, or fails: nothing is accepted",
            "export again; names are those of the raw layout (midlayer.*, fc, norm, lm_head)",
        )


def unknown(case: Case) -> Iterator[Finding]:
    """Tensors without a place."""
    shapes, draft = expected_shapes(case), case.draft
    if shapes is None or draft.family not in EAGLE:
        return
    extra = [
        name
        for name in draft.tensors
        if name not in shapes
        and name not in (*HARMLESS, *_ELSEWHERE)
        and not name.endswith((".bias", "rotary_emb.inv_freq"))
        and not name.startswith(("fc_norm.", "input_norm."))
        and name != "layers.0.input_layernorm.weight"
    ]
    if extra:
        yield error(
            f"{listed(extra)}: the engine has no place for {'it' if len(extra) == 1 else 'them'}",
            "it fails on them, or drops a part of the draft",
            "take them out if they are leftovers of training",
        )


def shapes_differ(case: Case) -> Iterator[Finding]:
    """Shapes against the config."""
    expected, draft = expected_shapes(case) or {}, case.draft
    wrong = [
        f"{name} is {draft.tensors[name].shape}, the config means {shape}"
        for name, shape in expected.items()
        if name in draft.tensors and draft.tensors[name].shape != shape and name not in ("fc.weight", "d2t", "t2d")
    ]
    if not wrong:
        return
    key, value = _head_dim(case)
    yield error(
        listed(wrong, 3),
        "the engine fails when it loads, or cuts heads in the wrong places",
        f"set head_dim to {value}" if key else "correct the sizes in the config",
        Mend(keys={key: value}) if key else None,
    )


def _head_dim(case: Case) -> tuple[str, int]:
    """The head size that explains q's rows, where it alone is wrong."""
    draft = case.draft
    prefix = next(iter(case.layer_prefixes()), None)
    q, k = (draft.shape(f"{prefix}.self_attn.{name}_proj.weight") for name in "qk")
    heads = draft.number("num_attention_heads")
    kv = draft.number("num_key_value_heads") or heads
    if not (q and k and heads and kv) or q[0] % heads or q[0] // heads != k[0] / kv:
        return "", 0
    size = q[0] // heads
    return ("", 0) if draft.number("head_dim") == size else (draft.key("head_dim"), size)


def head(case: Case) -> Iterator[Finding]:
    """EAGLE-3's own head."""
    draft = case.draft
    if "lm_head.weight" in draft.tensors:
        return
    said = draft.number("draft_vocab_size")
    reduced = "d2t" in draft.tensors or (said is not None and case.vocab_size is not None and said != case.vocab_size)
    make = error if reduced else warning
    yield make(
        "lm_head.weight is missing",
        "the engine puts the target's head in its place" + (", which has other rows than the map" if reduced else ""),
        "store the head that the draft was trained with",
    )


def eagle1_extras(case: Case) -> Iterator[Finding]:
    """What vLLM has no room for in an EAGLE-1 draft."""
    draft = case.draft
    if "lm_head.weight" in draft.tensors and case.engine == "vllm":
        yield error(
            "lm_head.weight is stored",
            "EAGLE-1 reads the target's head; vLLM refuses a draft that brings one",
            "take it out",
            Mend(drop_tensors=(draft.names["lm_head.weight"],)),
        )
    if "layers.0.input_layernorm.weight" in draft.tensors:
        ones = bool((draft.tensor("layers.0.input_layernorm.weight") == 1).all())
        yield error(
            "layers.0.input_layernorm.weight is stored",
            "the first layer of EAGLE-1 has no such norm: vLLM refuses it, others ignore it",
            "train without it"
            + (", or take it out: it is all ones, perhaps never used; the trial tells" if ones else ""),
        )


def fc_bias(case: Case) -> Iterator[Finding]:
    """FORMATS: dropped in silence."""
    draft, fc = case.draft, case.draft.tensors.get("fc.weight")
    has_one = case.engine == "sglang" and draft.family == "eagle1"
    if "fc.bias" not in draft.tensors:
        if has_one and fc is not None:
            zeros = torch.zeros(fc.shape[0], dtype=draft.tensor("fc.weight").dtype)
            yield error(
                "fc.bias is missing",
                "SGLang's fc always has a bias: it stays as memory happens to be",
                "store zeros",
                Mend(tensors={draft.beside("fc.weight", "fc.bias"): zeros}),
            )
    elif not has_one and bool(draft.tensor("fc.bias").any()):
        yield error(
            "fc.bias is stored and not zero",
            f"{case.engine}'s fc has no bias: it is dropped in silence, or refused",
            "train without a bias of fc" + ("; SGLang has one" if draft.family == "eagle1" else ""),
        )
    elif not has_one and draft.family == "eagle3":
        yield error(
            "fc.bias is stored (zeros)",
            "EAGLE-3's fc has no bias: the engine has no place for it",
            "take it out",
            Mend(drop_tensors=(draft.names["fc.bias"],)),
        )


def hidden_size(case: Case) -> Iterator[Finding]:
    """The draft's width against the target's."""
    draft, wide = case.draft, case.facts.hidden_size
    said = draft.number("target_hidden_size")
    if said is not None and said != wide:
        yield error(
            f"target_hidden_size is {said}, the target is {wide} wide",
            "the draft is of another target",
            "serve it with the target that it was trained for",
        )
    elif case.hidden is not None and case.hidden != wide and (draft.family != "eagle3" or said is None):
        yield error(
            f"the draft is {case.hidden} wide, the target {wide}",
            "it reads the target's states and embedding as they are",
            "serve it with the target that it was trained for",
        )


def embedding(case: Case) -> Iterator[Finding]:
    """An embedding of the draft's own."""
    shape = case.draft.shape("embed_tokens.weight")
    if shape is None:
        return
    if shape[0] != case.facts.vocab_size:
        yield error(
            f"embed_tokens.weight is {shape}, the target has {case.facts.vocab_size} tokens",
            "the engine reads rows that are not there, or refuses the folder",
            "store the target's embedding, or none: engines share it",
        )
    else:
        yield note(
            f"the draft brings an embedding of its own ({shape[0]} x {shape[1]})",
            "it is used in place of the target's where it differs, and doubles the memory",
            "leave it out if it is a copy of the target's",
        )


def dtypes(case: Case) -> Iterator[Finding]:
    """One floating-point type, and no wider than needed."""
    draft = case.draft
    found = {info.dtype for name, info in draft.tensors.items() if name not in ("d2t", "t2d")}
    plain = {dtype for dtype in found if dtype in ("F64", "F32", "F16", "BF16")}
    if len(plain) > 1:
        yield warning(
            f"weights are of several types: {listed(sorted(plain))}",
            "a part was converted and another not; the engine casts all to the target's type",
            "store one type",
        )
    if "F64" in plain:
        yield warning("weights are in 64-bit floats", "no engine computes in them", "store bfloat16 or float32")
    info = draft.tensors.get("d2t")
    if info is not None and info.dtype != "I64":
        fits = info.dtype in ("I32",)
        yield error(
            f"d2t is {info.dtype}, not int64",
            "offsets are indices: other types lose values or are refused",
            "store int64",
            Mend(tensors={draft.names["d2t"]: draft.tensor("d2t").to(torch.int64)}) if fits else None,
        )


RULES = (
    Rule("missing-norm", missing_norm, EAGLE),
    Rule("missing-tensors", missing, EAGLE),
    Rule("unknown-tensors", unknown, EAGLE),
    Rule("shapes", shapes_differ, (*EAGLE, "medusa")),
    Rule("missing-head", head, ("eagle3",)),
    Rule("eagle1-extras", eagle1_extras, ("eagle1",)),
    Rule("fc-bias", fc_bias, EAGLE),
    Rule("hidden-size", hidden_size, (*EAGLE, "medusa"), needs_target=True),
    Rule("embedding", embedding, EAGLE, needs_target=True),
    Rule("dtype", dtypes),
)
