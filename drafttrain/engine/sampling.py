"""From logits to the distribution that is sampled, the same for target, draft and bonus tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from drafttrain.config import LEAST_TEMPERATURE, is_temperature
from drafttrain.errors import EngineError

_TOP_P_WIDTH = 512
_BLOCK = 64
_GOLDEN = 0x9E3779B97F4A7C15
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_BY_PLACE = 0x6A09E667F3BCC909


@dataclass(frozen=True)
class Typical:
    """A draft token x is kept if p(x) > min(epsilon, delta exp(-H(p)))."""

    epsilon: float = 0.09
    delta: float = 0.3

    def __post_init__(self) -> None:
        if not (0 < self.epsilon < 1 and 0 < self.delta <= 1):
            raise EngineError(
                f"typical acceptance with epsilon {self.epsilon} and delta {self.delta}",
                remedy="both lie between 0 and 1; the paper's are 0.09 and 0.3",
            )


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are chosen, with the names and meanings of transformers.

    Attributes:
        temperature: 0 = greedy; otherwise at least `LEAST_TEMPERATURE`.
        top_p, top_k: 1 and 0 = off.
        seed: makes a request's randomness its own.
        min_p: drop tokens less likely than this share of the likeliest; 0 = off.
        repetition_penalty: divides positive and multiplies negative logits of tokens that the prompt or the output
            holds already (arXiv 1909.05858), greedy decoding included; 1 = off.
        typical: keep draft tokens that are typical enough instead of exactly as often as the target would write them
            (arXiv 2401.10774, section 2.3.1). LOSSY: outputs do not follow the target's distribution. Greedy rows
            ignore it.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    typical: Typical | None = None

    def __post_init__(self) -> None:
        if not is_temperature(self.temperature):
            raise EngineError(
                f"temperature is {self.temperature}",
                remedy=f"0 means greedy; otherwise it is at least {LEAST_TEMPERATURE:g}",
            )
        if not 0 < self.top_p <= 1:
            raise EngineError(f"top_p is {self.top_p}", remedy="it lies in (0, 1]; 1 means off")
        if self.top_k < 0:
            raise EngineError(f"top_k is {self.top_k}", remedy="it is a count; 0 means off")
        if not 0 <= self.min_p <= 1:
            raise EngineError(f"min_p is {self.min_p}", remedy="it lies in [0, 1]; 0 means off")
        if not 0 < self.repetition_penalty < float("inf"):
            raise EngineError(f"repetition_penalty is {self.repetition_penalty}", remedy="it is positive; 1 means off")

    @property
    def greedy(self) -> bool:
        """True where the output is the argmax."""
        return self.temperature == 0

    @property
    def plain_greedy(self) -> bool:
        """True where the output is the argmax of the logits themselves."""
        return self.greedy and self.repetition_penalty == 1

    @property
    def lossy(self) -> bool:
        """True where outputs do not follow the target's distribution."""
        return self.typical is not None and not self.greedy


@dataclass(frozen=True)
class Stream:
    """Uniform numbers that depend on a key, the place in the text and their own number alone."""

    key: int
    place: int


class RowStreams:
    """Independent random streams of one request: what the draft proposes must not be correlated with what decides
    about it (a shared stream biases the residual, which shows on narrow vocabularies only).

    A stream is restarted at each round from the place in the row, so that what a request draws does not depend on
    the requests it is batched with.
    """

    def __init__(self, seed: int, request: str) -> None:
        self._seed_with(f"{seed}/{request}".encode())

    def _seed_with(self, text: bytes) -> None:
        self._digest = hashlib.sha256(text).digest()
        self._proposal, self._verdict = (int.from_bytes(self._digest[i : i + 8], "little") for i in (0, 8))

    def proposal(self, place: int) -> Stream:
        """For the draft's tokens of the round that starts with `place` tokens in the row."""
        return Stream(self._proposal, place)

    def verdict(self, place: int) -> Stream:
        """For the decisions and the target's tokens of that round."""
        return Stream(self._verdict, place)

    def within(self, place: int) -> RowStreams:
        """Streams for the rounds that a staged draft plays by itself inside that round, independent of these."""
        inner = object.__new__(RowStreams)
        inner._seed_with(self._digest + place.to_bytes(8, "little"))
        return inner


def uniforms(streams: Sequence[Stream | None], count: int, *, first: int = 0, by_place: bool = False) -> Tensor:
    """float64 [rows, count] in [0, 1), from number `first` of each stream; a row without a stream gets zeros.

    Args:
        streams: one a row.
        count: numbers a row.
        first: number of the first.
        by_place: number i belongs to the place i behind the stream's, whatever round reaches it. What is drawn by
            these alone does not depend on how the text was cut into rounds, so it equals plain decoding's.
    """
    keys = [0 if s is None else s.key ^ _BY_PLACE if by_place else _mix(s.key + s.place * _GOLDEN) for s in streams]
    starts = [s.place if by_place and s is not None else 0 for s in streams]
    number = np.array(starts, np.uint64)[:, None] + np.arange(first + 1, first + count + 1, dtype=np.uint64)
    # SplitMix64: a counter makes numbers one by one without a generator's state a row.
    # Any: to numpy's stubs, an array of uint64 times a uint64 is one of float64.
    bits: Any = np.array(keys, np.uint64)[:, None] + number * np.uint64(_GOLDEN)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(_MIX[0])
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(_MIX[1])
    values = ((bits ^ (bits >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    values[[i for i, s in enumerate(streams) if s is None]] = 0.0
    return torch.from_numpy(values)


def _mix(bits: int) -> int:
    bits &= 2**64 - 1
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        bits = (bits ^ (bits >> shift)) * factor % 2**64
    return bits ^ (bits >> 31)


def probabilities(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Temperature, then top-k, top-p and min-p, as transformers orders them.

    Args:
        logits: [n, ..., V], row i sampled as params[i] says.

    Returns:
        float32 of the same shape; a greedy row is one-hot at its argmax.
    """
    shape = (-1,) + (1,) * (logits.dim() - 1)
    device = logits.device
    greedy = torch.tensor([p.greedy for p in params], device=device)
    temperature = torch.tensor([p.temperature or 1.0 for p in params], device=device).view(shape)
    scaled = logits.float() / temperature
    vocab = logits.shape[-1]
    if any(0 < p.top_k < vocab for p in params):
        scaled = _keep_top_k(scaled, params)
    probs = torch.softmax(scaled, -1)
    if any(p.top_p < 1 for p in params):
        probs = _keep_top_p(probs, torch.tensor([p.top_p for p in params], device=device).view(shape))
    if any(p.min_p > 0 for p in params):
        floor = torch.tensor([p.min_p for p in params], device=device).view(shape) * probs.amax(-1, keepdim=True)
        probs = probs.masked_fill(probs < floor, 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    if bool(greedy.any()):
        one_hot = torch.zeros_like(probs).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        probs = torch.where(greedy.view(shape), one_hot, probs)
    return probs


def _keep_top_k(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    vocab = logits.shape[-1]
    largest = max(p.top_k for p in params if p.top_k < vocab)
    values = logits.topk(min(largest, vocab), -1).values
    floor = torch.full_like(logits[..., :1], -torch.inf)
    for row, param in enumerate(params):
        if 0 < param.top_k < vocab:
            floor[row] = values[row, ..., param.top_k - 1 : param.top_k]
    return logits.masked_fill(logits < floor, -torch.inf)


def _keep_top_p(probs: Tensor, top_p: Tensor) -> Tensor:
    flat = probs.reshape(-1, probs.shape[-1])
    limit = top_p.expand(*probs.shape[:-1], 1).reshape(-1, 1)
    # A full sort of a 50k vocabulary costs more than a small model's forward. The head of a distribution nearly
    # always holds the mass; only rows where it does not are sorted to the end.
    width = min(_TOP_P_WIDTH, flat.shape[1])
    out = torch.where(limit < 1, 0.0, flat)
    short = (limit < 1)[:, 0]
    if width < flat.shape[1]:
        ordered, order = flat.topk(width, -1)
        enough = short & (ordered.sum(-1) >= limit[:, 0])
        out[enough] = _cut(out[enough], ordered[enough], order[enough], limit[enough])
        short = short & ~enough
    if bool(short.any()):
        ordered, order = flat[short].sort(-1, descending=True)
        out[short] = _cut(out[short], ordered, order, limit[short])
    return out.view_as(probs)


def _cut(out: Tensor, ordered: Tensor, order: Tensor, limit: Tensor) -> Tensor:
    # The token that crosses the threshold stays, so at least one always does.
    kept = ordered.masked_fill(ordered.cumsum(-1) - ordered >= limit, 0.0)
    return out.scatter(-1, order, kept / kept.sum(-1, keepdim=True))


def top_tokens(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest of [..., V], best first: (values, ids) [..., count].

    On a CPU `topk` over a vocabulary takes several times as long as a maximum, so only blocks that can hold one of
    the largest are looked at.
    """
    count = min(count, logits.shape[-1])
    blocks = logits.shape[-1] // _BLOCK
    if count == 1:
        best = logits.max(-1, keepdim=True)
        return best.values, best.indices
    if logits.is_cuda or blocks < 4 * count:
        values, ids = logits.topk(count, -1)
        return values, ids
    whole = logits[..., : blocks * _BLOCK].unflatten(-1, (blocks, _BLOCK))
    rest = torch.arange(blocks * _BLOCK, logits.shape[-1])
    chosen = whole.amax(-1).topk(count, -1).indices
    candidates = whole.gather(-2, chosen[..., None].expand(*chosen.shape, _BLOCK)).flatten(-2)
    places = (chosen[..., None] * _BLOCK + torch.arange(_BLOCK)).flatten(-2)
    candidates = torch.cat([candidates, logits[..., blocks * _BLOCK :]], -1)
    places = torch.cat([places, rest.expand(*places.shape[:-1], -1)], -1)
    values, order = candidates.topk(count, -1)
    return values, places.gather(-1, order)


def draw(weights: Tensor, uniform: Tensor) -> Tensor:
    """Inverse-CDF sampling.

    Args:
        weights: [..., V], non-negative, any positive sum.
        uniform: float64 [...], in [0, 1).

    Returns:
        int64 [...]; never an id of weight zero.
    """
    cumulative = weights.double().cumsum(-1)
    total = cumulative[..., -1:]
    # Rounding may lift u * total to total itself, behind the last token that has any weight.
    threshold = (uniform.to(weights.device).unsqueeze(-1) * total).minimum(torch.nextafter(total, total - 1))
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)
