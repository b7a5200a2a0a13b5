"""Plans against what they predict: published parameter counts, counted operations, tensors kept for the backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from drafttrain.drafters.base import DraftBatch, Drafter
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.lora import add_lora
from drafttrain.drafters.lora_config import LoraConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.errors import TargetError, UserError
from drafttrain.losses.config import LossConfig
from drafttrain.losses.objective import Objective
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.recipe.load import load_recipe
from drafttrain.training.launch import Launch
from drafttrain.training.plan import hardware as plan_hardware
from drafttrain.training.plan.activations import kept_bytes
from drafttrain.training.plan.fitting import find_fitting
from drafttrain.training.plan.flops import step_flops
from drafttrain.training.plan.hardware import kind_of, parse_gpus, this_machine
from drafttrain.training.plan.layout import ALONE, Layout
from drafttrain.training.plan.memory import peak
from drafttrain.training.plan.plan import make_plan, target_config
from drafttrain.training.plan.products import body_flops
from drafttrain.training.plan.workload import Workload, workload
from drafttrain.training.step import TrainStep
from tests.draft_support import new_draft, packed
from tests.support import VOCAB, tiny_hf, tiny_target

CONFIGS = Path(__file__).resolve().parents[2] / "fixtures" / "configs"
LENGTH = 24
DRAFTS: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(draft_vocab_size=30, depth=3),
    "eagle3-kept-head": Eagle3Config(depth=2, train_head=False),
    "eagle3-norms": Eagle3Config(depth=2, fc_norm=True, num_layers=2),
    "eagle3.1": Eagle3Config(depth=3, norm_before_fc=True, norm_output=True, norm_before_residual=True),
    "eagle1": Eagle1Config(depth=1),
    "hass": Eagle1Config(depth=3),
    "hass-attached": Eagle1Config(depth=2, detach=False),
    "medusa": MedusaConfig(num_heads=2, num_layers=2),
    "medusa-shared": MedusaConfig(num_heads=2, head="target"),
    "draft_lm": DraftLMConfig(layers=(0, 3)),
    "draft_lm-lora": DraftLMConfig(layers=(0, 3), lora=LoraConfig(rank=3)),
    "eagle3-lora": Eagle3Config(depth=3, warm_start="theirs", lora=LoraConfig(rank=3)),
    "eagle1-lora": Eagle1Config(depth=2, warm_start="theirs", lora=LoraConfig(rank=3, modules=("o_proj", "up_proj"))),
}


def draft_of(name: str, target: CausalLM) -> Drafter:
    small = VocabMap.from_ids(range(1, 60, 2), VOCAB) if name == "eagle3" else None
    draft = new_draft(DRAFTS[name], target, vocab_map=small).train()
    lora = getattr(DRAFTS[name], "lora", None)
    if lora is not None:
        add_lora(draft, lora)
    return draft


def batch_of(target: CausalLM, draft: Drafter) -> DraftBatch:
    """One document that fills its row; all but its first token are one answer."""
    ids = torch.randint(3, VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0))
    batch = packed(target, [[ids]], draft.feature_spec.taps, LENGTH)
    batch.spans[:, 0] = 0
    # The target says what the draft can say, so that no label is left out.
    batch.top1 = torch.ones_like(batch.tokens)
    return batch


def products(counter: FlopCounterMode) -> float:
    """Of matrices; attention goes through batched products or kernels that are not counted."""
    counts = counter.get_flop_counts()["Global"]
    return float(sum(value for op, value in counts.items() if str(op) in ("aten.mm", "aten.addmm")))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", list(DRAFTS))
def test_flops_of_a_training_step_are_those_that_are_counted(name: str, recompute: bool) -> None:
    if recompute and name == "draft_lm-lora":
        pytest.skip("transformers makes the sums of weights and adapters again, too; they are small")
    target = tiny_target(num_hidden_layers=8)
    draft = draft_of(name, target)
    draft.gradient_checkpointing = recompute
    batch = batch_of(target, draft)
    objective = Objective(LossConfig())
    step = TrainStep(draft, objective, target.head(), draft.vocab_map, torch.float32)
    counts = objective.counts(batch, draft.max_depth)
    with FlopCounterMode(display=False) as counter:
        loss = step(batch, counts).loss
        loss.backward()
    work = Workload(1, LENGTH, LENGTH - 1, 1.0, 1)
    flops = step_flops(draft, target.hf, LossConfig(), work, recompute=recompute, next_tokens=0)
    parts = [*flops.forward, *flops.backward]
    expected = sum(part.linear + part.head for part in parts) + flops.target.head + flops.merging
    assert (flops.merging > 0) == name.endswith("lora")
    assert [work.answer_tokens - 1 - k for k in range(draft.max_depth)] == counts.tolist()
    assert products(counter) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("kind", ["llama", "llama-tied", "qwen3", "gemma", "phi"])
def test_flops_of_the_target(kind: str) -> None:
    """Products with weights exactly; attention half of what the full square takes."""
    model = CausalLM(tiny_hf(kind)).eval()
    ids = torch.randint(3, VOCAB, (1, LENGTH))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        model(ids)
    flops = body_flops(model.hf, LENGTH)
    assert products(counter) == flops.linear
    square = float(sum(v for op, v in counter.get_flop_counts()["Global"].items() if str(op) == "aten.bmm"))
    # Rotary tables are a batched product, too; a small one.
    assert square == pytest.approx(flops.attention * 2 * LENGTH / (LENGTH + 1), rel=0.02)


def test_chosen_experts_alone_count() -> None:
    import transformers

    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    layer = 32 * 8 * (4 + 2 * 2) + 32 * 32 + 32 * 8 + 2 * 3 * 32 * 16
    assert body_flops(model, 10).linear == 2 * 2 * layer * 10


@pytest.mark.parametrize("name", list(DRAFTS))
@pytest.mark.parametrize("recompute", [False, True])
def test_activations_are_of_the_size_that_the_backward_keeps(name: str, recompute: bool) -> None:
    target = tiny_target(num_hidden_layers=8, hidden_size=64, intermediate_size=192)
    draft = draft_of(name, target)
    draft.gradient_checkpointing = recompute
    batch = batch_of(target, draft)
    weights = {p.untyped_storage().data_ptr() for p in draft.parameters()}
    weights |= {value.untyped_storage().data_ptr() for value in batch.features.values()}
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        # What is packed from the weights once has no dimension of the slots; some have a few more, or twice as many.
        slots = {*range(LENGTH, LENGTH + 4), 2 * LENGTH} & set(tensor.shape)
        if storage.data_ptr() not in weights and slots:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = draft.unroll(batch, draft.max_depth)
    predicted = kept_bytes(draft, 4, recompute).kept * LENGTH
    assert len(outputs) == draft.max_depth
    if name.endswith("lora"):
        # Frozen weights need less; what they keep is not told apart.
        assert predicted > 0.9 * sum(kept.values())
    else:
        assert predicted == pytest.approx(sum(kept.values()), rel=0.03)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("llama-3.3-70b", 70_553_706_496), ("llama-3.1-8b", 8_030_261_248), ("qwen3-8b", 8_190_735_360)],
)
def test_parameters_of_published_models(name: str, parameters: int) -> None:
    recipe = load_recipe("recipes/eagle_llama70b.yaml")
    plan = make_plan(recipe, target_config(recipe, CONFIGS / name / "config.json"), parse_gpus("8xH100-80G"))
    assert plan.target_parameters == parameters


@pytest.fixture(scope="module")
def llama70b() -> Callable[..., Any]:
    text = target_config(load_recipe("recipes/eagle_llama70b.yaml"), CONFIGS / "llama-3.3-70b" / "config.json")

    def plan(gpus: str, *overrides: str, nodes: int = 1, **sizes: int) -> Any:
        return make_plan(load_recipe("recipes/eagle_llama70b.yaml", overrides), text, parse_gpus(gpus, nodes), **sizes)

    return plan


def test_the_store_of_a_70b_target(llama70b: Callable[..., Any]) -> None:
    """A token of EAGLE-3 features at H 8192 is 64 KiB: 100k samples of 2,048 tokens are 13 TB."""
    plan = llama70b("8xB200", samples=100_000, tokens=2048)
    assert plan.store_token_bytes == 65536 + 8
    assert plan.store_bytes == pytest.approx(13.4e12, rel=0.01)


def test_memory_that_is_known_to_the_byte(llama70b: Callable[..., Any]) -> None:
    plan = llama70b("8xMI300X", "target.placement=whole")
    assert plan.layout.launch == ALONE
    exact = {item.name: item.nbytes for item in plan.memory if item.exact}
    assert exact["target weights"] == 2 * plan.target_parameters
    assert exact["Adam moments, fp32"] == 2 * exact["gradients, fp32"] == 8 * plan.trained_parameters
    shards = llama70b("8xH100-80G")
    exact = {item.name: item.nbytes for item in shards.memory if item.exact}
    assert exact["target weights, this rank's shard"] == 2 * plan.target_parameters // 8
    # Embedding and head of 128,256 x 8,192, and 161 norms.
    assert exact["embedding, head and norms of the target, whole"] == 2 * 8192 * (2 * 128256 + 161)


def test_phases_take_turns(llama70b: Callable[..., Any]) -> None:
    items = llama70b("8xB200").memory
    sums: dict[str, int] = {}
    for item in items:
        sums[item.phase] = sums.get(item.phase, 0) + item.nbytes
    always = sums.pop("always")
    assert {"training", "measuring"} <= set(sums)
    assert peak(items) == always + max(sums.values()) < always + sum(sums.values())


def test_the_70b_recipe_fits_eight_gpus_of_80_gb(llama70b: Callable[..., Any]) -> None:
    plan = llama70b("8xH100-80G")
    assert plan.fits and plan.fitting.changes == ()
    assert plan.layout.placement == "zero3" and plan.layout.launch in (Launch("zero", 1), Launch("zero", 2))
    assert 0 < plan.hours < float("inf") and plan.device_hours == pytest.approx(8 * plan.hours)
    # Whole it fits no such GPU, whatever becomes of the draft; in one node the blocks move faster than between two.
    room = plan.hardware.memory - plan.hardware.reserved
    assert all(needed > room for layout, needed in plan.peaks.items() if layout.placement == "whole")
    assert llama70b("4xH100-80G", nodes=2).gather_hours > 2 * plan.gather_hours > 0


def test_every_layout_is_planned_and_sharding_saves(llama70b: Callable[..., Any]) -> None:
    peaks = llama70b("8xH100-80G").peaks
    launches = [ALONE, *(Launch("zero", stage) for stage in (1, 2, 3))]
    whole = [peaks[Layout("whole", launch)] for launch in launches]
    assert whole == sorted(whole, reverse=True) and len(set(whole)) == 4
    assert {layout.launch for layout in peaks if layout.placement == "zero3"} == {Launch("zero", 1), Launch("zero", 2)}
    for launch in (Launch("zero", 1), Launch("zero", 2)):
        at = [peaks[Layout(placement, launch)] for placement in ("whole", "zero3", "elsewhere")]
        assert at == sorted(at, reverse=True)
    assert set(llama70b("1xB200").peaks) == {Layout("whole", ALONE), Layout("elsewhere", ALONE)}


def test_another_place_for_the_target_is_named(llama70b: Callable[..., Any]) -> None:
    plan = llama70b("8xH100-80G", "target.placement=whole")
    assert not plan.fits and plan.fitting.changes == ("target.placement=zero3",)
    assert plan.fitting.layout.placement == "zero3"
    away = llama70b("2xH100-80G")
    assert not away.fits and away.fitting.changes[0].startswith("target.placement=elsewhere evaluation.prompts=0")
    alone = llama70b("1xB200")
    assert alone.fitting.changes == ("target.placement=whole",) or "elsewhere" in alone.fitting.changes[0]


def test_a_target_elsewhere_costs_hours_of_other_devices(llama70b: Callable[..., Any]) -> None:
    words = ["target.placement=elsewhere", "features.source=stream", "features.urls=[http://a:1]", "evaluation={}"]
    plan = llama70b("8xH100-80G", *words, "evaluation.prompts=0", samples=1000)
    assert plan.layout.placement == "elsewhere" and plan.fits
    assert plan.device_hours == pytest.approx(8 * (plan.draft_hours + plan.target_hours))
    # Its forwards lie beside the draft's steps, which have the target's head rows for themselves.
    head = plan.flops.target.head * plan.work.seen / (0.40 * 8 * 989e12) / 3600
    assert plan.hours == plan.best_hours == pytest.approx(max(plan.target_hours - head, plan.draft_hours + head))
    # Without batches made ahead each step waits for them; a store is finished before the run.
    waits = llama70b("8xH100-80G", *words, "evaluation.prompts=0", "training.prefetch=0", samples=1000)
    assert waits.hours == pytest.approx(waits.draft_hours + waits.target_hours)
    stored = ["target.placement=elsewhere", "features.source=offline", "evaluation={}", "evaluation.prompts=0"]
    read = llama70b("8xH100-80G", *stored, samples=1000)
    assert read.hours == pytest.approx(read.draft_hours + head)


def test_on_one_gpu_target_and_draft_are_counted_in_turn_and_at_once() -> None:
    text = target_config(load_recipe("recipes/eagle3_qwen3_8b.yaml"), CONFIGS / "qwen3-8b")

    def plan(*overrides: str, on_cpu: bool = False) -> Any:
        recipe = load_recipe("recipes/eagle3_qwen3_8b.yaml", ["training.epochs=4", *overrides])
        hardware = replace(parse_gpus("1xB200"), is_cpu=on_cpu)
        return make_plan(recipe, text, hardware, samples=100, tokens=500)

    ahead, waits = plan(), plan("training.prefetch=0")
    head = ahead.flops.target.head * ahead.work.seen / (0.40 * 2250e12) / 3600
    states, steps = ahead.target_hours - head, ahead.draft_hours + head
    assert ahead.hours == waits.hours == waits.best_hours == pytest.approx(states + steps)
    assert ahead.best_hours == pytest.approx(max(states, steps))
    assert ahead.best_hours < 0.95 * ahead.hours and ahead.device_hours == pytest.approx(ahead.hours)
    # A store that fills is overlapped in the first of four epochs.
    hybrid = plan("features.source=hybrid")
    assert hybrid.hours < ahead.hours
    states = hybrid.target_hours - head
    assert hybrid.best_hours == pytest.approx(max(states, steps / 4) + 3 / 4 * steps)
    # Cores that both share compute all the time as it is; a store is filled before the run.
    shared = plan("training.prefetch=2", on_cpu=True)
    assert shared.hours == shared.best_hours
    offline = plan("features.source=offline")
    assert offline.hours == offline.best_hours == pytest.approx(hybrid.hours)


def test_the_target_s_own_next_tokens_are_counted_where_they_are_computed() -> None:
    text = target_config(load_recipe("recipes/eagle3_qwen3_8b.yaml"), CONFIGS / "qwen3-8b")

    def once(*overrides: str) -> float:
        words = ["data.answers={source: target, max_new_tokens: 300, temperature: 0}", *overrides]
        recipe = load_recipe("recipes/eagle3_qwen3_8b.yaml", words)
        return make_plan(recipe, text, parse_gpus("1xB200"), samples=10, tokens=500).flops.first_time.total

    row, full = 2.0 * text.hidden_size * text.vocab_size, "drafter.draft_vocab_size=null"
    offline, record = "features.source=offline", "features.record=true"
    assert once() == once(offline) == once(offline, full) == 300 * row
    assert once(full) == 0  # the loss finds them by itself
    assert once(offline, record) == 0 and once(offline, record, "data.answers.temperature=1") == 300 * row
    assert once(offline, record, "data.supervise=all") == 199 * row


def test_adapters_are_planned_as_adapters(tmp_path: Path) -> None:
    text = target_config(load_recipe("recipes/eagle3_qwen3_8b.yaml"), CONFIGS / "qwen3-8b")
    words = [f"drafter.warm_start={tmp_path / 'theirs'}", "drafter.lora={rank: 16}"]

    def plan(*overrides: str) -> Any:
        return make_plan(load_recipe("recipes/eagle3_qwen3_8b.yaml", overrides), text, parse_gpus("8xH100-80G"))

    whole, lora = plan(), plan(*words)
    assert lora.trained_parameters < 0.05 * whole.trained_parameters and lora.memory_bytes < whole.memory_bytes
    assert any("is not here" in note for note in lora.notes) and not whole.notes


def test_samples_end_where_the_target_s_context_does() -> None:
    """As in a run (`tests/unit/recipe/test_build.py`): counted so, and said in the same words."""
    long = ["training.row_length=8192", "data.answers.source=given"]
    text = target_config(load_recipe("recipes/eagle3_qwen3_8b.yaml"), CONFIGS / "qwen3-8b")
    text.max_position_embeddings = 1024

    def plan(length: int) -> Any:
        recipe = load_recipe("recipes/eagle3_qwen3_8b.yaml", [*long, f"data.max_length={length}"])
        return make_plan(recipe, text, parse_gpus("8xH100-80G"), samples=1000)

    longer, cut = plan(8192), plan(1024)
    assert longer.work.tokens_per_sample == 1024 and longer.work == cut.work and longer.peaks == cut.peaks
    assert (longer.hours, longer.store_bytes) == (cut.hours, cut.store_bytes)
    assert longer.notes == ["samples are cut at 1024 tokens, the target's context, not at 8192"] and not cut.notes
    # Rows of that length are what may make it fit, in words that the recipe takes.
    shorter = "training.row_length=1024"
    for length, words in ((8192, f"data.max_length=1024 {shorter}"), (1024, shorter)):
        overrides = [*long, f"data.max_length={length}"]
        recipe = load_recipe("recipes/eagle3_qwen3_8b.yaml", overrides)
        fitting = find_fitting(recipe, 8, lambda changed, _: changed.training.row_length <= 1024, False, 1024)
        assert fitting is not None and fitting.changes == (words,)
        changed = load_recipe("recipes/eagle3_qwen3_8b.yaml", [*overrides, *words.split()])
        assert (changed.data.max_length, changed.training.row_length) == (1024, 1024)


def test_what_does_not_fit_says_what_would(llama70b: Callable[..., Any]) -> None:
    hopeless = llama70b("8xL4-8G")
    assert not hopeless.fits and hopeless.fitting is None
    recipe = load_recipe(
        "recipes/eagle3_qwen3_8b.yaml", ["training.batch_rows=16", "training.gradient_checkpointing=false"]
    )
    text = target_config(recipe, CONFIGS / "qwen3-8b")
    plan = make_plan(recipe, text, parse_gpus("8xA100-80G"))
    assert not plan.fits and plan.fitting is not None and plan.fitting.changes
    changed = load_recipe(
        "recipes/eagle3_qwen3_8b.yaml",
        ["training.batch_rows=16", "training.gradient_checkpointing=false", *" ".join(plan.fitting.changes).split()],
    )
    assert make_plan(changed, text, parse_gpus("8xA100-80G")).fits


def test_hours_shrink_with_ranks_and_grow_with_epochs(llama70b: Callable[..., Any]) -> None:
    one = llama70b("8xH200", samples=1000)
    four = llama70b("8xH200", nodes=4, samples=1000)
    assert one.draft_hours == pytest.approx(4 * four.draft_hours)
    twice = llama70b("8xH200", "training.epochs=8", samples=1000)
    assert twice.target_hours == pytest.approx(2 * one.target_hours, rel=0.02)
    assert four.work.steps == pytest.approx(one.work.steps / 4, abs=4)


def test_recorded_features_cost_no_forward(llama70b: Callable[..., Any]) -> None:
    here = ("features.source=offline", "target.placement=whole", "data.answers.source=target")
    once, recorded = (llama70b("8xH200", *here, f"features.record={on}", samples=1000) for on in ("false", "true"))
    assert recorded.target_hours < 0.1 * once.target_hours and recorded.draft_hours == once.draft_hours


def test_less_than_an_epoch_runs_the_target_over_what_is_reached(llama70b: Callable[..., Any]) -> None:
    tenth, whole = (
        llama70b("8xH200", "training.epochs=null", f"training.max_steps={steps}", samples=16_000) for steps in (20, 200)
    )
    assert tenth.work.epochs < whole.work.epochs <= 1
    assert tenth.target_hours == pytest.approx(whole.target_hours / 10)


def test_a_store_runs_the_target_once(llama70b: Callable[..., Any]) -> None:
    online = llama70b("8xH200", samples=1000)
    stored = llama70b("8xH200", "features.source=offline", "target.placement=whole", samples=1000)
    assert not stored.online and stored.target_hours < 0.3 * online.target_hours


@pytest.mark.parametrize(
    ("spec", "ranks", "gigabytes"), [("8xH100-80G", 8, 80), ("H200", 1, 141), ("4xa100-40gb", 4, 40), ("2xL40S", 2, 48)]
)
def test_gpus(spec: str, ranks: int, gigabytes: int) -> None:
    hardware = parse_gpus(spec)
    assert (hardware.ranks, hardware.memory) == (ranks, gigabytes * 2**30)
    assert parse_gpus(spec, 3).ranks == 3 * ranks


@pytest.mark.parametrize("spec", ["8xH999", "0xH100", "H100-", "8 GPUs", ""])
def test_gpus_that_do_not_exist(spec: str) -> None:
    with pytest.raises(UserError, match=r"no such hardware[\s\S]*H200"):
        parse_gpus(spec)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA GH200 480GB", "H200"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("NVIDIA A10G", "A10"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA L4", "L4"),
        # Not those whose names they begin with: they are not known.
        ("NVIDIA L40", None),
        ("NVIDIA RTX A1000 Laptop GPU", None),
        ("NVIDIA H20", None),
    ],
)
def test_a_gpu_is_known_by_its_whole_name(name: str, kind: str | None) -> None:
    assert kind_of(name) == kind


def test_this_machine_has_memory_and_speed() -> None:
    hardware = this_machine()
    assert hardware.ranks >= 1 and hardware.memory > 2**28 and hardware.peak("float32") > 1e9


@pytest.mark.parametrize(("native", "slower"), [("bfloat16", False), ("float32", True)])
def test_a_cpu_without_bfloat16_is_planned_as_slow_in_it(
    monkeypatch: pytest.MonkeyPatch, native: str, slower: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(plan_hardware, "native_dtype", lambda device: native)
    here = this_machine()
    assert (here.peak("bfloat16") < here.peak("float32")) == slower


def test_the_size_of_data_is_counted_given_or_named_as_assumed(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"prompt": "x"}\n\n' * 50)
    overrides = [
        # A count is the most that is taken of a file.
        f"data.prompts=[{{source: {tmp_path / 'p.jsonl'}, count: 70}}, {{source: self, count: 30}}]",
        "data.held_out=20",
        "data.supervise=answers",
        "data.max_length=256",
        "data.answers.max_new_tokens=128",
        "training.row_length=256",
        "training.batch_rows=4",
        "training.max_steps=7",
        "training.epochs=null",
        "evaluation.prompts=2",
    ]
    recipe = load_recipe("recipes/quickstart.yaml", overrides)
    work = workload(recipe, ranks=1)
    assert (work.samples, work.tokens_per_sample, work.answer_tokens) == (60, 228, 128)
    # One sample of 228 tokens in a row of 256, four rows a step.
    assert work.steps == 7 and work.epochs == pytest.approx(7 / 15)
    assert not any("unknown" in note for note in work.notes)
    # Of a document of L tokens a draft is trained on all but the first two at depth 0, one less at each depth more.
    everything = workload(load_recipe("recipes/quickstart.yaml", [*overrides, "data.supervise=all"]), ranks=1)
    assert (everything.tokens_per_sample, everything.answer_tokens) == (228, 227)
    unknown = load_recipe("recipes/quickstart.yaml", ["data.prompts=[{source: someone/prompts}]"])
    assert any("someone/prompts" in note and "--samples" in note for note in workload(unknown, 1).notes)
    assert workload(unknown, 1, samples=10, tokens=64).tokens == 640
    # As the trainer counts: 100 * 1.1 is a little more than 110.
    tenth = ["training.max_steps=null", "training.epochs=1.1"]
    assert workload(load_recipe("recipes/quickstart.yaml", [*overrides, *tenth]), 1, samples=400).steps == 110
    (tmp_path / "p.jsonl").write_bytes(b'{"prompt": "\xff"}\n' * 3)
    assert workload(load_recipe("recipes/quickstart.yaml", [*overrides, "data.held_out=2"]), 1).samples == 31


def test_a_target_that_cannot_be_reached() -> None:
    recipe = load_recipe("recipes/eagle_llama70b.yaml", ["target.model=nobody/nothing"])
    with pytest.raises(TargetError, match=r"--target-config path/to/config\.json"):
        target_config(recipe)
    with pytest.raises(TargetError, match="no such file"):
        target_config(recipe, "nowhere/config.json")


def test_workloads_compare_by_what_is_seen() -> None:
    work = Workload(10, 20, 5, 2.5, 3)
    assert (work.tokens, work.seen, replace(work, epochs=1).seen) == (200, 25, 10)
