"""What an engine will hold, known before it is allocated."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from drafttrain.engine.graphs import buckets
from drafttrain.engine.proposers.base import Proposer, Reach
from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM

_GIB = 2**30


@dataclass(frozen=True)
class Memory:
    """Bytes on the target's device, weights not counted.

    Attributes:
        cache: keys and values of the target.
        draft: what the draft allocates, unless it is on a device of its own.
        round: logits of a verification, and their distribution in float32.
        graphs: what recorded rounds keep to themselves: states that each batch size hands over, and the activations of
            the largest, which the smaller ones share; an estimate from above.
    """

    cache: int
    draft: int
    round: int
    graphs: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.cache + self.draft + self.round + self.graphs


def memory_needed(
    target: CausalLM, proposer: Proposer | None, reach: Reach, rows: int, length: int, recorded: bool = False
) -> Memory:
    """Of an engine with rows of `length` cached tokens; `recorded`: its rounds may become CUDA graphs."""
    places = rows * (reach.tokens + 1)
    return Memory(
        cache=target.cache_bytes(rows, length),
        draft=0 if proposer is None else proposer.bytes_needed(rows, length),
        round=places * target.vocab_size * (target.dtype.itemsize + torch.float32.itemsize),
        graphs=_graph_bytes(target, proposer, reach, rows) if recorded else 0,
    )


@dataclass(frozen=True)
class Room:
    """What an engine will be given.

    Attributes:
        reach: how far its proposals go.
        length: cached tokens of a row: a row near its end takes part in rounds as wide as the others', so draft tokens
            are written behind it.
        memory: that it takes on the target's device.
        elsewhere: what the draft allocates on a device of its own.
    """

    reach: Reach
    length: int
    memory: Memory
    elsewhere: Memory


def room_for(
    target: CausalLM, proposer: Proposer | None, *, k: int, rows: int, longest: int, recorded: bool = False
) -> Room:
    """Of an engine that drafts `k` tokens for `rows` requests of up to `longest` tokens."""
    reach = Reach(0, 0) if proposer is None else proposer.reach(k)
    length = longest + max(reach.tokens, reach.scratch)
    length = target.cache_length(length)
    memory, elsewhere = memory_needed(target, proposer, reach, rows, length, recorded), Memory(0, 0, 0)
    if proposer is not None and proposer.device not in (None, target.device):
        memory, elsewhere = replace(memory, draft=0), Memory(0, memory.draft, 0)
    return Room(reach, length, memory, elsewhere)


def handed_over(target: CausalLM, taps: int, places: int, rows: int) -> int:
    """Bytes of the states that verifications of all batch sizes up to `rows` leave for the draft, `places` a row."""
    return sum(buckets(rows)) * places * taps * target.hidden_size * target.dtype.itemsize


def _graph_bytes(target: CausalLM, proposer: Proposer | None, reach: Reach, rows: int) -> int:
    taps = 0 if proposer is None else len(proposer.feature_spec.taps)
    hidden = target.hidden_size
    # Of one block at a time: gate, up and their product beside residual, norms, queries, keys, values and output.
    widest = 3 * (getattr(target.config, "intermediate_size", None) or 4 * hidden) + 8 * hidden
    working = rows * (reach.tokens + 1) * (widest + taps * hidden) * target.dtype.itemsize
    return handed_over(target, taps, reach.tokens + 1, rows) + working


def available_bytes(device: torch.device) -> int | None:
    """What can still be allocated; None where the system does not say."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    if device.type != "cpu" or not Path("/proc/meminfo").is_file():
        return None
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def require(memory: Memory, available: int | None, what: str) -> None:
    """Refuse what does not fit.

    Args:
        what: needs it, for the message.

    Raises:
        EngineError: naming both sizes.
    """
    if available is not None and memory.total > available:
        raise EngineError(
            f"{what} need {memory.total / _GIB:.2f} GiB (cache {memory.cache / _GIB:.2f}, draft "
            f"{memory.draft / _GIB:.2f}, a round {memory.round / _GIB:.2f}, graphs {memory.graphs / _GIB:.2f}), "
            f"{available / _GIB:.2f} are free",
            remedy="lower the batch size or the longest length, or free memory on the device",
        )
