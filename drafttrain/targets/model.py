"""The frozen target: an adapter, its tokenizer and its identity."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from drafttrain.errors import TargetError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.targets.identity import TargetIdentity


class TargetModel(CausalLM):
    """A causal LM that is never trained.

    Attributes:
        tokenizer: the transformers tokenizer.
        identity: hashes that features and drafts are checked against.
        stop_ids: ids that end a turn or a text, from the generation config and the tokenizer.
        context: longest sequence in tokens.
        runs: whether its forward can be called here.
    """

    runs = True

    def __init__(self, hf: Any, tokenizer: Any, identity: TargetIdentity) -> None:
        super().__init__(hf)
        self.tokenizer = tokenizer
        self.identity = identity
        self.stop_ids = stop_ids(getattr(hf, "generation_config", None), hf.config, tokenizer)
        self.context = int(getattr(self.config, "max_position_embeddings", 0) or 2**31)
        self.requires_grad_(False)
        self.eval()
        self._prove_forward()

    def train(self, mode: bool = True) -> TargetModel:
        """A frozen target stays in eval mode."""
        return super().train(False)

    def blocks_at_hand(self, blocks: Iterable[int]) -> AbstractContextManager[None]:
        """While active, the weights of `blocks` can be read; here they always can."""
        return nullcontext()

    @torch.inference_mode()
    def _prove_forward(self) -> None:
        """Refuse weights that give NaN, and an architecture whose logits our body and head do not reproduce.

        A target of NaN says one token for ever, which a draft learns at once: it would be measured as a triumph.
        """
        if self.device.type == "meta":
            return
        ids = torch.arange(8, device=self.device)[None] % self.vocab_size
        final = self(ids).final
        if not bool(torch.isfinite(final).all()):
            raise TargetError(
                f"its forward gives NaN or Inf in {str(self.dtype).removeprefix('torch.')}",
                where=self.identity.name,
                remedy="its weights are damaged, or overflow this dtype: try the dtype bfloat16 or float32",
            )
        ours = self.lm_head(final).float()
        theirs = self.hf(input_ids=ids, use_cache=False).logits.float()
        # The same tensors through the same kernels: only the order of scaling and casting may differ.
        tolerance = 1e-2 if self.dtype == torch.float32 else 2e-1
        if theirs.shape != ours.shape or (theirs - ours).abs().max() > tolerance * theirs.abs().max().clamp(min=1):
            raise TargetError(
                f"the logits of {type(self.hf).__name__} are not its head applied to its final state",
                remedy="this architecture scales its output in a way drafttrain does not know; please report it",
            )


def stop_ids(generation: Any, config: Any, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids that generation config, model config and tokenizer name, those of the vocabulary."""
    found: set[int] = set()
    for owner in (generation, config, tokenizer):
        eos = getattr(owner, "eos_token_id", None)
        if eos is not None:
            found.update(eos if isinstance(eos, list | tuple) else [eos])
    return frozenset(int(i) for i in found if 0 <= int(i) < len(tokenizer))
