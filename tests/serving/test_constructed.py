"""Drafts of every family whose acceptance is known in advance: a real vLLM counts what was worked out by hand.

Run with `python -m pytest tests/serving/test_constructed.py -m serving`. Here the bundled engine is no witness: what it
counts of the same drafts is checked without a server, in tests/unit/export/test_constructed.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from drafttrain.export.prove.environment import ServerEnvironment
from drafttrain.export.prove.prove import check_export, server_runs, speculative_config
from drafttrain.export.prove.server import PLAIN, ServerError, ServerRun
from tests.serving.cases import K, exported
from tests.serving.constructed import CONFIGS, COUNTS, NEW, OUTPUTS, RULES, STOP, constructed, counting_target

pytestmark = [pytest.mark.serving, pytest.mark.timeout(3600)]

CASES = [(name, rule) for name in CONFIGS for rule in RULES]


@pytest.fixture(scope="module")
def runs(
    environment: ServerEnvironment, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, ServerRun | ServerError]:
    """One start of the server for all of them."""
    folder = tmp_path_factory.mktemp("constructed")
    model = counting_target(folder / "target")
    jobs: dict[str, dict[str, Any] | None] = {PLAIN: None}
    for name, rule in CASES:
        run = folder / f"{name}-{rule}"
        export = exported(constructed(name, RULES[rule], model.target), model, run)
        jobs[run.name] = speculative_config(check_export(export, run), export, K)
    return server_runs(
        environment, model.target, model.folder, model.prompts, jobs, k=K, max_new_tokens=NEW, stop_ids={STOP}
    )


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_the_server_counts_what_was_worked_out(name: str, rule: str, runs: dict[str, ServerRun | ServerError]) -> None:
    """All accepted, none, and every other one."""
    plain, found = runs[PLAIN], runs[f"{name}-{rule}"]
    assert isinstance(plain, ServerRun) and isinstance(found, ServerRun), found
    assert found.outputs == plain.outputs == OUTPUTS
    assert found.counters == COUNTS[rule]
