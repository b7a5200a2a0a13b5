"""Which tensors an engine makes room for, as far as a config that may be wrong says it."""

from __future__ import annotations

from drafttrain.errors import UserError
from drafttrain.export.doctor.case import Case
from drafttrain.export.verify import Shapes, engine_shapes

# Read by engines or thrown away by them without harm.
HARMLESS = ("d2t", "t2d", "embed_tokens.weight", "mask_hidden")


def expected_shapes(case: Case) -> Shapes | None:
    """Canonical name -> shape; None where the config says too little.

    Sizes that have a rule of their own (taps, draft vocabulary, layers, heads of Medusa) are taken from the tensors, so
    that one fault is one finding.
    """
    draft = case.draft
    flat = {key: value for key, value in draft.flat.items() if value is not None}
    try:
        if draft.family in ("eagle1", "eagle3"):
            heads = int(flat["num_attention_heads"])
            flat.setdefault("num_key_value_heads", heads)
            flat["head_dim"] = flat.get("head_dim") or int(flat["hidden_size"]) // heads
            flat["num_hidden_layers"] = max(len(case.layer_prefixes()), 1)
            flat["num_aux_hidden_states"] = round(case.taps_in_fc or 3)
            flat["draft_vocab_size"] = case.rows or flat.get("draft_vocab_size") or flat["vocab_size"]
            flat.setdefault("architectures", None)
        if draft.family == "medusa":
            heads, layers = medusa_counts(case)
            flat |= {"num_heads": heads, "num_hidden_layers": layers}
            flat["truncated_vocab_size"] = flat.get("truncated_vocab_size") or flat.get("vocab_size") or case.vocab_size
        if draft.family is None:
            return None
        return engine_shapes(draft.family, flat)
    except (KeyError, TypeError, ValueError, ZeroDivisionError, UserError, OSError):
        return None


def medusa_counts(case: Case) -> tuple[int, int]:
    """Heads and residual blocks a head that are stored."""
    blocks = [name.split(".") for name in case.draft.tensors if name.startswith("blocks.")]
    heads = {int(parts[1]) for parts in blocks}
    layers = {int(parts[3]) for parts in blocks}
    return (max(heads) + 1 if heads else 0), (max(layers) + 1 if layers else 0)
