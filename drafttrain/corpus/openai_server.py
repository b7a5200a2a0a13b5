"""Answers from any OpenAI-compatible server: many at a time, with retries."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import httpx

from drafttrain.corpus.answers import Answer, Failure, Question
from drafttrain.corpus.config import AnswersConfig
from drafttrain.corpus.tool_calls import as_sent
from drafttrain.errors import DataError

logger = logging.getLogger(__name__)

_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_MISCONFIGURED = frozenset({401, 403, 404, 405})
_LONGEST_WAIT_S = 60.0


class ServerAnswers:
    """Chat completions over HTTP.

    A request that fails with a passing error (connection, time-out, 429, 5xx) is repeated `retries` times
    with exponential backoff; then its question is a `Failure` and the others go on. An error that every
    request would meet (wrong key, wrong URL, nobody listening) stops the run with a DataError.

    Args:
        template_kwargs: variables of the chat template, such as `enable_thinking`; the server renders the prompts.
        first_wait_s: seconds before the first repetition; doubled each time, with jitter.
    """

    def __init__(
        self, config: AnswersConfig, template_kwargs: dict[str, Any] | None = None, *, first_wait_s: float = 1.0
    ) -> None:
        if config.base_url is None:
            raise DataError("a server needs base_url", where="data.answers")
        self.config = config
        self.base_url = config.base_url.rstrip("/")
        self.template_kwargs = dict(template_kwargs or {})
        self.first_wait_s = first_wait_s
        self._model = config.model

    @property
    def identity(self) -> dict[str, Any]:
        """Model and sampling; not the address: a run can go on with another server of the same model."""
        return {**self.settings, "model": self.model}

    @property
    def settings(self) -> dict[str, Any]:
        """Sampling, and the model if it was named."""
        keys = {"source", "max_new_tokens", "temperature", "top_p", "top_k", "repetition_penalty", "seed"}
        named = {} if self._model is None else {"model": self._model}
        return {**self.config.model_dump(include=keys), "template_kwargs": self.template_kwargs, **named}

    @property
    def model(self) -> str:
        """The configured model name, else the first one the server lists."""
        if self._model is None:
            self._model = asyncio.run(self._first_model())
        return self._model

    def answer(self, questions: Sequence[Question]) -> Iterator[tuple[int, Answer | Failure]]:
        """Yield (index, outcome) as the server answers. Closing the iterator cancels what is under way."""
        model = self.model
        results: queue.Queue[tuple[int, Answer | Failure] | BaseException | None] = queue.Queue()
        loop = asyncio.new_event_loop()
        task = loop.create_task(self._ask_all(questions, model, results))

        def run() -> None:
            outcome: BaseException | None = None
            try:
                loop.run_until_complete(task)
            except BaseExceptionGroup as group:
                outcome = group.exceptions[0]
            except BaseException as error:  # handed to the caller's thread, which raises it
                outcome = error
            finally:
                loop.close()
                results.put(outcome)

        thread = threading.Thread(target=run, name="drafttrain-answers", daemon=True)
        thread.start()
        try:
            while (item := results.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                yield item
        finally:
            with contextlib.suppress(RuntimeError):  # the loop is closed: it has come to its end
                loop.call_soon_threadsafe(task.cancel)
            thread.join()

    def body(self, question: Question, model: str) -> dict[str, Any]:
        """The JSON of one request. Extensions of vLLM and SGLang are sent only where they are switched on."""
        config = self.config
        body: dict[str, Any] = {
            "model": model,
            "messages": [as_sent(message) for message in question.messages],
            "max_tokens": config.max_new_tokens,
            "temperature": config.temperature,
            "top_p": config.top_p,
            "seed": config.seed,
        }
        if question.tools:
            body["tools"] = question.tools
        if config.top_k:
            body["top_k"] = config.top_k
        if config.repetition_penalty != 1.0:
            body["repetition_penalty"] = config.repetition_penalty
        if self.template_kwargs:
            body["chat_template_kwargs"] = self.template_kwargs
        return body

    def _client(self) -> httpx.AsyncClient:
        key = os.environ.get(self.config.api_key_env)
        return httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(self.config.timeout_s, connect=min(self.config.timeout_s, 10.0), pool=None),
            limits=httpx.Limits(max_connections=self.config.concurrency),
        )

    async def _first_model(self) -> str:
        async with self._client() as client:
            outcome = await self._request(client, "GET", "/models", None)
        if isinstance(outcome, Failure):
            raise DataError(f"the server does not list its models: {outcome.reason}", where=self.base_url)
        listed = outcome.get("data")
        if not isinstance(listed, list) or not listed or "id" not in listed[0]:
            raise DataError("the server lists no model", where=self.base_url, remedy="set data.answers.model")
        return str(listed[0]["id"])

    async def _ask_all(self, questions: Sequence[Question], model: str, results: queue.Queue[Any]) -> None:
        """Workers that take the next question as soon as they have an answer."""
        waiting = iter(enumerate(questions))
        async with self._client() as client:

            async def work() -> None:
                for index, question in waiting:
                    results.put((index, await self._ask(client, question, model)))

            async with asyncio.TaskGroup() as group:
                for _ in range(min(self.config.concurrency, len(questions))):
                    group.create_task(work())

    async def _ask(self, client: httpx.AsyncClient, question: Question, model: str) -> Answer | Failure:
        outcome = await self._request(client, "POST", "/chat/completions", self.body(question, model))
        if isinstance(outcome, Failure):
            return outcome
        try:
            choice = outcome["choices"][0]
            said = choice["message"]
            message = {"role": "assistant", "content": said.get("content") or ""}
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            return Failure(f"the server's answer is no chat completion ({error!r})")
        if choice.get("finish_reason") == "content_filter":
            return Failure("the server's content filter removed the answer")
        reasoning = said.get("reasoning_content") or said.get("reasoning")
        if reasoning:
            message["reasoning_content"] = reasoning
        if said.get("tool_calls"):
            message["tool_calls"] = said["tool_calls"]
        return Answer(message, finished=choice.get("finish_reason") != "length")

    async def _request(
        self, client: httpx.AsyncClient, method: str, path: str, body: dict[str, Any] | None
    ) -> dict[str, Any] | Failure:
        """One request with its repetitions."""
        reason, unreachable = "", False
        for attempt in range(self.config.retries + 1):
            hint = 0.0
            try:
                response = await client.request(method, self.base_url + path, json=body)
            except httpx.InvalidURL as error:
                raise DataError(f"is no URL: {error}", where=self.base_url) from None
            except httpx.TransportError as error:
                reason = f"{type(error).__name__} {error}".strip()
                unreachable = isinstance(error, httpx.ConnectError | httpx.UnsupportedProtocol)
            else:
                unreachable = False
                if response.is_success:
                    try:
                        parsed = response.json()
                    except ValueError:
                        parsed = None
                    return parsed if isinstance(parsed, dict) else Failure("the server's answer is not JSON")
                reason = f"HTTP {response.status_code}: {response.text[:200].strip()}"
                if response.status_code in _MISCONFIGURED:
                    raise DataError(
                        f"the server refuses {method} {path}: {reason}",
                        where=self.base_url,
                        remedy=f"check base_url, the model's name and the key in ${self.config.api_key_env}",
                    )
                if response.status_code not in _RETRIED:
                    return Failure(reason)
                hint = _retry_after(response)
            if attempt < self.config.retries:
                wait = max(hint, self.first_wait_s * 2**attempt * random.uniform(0.5, 1.0))
                logger.info("%s %s: %s; again in %.1f s", method, path, reason, wait)
                await asyncio.sleep(min(wait, _LONGEST_WAIT_S))
        if unreachable:
            raise DataError(f"no server answers: {reason}", where=self.base_url, remedy="start it, or correct base_url")
        return Failure(f"given up after {self.config.retries + 1} attempts: {reason}")


def _retry_after(response: httpx.Response) -> float:
    try:
        return float(response.headers.get("Retry-After", 0))
    except ValueError:  # the header may also hold a date
        return 0.0
