"""Features from servers that run the target elsewhere; see `server` and `wire`."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import httpx
import torch
from torch import Tensor

from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import DraftBatch
from drafttrain.errors import DataError, FeatureServerError
from drafttrain.features.building import TOLERANCE, difference
from drafttrain.features.capture import capture, check_features
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.layout import Place, Rows, lay_out, places
from drafttrain.features.sources import Buffers, KnownTokens, taps_with_final
from drafttrain.features.wire import FEATURES_PATH, PROTOCOL, TARGET_PATH, FeatureAnswer, FeatureRequest
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import FeatureSpec, Tap
from drafttrain.targets.identity import TargetIdentity

_BACKOFF_S = (0.2, 15.0)
_REMIND_S = 60.0
T = TypeVar("T")
Documents = list[tuple[dict[Tap, Tensor], Tensor]]


class _Lost(Exception):
    """No answer: the server is gone, or broken for now."""


class _Busy(Exception):
    """The server is there, and its queue full."""


class _GivenUp(Exception):
    """No server answers, and nobody wants to wait any longer."""


class StreamedFeatures:
    """Asks feature servers for each batch.

    Documents are dealt out over the servers; a share of a lost one goes to the next. When none answers, the run
    stops or waits, as `config.on_loss` says.

    Args:
        config: urls, timeout and what to do on a loss.
        token: of the servers.
        spec: what the draft reads.
        identity: of the target that the servers must run.
        dtype: in which it must run, such as "bfloat16".
        want_top1: whether batches carry `top1`.
        say: tells the user that the run waits.

    Raises:
        FeatureServerError: a server that is not there, refuses the token, or runs another target.
    """

    def __init__(
        self,
        config: FeaturesConfig,
        token: str,
        spec: FeatureSpec,
        *,
        identity: TargetIdentity,
        dtype: str,
        want_top1: bool = True,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        self.taps = taps_with_final(spec)
        self.target_s = 0.0
        self._identity, self._dtype, self._want_top1, self._say = identity, dtype, want_top1, say
        self._wait, self._urls = config.on_loss == "wait", [url.rstrip("/") for url in config.urls]
        self._known = KnownTokens()
        self._closed, self._hurry = threading.Event(), threading.Event()
        self.gave_up = False
        self._http = httpx.Client(
            headers={"Authorization": f"Bearer {token}"},
            timeout=httpx.Timeout(config.timeout_s, connect=10.0),
            # Proxies of the environment are for the internet, servers of features stand in the next room.
            trust_env=False,
        )
        self._pool = ThreadPoolExecutor(len(self._urls), thread_name_prefix="features")
        self._request_tokens = min(int(self._patiently([url], self._describe)["request_tokens"]) for url in self._urls)

    def batch(self, rows: Rows, device: torch.device) -> DraftBatch:
        """See `FeatureSource`."""
        batch = lay_out(rows, device)
        buffers = Buffers(batch, self._want_top1)
        found: dict[str, list[Place]] = {}
        for place in places(rows):
            found.setdefault(place.sample.id, []).append(place)
        began = time.perf_counter()
        shares = self._deal([at[0].sample for at in found.values()])
        try:
            # Each server is asked for its share at once; a further share of the same one comes after.
            for share, documents in zip(shares, self._pool.map(self._ask, range(len(shares)), shares), strict=True):
                for sample, (features, top1) in zip(share, documents, strict=True):
                    if sample.id in self._known:
                        top1 = self._known[sample.id]
                    elif self._want_top1:
                        self._known.keep(sample.id, top1)
                    for place in found[sample.id]:
                        buffers.put(place, features, top1 if self._want_top1 else None)
        except _GivenUp:
            self.gave_up = True
            blank = torch.zeros(*batch.tokens.shape, self._identity.hidden_size, dtype=getattr(torch, self._dtype))
            batch.features = {tap: blank.to(device) for tap in self.taps}
        self.target_s += time.perf_counter() - began
        return batch

    def give_up(self) -> None:
        """See `WaitingSource`."""
        self._hurry.set()

    def close(self) -> None:
        """See `FeatureSource`. What still waits for a server gives up."""
        self._closed.set()
        self._hurry.set()
        self._pool.shutdown()
        self._http.close()

    def spot_check(self, target: CausalLM, samples: Sequence[Sample], count: int = 2) -> None:
        """Compare a few documents of every server with a forward here.

        Raises:
            FeatureServerError: names the sample and the tap.
        """
        chosen = [samples[index * len(samples) // count] for index in range(min(count, len(samples)))]
        for url in self._urls:
            for captured in capture(target, chosen, self.taps, batch_tokens=1, wants_top1=lambda _: False):
                ((features, _),) = self._patiently([url], partial(self._fetch, samples=[captured.sample]))
                for tap, expected in captured.features.items():
                    off = difference(features[tap], expected)
                    if off > TOLERANCE:
                        raise FeatureServerError(
                            f"the rows of tap {tap} for sample {captured.sample.id} differ from the target's by "
                            f"{off:.0%}",
                            where=url,
                            remedy="the server must run the recipe's target, without prefix caching",
                        )

    def _deal(self, samples: list[Sample]) -> list[list[Sample]]:
        """Shares of similar size, one a server, or more where a request would become too large."""
        total = sum(len(sample.ids) for sample in samples)
        limit = min(self._request_tokens, -(-total // len(self._urls)))
        shares: list[list[Sample]] = []
        size = limit
        for sample in samples:
            if size + len(sample.ids) > limit:
                shares.append([])
                size = 0
            shares[-1].append(sample)
            size += len(sample.ids)
        return shares

    def _ask(self, number: int, samples: list[Sample]) -> Documents:
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
                except _Busy:
                    continue
                except _Lost as error:
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
                    self._say(f"waiting for a feature server at {', '.join(urls)}: {reasons}")
                    reminded = time.monotonic()
            (self._closed if self._hurry.is_set() else self._hurry).wait(pause * random.uniform(0.5, 1.0))
            if self._closed.is_set():
                raise FeatureServerError("training ended while a server was waited for", where=", ".join(urls))
            if len(lost) == len(urls) and self._hurry.is_set():
                raise _GivenUp
            pause = min(2 * pause, _BACKOFF_S[1] if lost else 1.0)

    def _describe(self, url: str) -> dict[str, Any]:
        found: dict[str, Any] = self._checked(url, self._call("GET", url + TARGET_PATH)).json()
        if found.get("protocol") != PROTOCOL:
            raise FeatureServerError(f"speaks protocol {found.get('protocol')}, not {PROTOCOL}", where=url)
        theirs = TargetIdentity.from_dict(found["target"])
        differing = [name for name in self._identity.differences(theirs) if name != "template_hash"]
        if found["dtype"] != self._dtype:
            differing.append(f"dtype ({found['dtype']}, here {self._dtype})")
        if differing:
            raise FeatureServerError(
                f"runs another target than the recipe's; what differs: {', '.join(differing)}",
                where=url,
                remedy="start it with this recipe: drafttrain features serve RECIPE",
            )
        return found

    def _fetch(self, url: str, samples: list[Sample]) -> Documents:
        request = FeatureRequest(
            samples, self.taps, [self._want_top1 and sample.id not in self._known for sample in samples]
        )
        reply = self._checked(url, self._call("POST", url + FEATURES_PATH, request.pack()))
        try:
            answer = FeatureAnswer.unpack(reply.content)
        except ValueError as error:
            raise FeatureServerError(f"an answer that cannot be read: {error}", where=url) from None
        if answer.weights_hash != self._identity.weights_hash:
            raise FeatureServerError(
                "was started again with another target", where=url, remedy="start it with this recipe"
            )
        return _documents(url, request, answer)

    def _call(self, method: str, url: str, body: bytes | None = None) -> httpx.Response:
        try:
            return self._http.request(method, url, content=body)
        except httpx.TransportError as error:
            raise _Lost(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__) from None

    def _checked(self, url: str, reply: httpx.Response) -> httpx.Response:
        if reply.status_code == 200:
            return reply
        try:
            said = reply.json()
            what, where, remedy = str(said["error"]), said.get("where"), said.get("remedy")
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            what, where, remedy = reply.text[:200], None, None
        if reply.status_code == 503:
            raise _Busy
        if reply.status_code >= 500:
            raise _Lost(f"status {reply.status_code}: {what}")
        if reply.status_code == 401:
            raise FeatureServerError(what, where=url, remedy="give the server's own token: see features.token_file")
        if reply.status_code == 422:
            raise DataError(what, where=where, remedy=remedy)
        raise FeatureServerError(f"refuses the request with status {reply.status_code}: {what}", where=url)


def _documents(url: str, request: FeatureRequest, answer: FeatureAnswer) -> Documents:
    """The answer cut into documents. Refuses other taps, and another number of rows than of tokens."""
    if set(answer.features) != set(request.taps):
        raise FeatureServerError("gave other taps than were asked for", where=url)
    lengths = [len(sample.ids) for sample in request.samples]
    columns = [(str(tap), value) for tap, value in answer.features.items()]
    for name, value in (*columns, ("top1", answer.top1)):
        if len(value) != request.tokens:
            raise DataError(
                f"{name} has {len(value)} rows for {request.tokens} tokens",
                where=f"{url}, samples {', '.join(sample.id for sample in request.samples[:8])}",
                remedy="a feature server must not cache prefixes or split prefills",
            )
    parts = {tap: value.split(lengths) for tap, value in answer.features.items()}
    found: Documents = []
    for at, (sample, top1) in enumerate(zip(request.samples, answer.top1.split(lengths), strict=True)):
        features = {tap: part[at] for tap, part in parts.items()}
        check_features(sample, features)
        found.append((features, top1))
    return found
