"""Medusa heads: independent weights, identity at the start, heads of their own."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.medusa.model import MedusaDrafter
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap
from tests.draft_support import documents, packed, plain_target
from tests.support import VOCAB, tiny_target


def _heads(config: MedusaConfig, kind: str = "llama") -> tuple[MedusaDrafter, object]:
    target = tiny_target(kind)
    draft = build_drafter(config, target.config)
    init_from_target(draft, target)
    assert isinstance(draft, MedusaDrafter)
    return draft, target


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "granite"])
def test_starts_as_the_target_s_own_next_token(kind: str) -> None:
    draft, target = _heads(MedusaConfig(num_heads=2), kind)
    batch = packed(target, documents(), ())  # type: ignore[arg-type]
    for out in draft.unroll(batch, 2):
        assert torch.equal(out.readout, batch.features[Tap.final])
        expected = target.lm_head(out.readout)  # type: ignore[attr-defined]
        torch.testing.assert_close(draft.head(out.depth)(out.readout), expected)


def test_offsets() -> None:
    draft, target = _heads(MedusaConfig(num_heads=5))
    batch = packed(target, documents(), ())  # type: ignore[arg-type]
    assert [(out.depth, out.offset) for out in draft.unroll(batch, 5)] == [(i, 2 + i) for i in range(5)]
    assert draft.max_depth == 5


def test_blocks_and_heads_share_no_weights() -> None:
    draft, target = _heads(MedusaConfig(num_heads=3, num_layers=2))
    pointers = [weight.data_ptr() for weight in draft.parameters()]
    assert len(set(pointers)) == len(pointers) == 3 * 2 + 3
    batch = packed(target, documents(), ())  # type: ignore[arg-type]
    before = [draft.head(out.depth)(out.readout) for out in draft.unroll(batch, 3)]
    with torch.no_grad():
        draft.get_parameter("blocks.1.layers.0.weight").normal_()
    after = [draft.head(out.depth)(out.readout) for out in draft.unroll(batch, 3)]
    assert [torch.equal(a, b) for a, b in zip(before, after, strict=True)] == [True, False, True]


def test_the_targets_head_may_go_away_once_own_heads_exist() -> None:
    target = plain_target()
    draft = build_drafter(MedusaConfig(num_heads=2), target.config)
    init_from_target(draft, target)
    x = torch.randn(3, 32)
    before = draft.head(1)(x).detach()
    with torch.no_grad():
        target.head().weight.zero_()
    draft.bound = None
    assert torch.equal(draft.head(1)(x), before) and float(before.abs().max()) > 0


def test_heads_on_the_targets_own() -> None:
    draft, target = _heads(MedusaConfig(num_heads=2, head="target"))
    assert set(draft.state_dict()) == {"blocks.0.layers.0.weight", "blocks.1.layers.0.weight"}
    assert draft.head(1).weight.data_ptr() == target.head().weight.data_ptr()  # type: ignore[attr-defined]


def test_names_are_those_that_engines_load() -> None:
    draft, _ = _heads(MedusaConfig(num_heads=2, num_layers=2))
    assert {name: tuple(weight.shape) for name, weight in draft.state_dict().items()} == {
        **{f"blocks.{h}.layers.{i}.weight": (32, 32) for h in range(2) for i in range(2)},
        **{f"lm_heads.{h}.weight": (VOCAB, 32) for h in range(2)},
    }


def test_gradients_reach_every_parameter() -> None:
    draft, target = _heads(MedusaConfig(num_heads=2, num_layers=2))
    batch = packed(target, documents(), ())  # type: ignore[arg-type]
    sum(draft.head(out.depth)(out.readout).pow(2).sum() for out in draft.unroll(batch, 2)).backward()
    assert all(weight.grad is not None and float(weight.grad.abs().max()) > 0 for weight in draft.parameters())


def test_a_smaller_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match="span the target's vocabulary"):
        build_drafter(MedusaConfig(), plain_target().config, VocabMap.from_ids([1, 2], VOCAB))
