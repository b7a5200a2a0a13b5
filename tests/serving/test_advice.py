"""vLLM reads the advised schedule as it was meant: its own parser, of its own installation."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace

import pytest

from drafttrain.bench.advice import advise, vllm_config
from drafttrain.export.prove.environment import ServerEnvironment
from tests.unit.bench.conftest import TWO, simulate

pytestmark = [pytest.mark.serving, pytest.mark.timeout(600)]

# The file alone: importing the package would take a minute.
_READ = """
import importlib.util, json, pathlib, sys
root = pathlib.Path(importlib.util.find_spec("vllm").origin).parent
spec = importlib.util.spec_from_file_location("schedule", root / "v1/spec_decode/dynamic/utils.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
config = json.loads(sys.argv[1])
ranges = config["num_speculative_tokens_per_batch_size"]
print(json.dumps(module.build_dynamic_sd_schedule_lookup(ranges, 16, config["num_speculative_tokens"])))
"""


def test_each_batch_size_drafts_what_was_advised(environment: ServerEnvironment) -> None:
    advice = replace(advise(simulate(settings=TWO[:1])), chains=[(1, 2, 4), (3, 5, 2), (6, 8, 0)])
    config = vllm_config(advice, "eagle3", "draft")
    done = subprocess.run(
        [str(environment.python), "-c", _READ, json.dumps(config)], capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout)[1:] == [4, 4, 2, 2, 2, 0, 0, 0] + [0] * 8
