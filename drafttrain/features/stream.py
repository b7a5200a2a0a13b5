"""Features from our own servers; see `server` and `wire`."""

from __future__ import annotations

import json
from typing import Any

import httpx

from drafttrain.corpus.types import Sample
from drafttrain.errors import DataError, FeatureServerError
from drafttrain.features.capture import check_features
from drafttrain.features.client import Busy, FeatureClient, Fetched, refused
from drafttrain.features.wire import FEATURES_PATH, PROTOCOL, TARGET_PATH, FeatureAnswer, FeatureRequest
from drafttrain.targets.identity import TargetIdentity


class StreamedFeatures(FeatureClient):
    """Asks servers that `drafttrain features serve` started; a request carries several documents."""

    door = TARGET_PATH
    _request_tokens = 2**62
    """Of the largest request that every server takes; each says so when it is greeted."""

    def _greet(self, url: str) -> None:
        found: dict[str, Any] = self._checked(url, self._call("GET", url + self.door)).json()
        if found.get("protocol") != PROTOCOL:
            raise FeatureServerError(f"speaks protocol {found.get('protocol')}, not {PROTOCOL}", where=url)
        theirs, wanted = TargetIdentity.from_dict(found["target"]), self._wanted
        differing = [name for name in wanted.identity.differences(theirs) if name != "template_hash"]
        if found["dtype"] != wanted.dtype:
            differing.append(f"dtype ({found['dtype']}, here {wanted.dtype})")
        if differing:
            raise FeatureServerError(
                f"runs another target than the recipe's; what differs: {', '.join(differing)}",
                where=url,
                remedy=f"start it with this recipe: drafttrain features serve RECIPE target.dtype={wanted.dtype}",
            )
        self._request_tokens = min(self._request_tokens, int(found["request_tokens"]))

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

    def _fetch(self, url: str, samples: list[Sample]) -> list[Fetched]:
        request = FeatureRequest(samples, self.taps, [self._lacks_top1(sample) for sample in samples])
        reply = self._checked(url, self._call("POST", url + FEATURES_PATH, content=request.pack()))
        try:
            answer = FeatureAnswer.unpack(reply.content)
        except ValueError as error:
            raise FeatureServerError(f"an answer that cannot be read: {error}", where=url) from None
        if answer.weights_hash != self._wanted.identity.weights_hash:
            raise FeatureServerError(
                "was started again with another target", where=url, remedy="start it with this recipe"
            )
        return _documents(url, request, answer)

    @staticmethod
    def _checked(url: str, reply: httpx.Response) -> httpx.Response:
        if reply.status_code == 200:
            return reply
        try:
            said = reply.json()
            what, where, remedy = str(said["error"]), said.get("where"), said.get("remedy")
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError):
            what, where, remedy = reply.text[:200], None, None
        if reply.status_code == 503:
            raise Busy
        if reply.status_code == 422:
            raise DataError(what, where=where, remedy=remedy)
        raise refused(url, reply.status_code, what)


def _documents(url: str, request: FeatureRequest, answer: FeatureAnswer) -> list[Fetched]:
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
    found: list[Fetched] = []
    for at, (sample, top1) in enumerate(zip(request.samples, answer.top1.split(lengths), strict=True)):
        features = {tap: part[at] for tap, part in parts.items()}
        check_features(sample, features)
        found.append(Fetched(url, features, top1))
    return found
