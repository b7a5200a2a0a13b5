"""The target drafts for itself with a part of its blocks, in its own cache. Nothing is trained and nothing is added."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from drafttrain.engine.proposers.base import Row
from drafttrain.engine.proposers.readers import Reader
from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.course import Course
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap


class PartReader(Reader):
    """A part of the target.

    The keys and values of committed tokens are the target's own, at every block. Those of drafts are written behind
    them and written again when the target verifies.

    Args:
        target: the model.
        course: the part.
        name: as reports show it.
    """

    def __init__(self, target: CausalLM, course: Course, name: str) -> None:
        self.target, self.name = target, name
        self._course = course
        self.vocab_map = VocabMap.full(target.vocab_size)
        self._committed: Tensor | None = None

    def attach(self, target: CausalLM, cache: StaticKVCache) -> None:
        """Work in the engine's cache."""
        if target is not self.target:
            raise EngineError(f"{self.name} is a part of another target", remedy="build it from the engine's own")
        self.cache = cache

    def start(self, rows: Sequence[Row]) -> None:
        """Remember what the engine has committed."""
        super().start(rows)
        self._committed = self.cache.lengths.clone()

    def finish(self) -> None:
        """Leave the cache as it was; entries behind the committed ones are nobody's."""
        assert self._committed is not None
        self.cache.lengths.copy_(self._committed)

    def _known(self, index: int, row: Row) -> int:
        # All that is committed, and what this round keeps; a row that has all it wants reads its last token again.
        known = min(int(self.cache.lengths[index]), len(row.tokens) - 1)
        self.cache.lengths[index] = known
        return known

    def _run(self, tokens: Tensor) -> Tensor:
        return self.target(tokens, cache=self.cache, course=self._course).final  # type: ignore[no-any-return]

    def logits(self, readouts: Tensor) -> Tensor:
        """[..., H] -> [..., V]."""
        return self.target.lm_head(readouts)


class EarlyExit(PartReader):
    """The first `blocks` blocks, the final norm and the head (as in LayerSkip, arXiv 2404.16710). The verification of
    a chain goes on from where they ended.

    Args:
        target: the model.
        blocks: how many.

    Raises:
        EngineError: none, or all.
    """

    def __init__(self, target: CausalLM, blocks: int, name: str | None = None) -> None:
        if not 1 <= blocks < target.n_layers:
            raise EngineError(
                f"an early exit after {blocks} blocks of a target with {target.n_layers}",
                remedy=f"leave after 1 to {target.n_layers - 1}",
            )
        super().__init__(target, Course(end=blocks), name or f"early exit {blocks}")
        self.blocks = blocks
        self.course = Course(first=blocks)

    def _run(self, tokens: Tensor) -> Tensor:
        out = self.target(tokens, cache=self.cache, course=self._course, taps=(Tap.pre_norm,))
        self.states = out.taps[Tap.pre_norm]
        return out.final  # type: ignore[no-any-return]


class SkippedLayers(PartReader):
    """All blocks but for some of their attentions and MLPs (Draft & Verify, arXiv 2309.08168).

    Args:
        target: the model.
        attention, mlp: blocks without one; `drafttrain calibrate --kind skip` finds them.

    Raises:
        EngineError: nothing is left out, or a block does not exist.
    """

    def __init__(
        self, target: CausalLM, attention: Sequence[int], mlp: Sequence[int], name: str = "skipped layers"
    ) -> None:
        beyond = [block for block in (*attention, *mlp) if not 0 <= block < target.n_layers]
        if beyond or not (attention or mlp):
            raise EngineError(
                f"{name}: {'nothing' if not beyond else f'block {beyond[0]}'} is to be left out of a target with "
                f"{target.n_layers} blocks",
                remedy=f"name blocks from 0 to {target.n_layers - 1}",
            )
        course = Course(no_attention=frozenset(attention), no_mlp=frozenset(mlp))
        super().__init__(target, course, name)
