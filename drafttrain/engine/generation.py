"""Plain batched generation by the target, for corpora."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from drafttrain.corpus.types import Continuation, States
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers.base import Proposer
from drafttrain.engine.proposers.recorder import StateRecorder
from drafttrain.engine.records import Request
from drafttrain.engine.sampling import SamplingParams
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import Tap

_BEYOND = 2
"""Tokens behind a stop token: for its own states, and for those of the line break that many templates write there and
that a model which knows them says by itself."""


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
        taps: Sequence[Tap] = (),
    ) -> Iterator[Continuation]:
        """Continue the prompts, long ones first; they come as they finish.

        A prompt's output depends on its place and the seed, not on the batch size or the taps.

        Args:
            max_new_tokens: the stop token included.
            stop: token ids.
            taps: where states are kept. Then the engine drafts nothing, and reads a little more than it gives back.
        """
        if not prompts:
            return
        # A forward attends as far as its longest row: rows of like length meet, and few are left beside the last ones.
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]), reverse=True)
        recorder = StateRecorder(self.target, taps) if taps else None
        # The last token's states are there when the token behind it is.
        limit = max_new_tokens + 1 if recorder else max_new_tokens
        engine = Engine(
            self.target,
            recorder or self.proposer,
            k=self.k,
            max_batch=min(self.batch_size, len(prompts)),
            max_length=len(prompts[order[0]]) + limit,
        )
        requests = (
            Request(
                id=str(index),
                prompt_ids=prompts[index],
                max_new_tokens=limit,
                sampling=SamplingParams(temperature, top_p, top_k, seed),
                stop_ids=frozenset(stop),
                beyond=_BEYOND if recorder else 0,
            )
            for index in order
        )
        for completion in engine.stream(requests):
            if completion.error is not None:
                raise completion.error
            index, tokens = int(completion.id), completion.tokens
            if recorder is None:
                yield Continuation(index, tokens)
                continue
            features = recorder.take(completion.id)
            ids = np.asarray([*prompts[index], *tokens][:-1], dtype=np.int32)
            greedy_from = len(prompts[index]) - 1 if temperature == 0 else len(ids)
            end = next((place + 1 for place, token in enumerate(tokens) if token in stop), max_new_tokens)
            states = None if features is None else States(ids, features, greedy_from)
            yield Continuation(index, tokens[: min(end, max_new_tokens)], states)
