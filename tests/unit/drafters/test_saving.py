"""Saved drafts: what comes back, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import FAMILIES, DrafterConfig
from drafttrain.drafters.saving import (
    META,
    WEIGHTS,
    check_target,
    load_draft,
    read_draft,
    read_meta,
    save_draft,
    warm_start,
)
from drafttrain.errors import CheckpointError
from drafttrain.files import read_json, write_json
from drafttrain.modeling.vocab_map import VocabMap
from tests.draft_support import documents, new_draft, packed, plain_target
from tests.support import VOCAB, tiny_target

TARGET = {
    "name": "some/target",
    "weights_hash": "w",
    "tokenizer_hash": "t",
    "template_hash": "c",
    "vocab_size": VOCAB,
    "tokenizer_size": VOCAB,
    "hidden_size": 32,
    "n_layers": 6,
}
CONFIGS: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(draft_vocab_size=30, fc_norm=True, num_layers=2),
    "eagle1": Eagle1Config(depth=3),
    "medusa": MedusaConfig(num_heads=2),
    "medusa-shared": MedusaConfig(num_heads=2, head="target"),
    "draft_lm": DraftLMConfig(layers=(0, 3)),
}
MAP = VocabMap.from_ids(range(1, 60, 2), VOCAB)


def _draft(name: str, seed: int = 0) -> Any:
    return new_draft(CONFIGS[name], plain_target(), seed, MAP if name == "eagle3" else None)


def test_every_family_is_tried() -> None:
    assert {config.family for config in CONFIGS.values()} == set(FAMILIES)


@pytest.mark.parametrize("name", list(CONFIGS))
def test_round_trip(name: str, tmp_path: Path) -> None:
    draft = _draft(name)
    save_draft(tmp_path / "d", draft, target=TARGET, provenance={"step": 7})
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == [META, WEIGHTS]
    loaded, meta = load_draft(tmp_path / "d")
    assert meta.config == CONFIGS[name] and meta.target == TARGET and meta.provenance == {"step": 7}
    assert read_json(tmp_path / "d" / META)["tie_word_embeddings"] is False
    assert not loaded.training and loaded.vocab_map == draft.vocab_map
    target = plain_target()
    loaded.bind(target.embedding_weight, target.head())
    batch = packed(target, documents(), draft.feature_spec.taps)
    with torch.no_grad():
        for ours, theirs in zip(
            draft.unroll(batch, draft.max_depth), loaded.unroll(batch, draft.max_depth), strict=True
        ):
            inside = batch.segments >= 0
            assert torch.equal(ours.readout[inside], theirs.readout[inside])
            logits = draft.head(ours.depth)(ours.readout), loaded.head(ours.depth)(ours.readout)
            assert torch.equal(*logits)


def test_tied_draft_lm_is_stored_once_and_stays_tied(tmp_path: Path) -> None:
    target = tiny_target("llama-tied")
    draft = new_draft(DraftLMConfig(layers=(0, 3)), target)
    save_draft(tmp_path / "d", draft, target=TARGET)
    stored = load_file(tmp_path / "d" / WEIGHTS)
    assert "model.embed_tokens.weight" in stored and "lm_head.weight" not in stored
    loaded, _ = load_draft(tmp_path / "d")
    assert loaded.head(0).weight.data_ptr() == loaded.state_dict()["lm.hf.model.embed_tokens.weight"].data_ptr()
    assert torch.equal(loaded.head(0).weight, draft.head(0).weight)


def test_offsets_are_inside_the_file_and_weights_in_the_dtype_asked_for(tmp_path: Path) -> None:
    save_draft(tmp_path / "d", _draft("eagle3"), target=TARGET, dtype=torch.bfloat16)
    stored = load_file(tmp_path / "d" / WEIGHTS)
    assert torch.equal(stored["d2t"] + torch.arange(30), torch.arange(1, 60, 2))
    assert (stored["d2t"].dtype, stored["t2d"].dtype) == (torch.int64, torch.bool)
    assert stored["fc.weight"].dtype == torch.bfloat16
    assert next(load_draft(tmp_path / "d")[0].parameters()).dtype == torch.bfloat16
    assert next(load_draft(tmp_path / "d", dtype=torch.float32)[0].parameters()).dtype == torch.float32


def test_replace_swaps_and_existing_folders_are_kept_without_it(tmp_path: Path) -> None:
    first, second = _draft("eagle1", 1), _draft("eagle1", 2)
    save_draft(tmp_path / "d", first, target=TARGET)
    with pytest.raises(Exception, match="already exists"):
        save_draft(tmp_path / "d", second, target=TARGET)
    assert torch.equal(load_draft(tmp_path / "d")[0].state_dict()["fc.weight"], first.state_dict()["fc.weight"])
    save_draft(tmp_path / "d", second, target=TARGET, replace=True)
    assert torch.equal(load_draft(tmp_path / "d")[0].state_dict()["fc.weight"], second.state_dict()["fc.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["d"]
    # Killed between the two renames: the one before is still found, and the next save clears up.
    (tmp_path / "d").rename(tmp_path / ".d.old")
    assert torch.equal(load_draft(tmp_path / "d")[0].state_dict()["fc.weight"], second.state_dict()["fc.weight"])
    save_draft(tmp_path / "d", first, target=TARGET, replace=True)
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


@pytest.mark.parametrize(
    ("change", "message"),
    [({"arch": {}}, r"draft.json: not a valid draft description: arch\."), ({"vocab_size": 7}, "draft.json says 7")],
)
def test_a_description_that_is_not_the_draft(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    save_draft(tmp_path / "d", _draft("eagle3"), target=TARGET)
    file = tmp_path / "d" / "draft.json"
    write_json(file, {**read_json(file), **change})
    for read in (load_draft, read_draft):
        with pytest.raises(CheckpointError, match=message):
            read(tmp_path / "d")


def test_a_full_disk_leaves_the_draft_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _draft("eagle1", 1)
    save_draft(tmp_path / "d", first, target=TARGET)

    def full(*_: object, **__: object) -> None:
        raise SafetensorError("No space left on device")

    monkeypatch.setattr("drafttrain.drafters.saving.save_file", full)
    with pytest.raises(CheckpointError, match="No space left"):
        save_draft(tmp_path / "d", _draft("eagle1", 2), target=TARGET, replace=True)
    assert torch.equal(load_draft(tmp_path / "d")[0].state_dict()["fc.weight"], first.state_dict()["fc.weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["d"]


def _without(state: dict[str, Any]) -> None:
    del state["norm.weight"]


def _with_more(state: dict[str, Any]) -> None:
    state["embed_tokens.weight"] = torch.zeros(3)


def _with_a_shard(state: dict[str, Any]) -> None:
    # What ZeRO-3 leaves in place of a partitioned parameter.
    state["fc.weight"] = torch.empty(0)


def _with_nan(state: dict[str, Any]) -> None:
    state["fc.weight"] = state["fc.weight"] * float("nan")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without, r"missing: \['norm.weight'\]"),
        (_with_more, r"unknown: \['embed_tokens.weight'\]"),
        (_with_a_shard, r"fc.weight is \(0,\), not \(32, 96\)"),
        (_with_nan, "NaN or Inf in fc.weight"),
    ],
)
def test_a_state_that_is_not_the_draft_is_not_written(spoil: Any, message: str, tmp_path: Path) -> None:
    draft = _draft("eagle3")
    state = dict(draft.state_dict())
    spoil(state)
    with pytest.raises(CheckpointError, match=message):
        save_draft(tmp_path / "d", draft, target=TARGET, state=state)
    assert not (tmp_path / "d").exists()


def test_damaged_folders(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no draft is saved here"):
        load_draft(tmp_path)
    folder = tmp_path / "d"
    save_draft(folder, _draft("eagle3"), target=TARGET)
    weights = folder / WEIGHTS
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        load_draft(folder)
    with pytest.raises(CheckpointError, match="damaged or truncated"):
        warm_start(CONFIGS["eagle3"], folder)
    weights.unlink()
    # A pickle beside it is never opened.
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickled files are not read"):
        load_draft(folder)


def test_absolute_ids_and_lost_maps_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    save_draft(folder, _draft("eagle3"), target=TARGET)
    stored = load_file(folder / WEIGHTS)
    save_file({**stored, "d2t": MAP.target_ids}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="absolute"):
        load_draft(folder)
    save_file({name: tensor for name, tensor in stored.items() if name != "d2t"}, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match="d2t"):
        load_draft(folder)


@pytest.mark.parametrize("change", [{"format": 2}, {"family": "eagle9", "config": {"family": "eagle9"}}])
def test_descriptions_of_another_version(change: dict[str, Any], tmp_path: Path) -> None:
    save_draft(tmp_path / "d", _draft("eagle1"), target=TARGET)
    path = tmp_path / "d" / META
    write_json(path, {**read_json(path), **change})
    with pytest.raises(CheckpointError, match=r"format 2|not a valid draft description"):
        load_draft(tmp_path / "d")


def test_warm_start_keeps_the_map_of_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    saved = _draft("eagle3", 3)
    save_draft(folder, saved, target=TARGET, dtype=torch.bfloat16)
    config = CONFIGS["eagle3"]
    started, meta = warm_start(config.model_copy(update={"depth": 3, "draft_vocab_size": None}), folder)
    assert started.vocab_map == MAP and started.max_depth == 3 and started.training
    assert meta.config == config and {p.dtype for p in started.parameters()} == {torch.float32}
    rounded = {n: v.bfloat16().float() if v.is_floating_point() else v for n, v in saved.state_dict().items()}
    assert all(torch.equal(value, rounded[name]) for name, value in started.state_dict().items())


def test_warm_start_keeps_rotary_parameters_and_sizes(tmp_path: Path) -> None:
    """Case 16 of docs/cases.md: those of the draft, which a recipe cannot know, not those of the target."""
    saved = _draft("eagle1", 3)
    arch = saved.arch.model_copy(update={"rope_parameters": {"rope_type": "default", "rope_theta": 77.0}})  # type: ignore[union-attr]
    other = type(saved).from_saved(saved.config, arch.model_dump(), saved.vocab_map, None)  # type: ignore[operator]
    save_draft(tmp_path / "d", other, target=TARGET)
    started, _ = warm_start(CONFIGS["eagle1"], tmp_path / "d")
    assert started.saved_arch() == other.saved_arch()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"draft_vocab_size": 29}, "draft_vocab_size is 29, saved 30"),
        ({"taps": (1, 2, 4)}, r"taps is \['1', '2', '4'\], saved \['1', '3', '5'\]"),
        ({"fc_norm": False}, "fc_norm is False, saved True"),
        ({"num_layers": 1}, "num_layers is 1, saved 2"),
        ({"intermediate_size": 5, "norm_output": True}, "intermediate_size is 5, saved 48; norm_output is True"),
    ],
)
def test_a_recipe_that_contradicts_the_draft_it_starts_from(change: dict[str, Any], named: str, tmp_path: Path) -> None:
    """Case 12 of docs/cases.md."""
    save_draft(tmp_path / "d", _draft("eagle3"), target=TARGET)
    base = CONFIGS["eagle3"].model_dump()
    with pytest.raises(CheckpointError, match=named):
        warm_start(Eagle3Config.model_validate(base | change), tmp_path / "d")
    with pytest.raises(CheckpointError, match="of family eagle3"):
        warm_start(Eagle1Config(), tmp_path / "d")


def test_targets_are_compared_by_vocabulary_and_weights_not_by_name(tmp_path: Path) -> None:
    save_draft(tmp_path / "d", _draft("eagle3"), target=TARGET)
    meta = read_meta(tmp_path / "d")
    check_target(meta, {**TARGET, "name": "a/copy", "template_hash": "other"})
    for key in ("tokenizer_hash", "vocab_size", "hidden_size", "n_layers", "weights_hash"):
        with pytest.raises(CheckpointError, match=f"differs from some/target in {key}"):
            check_target(meta, {**TARGET, key: "x"})
    check_target(meta, {**TARGET, "weights_hash": "fine-tune"}, other_weights=True)
    with pytest.raises(CheckpointError, match="tokenizer_hash"):
        check_target(meta, {**TARGET, "tokenizer_hash": "x"}, other_weights=True)


def test_a_draft_lm_needs_the_targets_vocabulary_only(tmp_path: Path) -> None:
    save_draft(tmp_path / "d", _draft("draft_lm"), target=TARGET)
    meta = read_meta(tmp_path / "d")
    check_target(meta, {**TARGET, "weights_hash": "x", "hidden_size": 64, "n_layers": 12})
    with pytest.raises(CheckpointError, match="tokenizer_hash"):
        check_target(meta, {**TARGET, "tokenizer_hash": "x"})
