"""The way back from the intermediate form: to a family's config, a saved draft, or a draft that runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig, drafter_class
from drafttrain.drafters.saving import check_state, save_draft
from drafttrain.export.ir import DraftIR
from drafttrain.modeling.taps import Tap

IMPORTED = "imported"
"""Key of the provenance of drafts made elsewhere: `{"from", "format", "notes"}`."""


def config_of(ir: DraftIR) -> DrafterConfig:
    """The family's config: `from_saved` with it and the sizes builds this draft."""
    match ir.family:
        case "eagle3":
            return Eagle3Config(
                taps=tuple(_written(tap) for tap in ir.taps),
                draft_vocab_size=None if ir.vocab_map.is_full else ir.vocab_map.size,
                depth=ir.depth,
                num_layers=ir.layers,
                norm_before_fc=ir.norms.before_fc,
                fc_norm=ir.norms.per_tap,
                norm_output=ir.norms.output,
                norm_before_residual=ir.norms.before_residual,
                **_sizes(ir),
            )
        case "eagle1":
            return Eagle1Config(depth=ir.depth, fc_bias=ir.bias, **_sizes(ir))
        case "medusa":
            own = any(name.startswith("lm_heads.") for name in ir.tensors)
            return MedusaConfig(num_heads=ir.heads, num_layers=ir.layers, bias=ir.bias, head="own" if own else "target")
    origin = ir.provenance.get(IMPORTED, {}).get("from")
    if origin is None:
        return DraftLMConfig(init="scratch", num_layers=ir.layers)
    return DraftLMConfig(init="checkpoint", checkpoint=str(origin))


def _written(tap: Tap) -> int | str:
    return tap.index if tap.kind == "block" else tap.kind


def _sizes(ir: DraftIR) -> dict[str, Any]:
    arch = ir.sizes
    sizes: dict[str, Any] = {"intermediate_size": arch.intermediate_size}
    if arch.num_heads * arch.head_dim == arch.hidden_size:  # a head size of its own is in the saved sizes alone
        sizes |= {"num_heads": arch.num_heads, "num_kv_heads": arch.num_kv_heads}
    if ir.family == "eagle3" and arch.hidden_size != arch.target_hidden_size:
        sizes["hidden_size"] = arch.hidden_size
    return sizes


def twin_of(ir: DraftIR, device: torch.device | str | None = "meta") -> Drafter:
    """The draft without its weights.

    Raises:
        ValueError: sizes or taps that do not fit the target.
    """
    arch = ir.lm_config if ir.arch is None else ir.arch.model_dump(mode="json")
    assert arch is not None
    return drafter_class(ir.family).from_saved(config_of(ir), arch, ir.vocab_map, device)


def stored_tensors(ir: DraftIR) -> dict[str, torch.Tensor]:
    """The tensors under the names in which a saved draft holds them, the vocabulary map among them."""
    return {**ir.tensors, **(ir.vocab_map.state() if ir.family == "eagle3" else {})}


def check_ir(ir: DraftIR, where: str | Path) -> None:
    """Assert that the tensors are exactly the family's, and finite.

    Raises:
        CheckpointError: naming what is missing, unknown, of another shape, or not finite.
    """
    check_state(twin_of(ir), stored_tensors(ir), where)


def drafter_of(ir: DraftIR, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Drafter:
    """The draft with its weights, in eval mode; it still has to be bound to its target."""
    drafter = twin_of(ir, device)
    # Tied weights have a second name that is not stored.
    drafter.load_state_dict(drafter.loaded_names(stored_tensors(ir)), strict=False)
    return drafter.to(dtype or ir.dtype).eval()


def save_ir(folder: str | Path, ir: DraftIR) -> None:
    """Write a saved draft, as training does; `read_ir` reads the same form back.

    Raises:
        CheckpointError: it cannot be written.
    """
    twin = twin_of(ir)
    state = twin.loaded_names(stored_tensors(ir))
    save_draft(folder, twin, target=ir.target, state=state, provenance=ir.provenance)
