"""Layouts of other tools, targets that do not fit, folders that are no drafts: read as they lie there, never a
traceback."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import Tensor

from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.errors import UserError
from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.draft import open_draft
from drafttrain.export.doctor.finding import Finding, Mend, Severity
from drafttrain.export.doctor.mending import mend_case, write_copy
from drafttrain.export.doctor.registry import RULES, check_ignored, lint
from drafttrain.export.doctor.target import TargetFacts
from drafttrain.export.doctor.weights import INDEX
from drafttrain.export.ir import DraftIR
from drafttrain.export.tap_ids import KEY
from drafttrain.export.vllm import VLLM
from drafttrain.files import read_json, write_json
from tests.chats import CHATML, chat_tokenizer
from tests.support import VOCAB, tiny_hf, tiny_target
from tests.unit.export.test_export import ir_of

LAYERS = 8
FACTS = TargetFacts.of_config("some/target", tiny_target("llama", num_hidden_layers=LAYERS).config)


@pytest.fixture(scope="module")
def irs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DraftIR]:
    """One draft of each family."""
    configs: dict[str, DrafterConfig] = {
        "eagle3": Eagle3Config(draft_vocab_size=30),
        "eagle1": Eagle1Config(depth=3),
        "medusa": MedusaConfig(num_heads=2, num_layers=1),
        "draft_lm": DraftLMConfig(layers=(0, 3)),
    }
    return {name: ir_of(tmp_path_factory.mktemp(name), config) for name, config in configs.items()}


def written(folder: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", config)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def found(folder: Path, facts: TargetFacts | None = FACTS, engine: str = "vllm") -> dict[str, Finding]:
    return {finding.rule: finding for finding in lint(Case(open_draft(folder), facts, engine))}


def speculators(ir: DraftIR) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """As that library nests it."""
    layout = VLLM.layout(ir)
    outer = ("draft_vocab_size", "architectures", "eagle_config", KEY, "num_aux_hidden_states")
    config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": ir.vocab_map.size,
        "norm_before_residual": False,
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {key: value for key, value in layout.config.items() if key not in outer},
    }
    return config, {name.replace("midlayer.", "layers.0."): tensor for name, tensor in layout.tensors.items()}


def test_speculators(irs: dict[str, DraftIR], tmp_path: Path) -> None:
    config, tensors = speculators(irs["eagle3"])
    folder = written(tmp_path / "sound", config, tensors)
    assert open_draft(folder).family == "eagle3" and found(folder) == {}
    assert "engine-lacks" in found(folder, engine="sglang")
    del config["norm_before_residual"], config["speculators_config"]["proposal_methods"]
    config["transformer_layer_config"]["rope_theta"] = 1.0
    config["draft_vocab_size"] = 12
    broken = found(written(tmp_path / "broken", config, tensors))
    assert set(broken) == {"speculators-config", "rope-conflict", "draft-vocab-size"}
    case = mend_case(Case(open_draft(tmp_path / "broken"), FACTS)).case
    assert case.draft.config["transformer_layer_config"]["rope_theta"] == 10000.0
    assert case.draft.config["draft_vocab_size"] == 30 and "rope_theta" not in case.draft.config


def test_original_eagle_checkpoints(irs: dict[str, DraftIR], tmp_path: Path) -> None:
    """Pickled, the config copied from the target, `bias`, an embedding, a short context."""
    layout = VLLM.layout(irs["eagle1"])
    config = {**layout.config, "bias": True, "max_position_embeddings": 64}
    del config["architectures"]
    folder = written(tmp_path / "eagle", config, {})
    (folder / "model.safetensors").unlink()
    torch.save({**layout.tensors, "embed_tokens.weight": torch.randn(VOCAB, 32)}, folder / "pytorch_model.bin")
    assert set(found(folder)) == {"pickled-weights", "bias-key", "architecture", "context-length", "embedding"}
    write_copy(mend_case(Case(open_draft(folder), FACTS)).case.draft, tmp_path / "mended")
    assert set(found(tmp_path / "mended")) == {"embedding"}
    assert not list((tmp_path / "mended").glob("*.bin"))


def test_a_pickle_is_not_executed(tmp_path: Path) -> None:
    """Case 39 of docs/cases.md."""

    class Trap:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (tmp_path / "ran",))

    folder = tmp_path / "draft"
    folder.mkdir()
    write_json(folder / "config.json", {"model_type": "llama"})
    torch.save({"fc.weight": Trap()}, folder / "pytorch_model.bin")
    assert "cannot be read" in found(folder)["incomplete"].what
    assert not (tmp_path / "ran").exists()


def test_specforge(irs: dict[str, DraftIR], tmp_path: Path) -> None:
    """The raw layout behind a prefix, in shards."""
    layout = VLLM.layout(irs["eagle3"])
    tensors = {f"draft_model.{name}": tensor for name, tensor in layout.tensors.items()}
    tensors["draft_model.d2t"] = tensors["draft_model.d2t"] + torch.arange(30)
    folder = written(tmp_path / "sf", layout.config, {})
    (folder / "model.safetensors").unlink()
    halves = [dict(list(tensors.items())[::2]), dict(list(tensors.items())[1::2])]
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    for name, half in zip(names, halves, strict=True):
        save_file(half, folder / name)
    places = {key: name for name, half in zip(names, halves, strict=True) for key in half}
    write_json(folder / INDEX, {"metadata": {}, "weight_map": places})
    assert set(found(folder)) == {"d2t-absolute"}
    write_copy(mend_case(Case(open_draft(folder), FACTS)).case.draft, tmp_path / "mended")
    assert found(tmp_path / "mended") == {}
    assert sorted(path.name for path in (tmp_path / "mended").iterdir()) == sorted(["config.json", INDEX, *names])
    (folder / names[1]).unlink()
    assert "is missing" in found(folder)["incomplete"].what


def test_old_medusa(irs: dict[str, DraftIR], tmp_path: Path) -> None:
    """Keys by head and layer, blocks with biases, a config without a type."""
    tensors = {}
    for head in range(2):
        tensors[f"{head}.0.linear.weight"] = torch.randn(32, 32)
        tensors[f"{head}.0.linear.bias"] = torch.randn(32)
        tensors[f"{head}.1.weight"] = torch.randn(VOCAB, 32)
    folder = written(tmp_path / "medusa", {"medusa_num_heads": 2, "medusa_num_layers": 1, "hidden_size": 32}, tensors)
    assert open_draft(folder).family == "medusa"
    assert set(found(folder)) == {"medusa-bias"}
    assert set(found(written(tmp_path / "three", {"medusa_num_heads": 3, "hidden_size": 32}, tensors))) >= {
        "medusa-heads"
    }


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"hidden_size": 64}, "hidden-size"),
        ({"vocab_size": VOCAB + 3}, "vocab-size"),
        ({"context": 512}, "context-length"),
        ({"quantisation": "awq"}, "quantised-target"),
        ({"rope": {"rope_type": "default", "rope_theta": 5e5}}, "rope-theta"),
        ({"rope": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}, "rope-scaling"),
        ({"rope": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}}, "rope-scaling"),
        ({"tokenizer_size": 40}, "padded-vocabulary"),  # case 14 of docs/cases.md
        ({"stop_ids": frozenset({2})}, "stop-tokens"),  # case 11 of docs/cases.md
    ],
)
def test_a_target_that_does_not_fit(change: dict[str, Any], rule: str, irs: dict[str, DraftIR], tmp_path: Path) -> None:
    layout = VLLM.layout(irs["eagle3"])
    folder = written(tmp_path / "draft", layout.config, layout.tensors)
    assert found(folder) == {}
    assert rule in found(folder, replace(FACTS, **change))


@pytest.mark.parametrize("keys", [("rope_theta", "rope_scaling", "rope_parameters"), ()])
def test_a_rotary_base_that_may_be_meant(keys: tuple[str, ...], irs: dict[str, DraftIR], tmp_path: Path) -> None:
    """EAGLE's own drafts are trained with 10000 whatever the target's base is: only drafttrain's are known better."""
    layout = VLLM.layout(irs["eagle3"])
    config = {key: value for key, value in layout.config.items() if key not in keys}
    folder = written(tmp_path / "draft", config, layout.tensors)
    facts = replace(FACTS, rope={"rope_type": "default", "rope_theta": 5e5})
    rule = "rope-absent" if keys else "rope-theta"
    (theirs,) = lint(Case(open_draft(folder), facts))
    assert theirs.rule == rule and theirs.severity is Severity.warning and not theirs.fixable
    (ours,) = lint(Case(open_draft(folder), facts, about={"target": {}}))
    assert ours.rule == rule and ours.severity is Severity.error and ours.fixable


def test_norms_of_the_other_kind(irs: dict[str, DraftIR], tmp_path: Path) -> None:
    """Case 19 of docs/cases.md: an error where the target's norms multiply by 1 + weight, and mended."""
    layout = VLLM.layout(irs["eagle3"])
    tensors = {name: tensor - 1 if "norm" in name else tensor for name, tensor in layout.tensors.items()}
    folder = written(tmp_path / "draft", layout.config, tensors)
    gemma = replace(FACTS, model_type="gemma2")
    finding = found(folder, gemma)["norm-flavour"]
    assert finding.severity is Severity.error and finding.mend is not None
    draft = open_draft(folder).mended(finding.mend)
    assert all(
        torch.allclose(draft.tensor(name), tensor, atol=1e-6)
        for name, tensor in layout.tensors.items()
        if tensor.is_floating_point()
    )


@pytest.mark.parametrize("kind", ["gemma", "gemma2", "gemma3", "llama", "qwen3"])
def test_which_targets_norms_add_one(kind: str) -> None:
    """By what transformers' class does with a weight of zeros."""
    model = tiny_hf(kind)
    norm = model.model.norm
    with torch.no_grad():
        norm.weight.zero_()
        adds_one = bool(norm(torch.ones(1, 32)).any())
    facts = TargetFacts.of_config("some/target", model.config)
    assert facts.norms_add_one == adds_one


def test_another_tokenizer(irs: dict[str, DraftIR], tmp_path: Path) -> None:
    """Case 15 of docs/cases.md: compared by vocabulary."""
    words = chat_tokenizer(CHATML)
    layout = VLLM.layout(irs["eagle3"])
    folder = written(tmp_path / "draft", layout.config, layout.tensors)
    words.save_pretrained(folder)
    same = TargetFacts.of_config("some/target", tiny_target("llama", num_hidden_layers=LAYERS).config, words)
    assert "tokenizer" not in found(folder, same)
    raw = json.loads((folder / "tokenizer.json").read_text())
    first, second = list(raw["model"]["vocab"])[40:42]
    vocabulary = raw["model"]["vocab"]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    assert found(folder, same)["tokenizer"].severity is Severity.error


@pytest.mark.parametrize(
    ("nested", "top", "engine", "severity", "mended"),
    [
        ([1, 3, 4], None, "vllm", "error", [2, 4, 5]),  # SGLang's numbering of the default
        ([1, 3, 4], None, "sglang", None, None),
        ([2, 4, 5], None, "sglang", "error", [1, 3, 4]),
        ([0, 3, 5], None, "vllm", "warning", None),  # whose numbering it is cannot be known
        ([1, 4, 6], [1, 4, 6], "vllm", "error", [0, 3, 5]),
        ([0, 3, 5], [1, 4, 6], "vllm", None, None),
        (None, [1, 3, 4], "vllm", "error", [2, 4, 5]),
        (None, [1, 4, 6], "sglang", "error", [0, 3, 5]),
    ],
)
def test_layer_ids_of_drafts_made_elsewhere(
    nested: list[int] | None,
    top: list[int] | None,
    engine: str,
    severity: str | None,
    mended: list[int] | None,
    irs: dict[str, DraftIR],
    tmp_path: Path,
) -> None:
    """Case 26 of docs/cases.md: two engines, two numberings."""
    layout = VLLM.layout(irs["eagle3"])
    config: dict[str, Any] = {**layout.config, "num_aux_hidden_states": 3}
    if nested is not None:
        config["eagle_config"] = {KEY: nested}
    if top is not None:
        config[KEY] = top
    case = Case(open_draft(written(tmp_path / "draft", config, layout.tensors)), FACTS, engine)
    finding = next((one for one in lint(case) if one.rule == "layer-ids-convention"), None)
    assert (None if finding is None else str(finding.severity)) == severity
    if mended is not None:
        after = mend_case(case)
        ids = [after.case.top_ids, after.case.nested_ids]
        assert mended in ids and "layer-ids-convention" not in {one.rule for one in after.left}


def test_ids_beyond_the_target(irs: dict[str, DraftIR], tmp_path: Path) -> None:
    layout = VLLM.layout(irs["eagle3"])
    config = {**layout.config, KEY: [2, 20, 20], "num_aux_hidden_states": 3}
    broken = [
        finding.what
        for finding in lint(Case(open_draft(written(tmp_path / "draft", config, layout.tensors)), FACTS))
        if finding.rule == "layer-ids-range"
    ]
    assert any("[20, 20]" in what for what in broken) and any("twice" in what for what in broken)


def test_a_single_state_in_sglang(tmp_path: Path) -> None:
    layout = VLLM.layout(ir_of(tmp_path / "run", Eagle3Config(taps=(4,))))
    folder = written(tmp_path / "draft", layout.config, layout.tensors)
    assert found(folder) == {}
    assert "single state" in found(folder, engine="sglang")["engine-lacks"].what


def test_a_draft_lm(irs: dict[str, DraftIR], tmp_path: Path) -> None:
    layout = VLLM.layout(irs["draft_lm"])
    folder = written(tmp_path / "draft", layout.config, layout.tensors)
    assert found(folder) == {}
    assert set(found(folder, replace(FACTS, vocab_size=VOCAB + 3))) == {"vocab-size", "lm-vocabulary"}
    tied = written(tmp_path / "tied", {**layout.config, "tie_word_embeddings": True}, layout.tensors)
    assert set(found(tied)) == {"lm-head"}
    headless = {name: tensor for name, tensor in layout.tensors.items() if name != "lm_head.weight"}
    assert set(found(written(tmp_path / "headless", layout.config, headless))) == {"lm-head"}


def test_what_is_no_export(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        open_draft(tmp_path / "nowhere")
    (tmp_path / "run" / "best").mkdir(parents=True)
    write_json(tmp_path / "run" / "best" / "draft.json", {})
    with pytest.raises(UserError, match="drafttrain export RUN --to vllm"):
        open_draft(tmp_path / "run")
    (tmp_path / "empty").mkdir()
    broken = lint(Case(open_draft(tmp_path / "empty"), FACTS))
    assert {finding.rule for finding in broken} == {"incomplete"} and len(broken) == 2
    other = written(tmp_path / "other", {"model_type": "bert", "architectures": ["BertModel"]}, {"x": torch.ones(2)})
    assert found(other)["not-a-draft"].severity is Severity.warning


def test_rules_have_ids_of_their_own_and_unknown_ones_are_refused() -> None:
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)
    check_ignored(["rope-theta"])
    with pytest.raises(UserError, match=r"no rule 'rope-theat'[\s\S]*rope-theta"):
        check_ignored(["rope-theat"])


def test_without_a_target_its_rules_are_left_out(irs: dict[str, DraftIR], tmp_path: Path) -> None:
    layout = VLLM.layout(irs["eagle3"])
    folder = written(tmp_path / "draft", {**layout.config, "hidden_act": "gelu"}, layout.tensors)
    assert set(found(folder, None)) == {"activation"}


JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-3, 99), st.text(max_size=3), st.just([]), st.just({}), st.just([1])
)


@pytest.mark.parametrize("family", ["eagle3", "eagle1", "medusa", "draft_lm"])
def test_no_config_makes_the_doctor_stumble(family: str, irs: dict[str, DraftIR], tmp_path: Path) -> None:
    """Whatever stands in a config and whichever tensors are missing: findings, not a traceback."""
    layout = VLLM.layout(irs[family])
    draft = open_draft(written(tmp_path / "draft", layout.config, layout.tensors))
    keys = sorted([*layout.config, KEY, "eagle_config", "bias"])

    @settings(max_examples=40, database=None)
    @given(
        changes=st.dictionaries(st.sampled_from(keys), JUNK, max_size=4),
        dropped=st.sets(st.sampled_from(sorted(layout.tensors)), max_size=3),
        engine=st.sampled_from(["vllm", "sglang"]),
    )
    def examine(changes: dict[str, Any], dropped: set[str], engine: str) -> None:
        changed = draft.mended(Mend(keys=changes, drop_tensors=tuple(sorted(dropped))))
        assert all(finding.what for finding in lint(Case(changed, FACTS, engine)))

    examine()


def test_values_of_a_wrong_type_are_named(irs: dict[str, DraftIR], tmp_path: Path) -> None:
    layout = VLLM.layout(irs["eagle3"])
    config = {**layout.config, "architectures": "LlamaForCausalLMEagle3", "eagle_config": {KEY: "2,4,5"}}
    folder = written(tmp_path / "draft", config, layout.tensors)
    wrong = [finding.what for finding in lint(Case(open_draft(folder), FACTS)) if finding.rule == "config-types"]
    assert wrong == [
        "architectures is 'LlamaForCausalLMEagle3', not a list of strings",
        f"eagle_config.{KEY} is '2,4,5', not a list of integers",
    ]


def test_json(irs: dict[str, DraftIR], tmp_path: Path) -> None:
    layout = VLLM.layout(irs["eagle3"])
    folder = written(tmp_path / "draft", {**layout.config, "bias": True}, layout.tensors)
    (value,) = [finding.to_json() for finding in found(folder).values()]
    assert set(value) == {"rule", "severity", "what", "why", "remedy", "fixable"}
    assert json.loads(json.dumps(value)) == value and value["fixable"] is True
    assert read_json(folder / "config.json")["bias"] is True
