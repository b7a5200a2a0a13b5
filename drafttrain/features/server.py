"""A feature server: the target on other processes or machines than the draft. See `wire` for what is said.

One thread a connection reads requests into a bounded queue; one thread takes as many as fill a forward of the target,
and answers them together. Whoever finds the queue full is told to come again.
"""

from __future__ import annotations

import errno
import hmac
import json
import queue
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socket import socket
from typing import Any

import torch

from drafttrain.errors import DataError, FeatureServerError, UserError
from drafttrain.features.capture import UNKNOWN, Captured, capture
from drafttrain.features.wire import FEATURES_PATH, PROTOCOL, TARGET_PATH, FeatureAnswer, FeatureRequest
from drafttrain.modeling.taps import FeatureSpec, Tap
from drafttrain.targets.model import TargetModel

_OVERHEAD = 4 << 20  # names, spans and headers of a request beside its tokens, bytes
_IDLE_S = 120.0
_STOPPING = "the server is stopping"


@dataclass(frozen=True)
class ServerLimits:
    """What a server bears.

    Attributes:
        batch_tokens: of one forward, padding included.
        request_tokens: of one request.
        queue: requests that wait.
        connections: open at once.
    """

    batch_tokens: int = 8192
    request_tokens: int = 65536
    queue: int = 16
    connections: int = 128


@dataclass
class _Job:
    """A request, and later its answer or what went wrong."""

    request: FeatureRequest
    done: threading.Event = field(default_factory=threading.Event)
    answer: bytes = b""
    error: UserError | None = None


class FeatureServer:
    """Answers until it is stopped.

    Args:
        target: in the dtype of its features.
        token: that every caller must show.
        host: an address of this machine; loopback unless told otherwise, since nothing is encrypted.
        port: 0 for a free one.
        limits: what it bears.

    Raises:
        FeatureServerError: the port is in use, or the address is none of this machine.
    """

    def __init__(
        self,
        target: TargetModel,
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        limits: ServerLimits | None = None,
    ) -> None:
        self.target, self.token, self.limits = target, token, limits or ServerLimits()
        self.served = 0  # tokens
        self._queue: queue.Queue[_Job | None] = queue.Queue(self.limits.queue)
        self._entrance = threading.Lock()
        self._closed = False
        try:
            self._http = _Http((host, port), self)
        except OSError as error:
            what = "the port is in use" if error.errno == errno.EADDRINUSE else str(error.strerror or error)
            raise FeatureServerError(what, where=f"{host}:{port}", remedy="choose another --port or --host") from None
        self._computing = threading.Thread(target=self._compute, name="features", daemon=True)

    @property
    def url(self) -> str:
        """Where it listens."""
        host, port = self._http.server_address[:2]
        return f"http://{host!s}:{port}"

    def describe(self) -> dict[str, Any]:
        """What a client has to know before it asks."""
        return {
            "protocol": PROTOCOL,
            "target": self.target.identity.to_dict(),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "request_tokens": self.limits.request_tokens,
        }

    def serve(self) -> None:
        """Answer until `stop` is called from another thread; requests that wait then are refused."""
        self._computing.start()
        try:
            self._http.serve_forever(poll_interval=0.2)
        finally:
            with self._entrance:
                # Connections that are open may go on asking.
                self._closed = True
            self._queue.put(None)
            self._computing.join()
            self._http.server_close()

    def stop(self) -> None:
        """End `serve`."""
        self._http.shutdown()

    def check(self, request: FeatureRequest) -> None:
        """Refuse what the target cannot do.

        Raises:
            ValueError: says what.
        """
        FeatureSpec(request.taps).check(self.target.n_layers)
        if request.tokens > self.limits.request_tokens:
            raise ValueError(f"{request.tokens} tokens in one request, {self.limits.request_tokens} are the most")
        for sample in request.samples:
            if int(sample.ids.min()) < 0 or int(sample.ids.max()) >= self.target.identity.vocab_size:
                raise ValueError(f"sample {sample.id} has token ids that the target does not have")
            if len(sample.ids) > self.target.context:
                raise ValueError(
                    f"sample {sample.id} has {len(sample.ids)} tokens, the target's context {self.target.context}"
                )

    def submit(self, request: FeatureRequest) -> _Job | None:
        """Wait for the answer of a request; None if the queue is full."""
        job = _Job(request)
        with self._entrance:
            if self._closed:
                job.error = FeatureServerError(_STOPPING)
                return job
            try:
                self._queue.put_nowait(job)
            except queue.Full:
                return None
        job.done.wait()
        return job

    def _compute(self) -> None:
        while (first := self._queue.get()) is not None:
            jobs, tokens = [first], first.request.tokens
            while tokens < self.limits.batch_tokens:
                try:
                    further = self._queue.get_nowait()
                except queue.Empty:
                    break
                if further is None:
                    self._queue.put(None)
                    break
                jobs.append(further)
                tokens += further.request.tokens
            self._answer(jobs)
        while not self._queue.empty():
            left = self._queue.get()
            if left is not None:
                left.error = FeatureServerError(_STOPPING)
                left.done.set()

    def _answer(self, jobs: list[_Job]) -> None:
        try:
            self._run(jobs)
        except UserError as error:
            if len(jobs) > 1:  # one of them spoilt it
                for job in jobs:
                    self._answer([job])
                return
            jobs[0].error = error
        except Exception as error:  # out of memory, say: the caller has to know, and the next may succeed
            for job in jobs:
                job.error = FeatureServerError(f"{type(error).__name__}: {error}")
        for job in jobs:
            job.done.set()

    def _run(self, jobs: list[_Job]) -> None:
        taps = tuple(dict.fromkeys(tap for job in jobs for tap in job.request.taps))
        top1 = {id(s): flag for job in jobs for s, flag in zip(job.request.samples, job.request.top1, strict=True)}
        samples = [sample for job in jobs for sample in job.request.samples]
        found: dict[int, Captured] = {
            id(captured.sample): captured
            for captured in capture(
                self.target,
                samples,
                taps,
                batch_tokens=self.limits.batch_tokens,
                wants_top1=lambda sample: top1[id(sample)],
            )
        }
        for job in jobs:
            captures = [found[id(sample)] for sample in job.request.samples]
            features: dict[Tap, torch.Tensor] = {
                tap: torch.cat([captured.features[tap] for captured in captures]).cpu() for tap in job.request.taps
            }
            best = [
                torch.full((len(c.sample.ids),), UNKNOWN, dtype=torch.int32)
                if c.top1 is None
                else c.top1.to("cpu", torch.int32)
                for c in captures
            ]
            job.answer = FeatureAnswer(features, torch.cat(best), self.target.identity.weights_hash).pack()
            self.served += job.request.tokens


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], server: FeatureServer) -> None:
        self.features = server
        self._places = threading.BoundedSemaphore(server.limits.connections)
        super().__init__(address, _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection, or its end where there are too many."""
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: socket | tuple[bytes, socket], client_address: Any) -> None:
        """A caller that hung up is no error of the server; others are answered with 500."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = _IDLE_S
    server: _Http
    server_version = "drafttrain"

    def do_GET(self) -> None:
        """The target."""
        if not self._known():
            return
        if self.path != TARGET_PATH:
            self._error(404, "no such path")
            return
        self._send(200, json.dumps(self.server.features.describe()).encode(), "application/json")

    def do_POST(self) -> None:
        """Features."""
        if not self._known():
            return
        if self.path != FEATURES_PATH:
            self._error(404, "no such path")
            return
        server = self.server.features
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            self._error(411, "no Content-Length")
            return
        if int(length) > 4 * server.limits.request_tokens + _OVERHEAD:
            self._error(413, f"{length} bytes in one request")
            return
        try:
            request = FeatureRequest.unpack(self.rfile.read(int(length)))
            server.check(request)
        except ValueError as error:
            self._error(400, str(error))
            return
        job = server.submit(request)
        if job is None:
            self._error(503, "the queue is full")
        elif isinstance(job.error, DataError):
            self._error(422, job.error.what, where=job.error.where, remedy=job.error.remedy)
        elif job.error is not None:
            self._error(500, str(job.error))
        else:
            self._send(200, job.answer, "application/octet-stream")

    def _known(self) -> bool:
        shown = self.headers.get("Authorization", "").encode()
        if hmac.compare_digest(shown, f"Bearer {self.server.features.token}".encode()):
            return True
        self._error(401, "wrong or missing token")
        return False

    def _error(self, status: int, error: str, **more: str | None) -> None:
        # What was not read of the request would be taken for the next one.
        self.close_connection = True
        self._send(status, json.dumps({"error": error, **more}).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Callers see their errors; a line a request would drown the rest."""
