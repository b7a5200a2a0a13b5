"""Draft LMs as GGUF files: read back by gguf and by transformers, with the same logits and the same tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGUFReader
from tokenizers import Regex, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from drafttrain.drafters.eagle.config import Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.saving import save_draft
from drafttrain.errors import CheckpointError, TargetError
from drafttrain.export.foreign.read import read_foreign
from drafttrain.export.gguf_file import FILE, GGUF
from drafttrain.export.gguf_model import ROPE_FACTORS, gguf_layout, rope_factors, turned_heads, unturned
from drafttrain.export.gguf_tokenizer import tokenizer_fields
from drafttrain.export.ir import ExportError, read_ir
from drafttrain.export.write import export_draft
from drafttrain.modeling.blocks import Rotary
from drafttrain.targets.load import load_identity, load_tokenizer
from tests.draft_support import new_draft
from tests.foreign_support import target_folder
from tests.support import KINDS

TEXTS = ["def add(a, b):\n    return a + b", "你好，世界 مرحبا 😀", "It's 42!<|im_end|> And you?"]


def exported(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> tuple[Any, Any, Path]:
    """(the draft, the target's config section, the export's folder)."""
    target, config = target_folder(folder / "target", kind, **changes)
    draft = new_draft(DraftLMConfig(layers=(0, 3)), target)
    with torch.no_grad():
        for weight in draft.parameters():
            weight.copy_(weight.to(dtype))  # what the file can hold
    save_draft(folder / "run" / "draft", draft, target=load_identity(config).to_dict())
    (written,) = export_draft(folder / "run", ["gguf"], dtype=dtype)
    return draft, config, written.folder


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("llama", torch.float32),
        ("llama-tied", torch.bfloat16),
        ("mistral", torch.float32),
        ("qwen2", torch.float16),
        ("qwen3", torch.float32),
    ],
)
def test_transformers_reads_the_same_model(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    # transformers' reader takes 128 for granted in Qwen3; its Qwen2 tokenizer adds a token: rows are padded here.
    changes = {"qwen3": {"head_dim": 128}, "qwen2": {"vocab_size": 424}}.get(kind, {})
    draft, config, folder = exported(tmp_path, kind, dtype, **changes)
    assert sorted(path.name for path in folder.iterdir()) == ["README.md", FILE, "drafttrain.json"]
    loaded = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=FILE, quantization_config=GgufConfig(dequantize=True)
    ).float()
    tokenizer = load_tokenizer(config)
    theirs = AutoTokenizer.from_pretrained(folder, gguf_file=FILE)
    ids = torch.tensor([tokenizer(TEXTS[0])["input_ids"]])
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, draft.lm.lm_head(draft.lm(ids).final), atol=1e-4)
    for text in TEXTS:
        assert theirs(text)["input_ids"] == tokenizer(text)["input_ids"]
    assert theirs.eos_token_id == tokenizer.eos_token_id


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3"])
def test_it_comes_back_bit_by_bit(kind: str, tmp_path: Path) -> None:
    _, config, folder = exported(tmp_path, kind, torch.bfloat16)
    found = read_foreign(folder, config)
    assert (found.layout, found.ir.dtype) == ("gguf", torch.bfloat16)
    ours = read_ir(tmp_path / "run", torch.bfloat16)
    assert set(found.ir.tensors) == set(ours.tensors)
    assert all(torch.equal(found.ir.tensors[name], tensor) for name, tensor in ours.tensors.items())


def test_fields_and_types(tmp_path: Path) -> None:
    _, config, folder = exported(tmp_path, "llama-tied", torch.bfloat16)
    reader = GGUFReader(folder / FILE)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama" and fields["llama.block_count"] == 2
    assert fields["tokenizer.ggml.model"] == "gpt2" and fields["tokenizer.ggml.pre"] == "gpt-2"
    assert len(fields["tokenizer.ggml.tokens"]) == fields["llama.vocab_size"] == load_identity(config).vocab_size
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert "output.weight" not in types  # tied
    assert types["blk.0.attn_q.weight"] == "BF16" and types["blk.0.attn_norm.weight"] == "F32"
    assert "llama-server -m target.gguf --model-draft" in (folder / "README.md").read_text(encoding="utf-8")


def test_llama3_scaling_is_a_factor_for_each_frequency(tmp_path: Path) -> None:
    """Case 16 of docs/cases.md."""
    _, config, folder = exported(tmp_path, "llama3-rope")
    stored = {tensor.name: torch.tensor(tensor.data) for tensor in GGUFReader(folder / FILE).tensors}
    rope = KINDS["llama3-rope"][1]["rope_parameters"]
    plain = Rotary({"rope_type": "default", "rope_theta": 5000.0}, 8, 128)
    assert torch.allclose(plain.inv_freq / stored[ROPE_FACTORS], Rotary(rope, 8, 128).inv_freq)
    assert stored[ROPE_FACTORS].max() == rope["factor"] and stored[ROPE_FACTORS].min() == 1.0
    found = read_foreign(folder, config)
    assert found.ir.lm_config is not None and torch.equal(rope_factors(found.ir.lm_config), stored[ROPE_FACTORS])


def test_the_halves_of_a_head_are_interleaved() -> None:
    config = {"model_type": "llama", "num_attention_heads": 1, "num_key_value_heads": 1}
    rows = torch.tensor([[0.0], [10.0], [1.0], [11.0]])  # 0 turns with 10, 1 with 11
    assert unturned("q_proj.weight", rows, config).flatten().tolist() == [0.0, 1.0, 10.0, 11.0]
    assert turned_heads("q_proj.weight", {**config, "model_type": "qwen2"}) is None


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("gemma", {}, "model_type gemma"),
        ("mistral-window", {}, "sliding_window"),
        ("qwen2-window", {}, "sliding_window"),
        ("llama", {"attention_bias": True}, "attention_bias"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters .*only default, linear and llama3",
        ),
    ],
)
def test_what_is_not_written_is_refused_by_name(kind: str, changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    target, config = target_folder(tmp_path / "target", kind, **changes)
    draft = new_draft(DraftLMConfig(layers=(0, 3)), target)
    save_draft(tmp_path / "run" / "draft", draft, target=load_identity(config).to_dict())
    with pytest.raises(ExportError, match=f"gguf cannot serve this draft: {named}"):
        gguf_layout(read_ir(tmp_path / "run"))


def test_other_families_and_targets_without_a_tokenizer(tmp_path: Path) -> None:
    target, config = target_folder(tmp_path / "target")
    for name, drafter in (("eagle3", Eagle3Config()), ("lm", DraftLMConfig(layers=(0,)))):
        draft = new_draft(drafter, target)
        save_draft(tmp_path / name / "draft", draft, target=load_identity(config).to_dict())
    with pytest.raises(ExportError, match=r"drafter.family eagle3"):
        export_draft(tmp_path / "eagle3", ["gguf"])
    for file in (tmp_path / "target").glob("tokenizer*"):
        file.unlink()
    with pytest.raises(TargetError, match="cannot load its tokenizer"):
        export_draft(tmp_path / "lm", ["gguf"])
    assert not (tmp_path / "lm" / "export").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("split", "how it splits text"),
        ("normalise", "does not normalise text"),
        ("rows", "it has ids up to"),
    ],
)
def test_tokenizers_that_llama_cpp_would_split_otherwise(change: str, said: str, tmp_path: Path) -> None:
    _, config = target_folder(tmp_path / "target")
    tokenizer, rows = load_tokenizer(config), load_identity(config).vocab_size
    backend = tokenizer.backend_tokenizer
    match change:
        case "split":
            split = pre_tokenizers.Split(Regex(r"\p{N}{1,5}"), "isolated")
            level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
            backend.pre_tokenizer = pre_tokenizers.Sequence([split, level])
        case "normalise":
            backend.normalizer = normalizers.Lowercase()
        case "rows":
            rows -= 10
    with pytest.raises(ExportError, match=said):
        tokenizer_fields(tokenizer, rows)


@pytest.mark.parametrize(
    ("pattern", "name"),
    [(r"\p{N}{1,3}", "llama-bpe"), (r"\p{N}", "qwen2")],
)
def test_known_ways_of_splitting(pattern: str, name: str, tmp_path: Path) -> None:
    """Llama 3's and Qwen2's regular expressions; SmolLM's single digits."""
    _, config = target_folder(tmp_path / "target")
    tokenizer = load_tokenizer(config)
    whole = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + pattern
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(whole), "isolated"), level]
    )
    fields = tokenizer_fields(tokenizer, load_identity(config).vocab_size + 3)
    assert fields["tokenizer.ggml.pre"] == name
    assert fields["tokenizer.ggml.tokens"][-1].startswith("[PAD") and fields["tokenizer.ggml.token_type"][-1] == 5
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    assert tokenizer_fields(tokenizer, 500)["tokenizer.ggml.pre"] == "smollm"
    assert json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"]["type"] == "Sequence"


def test_a_file_that_was_cut_or_changed(tmp_path: Path) -> None:
    _, config, folder = exported(tmp_path, "llama")
    whole = (folder / FILE).read_bytes()
    (folder / FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        read_foreign(folder, config)
    (folder / FILE).write_bytes(whole)
    _, other = target_folder(tmp_path / "other", vocab_size=440)
    with pytest.raises(CheckpointError, match="its tokens are not those"):
        read_foreign(folder, other)


def test_it_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, config = target_folder(tmp_path / "target")
    draft = new_draft(DraftLMConfig(layers=(0,)), target)
    save_draft(tmp_path / "run" / "draft", draft, target=load_identity(config).to_dict())
    ir = read_ir(tmp_path / "run")
    layout = GGUF.layout(ir)
    (tmp_path / "out").mkdir()
    assert GGUF.write is not None
    GGUF.write(tmp_path / "out", ir, layout, tmp_path / "out")
    spoilt = {**layout.tensors, "output_norm.weight": layout.tensors["output_norm.weight"] + 1}
    monkeypatch.setattr("drafttrain.export.gguf_file._array", lambda tensor: torch.zeros_like(tensor).numpy())
    with pytest.raises(ExportError, match=r"tensor output_norm.weight differs"):
        GGUF.write(tmp_path / "out", ir, type(layout)(layout.config, spoilt), tmp_path / "out")
