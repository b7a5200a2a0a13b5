"""Generate in a real server: a subprocess in the server's environment, JSON over files."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafttrain.errors import UserError
from drafttrain.export.prove.environment import ServerEnvironment
from drafttrain.files import read_json, write_json

_WORKER = Path(__file__).with_name("vllm_worker.py")
PLAIN = "plain"
"""Name of the run without speculation."""


class ServerError(UserError):
    """The server could not load or run what it was given."""


@dataclass(frozen=True)
class Counters:
    """What a server counts of speculation, in vLLM's sense.

    Attributes:
        drafts: rounds that checked a draft.
        proposed, accepted: draft tokens. Tokens behind the end of an output count, too.
        per_position: rounds in which depth i (from 0) was accepted.
    """

    drafts: int
    proposed: int
    accepted: int
    per_position: list[int]

    @property
    def mean_length(self) -> float:
        """Tokens a round, the target's own included."""
        return 1 + self.accepted / self.drafts if self.drafts else 1.0


@dataclass(frozen=True)
class ServerRun:
    """Greedy outputs of one run.

    Attributes:
        outputs: token ids, one list a prompt.
        gaps: logit gap between the best and the second-best token at each emitted token; None with speculation.
        counters: None without speculation.
        load_s, generate_s: seconds.
    """

    outputs: list[list[int]]
    gaps: list[list[float]] | None
    counters: Counters | None
    load_s: float
    generate_s: float


def vllm_options(target: str | Path, dtype: str, max_length: int, rows: int) -> dict[str, Any]:
    """Arguments of `vllm.LLM` for small models on a CPU.

    Args:
        target: a transformers checkpoint, or a hub name that is in the cache.
        max_length: prompt plus output of the longest request, in tokens, speculation included.
        rows: requests decoded together.
    """
    return {
        "model": str(target),
        "dtype": dtype,
        "max_model_len": max_length,
        "max_num_seqs": rows,
        "enforce_eager": True,
        "enable_prefix_caching": False,  # each prompt is to be computed
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
        "seed": 0,
    }


def run_vllm(
    environment: ServerEnvironment,
    options: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    runs: Mapping[str, Mapping[str, Any] | None],
    stop_ids: Iterable[int] = (),
    timeout_s: float = 1200,
) -> dict[str, ServerRun | ServerError]:
    """Generate greedily once for each of `runs`.

    Args:
        options: of `vllm_options`.
        prompts: token ids.
        runs: name -> `speculative_config`, or None for plain decoding.
        stop_ids: tokens that end an output and are its last; no others do.
        timeout_s: for each run.

    Returns:
        what came of each run; an error, with the server's own message, where it refused the model or the draft.
    """
    job = {
        "engine": options,
        "prompts": prompts,
        "max_new_tokens": max_new_tokens,
        "stop_ids": sorted(stop_ids),
        "runs": runs,
    }
    with tempfile.TemporaryDirectory(prefix="drafttrain-prove-") as scratch:
        folder, log = Path(scratch), Path(scratch) / "server.log"
        write_json(folder / "job.json", job)
        # -P: the worker's folder is a package's, and its modules must not hide the server's.
        command = [str(environment.python), "-P", str(_WORKER), str(folder / "job.json"), str(folder)]
        ended = _call(command, folder, log, timeout_s * len(runs))
        return {name: _read(name, folder, log, ended) for name in runs}


def _call(command: Sequence[str], folder: Path, log: Path, timeout_s: float) -> str:
    """Run the worker to its end; how it ended, in a word. None of its children outlives this call."""
    with log.open("wb") as file:
        worker = subprocess.Popen(
            command,
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=server_variables(),
            cwd=folder,
            start_new_session=True,
        )
        try:
            worker.wait(timeout_s)
            return "died"
        except subprocess.TimeoutExpired:
            return f"was stopped after {timeout_s:.0f} s"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(worker.pid, signal.SIGKILL)
            worker.wait()


def server_variables() -> dict[str, str]:
    """Environment variables of a process that runs vLLM: offline, and with as many threads as torch has here."""
    threads = str(torch.get_num_threads())
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("PYTHON")},
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",  # a helper of the log-probabilities would be compiled for a minute
        "VLLM_LOGGING_LEVEL": "WARNING",
        "OMP_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
    }


def _tail(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-15:]
    return "\n  ".join(["its last words:", *lines])


def _read(name: str, folder: Path, log: Path, ended: str) -> ServerRun | ServerError:
    path, own_log = folder / f"{name}.json", folder / f"{name}.log"
    if not path.exists():
        return ServerError(f"vLLM {ended} in run {name!r}", remedy=_tail(own_log if own_log.exists() else log))
    raw = read_json(path)
    if "error" in raw:
        return ServerError(f"vLLM failed in run {name!r}: {raw['error']}")
    counters = None if raw["counters"] is None else Counters(**raw["counters"])
    return ServerRun(raw["outputs"], raw["gaps"], counters, raw["load_s"], raw["generate_s"])
