"""Draft language models: where their weights come from, and that they stay ordinary checkpoints."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM

from drafttrain.drafters.base import DraftBatch
from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.lm.model import DraftLM
from drafttrain.errors import TargetError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.course import Course
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap
from tests.architectures import odd_hf
from tests.draft_support import documents, packed
from tests.memory_worker import peak_of
from tests.support import VOCAB, tiny_hf, tiny_target

KINDS = ["llama", "llama-tied", "qwen2-window", "gemma3", "phi3"]


def _draft(config: DraftLMConfig, target: CausalLM) -> DraftLM:
    draft = build_drafter(config, target.config)
    init_from_target(draft, target)
    assert isinstance(draft, DraftLM)
    return draft


@pytest.mark.parametrize("kind", KINDS)
def test_all_blocks_of_the_target_are_the_target(kind: str) -> None:
    target = tiny_target(kind)
    draft = _draft(DraftLMConfig(layers=(0, 1, 2, 3)), target).eval()
    ids = torch.randint(0, VOCAB, (2, 9))
    with torch.no_grad():
        torch.testing.assert_close(draft.lm(ids).final, target(ids).final)
        torch.testing.assert_close(draft.head(0)(draft.lm(ids).final), target.lm_head(target(ids).final))


def test_chosen_blocks_are_taken_in_order() -> None:
    target = tiny_target("llama")
    draft = _draft(DraftLMConfig(layers=(1, 3)), target)
    for ours, theirs in ((0, 1), (1, 3)):
        mine = draft.lm.layers[ours].state_dict()
        assert all(torch.equal(mine[k], v) for k, v in target.layers[theirs].state_dict().items())


def test_layer_types_follow_the_chosen_blocks() -> None:
    target = tiny_target("gemma3", layer_types=["sliding_attention"] * 3 + ["full_attention"])
    draft = build_drafter(DraftLMConfig(layers=(0, 3)), target.config)
    assert isinstance(draft, DraftLM)
    assert draft.lm.config.layer_types == ["sliding_attention", "full_attention"]


@pytest.mark.parametrize("name", ["smollm3-nope", "deepseek-v3", "qwen2-moe", "cohere2-nope", "phi3-window"])
def test_what_a_config_says_of_each_block_follows_it(name: str) -> None:
    """Whether it rotates, has experts or a window: the draft is the target without the blocks that are left out."""
    target = CausalLM(odd_hf(name))
    draft = _draft(DraftLMConfig(layers=(1, 2, 3)), target).eval()
    ids = torch.randint(3, VOCAB, (1, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        embedded = target(ids, taps=[Tap.block(0)]).taps[Tap.block(0)]
        wanted = target(ids, course=Course(first=1), states=embedded).final
        torch.testing.assert_close(draft.lm(ids).final, wanted, atol=1e-4, rtol=1e-4)


def test_default_blocks_are_spread() -> None:
    assert DraftLMConfig().layers_for(30) == (0, 10, 19, 29)
    assert DraftLMConfig().layers_for(2) == (0, 1)


def test_from_scratch_has_the_sizes_asked_for() -> None:
    target = tiny_target("llama")
    config = DraftLMConfig(
        init="scratch", hidden_size=16, num_heads=2, num_kv_heads=1, num_layers=2, intermediate_size=20
    )
    draft = _draft(config, target)
    shapes = {name: tuple(weight.shape) for name, weight in draft.saved_names(draft.state_dict()).items()}
    assert shapes["model.layers.1.self_attn.k_proj.weight"] == (8, 16)
    assert shapes["model.layers.1.mlp.up_proj.weight"] == (20, 16)
    assert "model.layers.2.mlp.up_proj.weight" not in shapes
    assert draft.lm.config.max_position_embeddings == target.config.max_position_embeddings


def test_from_another_checkpoint(tmp_path: Path) -> None:
    other = tiny_hf("qwen2", seed=5)
    other.save_pretrained(tmp_path / "other")
    target = tiny_target("llama")
    draft = _draft(DraftLMConfig(init="checkpoint", checkpoint=str(tmp_path / "other")), target).eval()
    ids = torch.randint(0, VOCAB, (1, 7))
    with torch.no_grad():
        torch.testing.assert_close(draft.head(0)(draft.lm(ids).final), other(ids).logits)


def test_a_checkpoint_with_another_vocabulary_or_none_at_all_is_refused(tmp_path: Path) -> None:
    tiny_hf("llama", vocab_size=50).save_pretrained(tmp_path / "other")
    text = tiny_target("llama").config
    with pytest.raises(TargetError, match="50 tokens, the target 61"):
        build_drafter(DraftLMConfig(init="checkpoint", checkpoint=str(tmp_path / "other")), text)
    with pytest.raises(TargetError, match="no model can be loaded"):
        build_drafter(DraftLMConfig(init="checkpoint", checkpoint=str(tmp_path / "none")), text)


def test_a_pickled_checkpoint_is_not_read(tmp_path: Path) -> None:
    model = tiny_hf("llama")
    model.config.save_pretrained(tmp_path)
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    config = DraftLMConfig(init="checkpoint", checkpoint=str(tmp_path))
    with pytest.raises(TargetError, match="safetensors"):
        _draft(config, tiny_target("llama"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_is_an_ordinary_checkpoint(kind: str) -> None:
    target = tiny_target(kind)
    draft = _draft(DraftLMConfig(layers=(0, 3)), target).eval()
    plain = AutoModelForCausalLM.from_config(deepcopy(draft.lm.config), attn_implementation="eager").eval()
    plain.load_state_dict(draft.saved_names(draft.state_dict()))
    ids = torch.randint(0, VOCAB, (1, 7))
    with torch.no_grad():
        torch.testing.assert_close(draft.head(0)(draft.lm(ids).final), plain(ids).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", [*KINDS, "mistral-window", "gemma2"])
def test_packing_equals_rows_alone_and_padding_gets_no_gradient(kind: str) -> None:
    target = tiny_target(kind)
    draft = _draft(DraftLMConfig(layers=(0, 3)), target).train()
    docs = documents()
    batch = packed(target, docs, ())
    (out,) = draft.unroll(batch, 1)
    for row, parts in enumerate(docs):
        start = 0
        for ids in parts:
            alone = draft.lm(ids[None]).final[0]
            torch.testing.assert_close(out.readout[row, start : start + len(ids)], alone, rtol=1e-4, atol=1e-4)
            start += len(ids)
    out.readout[batch.segments >= 0].sum().backward()
    assert all(weight.grad is None or bool(weight.grad.isfinite().all()) for weight in draft.parameters())


def test_memory_grows_with_the_slots_of_a_row_and_not_with_their_pairs() -> None:
    """8 times the slots; what is more than linear would be 64 times as much."""
    draft = _draft(DraftLMConfig(layers=(0, 3)), tiny_target("llama", max_position_embeddings=4096)).train()
    peaks = {}
    for length in (64, 512, 4096):  # the first warms up what is allocated once
        segments = torch.arange(4).repeat_interleave(length // 4)[None]
        positions = torch.arange(length // 4).repeat(4)[None]
        batch = DraftBatch(torch.randint(0, VOCAB, (1, length)), positions, segments, torch.zeros_like(segments), {})
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            (out,) = draft.unroll(batch, 1)
            out.readout.pow(2).sum().backward()
        peaks[length] = peak_of(profiler)
        del out
        draft.zero_grad()
    print({length: f"{peak / 2**20:.2f} MiB" for length, peak in peaks.items()})
    assert peaks[4096] <= 9 * peaks[512]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_gradient_checkpointing_changes_nothing(kind: str) -> None:
    target = tiny_target(kind)
    draft = _draft(DraftLMConfig(layers=(0, 3)), target).train()
    batch = packed(target, documents(), ())
    results: list[list[Any]] = []
    for on in (False, True):
        draft.gradient_checkpointing = on
        draft.zero_grad()
        (out,) = draft.unroll(batch, 1)
        draft.head(0)(out.readout[batch.segments >= 0]).pow(2).sum().backward()
        assert all(weight.grad is not None for weight in draft.parameters())
        results.append([weight.grad for weight in draft.parameters()])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-4, atol=1e-4)


def test_dropout_of_the_target_is_not_the_draft_s() -> None:
    target = tiny_target("llama", attention_dropout=0.5)
    draft = _draft(DraftLMConfig(layers=(0, 3)), target)
    assert draft.training and target.config.attention_dropout == 0.5
    batch = packed(target, documents(), ())
    first, again = (draft.unroll(batch, 1)[0].readout for _ in range(2))
    assert torch.equal(first, again)
    arch = draft.saved_arch()
    assert arch["attention_dropout"] == 0.0
    loaded = DraftLM.from_saved(draft.config, {**arch, "attention_dropout": 0.5}, VocabMap.full(VOCAB), None)
    assert loaded.saved_arch() == arch


def test_frozen_embedding_and_head() -> None:
    target = tiny_target("llama")
    draft = _draft(DraftLMConfig(layers=(0,), train_embedding=False), target)
    frozen = {name for name, weight in draft.named_parameters() if not weight.requires_grad}
    assert frozen == {"lm.hf.model.embed_tokens.weight", "lm.hf.lm_head.weight"}


@pytest.mark.parametrize(
    "values",
    [
        {"init": "checkpoint"},
        {"init": "scratch"},
        {"checkpoint": "x"},
        {"init": "scratch", "num_layers": 1, "layers": (0,)},
        {"layers": (3, 1)},
        {"layers": (1, 1)},
        {"layers": ()},
        {"num_heads": 2},
    ],
)
def test_impossible_configs(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        DraftLMConfig(**values)


def test_blocks_that_the_target_lacks_and_smaller_vocabularies() -> None:
    text = tiny_target("llama").config
    with pytest.raises(ValueError, match=r"blocks 0\.\.3, not 9"):
        build_drafter(DraftLMConfig(layers=(0, 9)), text)
    with pytest.raises(ValueError, match="has the target's vocabulary"):
        build_drafter(DraftLMConfig(), text, VocabMap.from_ids([1, 2], VOCAB))
