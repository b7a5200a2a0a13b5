"""An HTTP server in this process that says what vLLM with `extract_hidden_states` says, of a tiny target that it runs.

It is not vLLM (that is `tests/serving/test_vllm_states.py`), and no stand-in for the client: real requests, real locks,
real files of real states. `spoil` and its other attributes are faults to put in.
"""

from __future__ import annotations

import fcntl
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.features.vllm_serve import served_name
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import Tap

Answer = dict[str, Any]


class StatesServer(ThreadingHTTPServer):
    """Serves until it is closed.

    Attributes:
        spoil: changes the tensors of a file before it is written.
        spoil_answer: changes the answer that names it.
        delay_s: from the answer to the file.
        write: puts the tensors on disk; the lock is held meanwhile.
        asked: bodies of the requests.
    """

    daemon_threads = True

    def __init__(self, target: CausalLM, folder: Path, ids: tuple[int, ...], model: str, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.target, self.folder, self.ids = target, folder, ids
        self.name, self.max_model_len, self.key = served_name(model, ids), 256, ""
        self.spoil: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda tensors: tensors
        self.spoil_answer: Callable[[Answer], Answer] = lambda answer: answer
        self.write: Callable[[dict[str, Tensor], Path], None] = save_file
        self.delay_s = 0.0
        self.asked: list[Answer] = []
        self.closed = False
        self._forward = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    @torch.inference_mode()
    def states(self, prompt: list[int]) -> tuple[dict[str, Tensor], int]:
        """The file of a prompt, and the token that the target would write next."""
        n = self.target.n_layers
        taps = [Tap.pre_norm if number == n else Tap.block(number) for number in sorted(self.ids)]
        with self._forward:
            output = self.target(torch.tensor([prompt]), taps=taps)
        hidden = torch.stack([output.taps[tap][0] for tap in taps], 1)
        following = int(self.target.lm_head(output.final[0, -1]).argmax())
        return {"hidden_states": hidden, "token_ids": torch.tensor(prompt)}, following

    def answer(self, request: Answer) -> tuple[int, Answer]:
        """Status and body; the file is written after it, under a lock that exists before."""
        if request["model"] != self.name:
            message = f"The model `{request['model']}` does not exist."
            return 404, {"error": {"message": message, "type": "NotFoundError", "code": 404}}
        prompt = request["prompt"]
        if len(prompt) + request["max_tokens"] > self.max_model_len:
            return 400, {"error": {"message": f"This model's maximum context length is {self.max_model_len}"}}
        tensors, following = self.states(prompt)
        path = self.folder / f"cmpl-{request['request_id']}-0-0badcafe.safetensors"
        lock = path.with_name(f"{path.name}.lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        threading.Thread(target=self._write, args=(tensors, path, lock)).start()
        choice = {"index": 0, "text": "", "finish_reason": "length", "token_ids": [following]}
        return 200, {"choices": [choice], "kv_transfer_params": {"hidden_states_path": str(path)}}

    def _write(self, tensors: dict[str, Tensor], path: Path, lock: Any) -> None:
        with lock:
            time.sleep(self.delay_s)
            self.write({name: value.contiguous() for name, value in self.spoil(tensors).items()}, path)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: StatesServer

    def do_GET(self) -> None:
        card = {"id": self.server.name, "object": "model", "max_model_len": self.server.max_model_len}
        self._send(200, {"object": "list", "data": [card]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(request)
        status, said = self.server.answer(request)
        self._send(status, self.server.spoil_answer(said) if status == 200 else said)

    def _send(self, status: int, said: Answer) -> None:
        if self.server.closed:  # connections outlive the loop that accepts them
            self.close_connection = True
            return
        if self.server.key and self.headers.get("Authorization") != f"Bearer {self.server.key}":
            status, said = 401, {"error": "Unauthorized"}
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@contextmanager
def serving(server: StatesServer) -> Iterator[StatesServer]:
    """A server that answers meanwhile."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.closed = True
        server.shutdown()
        server.server_close()
        thread.join(30)
