"""What a trainer reads of a target that runs elsewhere: embedding, final norm and head."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from drafttrain.errors import TargetError
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.identity import TargetIdentity
from drafttrain.targets.load import load_target
from drafttrain.targets.model import TargetModel


class TargetEnds(TargetModel):
    """A target without blocks: everything but a forward."""

    runs = False

    def __init__(self, hf: Any, tokenizer: Any, identity: TargetIdentity) -> None:
        super().__init__(hf, tokenizer, identity)
        self.n_layers = identity.n_layers

    def _prove_forward(self) -> None:
        """Nothing to prove: who runs the target does so."""

    def forward(self, *_: Any, **__: Any) -> NoReturn:
        """Refused.

        Raises:
            TargetError: always.
        """
        raise self._absent("its forward is")

    def blocks_at_hand(self, blocks: Iterable[int]) -> AbstractContextManager[None]:
        """Refused, but for no blocks.

        Raises:
            TargetError: some block is wanted.
        """
        wanted = list(blocks)
        if wanted:
            raise self._absent(f"blocks {', '.join(map(str, wanted))} are")
        return nullcontext()

    def _absent(self, what: str) -> TargetError:
        return TargetError(
            f"{what} not here: target.placement is elsewhere",
            where=self.identity.name,
            remedy="start the draft from something else (drafter.init_layer=random, or warm_start), or use "
            "target.placement=whole",
        )


def load_ends(config: TargetConfig) -> TargetEnds:
    """Load embedding, final norm and head, frozen; the blocks' weights are not read.

    Raises:
        TargetError: see `load_target`.
    """
    target = load_target(config, wrap=TargetEnds, blocks=False)
    assert isinstance(target, TargetEnds)
    return target
