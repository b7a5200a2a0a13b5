"""Plain batched generation by the target, for corpora."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers.base import Proposer
from drafttrain.engine.records import Request
from drafttrain.engine.sampling import SamplingParams
from drafttrain.modeling.causal_lm import CausalLM


class TargetGenerator:
    """Answers prompts with the bundled engine.

    Args:
        target: the model that answers.
        batch_size: rows in flight.
        proposer: a draft to speed it up, or None.
    """

    def __init__(self, target: CausalLM, batch_size: int = 32, proposer: Proposer | None = None, k: int = 4) -> None:
        self.target, self.batch_size, self.proposer, self.k = target, batch_size, proposer, k

    def generate(
        self,
        prompts: Sequence[list[int]],
        *,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int = 0,
        stop: frozenset[int] | set[int] = frozenset(),
    ) -> Iterator[tuple[int, list[int]]]:
        """Yield (index of the prompt, new token ids, the stop token included) as they finish, long prompts first.

        A prompt's output depends on its place and the seed, not on the batch size.
        """
        if not prompts:
            return
        # A forward attends as far as its longest row: rows of like length meet, and few are left beside the last ones.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
        length = len(prompts[order[0]]) + max_new_tokens
        engine = Engine(
            self.target,
            self.proposer,
            k=self.k,
            max_batch=min(self.batch_size, len(prompts)),
            max_length=length,
        )
        requests = (
            Request(
                id=str(index),
                prompt_ids=prompts[index],
                max_new_tokens=max_new_tokens,
                sampling=SamplingParams(temperature, top_p, top_k, seed),
                stop_ids=frozenset(stop),
            )
            for index in order
        )
        for completion in engine.stream(requests):
            if completion.error is not None:
                raise completion.error
            yield int(completion.id), completion.tokens
