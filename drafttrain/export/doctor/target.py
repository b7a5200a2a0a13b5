"""What the rules need to know of the target; its weights are not read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from drafttrain.modeling.blocks import draft_rope_parameters
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.identity import tokenizer_hash
from drafttrain.targets.load import load_stop_ids, load_text_config, load_tokenizer

# transformers' classes whose norms multiply by 1 + weight.
_ONE_PLUS = (
    "gemma",
    "gemma2",
    "gemma3",
    "gemma3_text",
    "recurrent_gemma",
    "t5gemma",
    "vaultgemma",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_text",
    "qwen3_5_moe",
    "qwen3_5_moe_text",
    "qwen4_exp_text",
    "minimax_m3_vl_text",
    "step3p5",
)


@dataclass(frozen=True)
class TargetFacts:
    """A target, from its config and tokenizer.

    Attributes:
        name: for messages.
        model_type: of its text config.
        vocab_size: rows of its embedding and head.
        context: `max_position_embeddings`.
        rope: rotary parameters that its drafts turn with, in transformers 5 form.
        quantisation: its method, or None.
        tokenizer_size: ids the tokenizer knows; None without one.
        tokenizer_hash: of the vocabulary; "" without one.
        stop_ids: ids that end a turn or a text.
    """

    name: str
    model_type: str
    hidden_size: int
    n_layers: int
    vocab_size: int
    context: int | None
    rope: dict[str, Any] = field(default_factory=dict)
    quantisation: str | None = None
    tokenizer_size: int | None = None
    tokenizer_hash: str = ""
    stop_ids: frozenset[int] = frozenset()

    @property
    def norms_add_one(self) -> bool:
        """Whether its norms multiply by 1 + weight."""
        return self.model_type in _ONE_PLUS

    @staticmethod
    def of_config(name: str, text: Any, tokenizer: Any = None, stop_ids: frozenset[int] = frozenset()) -> TargetFacts:
        """From a Hugging Face text config and, if there is one, the tokenizer."""
        return TargetFacts(
            name=name,
            model_type=str(text.model_type),
            hidden_size=int(text.hidden_size),
            n_layers=int(text.num_hidden_layers),
            vocab_size=int(text.vocab_size),
            context=getattr(text, "max_position_embeddings", None),
            rope=draft_rope_parameters(text),
            quantisation=_quantisation(text),
            tokenizer_size=None if tokenizer is None else len(tokenizer),
            tokenizer_hash="" if tokenizer is None else tokenizer_hash(tokenizer),
            stop_ids=stop_ids,
        )


def _quantisation(text: Any) -> str | None:
    found = getattr(text, "quantization_config", None)
    if not found:
        return None
    values = found if isinstance(found, dict) else found.to_dict()
    return str(values.get("quant_method") or "unknown")


def read_target(config: TargetConfig) -> TargetFacts:
    """Read config and tokenizer.

    Raises:
        TargetError: there is no such target, or one without a tokenizer.
    """
    return TargetFacts.of_config(config.model, load_text_config(config), load_tokenizer(config), load_stop_ids(config))
