"""Loading targets: shapes of checkpoints, identity, errors that say what to do."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from drafttrain.errors import TargetError
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.ends import load_ends
from drafttrain.targets.load import load_stop_ids, load_target, load_text_config, load_tokenizer
from tests.chats import chat_tokenizer
from tests.support import tiny_hf


def _save(folder: Path, kind: str = "llama", template: str = "chatml", **save: object) -> Path:
    tokenizer = chat_tokenizer(template)
    hf = tiny_hf(kind, vocab_size=len(tokenizer))
    hf.save_pretrained(folder, **save)
    tokenizer.save_pretrained(folder)
    return folder


def _config(folder: Path, **changes: object) -> TargetConfig:
    return TargetConfig(model=str(folder), dtype="float32", device="cpu", **changes)  # type: ignore[arg-type]


def test_single_file_and_sharded_checkpoints_are_the_same_model(tmp_path: Path) -> None:
    one = _save(tmp_path / "one")
    many = _save(tmp_path / "many", max_shard_size="20KB")
    assert not (one / "model.safetensors.index.json").exists()
    assert len(list(many.glob("model-*.safetensors"))) > 1
    a, b = load_target(_config(one)), load_target(_config(many))
    ids = torch.tensor([[3, 4, 5]])
    torch.testing.assert_close(a.lm_head(a(ids).final), b.lm_head(b(ids).final))
    assert a.identity.tokenizer_hash == b.identity.tokenizer_hash
    assert a.identity.n_layers == 4 and a.identity.hidden_size == 32


@pytest.mark.parametrize("kind", ["llama", "llama-tied"])
def test_tied_and_untied_heads(tmp_path: Path, kind: str) -> None:
    target = load_target(_config(_save(tmp_path / kind, kind)))
    tied = target.head().weight.data_ptr() == target.embedding_weight.data_ptr()
    assert tied == (kind == "llama-tied")
    assert target.vocab_size == target.identity.vocab_size == target.identity.tokenizer_size


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3", "gemma"])
def test_the_ends_of_a_target_are_those_of_the_whole(tmp_path: Path, kind: str) -> None:
    config = _config(_save(tmp_path / kind, kind))
    whole, ends = load_target(config), load_ends(config)
    assert ends.identity == whole.identity and ends.n_layers == whole.n_layers and ends.vocab_size == whole.vocab_size
    assert ends.config.to_dict() == whole.config.to_dict()
    states = torch.randn(2, 3, whole.hidden_size)
    torch.testing.assert_close(ends.lm_head(states), whole.lm_head(states))
    torch.testing.assert_close(ends.final_norm(states), whole.final_norm(states))
    torch.testing.assert_close(ends.embed(torch.tensor([[3, 4]])), whole.embed(torch.tensor([[3, 4]])))
    assert sum(p.numel() for p in ends.parameters()) < sum(p.numel() for p in whole.parameters())
    with pytest.raises(TargetError, match=r"its forward is not here[\s\S]*placement=whole"):
        ends(torch.tensor([[3, 4]]))
    with ends.blocks_at_hand(()), pytest.raises(TargetError, match="blocks 2, 3 are not here"):
        ends.blocks_at_hand((2, 3))


def test_target_is_frozen_and_stays_in_eval(tmp_path: Path) -> None:
    target = load_target(_config(_save(tmp_path / "t")))
    assert not any(p.requires_grad for p in target.parameters())
    assert not target.train().training
    assert target.stop_ids and all(0 <= i < target.vocab_size for i in target.stop_ids)


def test_identity_names_what_differs(tmp_path: Path) -> None:
    first = load_target(_config(_save(tmp_path / "a"))).identity
    assert not first.differences(load_target(_config(_save(tmp_path / "b"))).identity)
    other = shutil.copytree(tmp_path / "a", tmp_path / "c")
    hf = tiny_hf("llama", seed=9, vocab_size=first.vocab_size)
    hf.save_pretrained(other)
    assert first.differences(load_target(_config(other)).identity) == ["weights_hash"]
    llama3 = load_target(_config(_save(tmp_path / "d", template="llama3"))).identity
    assert first.differences(llama3) == ["template_hash"]
    assert type(first).from_dict(json.loads(json.dumps(first.to_dict()))) == first


def test_text_config_and_tokenizer_alone(tmp_path: Path) -> None:
    folder = _save(tmp_path / "t")
    (folder / "model.safetensors").unlink()
    assert load_text_config(_config(folder)).num_hidden_layers == 4
    assert load_tokenizer(_config(folder)).chat_template


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"nowhere: no such target folder\n  check the path"):
        load_target(TargetConfig(model=str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TargetError, match="has no config"):
        load_target(_config(tmp_path / "empty"))
    broken = _save(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(TargetError, match="cannot load its weights"):
        load_target(_config(broken))
    bare = _save(tmp_path / "bare")
    for file in bare.glob("token*"):
        file.unlink()
    with pytest.raises(TargetError, match="cannot load its tokenizer"):
        load_target(_config(bare))


def test_a_fault_of_the_config_is_the_configs(tmp_path: Path) -> None:
    folder = _save(tmp_path / "target")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "max_position_embeddings": None}))
    with pytest.raises(TargetError, match=r"cannot load its config: .*'max_position_embeddings': .*expected int"):
        load_target(_config(folder))
    (folder / "config.json").write_text("{")
    with pytest.raises(TargetError, match=r"cannot load its config: .*not a valid JSON"):
        load_target(_config(folder))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON"),
        ("[]", "holds no JSON object"),
        ('{"eos_token_id": "<|im_end|>"}', "eos_token_id of its"),
    ],
)
def test_a_generation_config_that_says_no_ids(tmp_path: Path, text: str, words: str) -> None:
    """Left out silently it would take the ids that end a turn with it."""
    folder = _save(tmp_path / "target")
    (folder / "generation_config.json").write_text(text)
    for load in (load_target, load_stop_ids):
        with pytest.raises(TargetError, match=words):
            load(_config(folder))


@pytest.mark.parametrize("kind", ["llama", "phi", "gemma3"])
def test_a_config_that_says_fewer_layers_than_the_weights_hold(tmp_path: Path, kind: str) -> None:
    """Transformers runs the shorter model. One that is saved so is a model of its own."""
    folder = _save(tmp_path / "target", kind)
    values = json.loads((folder / "config.json").read_text())
    shorter = {**values, "num_hidden_layers": 2}
    if values.get("layer_types"):
        shorter["layer_types"] = values["layer_types"][:2]
    (folder / "config.json").write_text(json.dumps(shorter))
    for load in (load_target, load_ends):
        with pytest.raises(TargetError, match="num_hidden_layers is 2, and its weights hold 4 layers") as caught:
            load(_config(folder))
        assert caught.value.where == str(folder / "config.json") and "set it to 4" in str(caught.value)
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "shorter")
    chat_tokenizer("chatml").save_pretrained(tmp_path / "shorter")
    assert load_target(_config(tmp_path / "shorter")).n_layers == 2


def test_weights_of_a_body_alone_and_of_layers_that_are_none_of_the_models(tmp_path: Path) -> None:
    folder = _save(tmp_path / "target", "llama-tied")
    weights = folder / "model.safetensors"
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(weights).items()}
    # As DeepSeek V3 has its multi-token prediction: behind the last layer.
    further = {name.replace("layers.3", "layers.4"): x.clone() for name, x in tensors.items() if "layers.3" in name}
    further["layers.4.eh_proj.weight"] = torch.zeros(32, 64)
    tower = {"vision_tower.layers.9.weight": torch.zeros(2, 2)}
    save_file({**tensors, **further, **tower}, weights, metadata={"format": "pt"})
    assert load_target(_config(folder)).n_layers == 4
    del further["layers.4.eh_proj.weight"]
    save_file({**tensors, **further, **tower}, weights, metadata={"format": "pt"})
    with pytest.raises(TargetError, match="num_hidden_layers is 4, and its weights hold 5 layers"):
        load_target(_config(folder))


def test_a_config_of_another_size(tmp_path: Path) -> None:
    folder = _save(tmp_path / "target")
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "intermediate_size": 8}))
    with pytest.raises(TargetError, match=r"other shapes than its config\.json says\n  its config\.json is another"):
        load_target(_config(folder))


def test_a_checkpoint_without_some_tensor_is_refused(tmp_path: Path) -> None:
    """transformers would fill the gap with random numbers."""
    folder = _save(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.down_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        TargetError, match=r"lack model\.layers\.1\.mlp\.down_proj\.weight\n  the checkpoint is incomplete"
    ):
        load_target(_config(folder))
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"lack model\.norm\.weight\n"):
        load_ends(_config(folder))


def test_a_target_that_gives_nan_is_refused(tmp_path: Path) -> None:
    folder = _save(tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match="forward gives NaN or Inf in float32"):
        load_target(_config(folder))


@pytest.mark.parametrize("device", ["cuda:99", "nothing"])
def test_a_device_that_is_not_here(tmp_path: Path, device: str) -> None:
    with pytest.raises(TargetError, match=f"target.device: no device '{device}' here"):
        load_target(TargetConfig(model=str(_save(tmp_path / "target")), device=device))


def test_a_hub_that_cannot_be_reached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with pytest.raises(TargetError, match="give a local folder, or check the name"):
        load_target(TargetConfig(model="nobody/nothing"))


def test_weights_that_would_be_unpickled_are_refused(tmp_path: Path) -> None:
    """A pickle that runs code when loaded must not run it."""
    folder = _save(tmp_path / "t")
    (folder / "model.safetensors").unlink()
    flag = tmp_path / "ran"

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (flag,))  # type: ignore[return-value]

    torch.save({"model.norm.weight": Evil()}, folder / "pytorch_model.bin")
    with pytest.raises(TargetError):
        load_target(_config(folder))
    assert not flag.exists()


def test_code_of_a_checkpoint_runs_only_where_it_is_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 39 of docs/cases.md."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # transformers adds to it
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    folder, flag = _save(tmp_path / "t"), tmp_path / "ran"
    names = {"AutoConfig": "strange.StrangeConfig", "AutoModelForCausalLM": "strange.Strange"}
    config = {**json.loads((folder / "config.json").read_text()), "model_type": "strange", "auto_map": names}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "strange.py").write_text(
        f"from pathlib import Path\nfrom transformers import LlamaConfig\nPath({str(flag)!r}).touch()\n"
        "class StrangeConfig(LlamaConfig):\n    model_type = 'strange'\n"
    )
    for load in (load_target, load_text_config):
        with pytest.raises(TargetError, match=r"set target\.trust_remote_code: true if you trust"):
            load(_config(folder))
        assert not flag.exists()
    assert load_text_config(_config(folder, trust_remote_code=True)).num_hidden_layers == 4
    assert flag.exists()


def test_an_unknown_scaling_of_the_logits_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForCausalLM

    plain = LlamaForCausalLM.forward

    def scaled(self: LlamaForCausalLM, *args: object, **kwargs: object) -> object:
        out = plain(self, *args, **kwargs)
        out.logits = out.logits * 3
        return out

    folder = _save(tmp_path / "t")
    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(TargetError, match="are not its head applied to its final state"):
        load_target(_config(folder))
