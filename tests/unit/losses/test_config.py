from __future__ import annotations

from math import exp

import pytest
from pydantic import ValidationError

from drafttrain.losses.config import LossConfig


def test_terms_from_a_recipe() -> None:
    config = LossConfig.model_validate({"terms": [{"name": "smooth_l1"}, {"name": "lk", "weight": 0.1, "eta": 2.0}]})
    assert [(t.name, t.weight) for t in config.terms] == [("smooth_l1", 1.0), ("lk", 0.1)]
    assert LossConfig.model_validate(config.model_dump()) == config


def test_depth_weights() -> None:
    assert [LossConfig(decay=0.5).depth_weight(k) for k in range(3)] == [1.0, 0.5, 0.25]
    assert LossConfig(depth_decay="exponential", decay=4.0).depth_weight(2) == pytest.approx(exp(-0.5))


@pytest.mark.parametrize(
    "bad",
    [
        {"terms": []},
        {"terms": [{"name": "ce"}, {"name": "ce"}]},
        {"terms": [{"name": "ce", "beta": 0.5}]},  # an option of another term is not ignored
        {"terms": [{"name": "cross_entropy"}]},
        {"terms": [{"name": "tv", "weight": -1.0}]},
        {"decay": 1.5},
        {"decay": 0.0},
        {"chunk_rows": 0},
        {"unknown": 1},
    ],
    ids=str,
)
def test_refuses(bad: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LossConfig.model_validate(bad)
