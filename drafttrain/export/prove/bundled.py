"""What the bundled engine measures on the same prompts, counted as a server counts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from drafttrain.drafters.base import Drafter
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import build_proposer
from drafttrain.engine.records import Request, RoundRecord
from drafttrain.errors import EngineError
from drafttrain.export.prove.server import Counters
from drafttrain.modeling.causal_lm import CausalLM


@dataclass(frozen=True)
class BundledRun:
    """Greedy outputs, one list of token ids a prompt, and the counts of their rounds."""

    outputs: list[list[int]]
    counters: Counters


def room(k: int) -> int:
    """Tokens behind an output that the last round may write."""
    return k + 1


def run_bundled(
    target: CausalLM,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    *,
    k: int,
    max_new_tokens: int,
    rows: int,
    stop_ids: Set[int] = frozenset(),
) -> BundledRun:
    """Generate greedily.

    A server drafts k tokens in every round, also where fewer are still wanted, and counts what it accepts behind the
    end. So each request runs on behind its end here, and rounds that begin there are left out.

    Args:
        drafter: bound to `target`.
        k: draft tokens a round.
        rows: requests decoded together.
        stop_ids: tokens that end an output and are its last.

    Raises:
        EngineError: prompts that leave no room in the target's context.
    """
    longest = max(map(len, prompts)) + max_new_tokens + room(k)
    engine = Engine(target, build_proposer(drafter), k=k, max_batch=min(rows, len(prompts)), max_length=longest)
    if engine.max_length < longest:
        raise EngineError(
            f"the longest prompt, {max_new_tokens} tokens and a round of {k} need {longest} tokens, the target's "
            f"context has {engine.max_length}",
            remedy="shorten the prompts, or give a smaller --max-new-tokens",
        )
    requests = [Request(str(i), list(ids), max_new_tokens + room(k)) for i, ids in enumerate(prompts)]
    outputs = [_ended(completion.tokens[:max_new_tokens], stop_ids) for completion in engine.generate(requests)]
    ends = {request.id: len(output) for request, output in zip(requests, outputs, strict=True)}
    return BundledRun(outputs, server_counts(engine.records, k, ends))


def _ended(tokens: list[int], stop_ids: Set[int]) -> list[int]:
    end = next((i + 1 for i, token in enumerate(tokens) if token in stop_ids), len(tokens))
    return tokens[:end]


def server_counts(records: Sequence[RoundRecord], k: int, ends: Mapping[str, int]) -> Counters:
    """Counters over the rounds that begin before the end of their request's output.

    Args:
        records: of requests that ran on for at least `room(k)` tokens, each request's in order.
        ends: request -> length of its output.
    """
    emitted: dict[str, int] = defaultdict(lambda: 1)  # the prefill's
    per_position, drafts, proposed = [0] * k, 0, 0
    for record in records:
        if emitted[record.request] < ends[record.request]:
            drafts += 1
            proposed += record.proposed
            for depth in range(record.accepted):
                per_position[depth] += 1
        emitted[record.request] += record.emitted
    return Counters(drafts, proposed, sum(per_position), per_position)
