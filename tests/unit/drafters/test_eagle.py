"""EAGLE drafts against a plain re-derivation from the papers, their switches, gradients and names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.build import build_drafter, init_from_target, serving_copy
from drafttrain.drafters.eagle.base import EagleDrafter
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.eagle.eagle1 import Eagle1Drafter
from drafttrain.drafters.eagle.eagle3 import Eagle3Drafter
from drafttrain.drafters.eagle.initialise import norm_weight
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import FeatureSpec, Tap
from drafttrain.modeling.vocab_map import VocabMap
from tests.draft_support import documents, new_draft, packed, plain_target
from tests.support import KINDS, VOCAB, tiny_target

SWITCHES: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_output": {"norm_output": True},
    "fc_norm": {"fc_norm": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
}


def _rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _attention(q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
    """Every slot on its own: step-0 keys up to it, then its own keys of later steps. [heads, L, D]."""
    slots, rows = q.shape[1], []
    for t in range(slots):
        seen_k = torch.cat([keys[0][:, : t + 1], *[k[:, t : t + 1] for k in keys[1:]]], 1)
        seen_v = torch.cat([values[0][:, : t + 1], *[v[:, t : t + 1] for v in values[1:]]], 1)
        weights = torch.softmax(q[:, t : t + 1] @ seen_k.mT / q.shape[-1] ** 0.5, -1)
        rows.append(weights @ seen_v)
    return torch.cat(rows, 1)


def _naive(draft: EagleDrafter[Any], target: CausalLM, ids: Tensor, features: Tensor, depths: int) -> list[Tensor]:
    """One document, as the papers write it down, over the state dict alone. [L, H] for each depth."""
    w, c = draft.state_dict(), draft.config
    three = isinstance(draft, Eagle3Drafter)
    layer = "midlayer." if three else "layers.0."
    rope = LlamaRotaryEmbedding(target.config)
    slots, outs = len(ids), []
    keys: list[Tensor] = []
    values: list[Tensor] = []
    state = features
    if three:
        if c.norm_before_fc:
            state = _rms(state, w["input_norm.weight"])
        if c.fc_norm:
            parts = state.chunk(3, -1)
            state = torch.cat([_rms(part, w[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)], -1)
        state = state @ w["fc.weight"].T
    for k in range(depths):
        shifted = torch.cat([ids, ids[-1:].repeat(depths + 1)])[1 + k : 1 + k + slots]
        embedding = target.embedding_weight[shifted]
        if three:
            normed = _rms(state, w[layer + "hidden_norm.weight"])
            x = torch.cat([_rms(embedding, w[layer + "input_layernorm.weight"]), normed], -1)
            residual = normed if c.norm_before_residual else state
        else:
            x = residual = torch.cat([embedding, state], -1) @ w["fc.weight"].T
        q, key, value = (
            (x @ w[f"{layer}self_attn.{name}_proj.weight"].T).view(slots, -1, 8).transpose(0, 1) for name in "qkv"
        )
        cos, sin = rope(x, torch.arange(slots)[None] + k)
        q, key = (t[0] for t in apply_rotary_pos_emb(q[None], key[None], cos, sin))
        keys.append(key.repeat_interleave(2, 0))
        values.append(value.repeat_interleave(2, 0))
        mixed = _attention(q, keys, values).transpose(0, 1).flatten(1)
        state = residual + mixed @ w[layer + "self_attn.o_proj.weight"].T
        x = _rms(state, w[layer + "post_attention_layernorm.weight"])
        gate, up = x @ w[layer + "mlp.gate_proj.weight"].T, x @ w[layer + "mlp.up_proj.weight"].T
        state = state + (torch.nn.functional.silu(gate) * up) @ w[layer + "mlp.down_proj.weight"].T
        readout = _rms(state, w["norm.weight"]) if three else state
        outs.append(readout)
        state = readout if three and c.norm_output else state
    return outs


def _draft_and_batch(config: Any, **changes: Any) -> tuple[EagleDrafter[Any], CausalLM, Any]:
    target = plain_target(**changes).double()
    draft = new_draft(config, target)
    assert isinstance(draft, EagleDrafter)
    batch = packed(target, documents(rows=[[11]]), draft.feature_spec.taps, length=11)
    return draft, target, batch


@pytest.mark.parametrize("name", [*SWITCHES, "eagle1"])
def test_equals_the_plain_derivation(name: str) -> None:
    config = Eagle1Config(depth=3) if name == "eagle1" else Eagle3Config(depth=3, **SWITCHES[name])
    draft, target, batch = _draft_and_batch(config)
    features = torch.cat([batch.features[tap][0] for tap in draft.feature_spec.taps], -1)
    with torch.no_grad():
        expected = _naive(draft, target, batch.tokens[0], features, 3)
        unrolled = draft.unroll(batch, 3)
    for out, reference in zip(unrolled, expected, strict=True):
        # The rotary tables are single precision on both sides, rounded in a different order.
        torch.testing.assert_close(out.readout[0], reference, rtol=1e-5, atol=1e-6)


ROTARY = {
    "base": {"rope_type": "default", "rope_theta": 40.0},
    "scaling": {**KINDS["llama3-rope"][1]["rope_parameters"], "original_max_position_embeddings": 8},
}


@pytest.mark.parametrize("name", ROTARY)
@pytest.mark.parametrize("config", [Eagle3Config(depth=3), Eagle1Config(depth=3)], ids=["eagle3", "eagle1"])
def test_the_rotary_parameters_of_the_target_are_what_it_computes_with(config: Any, name: str) -> None:
    """Case 16 of docs/cases.md: against transformers' rotation for the target's own config."""
    draft, target, batch = _draft_and_batch(config, rope_parameters=ROTARY[name])
    features = torch.cat([batch.features[tap][0] for tap in draft.feature_spec.taps], -1)
    with torch.no_grad():
        expected = _naive(draft, target, batch.tokens[0], features, 3)
        for out, reference in zip(draft.unroll(batch, 3), expected, strict=True):
            torch.testing.assert_close(out.readout[0], reference, rtol=1e-5, atol=1e-6)


def test_rotary_position_grows_with_the_step() -> None:
    """Case 17 of docs/cases.md."""
    draft, _, batch = _draft_and_batch(Eagle3Config(depth=3))
    seen: list[Tensor] = []
    draft.rotary.register_forward_pre_hook(lambda _, args: seen.append(args[0].clone()))
    draft.unroll(batch, 3)
    assert [int((positions - batch.positions).unique()) for positions in seen] == [0, 1, 2]


def test_head_reads_the_normed_state_and_norm_output_changes_only_what_is_fed_back() -> None:
    """Case 18 of docs/cases.md."""
    plain, target, batch = _draft_and_batch(Eagle3Config(depth=2))
    fed_back = build_drafter(Eagle3Config(depth=2, norm_output=True), target.config).double().eval()
    init_from_target(fed_back, target)
    fed_back.load_state_dict(plain.state_dict())
    with torch.no_grad():
        first, second = plain.unroll(batch, 2), fed_back.unroll(batch, 2)
    assert torch.equal(first[0].readout, second[0].readout)
    assert not torch.allclose(first[1].readout, second[1].readout)
    for out in (*first, *second):
        unit = out.readout / plain.state_dict()["norm.weight"]
        torch.testing.assert_close(unit.pow(2).mean(-1), torch.ones_like(unit[..., 0]), rtol=1e-3, atol=0)


ALL = {
    "eagle1": Eagle1Config(depth=2, feature_noise=0.0, detach=False),
    "two-layers": Eagle3Config(depth=2, num_layers=2),
    **{name: Eagle3Config(depth=2, draft_vocab_size=30, **value) for name, value in SWITCHES.items()},
}


def _loss(draft: Drafter, batch: Any, depths: int = 2) -> Tensor:
    outs = draft.unroll(batch, depths)
    torch.manual_seed(5)
    total = torch.zeros((), dtype=torch.float64)
    for out in outs:
        # Only where the label lies in the same document; slots behind read tokens of what follows.
        ahead = torch.nn.functional.pad(batch.segments[:, out.offset :], (0, out.offset), value=-1)
        logits = draft.head(out.depth)(out.readout)[(batch.segments >= 0) & (ahead == batch.segments)]
        total = total + (logits.double() * torch.randn(logits.shape)).sum()
    return total


@pytest.mark.parametrize("name", list(ALL))
def test_gradients_reach_every_parameter_and_padding_gets_none(name: str) -> None:
    target = plain_target()
    draft = new_draft(ALL[name], target).train()
    batch = packed(target, documents(), draft.feature_spec.taps)
    _loss(draft, batch).backward()
    grads = {key: weight.grad.clone() for key, weight in draft.named_parameters() if weight.grad is not None}
    assert set(grads) == {key for key, _ in draft.named_parameters()}
    assert all(float(grad.abs().max()) > 0 and bool(grad.isfinite().all()) for grad in grads.values())

    draft.zero_grad()
    padding = batch.segments < 0
    batch.tokens[padding] = 11
    for value in batch.features.values():
        value[padding] = -50.0
    _loss(draft, batch).backward()
    for key, weight in draft.named_parameters():
        torch.testing.assert_close(weight.grad, grads[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["eagle1", "plain", "two-layers"])
def test_gradient_checkpointing_changes_nothing(name: str) -> None:
    target = plain_target()
    draft = new_draft(ALL[name], target).train()
    batch = packed(target, documents(), draft.feature_spec.taps)
    results = []
    for on in (False, True):
        draft.gradient_checkpointing = on
        draft.zero_grad()
        _loss(draft, batch).backward()
        results.append([weight.grad.clone() for weight in draft.parameters() if weight.grad is not None])
    for first, second in zip(*results, strict=True):
        torch.testing.assert_close(first, second, rtol=1e-5, atol=1e-5)


def test_autocast_computes_in_bf16_over_fp32_weights() -> None:
    target = plain_target()
    draft = new_draft(ALL["plain"], target).train()
    batch = packed(target, documents(), draft.feature_spec.taps)
    batch.features = {tap: value.bfloat16() for tap, value in batch.features.items()}
    exact = draft.unroll(batch, 2)
    assert exact[0].readout.dtype == torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        rounded = draft.unroll(batch, 2)
        loss = _loss(draft, batch)
    loss.backward()
    assert rounded[1].readout.dtype == torch.bfloat16
    assert all(weight.grad is not None and weight.grad.dtype == torch.float32 for weight in draft.parameters())
    for out, reference in zip(rounded, exact, strict=True):
        inside = batch.segments >= 0
        error = (out.readout.float() - reference.readout)[inside].norm() / reference.readout[inside].norm()
        assert float(error.detach()) < 0.05


def test_packed_weights_follow_training() -> None:
    target = plain_target()
    draft = new_draft(ALL["plain"], target)
    batch = packed(target, documents(), draft.feature_spec.taps)
    draft.prepare_for_inference()
    with torch.no_grad():
        before = draft.unroll(batch, 1)[0].readout
        draft.train()
        draft.get_parameter("fc.weight").mul_(2.0)
        draft.get_parameter("midlayer.mlp.down_proj.weight").mul_(2.0)
        after = draft.unroll(batch, 1)[0].readout
        assert not torch.allclose(before, after)
        draft.prepare_for_inference()
        draft.load_state_dict({**draft.state_dict(), "norm.weight": torch.zeros(32)})
        assert float(draft.unroll(batch, 1)[0].readout.abs().max()) == 0.0
        draft.prepare_for_inference()
        assert draft.double().unroll(batch, 1)[0].readout.dtype == torch.float64


def test_serving_copy() -> None:
    target = plain_target()
    draft = new_draft(ALL["plain"], target).train()
    copy = serving_copy(draft, torch.bfloat16)
    assert draft.training and not copy.training
    assert next(copy.parameters()).dtype == torch.bfloat16
    assert copy.vocab_map == draft.vocab_map
    batch = packed(target, documents(), draft.feature_spec.taps)
    with torch.no_grad():
        ours, theirs = draft.unroll(batch, 1)[0].readout, copy.unroll(batch, 1)[0].readout
    inside = batch.segments >= 0
    assert float((ours - theirs.float())[inside].norm() / ours[inside].norm()) < 0.05


def test_feature_noise_only_in_training_and_within_bounds() -> None:
    target = plain_target()
    draft = new_draft(Eagle1Config(feature_noise=0.1), target)
    assert isinstance(draft, Eagle1Drafter)
    features = torch.zeros(2, 500, 32)
    assert torch.equal(draft.disturb(features), features)
    noise = draft.train().disturb(features)
    assert float(noise.abs().max()) <= 0.1 and float(noise.std()) == pytest.approx(0.1 / 3**0.5, rel=0.05)


def test_hass_steps_carry_no_gradient_to_the_step_before() -> None:
    target = plain_target()
    batch = packed(target, documents(), (Tap.final,))
    reached = {}
    for detach in (True, False):
        draft = new_draft(Eagle1Config(depth=2, detach=detach, feature_noise=0.0), target).train()
        first, second = draft.unroll(batch, 2)
        assert first.hidden is not None and second.hidden is not None
        (grad,) = torch.autograd.grad(second.readout.sum(), first.hidden, allow_unused=True)
        reached[detach] = grad is not None
    assert reached == {True: False, False: True}


def test_names_are_those_that_engines_load() -> None:
    target = plain_target()
    block = {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
        "post_attention_layernorm.weight",
    }
    eagle3 = new_draft(Eagle3Config(draft_vocab_size=30, fc_norm=True), target).state_dict()
    assert set(eagle3) == {
        *(f"midlayer.{name}" for name in (*block, "input_layernorm.weight", "hidden_norm.weight")),
        *(f"fc_norm.{i}.weight" for i in range(3)),
        *("fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"),
    }
    assert eagle3["fc.weight"].shape == (32, 96)
    assert eagle3["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    assert eagle3["midlayer.self_attn.k_proj.weight"].shape == (16, 64)
    assert eagle3["lm_head.weight"].shape == (30, 32)
    assert (eagle3["d2t"].dtype, eagle3["t2d"].dtype) == (torch.int64, torch.bool)
    eagle1 = new_draft(Eagle1Config(), target).state_dict()
    assert set(eagle1) == {"fc.weight", *(f"layers.0.{name}" for name in block)}
    assert eagle1["fc.weight"].shape == (32, 64)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gemma", "granite", "cohere"])
def test_head_starts_as_the_rows_of_the_target(kind: str) -> None:
    target = tiny_target(kind)
    mapping = VocabMap.from_ids([2, 5, 7, 30], VOCAB)
    draft = build_drafter(Eagle3Config(draft_vocab_size=4), target.config, mapping).eval()
    init_from_target(draft, target)
    assert isinstance(draft, Eagle3Drafter)
    x = torch.randn(3, 32)
    normed = draft.norm(x)
    torch.testing.assert_close(draft.head(0)(normed), mapping.restrict(target.lm_head(normed)))
    if kind != "cohere":
        # Cohere's norm takes the mean off, too: only its factor is kept.
        torch.testing.assert_close(normed, target.final_norm(x), rtol=1e-4, atol=1e-4)


def test_factor_of_a_norm_whatever_its_class_stores() -> None:
    gemma = tiny_target("gemma")
    torch.nn.init.normal_(gemma.norm.get_parameter("weight"))
    factor = norm_weight(gemma.norm, 32, gemma.device, gemma.dtype)
    torch.testing.assert_close(factor, 1 + gemma.norm.get_parameter("weight").float(), rtol=1e-4, atol=1e-4)
    qwen = Qwen3_5RMSNorm(32)
    torch.nn.init.normal_(qwen.weight)
    factor = norm_weight(qwen, 32, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(factor, 1 + qwen.weight.detach(), rtol=1e-4, atol=1e-4)
    layer_norm = torch.nn.LayerNorm(32)
    torch.nn.init.normal_(layer_norm.weight)
    torch.nn.init.normal_(layer_norm.bias)
    torch.testing.assert_close(
        norm_weight(layer_norm, 32, torch.device("cpu"), torch.float32),
        layer_norm.weight.detach(),
        rtol=1e-4,
        atol=1e-4,
    )


@pytest.mark.parametrize(("source", "index"), [("target:4", 4), ("target:last", 5)])
def test_layer_from_a_block_of_the_target(source: str, index: int) -> None:
    target = plain_target()
    draft = build_drafter(Eagle3Config(init_layer=source), target.config)
    init_from_target(draft, target)
    weights, block = draft.state_dict(), target.layers[index].state_dict()
    assert torch.equal(weights["midlayer.self_attn.q_proj.weight"][:, 32:], block["self_attn.q_proj.weight"])
    assert torch.equal(weights["midlayer.mlp.down_proj.weight"], block["mlp.down_proj.weight"])
    with pytest.raises(ValueError, match=r"blocks 0\.\.5, not 6"):
        init_from_target(build_drafter(Eagle3Config(init_layer="target:6"), target.config), target)
    phi = tiny_target("phi")
    with pytest.raises(ValueError, match="does not fit"):
        init_from_target(build_drafter(Eagle1Config(init_layer="target:0"), phi.config), phi)


@pytest.mark.parametrize(("source", "first"), [("target:1", 1), ("target:last", 4)])
def test_further_layers_start_from_the_blocks_behind(source: str, first: int) -> None:
    target = plain_target()
    draft = build_drafter(Eagle3Config(init_layer=source, num_layers=2), target.config)
    init_from_target(draft, target)
    weights, blocks = draft.state_dict(), [target.layers[first + i].state_dict() for i in range(2)]
    assert torch.equal(weights["midlayer.self_attn.k_proj.weight"][:, 32:], blocks[0]["self_attn.k_proj.weight"])
    assert torch.equal(weights["layers.1.self_attn.k_proj.weight"], blocks[1]["self_attn.k_proj.weight"])
    assert torch.equal(weights["layers.1.mlp.up_proj.weight"], blocks[1]["mlp.up_proj.weight"])
    with pytest.raises(ValueError, match=r"blocks 0\.\.5, not 6"):
        init_from_target(build_drafter(Eagle3Config(init_layer="target:5", num_layers=2), target.config), target)


def test_layer_from_a_block_that_keeps_matrices_together() -> None:
    """q, k and v in one, gate and up in one; and attention beside the MLP behind one norm."""
    phi3 = tiny_target("phi3")
    draft = build_drafter(Eagle1Config(init_layer="target:2"), phi3.config)
    init_from_target(draft, phi3)
    weights, block = draft.state_dict(), phi3.layers[2].state_dict()
    qkv = [weights[f"layers.0.self_attn.{name}_proj.weight"] for name in "qkv"]
    assert torch.equal(torch.cat(qkv), block["self_attn.qkv_proj.weight"])
    gated = [weights[f"layers.0.mlp.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(torch.cat(gated), block["mlp.gate_up_proj.weight"])
    cohere = tiny_target("cohere")
    with torch.no_grad():
        cohere.layers[1].input_layernorm.weight.uniform_(0.5, 1.5)
    draft = build_drafter(Eagle1Config(init_layer="target:1"), cohere.config)
    init_from_target(draft, cohere)
    torch.testing.assert_close(
        draft.state_dict()["layers.0.post_attention_layernorm.weight"],
        cohere.layers[1].input_layernorm.weight,
        atol=1e-3,
        rtol=1e-3,
    )


@pytest.mark.parametrize("kind", ["llama", "llama3-rope", "qwen3", "gemma3", "phi"])
def test_positions_and_sizes_are_the_targets(kind: str) -> None:
    config = tiny_target(kind).config
    draft = build_drafter(Eagle3Config(), config)
    assert isinstance(draft, Eagle3Drafter)
    assert draft.arch.max_position_embeddings >= config.max_position_embeddings
    assert draft.arch.vocab_size == config.vocab_size
    source = config.rope_parameters
    source = source.get("full_attention", source)
    assert draft.arch.rope_parameters["rope_theta"] == source["rope_theta"]
    assert draft.arch.rope_parameters["rope_type"] == source["rope_type"]
    assert draft.arch.rope_parameters.get("partial_rotary_factor") == (0.5 if kind == "phi" else None)


def test_default_taps_are_low_middle_and_high() -> None:
    assert Eagle3Config().taps_for(32) == (2, 16, 29)
    assert Eagle3Config(taps=(1, "pre_norm")).taps_for(32) == (1, "pre_norm")
    for layers in range(1, 12):
        # An engine captures a state once, so those of a small target must differ, too.
        taps = Eagle3Config().taps_for(layers)
        assert len(set(taps)) == 3
        FeatureSpec.of(taps).check(layers)
    with pytest.raises(ValueError, match="tap 6 does not exist"):
        build_drafter(Eagle3Config(taps=(1, 6)), plain_target().config)


def test_eagle1_can_start_as_the_copy_of_its_feature() -> None:
    target = tiny_target("llama")
    draft = build_drafter(Eagle1Config(init_fc="feature"), target.config)
    init_from_target(draft, target)
    assert isinstance(draft, Eagle1Drafter)
    feature_half = draft.fc.weight[:, target.hidden_size :]
    assert torch.equal(feature_half, torch.eye(target.hidden_size))


def test_a_head_that_is_kept_is_not_trained_and_is_saved() -> None:
    target = tiny_target("llama")
    draft = new_draft(Eagle3Config(taps=(0, 1, 2), depth=2, train_head=False), target).train()
    frozen = {name for name, weight in draft.named_parameters() if not weight.requires_grad}
    assert frozen == {"lm_head.weight"}
    assert "lm_head.weight" in draft.saved_names(dict(draft.state_dict()))


@pytest.mark.parametrize(
    "values",
    [
        {"fc_norm": True, "norm_before_fc": True},
        {"taps": ()},
        {"init_layer": "middle"},
        {"depth": 0},
        {"norm_outptu": True},
        {"train_head": False, "init_head": "random"},
    ],
)
def test_impossible_configs(values: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Eagle3Config(**values)


def test_a_target_of_other_sizes_is_not_bound() -> None:
    target = plain_target()
    other = tiny_target("llama", hidden_size=16)
    draft = build_drafter(Eagle3Config(), target.config)
    with pytest.raises(ValueError, match="this draft was made for"):
        draft.bind(other.embedding_weight, other.head())
    with pytest.raises(RuntimeError, match="call bind"):
        draft.unroll(packed(target, documents(), draft.feature_spec.taps), 1)


def test_a_one_token_row_unrolls() -> None:
    draft, target, _ = _draft_and_batch(Eagle3Config(depth=3))
    batch = packed(target, [[torch.tensor([5])]], draft.feature_spec.taps, length=1)
    assert [out.readout.shape for out in draft.unroll(batch, 3)] == [(1, 1, 32)] * 3


def test_what_is_bound_is_no_parameter() -> None:
    target = plain_target()
    draft = new_draft(Eagle1Config(), target)
    assert sum(weight.numel() for weight in draft.parameters()) < target.embedding_weight.numel() * 20
    assert not any(weight is target.embedding_weight for weight in draft.parameters())
    assert draft.target_head.weight.data_ptr() == target.head().weight.data_ptr()
