"""Whether a draft changed the output: greedy answers against those of the same engine without drafting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from drafttrain.engine.penalty import lowered
from drafttrain.modeling.causal_lm import CausalLM


@dataclass(frozen=True)
class Divergence:
    """The first token in which two greedy answers differ.

    Attributes:
        request, turn: which answer.
        index: of the token in the answer, from 0; the length of the shorter answer when one is a prefix.
        gap: the target's first logit minus its second at that place. Near 0 it is a tie that rounding broke,
            which reduced precision explains; large, the engine is wrong.
    """

    request: str
    turn: int
    index: int
    gap: float


@dataclass(frozen=True)
class ExactMatch:
    """matched of total answers are equal token for token; `divergences` are the others."""

    matched: int
    total: int
    divergences: list[Divergence]

    @property
    def rate(self) -> float | None:
        """Share of equal answers; None without answers."""
        return self.matched / self.total if self.total else None


@dataclass(frozen=True)
class AnswerPair:
    """One answer with a draft and one without, to the same prompt."""

    request: str
    turn: int
    prompt_ids: list[int]
    tokens: list[int]
    baseline: list[int]


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first difference, the shorter length if one is a proper prefix, None if equal."""
    for index, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return index
    return None if len(one) == len(other) else min(len(one), len(other))


def exact_match(pairs: Iterable[AnswerPair], gap: Callable[[list[int]], float]) -> ExactMatch:
    """Compare answers.

    Args:
        pairs: greedy answers.
        gap: the target's top-2 logit gap after a sequence of ids; called once a divergence.
    """
    total = 0
    divergences = []
    for pair in pairs:
        total += 1
        index = first_difference(pair.tokens, pair.baseline)
        if index is not None:
            context = pair.prompt_ids + pair.baseline[:index]
            divergences.append(Divergence(pair.request, pair.turn, index, gap(context)))
    return ExactMatch(total - len(divergences), total, divergences)


@torch.inference_mode()
def top2_gap(target: CausalLM, ids: list[int], penalty: float = 1.0) -> float:
    """The target's largest logit minus its second largest after `ids`, in one forward without a cache.

    Args:
        penalty: repetition penalty (arXiv 1909.05858) of the tokens in `ids`; the greedy choice is made behind it.
    """
    tokens = torch.tensor(ids, device=target.device)
    logits = target.lm_head(target(tokens[None]).final[:, -1]).float()[0]
    held = torch.zeros_like(logits, dtype=torch.bool).index_fill_(0, tokens, True)
    first, second = lowered(logits, held, penalty).topk(2).values.tolist()
    return float(first - second)
