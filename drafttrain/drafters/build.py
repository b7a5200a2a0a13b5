"""From a config to a draft, and from a target to its first weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig, drafter_class
from drafttrain.errors import RecipeError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.vocab_map import VocabMap


def build_drafter(
    config: DrafterConfig,
    text: Any,
    vocab_map: VocabMap | None = None,
    device: torch.device | str | None = None,
) -> Drafter:
    """A draft with fresh fp32 weights, in train mode.

    Args:
        config: of any family.
        text: the target's Hugging Face text config; the target itself is not needed.
        vocab_map: None = the most modest that the config allows: its first `draft_vocab_size` ids, else all.
        device: "meta" allocates nothing, for counting.

    Raises:
        ValueError: sizes or taps that do not fit the target.
    """
    if vocab_map is None and isinstance(config, Eagle3Config) and config.draft_vocab_size is not None:
        vocab_map = new_vocab_map(config, text.vocab_size, torch.zeros(text.vocab_size))
    drafter = drafter_class(config.family).from_text_config(config, text, vocab_map, device)
    return drafter.train()


def init_from_target(drafter: Drafter, target: CausalLM) -> None:
    """Copy from the target what the config says, and bind the draft to its embedding and head."""
    drafter.init_from_target(target)
    drafter.bind(target.embedding_weight, target.head())


def check_start(config: DrafterConfig, target: CausalLM) -> Drafter:
    """Refuse now what building the draft and `init_from_target` would refuse, before data is made for it.

    Returns:
        the draft without weights.

    Raises:
        ValueError: sizes, taps or blocks that do not fit the target.
    """
    drafter = build_drafter(config, target.config, device="meta")
    drafter.check_start(target)
    return drafter


def blocks_read(config: DrafterConfig, n_layers: int) -> tuple[int, ...]:
    """Blocks of a target with `n_layers` that `init_from_target` copies from."""
    if isinstance(config, DraftLMConfig):
        return config.layers_for(n_layers) if config.init == "target_layers" else ()
    if isinstance(config, MedusaConfig):
        return ()
    return config.init_blocks(n_layers, config.num_layers if isinstance(config, Eagle3Config) else 1)


def new_vocab_map(
    config: DrafterConfig,
    vocab_size: int,
    counts: Tensor,
    always: Iterable[int] = (),
    tokenizer_size: int | None = None,
) -> VocabMap:
    """The draft vocabulary that a config asks for.

    Args:
        vocab_size: rows of the target's head.
        counts: [V] how often the target says each token in the training data.
        always: ids that must be in: eos, end of turn, the template's special tokens.
        tokenizer_size: ids from here up are padding and never drafted.

    Raises:
        RecipeError: more tokens are asked for than the target has.
        ValueError: `always` does not fit.
    """
    size = config.draft_vocab_size if isinstance(config, Eagle3Config) else None
    if size is None:
        return VocabMap.full(vocab_size)
    if size > vocab_size:
        raise RecipeError(
            f"{size} tokens are asked for, the target has {vocab_size}",
            where="drafter.draft_vocab_size",
            remedy="drafter.draft_vocab_size=null takes them all",
        )
    return VocabMap.from_counts(counts, size, always, tokenizer_size)


def serving_copy(drafter: Drafter, dtype: torch.dtype) -> Drafter:
    """A copy of a draft in another dtype, ready to serve, that reads the same embedding and head."""
    from_saved = type(drafter).from_saved
    device = next(drafter.parameters()).device
    copy = from_saved(drafter.config, drafter.saved_arch(), drafter.vocab_map, device).to(dtype)
    copy.load_state_dict(drafter.state_dict())
    copy.bound = drafter.bound
    copy.prepare_for_inference()
    return copy
