"""The frozen target: an adapter, its tokenizer and its identity."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from drafttrain.errors import TargetError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.targets.identity import TargetIdentity
from drafttrain.targets.proof import prove


class TargetModel(CausalLM):
    """A causal LM that is never trained.

    Attributes:
        tokenizer: the transformers tokenizer.
        identity: hashes that features and drafts are checked against.
        stop_ids: ids that end a turn or a text, from the generation config and the tokenizer.
        runs: whether its forward can be called here.
    """

    runs = True

    def __init__(self, hf: Any, tokenizer: Any, identity: TargetIdentity) -> None:
        super().__init__(hf)
        self.tokenizer = tokenizer
        self.identity = identity
        self.stop_ids = stop_ids(getattr(hf, "generation_config", None), hf.config, tokenizer)
        self.requires_grad_(False)
        self.eval()
        self._prove_forward()

    def train(self, mode: bool = True) -> TargetModel:
        """A frozen target stays in eval mode."""
        return super().train(False)

    def blocks_at_hand(self, blocks: Iterable[int]) -> AbstractContextManager[None]:
        """While active, the weights of `blocks` can be read; here they always can."""
        return nullcontext()

    def _prove_forward(self) -> None:
        if self.device.type != "meta":
            prove(self)


def stop_ids(generation: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids that generation config, model config and tokenizer name, those of the vocabulary.

    Raises:
        TargetError: one of them names something else than ids.
    """
    found: set[int] = set()
    for owner in (generation, config, tokenizer):
        eos = getattr(owner, "eos_token_id", None)
        ids = [] if eos is None else eos if isinstance(eos, list | tuple) else [eos]
        if not all(isinstance(i, int) for i in ids):
            raise TargetError(
                f"eos_token_id of its {type(owner).__name__} is {eos!r}",
                where=getattr(config, "_name_or_path", None),
                remedy="write token ids there: an integer, or a list of them",
            )
        found.update(ids)
    return frozenset(i for i in found if 0 <= i < len(tokenizer))
