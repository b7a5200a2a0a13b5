"""Runs inside the server's own environment: generate with vLLM, with and without speculation.

A script, not a module of the package: nothing of drafttrain can be imported here. Called as

    python -P vllm_worker.py JOB.json FOLDER

JOB holds `engine` (arguments of `vllm.LLM`), `prompts` (token ids), `max_new_tokens`, `stop_ids` and `runs` (name ->
`speculative_config` or null). For each run `FOLDER/<name>.json` is written, with `outputs`, `gaps` and `counters`, or
with `error`; what the server says goes to `FOLDER/<name>.log`.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

_COUNTERS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "proposed",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "per_position",
}


def main() -> None:
    """Import vLLM once, then give each run a child of its own: engines of one process share global state."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    import vllm

    for name, speculative in job["runs"].items():
        child = os.fork()
        if child == 0:
            log = os.open(Path(sys.argv[2]) / f"{name}.log", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            _write(Path(sys.argv[2]) / f"{name}.json", _run(vllm, job, speculative))
            # Not through the interpreter's exit: it would wait for the server's threads.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
        os.waitpid(child, 0)


def _run(vllm: Any, job: dict[str, Any], speculative: dict[str, Any] | None) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        llm = vllm.LLM(**job["engine"], speculative_config=speculative)
        # The gap to the second-best token tells a near-tie from a fault; only the plain output is judged by it.
        params = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=job["max_new_tokens"],
            stop_token_ids=job["stop_ids"],
            ignore_eos=True,  # of what the server finds by itself
            detokenize=False,
            logprobs=2 if speculative is None else None,
        )
        loaded = time.perf_counter()
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        answers = [request.outputs[0] for request in llm.generate(prompts, params, use_tqdm=False)]
        return {
            "vllm": vllm.__version__,
            "outputs": [list(answer.token_ids) for answer in answers],
            "gaps": [_gaps(answer.logprobs) for answer in answers] if speculative is None else None,
            "counters": _counters(llm.get_metrics()) if speculative is not None else None,
            "load_s": loaded - start,
            "generate_s": time.perf_counter() - loaded,
        }
    except Exception as error:
        traceback.print_exc()
        return {"vllm": vllm.__version__, "error": f"{type(error).__name__}: {error}"}


def _gaps(logprobs: Any) -> list[float]:
    """First minus second log-probability at each emitted token: the same as of the logits."""
    gaps = []
    for step in logprobs:
        first, second = sorted((entry.logprob for entry in step.values()), reverse=True)[:2]
        gaps.append(first - second)
    return gaps


def _counters(metrics: Any) -> dict[str, Any]:
    found = {}
    for metric in metrics:
        if metric.name in _COUNTERS:
            found[_COUNTERS[metric.name]] = metric.values if hasattr(metric, "values") else metric.value
    return found


def _write(path: Path, value: dict[str, Any]) -> None:
    part = path.with_suffix(".part")
    part.write_text(json.dumps(value), encoding="utf-8")
    part.replace(path)


if __name__ == "__main__":
    main()
