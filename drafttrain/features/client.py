"""What clients of servers that run the target elsewhere share: dealing out, retrying, waiting, checking."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, TypeVar

import httpx
import torch
from torch import Tensor

from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import DraftBatch
from drafttrain.errors import FeatureServerError
from drafttrain.features.building import TOLERANCE, difference
from drafttrain.features.capture import Captured, capture
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.layout import Rows, by_document, lay_out
from drafttrain.features.sources import Buffers, KnownTokens, taps_with_final
from drafttrain.features.waiting import outcome
from drafttrain.modeling.taps import FeatureSpec, Tap
from drafttrain.targets.identity import TargetIdentity
from drafttrain.targets.model import TargetModel

_BACKOFF_S = (0.2, 15.0)
_REMIND_S = 60.0
T = TypeVar("T")


class Lost(Exception):
    """No answer: the server is gone, or broken for now."""


class Busy(Exception):
    """The server is there, and its queue full."""


class _GivenUp(Exception):
    """No server answers, and nobody wants to wait any longer."""


@dataclass(frozen=True)
class Fetched:
    """What a server gave for one document of L tokens.

    Attributes:
        url: of the server.
        features: tap -> [L, H].
        top1: [L], or None where the client has it, or finds it itself.
        next_token: the token that the server would write after the document, if it says so.
    """

    url: str
    features: dict[Tap, Tensor]
    top1: Tensor | None = None
    next_token: int | None = None


@dataclass(frozen=True)
class Wanted:
    """What a run reads.

    Attributes:
        spec: what the draft reads.
        identity: of the target that the servers must run.
        dtype: in which it must run, such as "bfloat16".
        top1: whether batches carry `top1`.
        say: tells the user that the run waits.
    """

    spec: FeatureSpec
    identity: TargetIdentity
    dtype: str
    top1: bool = True
    say: Callable[[str], None] = field(default=lambda message: None)


class FeatureClient(ABC):
    """Asks servers for each batch.

    Documents are dealt out over the servers; a share of a lost one goes to the next. When none answers, the run
    stops or waits, as `config.on_loss` says.

    Args:
        config: urls, timeout and what to do on a loss.
        token: of the servers; None asks without.
        wanted: features of which target, and for whom.
        requests: that may be under way at each server.

    Raises:
        FeatureServerError: a server that is not there, refuses the token, or does not serve what is wanted.
    """

    door: ClassVar[str]
    """Path under which a server says what it serves."""

    def __init__(self, config: FeaturesConfig, token: str | None, wanted: Wanted, *, requests: int = 1) -> None:
        self.taps = taps_with_final(wanted.spec)
        self.target_s = 0.0
        self.gave_up = False
        self._wanted = wanted
        self._wait, self._urls = config.on_loss == "wait", [self._base(url) for url in config.urls]
        self._known = KnownTokens()
        self._closed, self._hurry = threading.Event(), threading.Event()
        self._http = _http(config, token, requests)
        self._threads = requests * len(self._urls)
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="features")
        for url in self._urls:
            self._patiently([url], self._greet)

    @classmethod
    def knock(cls, config: FeaturesConfig, token: str | None) -> None:
        """Find out whether the servers that are there take the token; nothing is asked of them.

        Raises:
            FeatureServerError: one that does not, or is of another kind.
        """
        with _http(config, token) as http:
            for url in map(cls._base, config.urls):
                with suppress(Lost, Busy):
                    cls._checked(url, _call(http, "GET", url + cls.door))

    @abstractmethod
    def _greet(self, url: str) -> None:
        """Find out at start whether a server serves what is wanted.

        Raises:
            FeatureServerError: it does not.
            Lost, Busy: see there.
        """

    @abstractmethod
    def _fetch(self, url: str, samples: list[Sample]) -> list[Fetched]:
        """Ask a server for a share. May be called by several threads at once.

        Raises:
            FeatureServerError, DataError: an answer that is not what was asked for.
            Lost, Busy: see there.
        """

    @abstractmethod
    def _deal(self, samples: list[Sample]) -> list[list[Sample]]:
        """Samples in shares, one a request."""

    @staticmethod
    @abstractmethod
    def _checked(url: str, reply: httpx.Response) -> Any:
        """An answer, in whatever form, that is none of an error.

        Raises:
            FeatureServerError, DataError: one that asking again does not mend.
            Lost, Busy: see there.
        """

    @staticmethod
    def _base(url: str) -> str:
        """The url that paths are appended to."""
        return url.rstrip("/")

    def _complete(self, sample: Sample, fetched: Fetched) -> tuple[dict[Tap, Tensor], Tensor | None]:
        """Features and top1 of a document as they are read; called by the thread that asks for a batch."""
        return fetched.features, fetched.top1

    def batch(self, rows: Rows, device: torch.device) -> DraftBatch:
        """See `FeatureSource`."""
        batch = lay_out(rows, device)
        buffers = Buffers(batch, self._wanted.top1)
        found = by_document(rows)
        began = time.perf_counter()
        try:
            for sample, features, top1 in self._documents([at[0].sample for at in found.values()]):
                for place in found[sample.id]:
                    buffers.put(place, features, top1)
        except _GivenUp:
            self.gave_up = True
            dtype = getattr(torch, self._wanted.dtype)
            blank = torch.zeros(*batch.tokens.shape, self._wanted.identity.hidden_size, dtype=dtype)
            batch.features = {tap: blank.to(device) for tap in self.taps}
        self.target_s += time.perf_counter() - began
        return batch

    def _documents(self, samples: list[Sample]) -> Iterator[tuple[Sample, dict[Tap, Tensor], Tensor | None]]:
        """Each sample with its features and top1, as far as that is wanted."""
        for share, answer in self._answers(self._deal(samples)):
            for sample, fetched in zip(share, answer, strict=True):
                features, top1 = self._complete(sample, fetched)
                if not (self._wanted.top1 and sample.spans):
                    top1 = None
                elif sample.id in self._known:
                    top1 = self._known[sample.id]
                elif top1 is not None:
                    self._known.keep(sample.id, top1)
                yield sample, features, top1

    def _answers(self, shares: list[list[Sample]]) -> Iterator[tuple[list[Sample], list[Fetched]]]:
        """Each share with its answer, in order. As many are under way as there are threads, and as many wait here."""
        under_way: deque[tuple[list[Sample], Future[list[Fetched]]]] = deque()
        try:
            for number, share in enumerate(shares):
                if len(under_way) >= 2 * self._threads:
                    first, answer = under_way.popleft()
                    yield first, outcome(answer)
                under_way.append((share, self._pool.submit(self._ask, number, share)))
            while under_way:
                first, answer = under_way.popleft()
                yield first, outcome(answer)
        finally:
            for _, answer in under_way:
                answer.cancel()

    def captured(self, samples: Sequence[Sample], taps: Sequence[Tap]) -> Iterator[Captured]:
        """Each sample as `capture` gives it, for a store.

        Raises:
            FeatureServerError: also for taps that this client does not read.
        """
        lacking = [str(tap) for tap in taps if tap not in self.taps]
        if lacking:
            raise FeatureServerError(
                f"the store has tap {', '.join(lacking)}, too, which the recipe's draft does not read",
                where=", ".join(self._urls),
                remedy="build another one (features.path), or let the target fill this one (without features.urls)",
            )
        for sample, features, top1 in self._documents(list(samples)):
            yield Captured(sample, {tap: features[tap] for tap in taps}, top1)

    def _lacks_top1(self, sample: Sample) -> bool:
        """Whether a document's top1 is wanted and not known yet; a copy that keeps a rank in step has no spans, and
        needs none."""
        return self._wanted.top1 and bool(sample.spans) and sample.id not in self._known

    def give_up(self) -> None:
        """See `WaitingSource`."""
        self._hurry.set()

    def close(self) -> None:
        """See `FeatureSource`. What still waits for a server gives up."""
        self._closed.set()
        self._hurry.set()
        self._pool.shutdown()
        self._http.close()

    def spot_check(self, target: TargetModel, samples: Sequence[Sample], count: int = 2) -> None:
        """Have every server give a few documents, and compare them with a forward here, if the target is.

        Raises:
            FeatureServerError: names the sample and the tap.
        """
        chosen = [samples[index * len(samples) // count] for index in range(min(count, len(samples)))]
        expected = (
            list(capture(target, chosen, self.taps, batch_tokens=1, wants_top1=lambda _: False))
            if target.runs
            else [Captured(sample, {}, None) for sample in chosen]
        )
        for url in self._urls:
            for captured in expected:
                (fetched,) = self._patiently([url], partial(self._fetch, samples=[captured.sample]))
                features, _ = self._complete(captured.sample, fetched)
                for tap, value in captured.features.items():
                    off = difference(features[tap], value)
                    if off > TOLERANCE:
                        raise FeatureServerError(
                            f"the rows of tap {tap} for sample {captured.sample.id} differ from the target's by "
                            f"{off:.0%}",
                            where=url,
                            remedy="the server must run the recipe's target, without prefix caching",
                        )

    def _ask(self, number: int, samples: list[Sample]) -> list[Fetched]:
        first = number % len(self._urls)
        order = self._urls[first:] + self._urls[:first]
        return self._patiently(order, partial(self._fetch, samples=samples))

    def _patiently(self, urls: list[str], call: Callable[[str], T]) -> T:
        """The result of `call` at the first server that answers; while all are busy, or gone and to be waited for,
        again and again."""
        pause, reminded = _BACKOFF_S[0], 0.0
        while True:
            lost: dict[str, str] = {}
            for url in urls:
                try:
                    return call(url)
                except Busy:
                    continue
                except Lost as error:
                    lost[url] = str(error)
            if len(lost) == len(urls):
                reasons = "; ".join(lost.values())
                if not self._wait:
                    raise FeatureServerError(
                        f"no feature server answers: {reasons}",
                        where=", ".join(urls),
                        remedy="start it and run the same command again: training goes on from its last checkpoint; "
                        "with features.on_loss=wait a run waits by itself",
                    )
                if time.monotonic() - reminded > _REMIND_S:
                    self._wanted.say(f"waiting for a feature server at {', '.join(urls)}: {reasons}")
                    reminded = time.monotonic()
            (self._closed if self._hurry.is_set() else self._hurry).wait(pause * random.uniform(0.5, 1.0))
            if self._closed.is_set():
                raise FeatureServerError("training ended while a server was waited for", where=", ".join(urls))
            if len(lost) == len(urls) and self._hurry.is_set():
                raise _GivenUp
            pause = min(2 * pause, _BACKOFF_S[1] if lost else 1.0)

    def _call(self, method: str, url: str, **body: Any) -> httpx.Response:
        """The answer to a request, of whatever status; `body` is `content` or `json`, as httpx takes it."""
        return _call(self._http, method, url, **body)


def _http(config: FeaturesConfig, token: str | None, requests: int = 1) -> httpx.Client:
    return httpx.Client(
        headers={} if token is None else {"Authorization": f"Bearer {token}"},
        timeout=httpx.Timeout(config.timeout_s, connect=10.0),
        # Idle connections are let go before a server does it (vLLM: after 5 s), not at the same time.
        limits=httpx.Limits(max_keepalive_connections=requests * len(config.urls), keepalive_expiry=2.0),
        # Proxies of the environment are for the internet, servers of features stand in the next room.
        trust_env=False,
    )


def _call(http: httpx.Client, method: str, url: str, **body: Any) -> httpx.Response:
    try:
        return http.request(method, url, **body)
    except httpx.TransportError as error:
        raise Lost(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None


def refused(url: str, status: int, what: str, remedy: str | None = None) -> FeatureServerError | Lost:
    """What to raise for an answer whose status is not 200."""
    if status >= 500:
        return Lost(f"status {status}: {what}")
    if status == 401:
        return FeatureServerError(what, where=url, remedy="give the server's own token: see features.token_file")
    return FeatureServerError(f"refuses the request with status {status}: {what}", where=url, remedy=remedy)
