"""Serving tests start a real server, in an environment of 3.4 GB: they run only where their marker is named."""

from __future__ import annotations

from typing import Any

import pytest

from drafttrain.errors import UserError
from drafttrain.export.prove.environment import ServerEnvironment, vllm_environment

NOTHING = "NOTHING IS PROVEN"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip them unless `-m` names them."""
    if "serving" in str(config.getoption("markexpr")):
        return
    for item in items:
        if item.get_closest_marker("serving"):
            item.add_marker(pytest.mark.skip(reason="starts a real server: run with -m serving"))


@pytest.fixture(scope="session")
def environment() -> ServerEnvironment:
    """vLLM's environment in the cache, made when it is missing."""
    try:
        return vllm_environment()
    except UserError as error:
        pytest.skip(f"{NOTHING}: {error}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Skipping the proof is no proof: say so where nobody can miss it."""
    skipped = terminalreporter.stats.get("skipped", [])
    if any(NOTHING in str(report.longrepr) for report in skipped):
        terminalreporter.write_sep("!", f"{NOTHING}: the server could not be installed", red=True, bold=True)
