"""A draft trained further over a larger vocabulary."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import ValidationError

from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.eagle.eagle3 import Eagle3Drafter
from drafttrain.drafters.eagle.widen import widen_vocab
from drafttrain.drafters.saving import draft_shape, save_draft, warm_start
from drafttrain.errors import CheckpointError
from drafttrain.modeling.vocab_map import VocabMap
from tests.draft_support import new_draft, plain_target
from tests.unit.drafters.test_saving import TARGET

VOCAB = TARGET["vocab_size"]
NARROW = VocabMap.from_ids(range(1, 60, 2), VOCAB)
WIDE = VocabMap.from_ids(range(1, 61), VOCAB)
CONFIG = Eagle3Config(draft_vocab_size=30)


def _trained() -> Eagle3Drafter:
    drafter = new_draft(CONFIG, plain_target(), 0, NARROW)
    assert isinstance(drafter, Eagle3Drafter)
    torch.nn.init.normal_(drafter.lm_head.weight)
    return drafter


def test_old_tokens_keep_their_rows_and_new_ones_get_the_targets() -> None:
    drafter, head = _trained(), plain_target().head()
    wide = widen_vocab(drafter, WIDE, head)
    assert wide.vocab_map == WIDE and wide.training == drafter.training
    own = WIDE.to_draft[NARROW.target_ids]
    assert torch.equal(wide.lm_head.weight[own], drafter.lm_head.weight)
    new = [i for i in range(WIDE.size) if i not in set(own.tolist())]
    assert torch.equal(wide.lm_head.weight[new], head.weight[WIDE.target_ids[new]].float())
    for name, value in drafter.state_dict().items():
        if name not in ("lm_head.weight", "d2t", "t2d"):
            assert torch.equal(wide.state_dict()[name], value), name


def test_a_vocabulary_that_lacks_a_known_token_is_refused() -> None:
    with pytest.raises(ValueError, match="lacks tokens of the saved one"):
        widen_vocab(_trained(), VocabMap.from_ids(range(2, 61), VOCAB), plain_target().head())


def test_a_warm_start_may_ask_for_more_words_only_where_it_says_so(tmp_path: Path) -> None:
    """Case 12 of docs/cases.md."""
    save_draft(tmp_path / "d", _trained(), target=TARGET)
    more = {"draft_vocab_size": 60, "warm_start": str(tmp_path / "d")}
    with pytest.raises(CheckpointError, match="draft_vocab_size is 60, saved 30"):
        warm_start(CONFIG.model_copy(update=more), tmp_path / "d")
    started, _ = warm_start(CONFIG.model_copy(update=more | {"widen_vocab": True}), tmp_path / "d")
    assert started.vocab_map == NARROW
    # Of its shape the wider one is asked for.
    for config, size in ((CONFIG, 30), (CONFIG.model_copy(update=more | {"widen_vocab": True}), 60)):
        shape = draft_shape(config, tmp_path / "d")
        assert shape is not None and shape.vocab_map.size == shape.head(0).weight.shape[0] == size
    with pytest.raises(CheckpointError, match="draft_vocab_size is 20, saved 30"):
        fewer = {"draft_vocab_size": 20, "widen_vocab": True}
        warm_start(CONFIG.model_copy(update=more | fewer), tmp_path / "d")


@pytest.mark.parametrize("lacking", ["warm_start", "draft_vocab_size"])
def test_widening_needs_a_draft_and_a_size(lacking: str) -> None:
    given = {"warm_start": "somewhere", "draft_vocab_size": 60, "widen_vocab": True}
    with pytest.raises(ValidationError, match="widen_vocab needs warm_start"):
        Eagle3Config.model_validate({key: value for key, value in given.items() if key != lacking})
