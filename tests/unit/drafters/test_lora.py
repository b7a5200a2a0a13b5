from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.lora import adapters, add_lora, merged
from drafttrain.drafters.lora_config import LoraConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.training.adapter import save_adapter
from drafttrain.training.strategies.base import kept_tensors, trainable
from tests.draft_support import documents, packed
from tests.support import tiny_target

LORA = LoraConfig(rank=4, alpha=8.0)
FAMILIES: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(taps=(0, 2, 3), depth=2, init_layer="target:last"),
    "eagle1": Eagle1Config(feature_noise=0.0),
    "draft_lm": DraftLMConfig(layers=(0, 3)),
}


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return tiny_target()


def drafts(target: CausalLM, family: str) -> tuple[Drafter, Drafter]:
    """A draft without and one with adapters, on the same weights."""
    torch.manual_seed(0)
    plain = build_drafter(FAMILIES[family], target.config)
    init_from_target(plain, target)
    adapted = copy.deepcopy(plain)
    adapted.bound = plain.bound
    add_lora(adapted, LORA)
    return plain, adapted


def logits(draft: Drafter, target: CausalLM) -> torch.Tensor:
    batch = packed(target, documents(), draft.feature_spec.taps)
    outputs = draft.unroll(batch, min(2, draft.max_depth))
    return torch.stack([draft.head(output.depth)(output.readout) for output in outputs])


def disturb(draft: Drafter) -> None:
    with torch.no_grad():
        for _, adapter in adapters(draft):
            adapter.lora_B.normal_(std=0.2)


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_start_at_nothing_and_are_all_that_is_trained(target: CausalLM, family: str) -> None:
    plain, adapted = drafts(target, family)
    torch.testing.assert_close(logits(adapted, target), logits(plain, target))
    names = [name for name, _ in trainable(adapted)]
    assert names and all(name.rpartition(".")[2] in ("lora_A", "lora_B") for name in names)
    assert set(kept_tensors(adapted)) - {"d2t", "t2d"} == set(names)
    logits(adapted, target).square().sum().backward()
    assert all(p.grad is None for n, p in adapted.named_parameters() if n not in names)
    assert all(bool(a.lora_B.grad is not None and a.lora_B.grad.abs().sum() > 0) for _, a in adapters(adapted))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_merged_draft_says_what_the_adapted_one_says(target: CausalLM, family: str) -> None:
    plain, adapted = drafts(target, family)
    disturb(adapted)
    expected = logits(adapted, target)
    assert not torch.allclose(expected, logits(plain, target), atol=1e-3)
    plain.load_state_dict(merged(adapted, adapted.state_dict()))
    torch.testing.assert_close(logits(plain, target), expected)


def test_a_layer_that_is_not_there_is_named(target: CausalLM) -> None:
    plain, _ = drafts(target, "eagle3")
    with pytest.raises(ValueError, match=r"has no qkv_proj; it has down_proj, fc"):
        add_lora(plain, LoraConfig(modules=("q_proj", "qkv_proj")))


def test_an_eagle_draft_is_adapted_only_when_it_was_trained() -> None:
    with pytest.raises(ValueError, match="warm_start"):
        Eagle3Config(lora=LORA)


@pytest.mark.parametrize("family", ["eagle3", "draft_lm"])
def test_peft_reads_the_saved_adapter(target: CausalLM, tmp_path: Path, family: str) -> None:
    peft = pytest.importorskip("peft")
    plain, adapted = drafts(target, family)
    disturb(adapted)
    state = {name: value.detach() for name, value in trainable(adapted)}
    save_adapter(tmp_path / "adapter", adapted, LORA, state, "base")
    described = peft.PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    assert (described.r, described.lora_alpha) == (LORA.rank, LORA.alpha)
    if family == "draft_lm":
        ids = torch.arange(3, 12)[None]
        expected = adapted.lm.hf(input_ids=ids).logits
        loaded = peft.PeftModel.from_pretrained(plain.lm.hf, str(tmp_path / "adapter"))
        torch.testing.assert_close(loaded(input_ids=ids).logits, expected)
