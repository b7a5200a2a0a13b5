"""Drafts in the layouts of other tools, built here by hand: what is imported computes what theirs computed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.drafters.base import Drafter, DraftInputs
from drafttrain.errors import CheckpointError, TargetError, UserError
from drafttrain.export.foreign.read import ForeignDraft, read_foreign
from drafttrain.export.ir import ExportError, read_ir
from drafttrain.export.rebuild import IMPORTED, drafter_of, save_ir
from drafttrain.export.sglang import SGLANG
from drafttrain.export.vllm import VLLM
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.targets.config import TargetConfig
from tests.foreign_support import target_folder
from tests.support import tiny_hf
from tests.unit.export.reference_drafts import Tensors, eagle1_chain, eagle3_chain, medusa_logits

HIDDEN, INNER, HEADS, KV, EPS = 32, 48, 4, 2, 1e-5
PREFIX, STEPS = 7, 2
SHAPE = {"heads": HEADS, "kv_heads": KV, "eps": EPS}


@dataclass(frozen=True)
class World:
    """A target, how a recipe names it, and a text for it."""

    target: CausalLM
    config: TargetConfig
    ids: Tensor

    @property
    def vocab(self) -> int:
        return self.target.vocab_size

    @property
    def embedding(self) -> Tensor:
        return self.target.embedding_weight.detach()

    @property
    def head(self) -> Tensor:
        return self.target.head().weight.detach()

    def features(self, *taps: Tap) -> Tensor:
        """[PREFIX, n * H]."""
        with torch.no_grad():
            out = self.target(self.ids[None, :PREFIX], taps=taps)
        return torch.cat([out.taps[tap][0] for tap in taps], -1)

    def tokens(self) -> list[Tensor]:
        """Behind each slot of the prefix, then one a step."""
        return [self.ids[1 : PREFIX + 1], *(self.ids[PREFIX + 1 + i, None] for i in range(STEPS))]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    target, config = target_folder(
        tmp_path_factory.mktemp("foreign") / "target",
        rope_parameters={"rope_type": "default", "rope_theta": 5000.0},
    )
    generator = torch.Generator().manual_seed(3)
    return World(target, config, torch.randint(3, target.vocab_size, (PREFIX + STEPS + 2,), generator=generator))


def layer_tensors(prefix: str, width: int, generator: torch.Generator) -> Tensors:
    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    dim = HIDDEN // HEADS
    return {
        f"{prefix}.self_attn.q_proj.weight": matrix(HIDDEN, width),
        f"{prefix}.self_attn.k_proj.weight": matrix(KV * dim, width),
        f"{prefix}.self_attn.v_proj.weight": matrix(KV * dim, width),
        f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HIDDEN),
        f"{prefix}.mlp.gate_proj.weight": matrix(INNER, HIDDEN),
        f"{prefix}.mlp.up_proj.weight": matrix(INNER, HIDDEN),
        f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, INNER),
        f"{prefix}.post_attention_layernorm.weight": 1 + matrix(HIDDEN),
    }


def eagle3_tensors(world: World, prefix: str, size: int | None = None, seed: int = 0) -> Tensors:
    """EAGLE-3 over all tokens, or over `size` of them with a map."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) * 0.2

    tensors = {
        **layer_tensors(prefix, 2 * HIDDEN, generator),
        f"{prefix}.hidden_norm.weight": 1 + matrix(HIDDEN),
        f"{prefix}.input_layernorm.weight": 1 + matrix(HIDDEN),
        "fc.weight": matrix(HIDDEN, 3 * HIDDEN),
        "norm.weight": 1 + matrix(HIDDEN),
        "lm_head.weight": matrix(size or world.vocab, HIDDEN),
    }
    if size is not None:
        ids = torch.sort(torch.randperm(world.vocab, generator=generator)[:size]).values
        tensors["d2t"] = ids - torch.arange(size)
        tensors["t2d"] = torch.isin(torch.arange(world.vocab), ids)
    return tensors


def llama(world: World, **changes: Any) -> dict[str, Any]:
    """A config as these tools write it."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "max_position_embeddings": 64,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV,
        "num_hidden_layers": 1,
        "rms_norm_eps": EPS,
        "rope_theta": 5000.0,
        "vocab_size": world.vocab,
        **changes,
    }


def write(folder: Path, config: dict[str, Any] | None, tensors: Tensors, file: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    if file.endswith(".safetensors"):
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / file)
    else:
        torch.save(tensors, folder / file)
    return folder


@torch.no_grad()
def ours(found: ForeignDraft, world: World) -> list[Tensor]:
    """Logits of the imported draft over its vocabulary, served step by step as the engine does."""
    draft = drafter_of(found.ir)
    draft.bind(world.target.embedding_weight, world.target.head())
    return chain(draft, world)


@torch.no_grad()
def chain(draft: Drafter, world: World) -> list[Tensor]:
    cache = draft.new_cache(1, 32)
    state: Tensor | None = world.features(*draft.feature_spec.taps)[None]
    logits = []
    for depth, step in enumerate(world.tokens()):
        if cache is not None:
            cache.begin(1, len(step), offset=max(depth - 1, 0))
            positions = cache.positions()
        out = draft.step(DraftInputs(step[None], positions, state, depth), cache)  # type: ignore[arg-type]
        if depth == 0 and cache is not None:
            cache.commit(torch.tensor([len(step)]))
        assert out.hidden is not None
        logits.append(draft.head(depth)(out.readout[0]))
        state = out.hidden[:, -1:]
    return logits


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted) == 1 + STEPS
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, atol=2e-5, rtol=1e-4)
        assert torch.equal(one.argmax(-1), other.argmax(-1))  # so that the same tokens are accepted


def test_original_eagle3(world: World, tmp_path: Path) -> None:
    """pytorch_model.bin, midlayer, a map, a copy of the embedding, a context shorter than the target's."""
    tensors = eagle3_tensors(world, "midlayer", 40)
    folder = write(
        tmp_path / "draft",
        llama(world, draft_vocab_size=40),
        {**tensors, "embed_tokens.weight": world.embedding},
        "pytorch_model.bin",
    )
    found = read_foreign(folder, world.config)
    assert (found.layout, found.ir.family) == ("eagle3", "eagle3")
    assert found.ir.taps == (Tap.block(2), Tap.block(4), Tap.block(5))
    assert found.ir.vocab_map == VocabMap(tensors["d2t"], tensors["t2d"])
    assert found.ir.sizes.max_position_embeddings == world.target.config.max_position_embeddings
    assert any(note.startswith("embed_tokens.weight: dropped, it is the target's") for note in found.notes)
    features = world.features(*found.ir.taps)
    wanted = eagle3_chain(tensors, "midlayer", world.embedding, features, world.tokens(), theta=5000.0, **SHAPE)
    same(ours(found, world), wanted)


def test_specforge_eagle3(world: World, tmp_path: Path) -> None:
    """Explicit layers in SpecForge's sense (outputs), the switches of 3.1, offsets over the whole vocabulary."""
    tensors = eagle3_tensors(world, "midlayer")
    generator = torch.Generator().manual_seed(9)
    tensors |= {f"fc_norm.{i}.weight": 1 + 0.2 * torch.randn(HIDDEN, generator=generator) for i in range(3)}
    config = llama(
        world,
        architectures=["LlamaForCausalLMEagle3"],
        draft_vocab_size=world.vocab,
        fc_norm=True,
        norm_output=True,
        rope_theta=10000.0,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6]},
    )
    full = VocabMap.full(world.vocab).state()
    found = read_foreign(write(tmp_path / "draft", config, {**tensors, **full}), world.config)
    assert found.ir.taps == (Tap.block(1), Tap.block(4), Tap.block(7)) and found.ir.vocab_map.is_full
    assert any("outputs of layers" in note for note in found.notes)
    assert any("differ from the target's" in note for note in found.notes)  # the rotary base is kept
    wanted = eagle3_chain(
        tensors,
        "midlayer",
        world.embedding,
        world.features(*found.ir.taps),
        world.tokens(),
        theta=10000.0,
        per_tap=True,
        norm_output=True,
        **SHAPE,
    )
    same(ours(found, world), wanted)


@pytest.mark.parametrize("explicit", [True, False])
def test_speculators_eagle3(explicit: bool, world: World, tmp_path: Path) -> None:
    """Numbered layers, the layer's config apart, the target named in the folder, vLLM's ids (inputs)."""
    tensors = eagle3_tensors(world, "layers.0", 40)
    config = {
        "architectures": ["Eagle3Speculator"],
        "model_type": "speculator_model",
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": world.config.model, "architectures": ["LlamaForCausalLM"]},
        },
        "draft_vocab_size": 40,
        "eagle_aux_hidden_state_layer_ids": [1, 5, 8],
        "transformer_layer_config": llama(world),
        **({"norm_before_residual": False} if explicit else {}),
    }
    extra = {"verifier_lm_head.weight": world.head, "embed_tokens.weight": world.embedding}
    found = read_foreign(write(tmp_path / "draft", config, {**tensors, **extra}))
    assert found.layout == "speculators" and found.ir.target["name"] == world.config.model
    assert found.ir.taps == (Tap.block(1), Tap.block(5), Tap.pre_norm)
    assert found.ir.norms.before_residual is not explicit  # without the key, as vLLM serves it
    wanted = eagle3_chain(
        tensors,
        "layers.0",
        world.embedding,
        world.features(*found.ir.taps),
        world.tokens(),
        theta=5000.0,
        norm_before_residual=not explicit,
        **SHAPE,
    )
    same(ours(found, world), wanted)


@pytest.mark.parametrize("bias", [True, False])
def test_original_eagle1(bias: bool, world: World, tmp_path: Path) -> None:
    """With a bias of fc, as most of the paper's checkpoints; `"bias": true` or not stands in config.json."""
    generator = torch.Generator().manual_seed(1)
    tensors = layer_tensors("layers.0", HIDDEN, generator)
    tensors["fc.weight"] = torch.randn(HIDDEN, 2 * HIDDEN, generator=generator) * 0.2
    if bias:
        tensors["fc.bias"] = torch.randn(HIDDEN, generator=generator)
    stored = {**tensors, "embed_tokens.weight": world.embedding, "lm_head.weight": world.head}
    folder = write(tmp_path / "draft", llama(world, bias=bias), stored, "pytorch_model.bin")
    found = read_foreign(folder, world.config)
    assert (found.layout, found.ir.family, found.ir.bias) == ("eagle", "eagle1", bias)
    assert set(found.ir.tensors) == set(tensors)
    features = world.features(Tap.final)
    wanted = eagle1_chain(tensors, world.embedding, world.head, features, world.tokens(), theta=5000.0, **SHAPE)
    same(ours(found, world), wanted)
    if bias:
        with pytest.raises(ExportError, match=r"vllm cannot serve.*drafter.fc_bias"):
            VLLM.layout(found.ir)
        assert torch.equal(SGLANG.layout(found.ir).tensors["fc.bias"], tensors["fc.bias"])


def medusa_tensors(world: World, heads: int = 3, layers: int = 2) -> Tensors:
    generator = torch.Generator().manual_seed(2)
    tensors = {}
    for head in range(heads):
        for layer in range(layers):
            tensors[f"{head}.{layer}.linear.weight"] = torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.3
            tensors[f"{head}.{layer}.linear.bias"] = torch.randn(HIDDEN, generator=generator)
        tensors[f"{head}.{layers}.weight"] = torch.randn(world.vocab, HIDDEN, generator=generator)
    return tensors


@pytest.mark.parametrize(
    ("file", "prefix"), [("medusa_lm_head.pt", ""), ("medusa_lm_head.safetensors", "medusa_head.")]
)
def test_original_medusa(file: str, prefix: str, world: World, tmp_path: Path) -> None:
    """Blocks with biases, a config that is wrong about the number of heads."""
    tensors = medusa_tensors(world)
    config = {"medusa_num_heads": 2, "medusa_num_layers": 2, "base_model_name_or_path": world.config.model}
    stored = {prefix + name: tensor for name, tensor in tensors.items()}
    found = read_foreign(write(tmp_path / "draft", config, stored, file))
    assert (found.layout, found.ir.heads, found.ir.layers, found.ir.bias) == ("medusa-original", 3, 2, True)
    assert any("medusa_num_heads 2, the tensors are of 3" in note for note in found.notes)
    draft, features = drafter_of(found.ir), world.features(Tap.final)
    with torch.no_grad():
        for depth, wanted in enumerate(medusa_logits(tensors, features, 3, 2)):
            assert torch.allclose(draft.head(depth)(draft.read(features, depth)), wanted, atol=1e-4)  # type: ignore[operator]
    layout = VLLM.layout(found.ir)
    assert layout.config["medusa_fc_bias"] is True
    assert torch.equal(layout.tensors["blocks.2.layers.1.bias"], tensors["2.1.linear.bias"])


@pytest.mark.parametrize("shared", ["target", "own"])
def test_medusa_with_one_head_for_all(shared: str, world: World, tmp_path: Path) -> None:
    """vLLM's `original_lm_head`: the target's head, or one of the draft's."""
    generator = torch.Generator().manual_seed(4)
    blocks = {f"blocks.{i}.layers.0.weight": torch.randn(HIDDEN, HIDDEN, generator=generator) for i in range(2)}
    head = world.head if shared == "target" else torch.randn(world.vocab, HIDDEN, generator=generator)
    config = {"model_type": "medusa", "num_heads": 2, "num_hidden_layers": 1, "original_lm_head": True}
    folder = write(tmp_path / "draft", config, {**blocks, "lm_heads.0.weight": head})
    ir = read_foreign(folder, world.config).ir
    if shared == "target":
        assert set(ir.tensors) == set(blocks)
    else:
        assert all(torch.equal(ir.tensors[f"lm_heads.{i}.weight"], head) for i in range(2))
    assert not ir.bias


def test_a_draft_lm_in_shards(world: World, tmp_path: Path) -> None:
    hf = tiny_hf("qwen2", vocab_size=world.vocab, num_hidden_layers=2)
    hf.save_pretrained(tmp_path / "draft", max_shard_size="40KB")
    assert (tmp_path / "draft" / "model.safetensors.index.json").exists()
    found = read_foreign(tmp_path / "draft", world.config)
    draft = drafter_of(found.ir)
    with torch.no_grad():
        logits = draft.lm.lm_head(draft.lm(world.ids[None]).final)  # type: ignore[union-attr, operator]
        assert torch.allclose(logits, hf(world.ids[None]).logits, atol=1e-4)
    assert found.ir.layers == 2


def test_a_saved_draft_keeps_where_it_came_from(world: World, tmp_path: Path) -> None:
    folder = write(tmp_path / "draft", llama(world, draft_vocab_size=40), eagle3_tensors(world, "midlayer", 40))
    found = read_foreign(folder, world.config)
    save_ir(tmp_path / "saved", found.ir)
    again = read_ir(tmp_path / "saved")
    assert again.vocab_map == found.ir.vocab_map and again.taps == found.ir.taps and again.arch == found.ir.arch
    assert again.provenance[IMPORTED]["format"] == "eagle3" and again.target == found.ir.target
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in found.ir.tensors.items())


def spoilt(world: World, tmp_path: Path, what: str) -> Path:
    """A folder with one fault."""
    config, tensors = llama(world, draft_vocab_size=40), eagle3_tensors(world, "midlayer", 40)
    match what:
        case "absolute":
            tensors["d2t"] = tensors["d2t"] + torch.arange(40)
        case "no map":
            tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
        case "other embedding":
            tensors["embed_tokens.weight"] = world.embedding + 1
        case "leftover":
            tensors["midlayer.self_attn.q_norm.weight"] = torch.ones(8)
        case "attention bias":
            tensors["midlayer.self_attn.q_proj.bias"] = torch.ones(HIDDEN)
        case "fc_norm without tensors":
            config["fc_norm"] = True
        case "default nested":
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
        case "contradicting ids":
            config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [3, 4, 6]}
            config["eagle_aux_hidden_state_layer_ids"] = [1, 4, 7]
        case "two ids":
            config["eagle_aux_hidden_state_layer_ids"] = [1, 4]
        case "ids beyond":
            config["eagle_aux_hidden_state_layer_ids"] = [1, 4, 12]
        case "p-eagle":
            tensors["mask_hidden"] = torch.zeros(1, 1, 96)
        case "dflash":
            config["architectures"] = ["DFlashDraftModel"]
        case "nan":
            tensors["fc.weight"][0, 0] = torch.nan
        case "missing tensor":
            del tensors["norm.weight"]
        case "unknown":
            tensors = {"encoder.weight": torch.ones(2, 2)}
        case "ambiguous":
            tensors |= {"blocks.0.layers.0.weight": torch.zeros(HIDDEN, HIDDEN)}
        case "no heads":
            del config["num_attention_heads"]
        case "ids in a list":
            config["eagle_config"] = [1, 2]
        case "rotary by name":
            config["rope_parameters"] = "default"
    return write(tmp_path / "draft", config, tensors)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("absolute", "d2t holds absolute target ids"),
        ("no map", "no d2t says which tokens"),
        ("other embedding", "embed_tokens.weight is not the embedding of"),
        ("leftover", "unknown: .*q_norm"),
        ("attention bias", "q_proj.bias is not zero"),
        ("fc_norm without tensors", "fc_norm true, but tensors fc_norm"),
        ("default nested", r"could be inputs of layers[\s\S]*--taps"),
        ("contradicting ids", "mean different states"),
        ("two ids", "reads 3 states, the layer ids name 2"),
        ("ids beyond", r"\[12\] do not exist"),
        ("p-eagle", "P-EAGLE"),
        ("dflash", "DFlash"),
        ("nan", "NaN or Inf in fc.weight"),
        ("missing tensor", "missing: .*norm.weight"),
        ("unknown", r"no known layout: its tensors are encoder.weight[\s\S]*medusa-original"),
        ("ambiguous", r"could be any of eagle3, medusa: .*hidden_norm[\s\S]*--format"),
        ("no heads", "num_attention_heads is None"),
        ("ids in a list", r"eagle_config is \[1, 2\], which is no object"),
        ("rotary by name", "rope_parameters is 'default', which is no object"),
    ],
)
def test_what_is_wrong_is_named(what: str, said: str, world: World, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said) as refused:
        read_foreign(spoilt(world, tmp_path, what), world.config)
    assert str(tmp_path / "draft") in str(refused.value)


def test_a_format_that_is_asked_for(world: World, tmp_path: Path) -> None:
    folder = spoilt(world, tmp_path, "ambiguous")
    with pytest.raises(CheckpointError, match=r"blocks\.0"):  # what the other one left over
        read_foreign(folder, world.config, layout="eagle3")
    with pytest.raises(CheckpointError, match="is not in format eagle "):
        read_foreign(folder, world.config, layout="eagle")
    with pytest.raises(CheckpointError, match="no format 'eagel'"):
        read_foreign(folder, world.config, layout="eagel")


def test_taps_by_hand(world: World, tmp_path: Path) -> None:
    folder = spoilt(world, tmp_path, "default nested")
    found = read_foreign(folder, world.config, taps=["3", "5", "pre_norm"])
    assert found.ir.taps == (Tap.block(3), Tap.block(5), Tap.pre_norm)
    with pytest.raises(CheckpointError, match=r"--taps.*tap 8 does not exist"):
        read_foreign(folder, world.config, taps=[1, 2, 8])


class Evil:
    """What a pickle may do when it is opened."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("opened",)


def test_pickles_of_more_than_tensors_are_not_opened(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 39 of docs/cases.md."""
    folder = write(tmp_path / "draft", llama(world), {"fc.weight": Evil()}, "pytorch_model.bin")  # type: ignore[dict-item]
    with pytest.raises(CheckpointError, match="holds more than tensors"):
        read_foreign(folder, world.config)
    assert "opened" not in capsys.readouterr().out


def test_state_dicts_in_a_wrapper_and_truncated_files(world: World, tmp_path: Path) -> None:
    tensors = eagle3_tensors(world, "midlayer", 40)
    folder = write(tmp_path / "draft", llama(world, draft_vocab_size=40), {}, "model.pt")
    torch.save({"step": 3, "state_dict": {f"draft_model.{n}": t for n, t in tensors.items()}}, folder / "model.pt")
    found = read_foreign(folder, world.config)
    assert torch.equal(found.ir.tensors["fc.weight"], tensors["fc.weight"])
    whole = (folder / "model.pt").read_bytes()
    (folder / "model.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        read_foreign(folder, world.config)
    (folder / "other.pt").write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"could be meant: model\.pt, other\.pt"):
        read_foreign(folder, world.config)


def test_targets_that_cannot_be_it(world: World, tmp_path: Path) -> None:
    """Case 15 of docs/cases.md: told by vocabularies and sizes, not by names."""
    folder = write(tmp_path / "draft", llama(world, draft_vocab_size=40), eagle3_tensors(world, "midlayer", 40))
    with pytest.raises(CheckpointError, match="does not say which target"):
        read_foreign(folder)
    _, wide = target_folder(tmp_path / "wide", hidden_size=64)
    with pytest.raises(CheckpointError, match="32 wide and the target 64"):
        read_foreign(folder, wide)
    bare = tmp_path / "bare"
    tiny_hf(vocab_size=world.vocab, num_hidden_layers=8).save_pretrained(bare)
    with pytest.raises(TargetError, match="tokenizer"):
        read_foreign(folder, TargetConfig(model=str(bare)))
    with pytest.raises(UserError, match="no such"):
        read_foreign(tmp_path / "nowhere", world.config)
    lm = tmp_path / "lm"
    tiny_hf(vocab_size=world.vocab - 1, num_hidden_layers=2).save_pretrained(lm)
    with pytest.raises(CheckpointError, match="the draft has 419 tokens, the target 420"):
        read_foreign(lm, world.config)
