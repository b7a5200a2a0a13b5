"""A draft's adapters on disk in peft's format, beside the draft that they are merged into."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from safetensors.torch import save_file
from torch import Tensor

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.lora import adapters
from drafttrain.drafters.lora_config import LoraConfig
from drafttrain.errors import UserError
from drafttrain.files import atomic_folder

ADAPTER = "adapter"
"""Folders of a run: `best-adapter`, `draft-adapter`."""


def require_peft(config: LoraConfig | None) -> None:
    """Refuse at the start what would fail at the end.

    Raises:
        UserError: adapters are asked for and peft is not installed.
    """
    if config is not None and find_spec("peft") is None:
        raise UserError(
            "adapters are saved in peft's format, and peft is not installed",
            where="drafter.lora",
            remedy="pip install 'drafttrain[peft]', or train without drafter.lora",
        )


def save_adapter(folder: Path, drafter: Drafter, config: LoraConfig, state: Mapping[str, Tensor], base: str) -> None:
    """Write `adapter_model.safetensors` and `adapter_config.json`; for a draft LM, peft loads them onto its base.

    Args:
        folder: is replaced.
        state: whole trainable tensors by their names in the draft, as a checkpoint has them.
        base: what the adapters were trained on.
    """
    from peft import LoraConfig as PeftConfig

    tensors = {}
    for name, _ in adapters(drafter):
        short = next(iter(drafter.saved_names({f"{name}.weight": state[f"{name}.parametrizations.weight.0.lora_A"]})))
        for side in "AB":
            key = f"base_model.model.{short.removesuffix('.weight')}.lora_{side}.weight"
            tensors[key] = state[f"{name}.parametrizations.weight.0.lora_{side}"].contiguous()
    described = PeftConfig(
        r=config.rank,
        # Typed as an integer, and used as a number.
        lora_alpha=cast("int", config.alpha),
        target_modules=list(config.modules),
        base_model_name_or_path=base,
        inference_mode=True,
        task_type="CAUSAL_LM" if drafter.family == "draft_lm" else None,
    )
    # It is always found beside the draft that it was merged into, which is replaced atomically and is what is served.
    shutil.rmtree(folder, ignore_errors=True)
    with atomic_folder(folder) as partial:
        save_file(tensors, partial / "adapter_model.safetensors", metadata={"format": "pt"})
        described.save_pretrained(str(partial))
