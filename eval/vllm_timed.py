"""Plain greedy decoding in vLLM, on demand: run by `eval/decode_speed.py` in vLLM's own environment.

    python -P vllm_timed.py '{"model": ...}'          # arguments of `vllm.LLM`

Each line of input, `{"prompts": [[ids]], "tokens": n}`, is answered by one line, `{"seconds": s, "outputs": [[ids]]}`.
The first line of output is `{"vllm": version}`, once the model is loaded.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any


def main() -> None:
    """Serve until the input ends."""
    # What the server prints must not come between the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    import vllm

    llm = vllm.LLM(**json.loads(sys.argv[1]))

    def say(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=answers, flush=True)

    say({"vllm": vllm.__version__})
    for line in sys.stdin:
        job = json.loads(line)
        params = vllm.SamplingParams(temperature=0.0, max_tokens=job["tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        start = time.perf_counter()
        done = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        say({"seconds": seconds, "outputs": [list(request.outputs[0].token_ids) for request in done]})


if __name__ == "__main__":
    main()
