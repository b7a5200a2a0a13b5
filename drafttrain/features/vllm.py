"""Features from vLLM servers that hand out hidden states (vLLM 0.32: `extract_hidden_states`); see `vllm_serve`.

A request carries one document: of several, vLLM names the file of the first alone.
"""

from __future__ import annotations

import itertools
import json
import uuid
from pathlib import PurePosixPath
from typing import Any

import httpx
import torch
from torch import Tensor

from drafttrain.corpus.types import Sample
from drafttrain.errors import DataError, FeatureServerError
from drafttrain.features.capture import check_features, top1_of
from drafttrain.features.client import FeatureClient, Fetched, Wanted, refused
from drafttrain.features.config import FeaturesConfig
from drafttrain.features.exchange import Exchange
from drafttrain.features.vllm_serve import served_name, state_ids
from drafttrain.modeling.taps import Tap, vllm_id
from drafttrain.targets.model import TargetModel

_COMPLETIONS = "/v1/completions"
_COMMAND = "start it with the command that `drafttrain features vllm RECIPE` prints"
_NEAR = 0.1
"""How far, as a share of what lies between best and mean logit, roundings may put the server's token behind ours."""


class VllmFeatures(FeatureClient):
    """Asks vLLM servers. They give states up to the last block; final norm and head are applied here.

    Args:
        config: of the recipe.
        token: the servers' API key; None where they have none.
        wanted: features of which target.
        target: its embedding, final norm and head at least.
        model: the target's name in the recipe.
        longest: tokens of the longest document.

    Raises:
        FeatureServerError: see `FeatureClient`; also no folder for the states.
    """

    door = "/v1/models"

    def __init__(
        self,
        config: FeaturesConfig,
        token: str | None,
        wanted: Wanted,
        *,
        target: TargetModel,
        model: str,
        longest: int,
    ) -> None:
        self._target, self._longest = target, longest
        n_layers = wanted.identity.n_layers
        self._ids = state_ids(wanted.spec, n_layers)
        given = {*wanted.spec.taps, Tap.pre_norm} - {Tap.final}
        self._columns = {tap: self._ids.index(vllm_id(tap, n_layers)) for tap in given}
        self._name = served_name(model, self._ids)
        self._prefix, self._numbers = f"drafttrain-{uuid.uuid4().hex}", itertools.count()
        super().__init__(config, token, wanted, requests=config.concurrency)
        assert config.exchange is not None  # of the config's own checks
        self._exchange = Exchange(config.exchange, config.timeout_s, self._closed)

    def close(self) -> None:
        """See `FeatureSource`. Answers that nobody took are removed."""
        super().close()
        self._exchange.sweep(self._prefix)

    @staticmethod
    def _base(url: str) -> str:
        return FeatureClient._base(url).removesuffix("/v1")

    def _greet(self, url: str) -> None:
        listed = self._checked(url, self._call("GET", url + self.door))
        try:
            served = {str(card["id"]): card.get("max_model_len") for card in listed["data"]}
        except (KeyError, TypeError, AttributeError):
            raise FeatureServerError("lists no models: is it vLLM?", where=url, remedy=_COMMAND) from None
        if self._name not in served:
            raise FeatureServerError(
                f"serves {', '.join(served) or 'nothing'}, not {self._name}: the states of other layers, or of "
                "another model",
                where=url,
                remedy=_COMMAND,
            )
        length = served[self._name]
        if length is not None and int(length) <= self._longest:
            raise FeatureServerError(
                f"its max_model_len is {length}; the longest document has {self._longest} tokens, and each needs one "
                "more",
                where=url,
                remedy=_COMMAND,
            )

    def _deal(self, samples: list[Sample]) -> list[list[Sample]]:
        return [[sample] for sample in samples]

    def _fetch(self, url: str, samples: list[Sample]) -> list[Fetched]:
        (sample,) = samples
        name = f"{self._prefix}-{next(self._numbers)}"
        request = {
            "model": self._name,
            "request_id": name,
            "prompt": sample.ids.tolist(),
            "max_tokens": 1,
            # The target's own next token, whatever its generation config says.
            "temperature": 0.0,
            "repetition_penalty": 1.0,
            "return_token_ids": True,
        }
        said = self._checked(url, self._call("POST", url + _COMPLETIONS, json=request))
        try:
            file = PurePosixPath(said["kv_transfer_params"]["hidden_states_path"]).name
            next_token = int(said["choices"][0]["token_ids"][0])
        except (KeyError, TypeError, IndexError, ValueError):
            raise FeatureServerError(
                "answers without the path of hidden states, or without token ids", where=url, remedy=_COMMAND
            ) from None
        if f"{name}-" not in file or not file.endswith(".safetensors"):
            # It will be removed, so it must be the answer to this request.
            raise FeatureServerError(f"names a file that is not of request {name}: {file}", where=url, remedy=_COMMAND)
        features = self._features(url, sample, self._exchange.take(file))
        return [Fetched(url, features, next_token=next_token)]

    def _features(self, url: str, sample: Sample, given: dict[str, Tensor]) -> dict[Tap, Tensor]:
        """The states of a file by tap, after they were found to be those of this document."""
        where = f"{url}, sample {sample.id}"
        hidden, tokens = given.get("hidden_states"), given.get("token_ids")
        if hidden is None or tokens is None or hidden.dim() != 3 or tokens.dim() != 1:
            what = "a file without hidden_states [L, ids, H] and token_ids [L]"
            raise FeatureServerError(what, where=where, remedy=_COMMAND)
        rows, columns, width = hidden.shape
        size, dtype = self._wanted.identity.hidden_size, str(hidden.dtype).removeprefix("torch.")
        what = ""
        if tokens.tolist() != sample.ids.tolist():
            what = f"gave states of other tokens than were asked for: {len(tokens)} for {len(sample.ids)}"
        elif rows != len(sample.ids):
            what = f"gave {rows} rows for {len(sample.ids)} tokens"
        elif columns != len(self._ids):
            what = f"gave {columns} states a token, not {len(self._ids)} (of the ids {self._ids})"
        elif width != size:
            what = f"gave states of {width} elements, the target's have {size}"
        elif dtype != self._wanted.dtype:
            what = f"gave states in {dtype}, target.dtype is {self._wanted.dtype}"
        if what:
            raise FeatureServerError(what, where=where, remedy=_COMMAND)
        features = {tap: hidden[:, column] for tap, column in self._columns.items()}
        try:
            check_features(sample, features)
        except DataError as error:
            raise FeatureServerError(error.what, where=where, remedy=error.remedy) from None
        return features

    @torch.inference_mode()
    def _complete(self, sample: Sample, fetched: Fetched) -> tuple[dict[Tap, Tensor], Tensor | None]:
        target = self._target
        final = target.final_norm(fetched.features[Tap.pre_norm].to(target.device))
        self._check_next(sample, fetched, target.lm_head(final[-1:])[0].float())
        top1 = top1_of(target, sample, final) if self._lacks_top1(sample) else None
        states = {**fetched.features, Tap.final: final}
        return {tap: states[tap] for tap in self.taps}, top1

    def _check_next(self, sample: Sample, fetched: Fetched, logits: Tensor) -> None:
        """The token that the server would write next must be best here, too, or nearly: then the last row is of this
        document, and the server runs this target."""
        best, token = logits.max(), fetched.next_token
        known = token is not None and 0 <= token < len(logits)
        if known and bool(best - logits[token] <= _NEAR * (best - logits.mean())):
            return
        raise FeatureServerError(
            f"would go on with token {token} after sample {sample.id}, this target's head with {int(logits.argmax())} "
            "on the state that it gave",
            where=fetched.url,
            remedy=f"it runs another target than the recipe's, or gave another state: {_COMMAND}",
        )

    @staticmethod
    def _checked(url: str, reply: httpx.Response) -> dict[str, Any]:
        """The JSON of an answer that is one."""
        try:
            said = reply.json()
        except json.JSONDecodeError:
            said = None
        if reply.status_code != 200:
            error = said.get("error", said) if isinstance(said, dict) else reply.text[:200]
            what = error.get("message", error) if isinstance(error, dict) else error
            raise refused(url, reply.status_code, str(what), _COMMAND)
        if not isinstance(said, dict):
            raise FeatureServerError("an answer that is no JSON object: is it vLLM?", where=url, remedy=_COMMAND)
        return said
