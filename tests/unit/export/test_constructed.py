"""The drafts that tests/serving gives to a real server: the bundled engine, too, counts what was worked out by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from drafttrain.export.prove.prove import bundled_run, check_export
from tests.serving.cases import K, Tiny, exported
from tests.serving.constructed import CONFIGS, COUNTS, NEW, OUTPUTS, RULES, STOP, constructed, counting_target


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return counting_target(tmp_path_factory.mktemp("counting") / "target")


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("rule", RULES)
def test_the_bundled_engine_counts_what_was_worked_out(name: str, rule: str, model: Tiny, tmp_path: Path) -> None:
    draft = constructed(name, RULES[rule], model.target)
    export = exported(draft, model, tmp_path)
    ir = check_export(export, tmp_path)
    found = bundled_run(ir, tmp_path, model.target, model.prompts, k=K, max_new_tokens=NEW, stop_ids={STOP})
    assert found.outputs == OUTPUTS
    assert found.counters == COUNTS[rule]
