"""What a recipe's draft starts as, from real files in this process."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from drafttrain.corpus.dataset import token_counts
from drafttrain.drafters.saving import save_draft
from drafttrain.errors import CheckpointError, DataError, RecipeError, TargetError
from drafttrain.files import read_json, write_json
from drafttrain.recipe.build import build_run, prepare_store
from drafttrain.recipe.load import load_recipe
from drafttrain.recipe.schema import Recipe
from tests.chats import CHATML, chat_tokenizer
from tests.tiny_world import make_world, recipe, save_target


class Said:
    """A reporter that keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)

    def progress(self, task: str, done: int, total: int) -> None:
        pass


def test_special_tokens_are_in_the_draft_vocabulary_and_padding_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cases 11 and 14 of docs/cases.md."""
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    world = make_world(tmp_path)
    generation = world / "target" / "generation_config.json"
    values = read_json(generation)
    never_said = 10  # <end_of_turn>, of another template
    write_json(generation, {**values, "eos_token_id": [values["eos_token_id"], never_said]})
    for size in (12, None):
        # None: as many as the target's padded head has rows, so more than the tokenizer knows and the data holds.
        rows = size or read_json(world / "target" / "config.json")["vocab_size"]
        drafter = {"family": "eagle3", "draft_vocab_size": rows, "depth": 3}
        said = Said()
        parts = build_run(load_recipe(recipe(world, tmp_path / f"run{rows}", drafter=drafter)), said)
        chosen, tokenizer = parts.drafter.vocab_map.target_ids.tolist(), parts.target.tokenizer
        counts = token_counts(parts.corpus.samples, parts.target.vocab_size)
        assert len(tokenizer) < parts.target.vocab_size and counts[never_said] == 0
        assert len(chosen) == min(rows, len(tokenizer)) and max(chosen) < len(tokenizer)
        header = tokenizer.convert_tokens_to_ids("<|im_start|>")  # in every prompt, in no answer
        assert {tokenizer.eos_token_id, never_said, header} <= set(chosen) and counts[header] == 0
        assert parts.coverage == pytest.approx(sum(float(counts[token]) for token in chosen) / float(counts.sum()))
        assert f"covers {parts.coverage:.2%} of the labels" in said.lines[-1]
        assert (parts.coverage == 1.0) == (size is None)


def test_the_vocabulary_is_judged_by_answers_that_it_was_not_chosen_by(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    world, said = make_world(tmp_path), Said()
    # No more than the template's tokens and a few: most answers have words outside.
    drafter = {"family": "eagle3", "draft_vocab_size": 12, "depth": 3}
    parts = build_run(load_recipe(recipe(world, tmp_path / "run", drafter=drafter)), said)
    trained = {sample.id for sample in parts.corpus.samples}
    answers = {
        item["id"]: item["messages"][1]["content"]
        for item in map(json.loads, (world / "conversations.jsonl").read_text().splitlines())
    }
    held_out = [text for name, text in answers.items() if name not in trained]
    assert len(held_out) == 4
    tokenizer = parts.target.tokenizer
    # The target itself says an answer's first token.
    said_by_draft = [
        token
        for text in held_out
        for token in [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id][1:]
    ]
    inside = [int(parts.drafter.vocab_map.to_draft[token]) >= 0 for token in said_by_draft]
    assert parts.held_out_coverage == pytest.approx(sum(inside) / len(inside))
    assert 0 < parts.held_out_coverage < 1
    assert f"{parts.held_out_coverage:.2%} of the answers held out" in said.lines[-1]
    trainable = sum(p.numel() for p in parts.drafter.parameters() if p.requires_grad)
    assert f"{trainable:,} trainable parameters" in said.lines[-1]  # adapters have thousands, not millions
    nothing = {"evaluation": {"prompts": 0}, "data": {"held_out": 0}}
    assert build_run(load_recipe(recipe(world, tmp_path / "none", **nothing)), said).held_out_coverage is None


def test_runs_of_other_seeds_train_on_the_same_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    world = make_world(tmp_path)
    path = recipe(world, tmp_path / "run")
    one, other = (build_run(load_recipe(path, [f"seed={seed}"]), Said()) for seed in (0, 1))
    assert one.fingerprint() == other.fingerprint() and one.held_out == other.held_out


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        ({"family": "eagle3", "init_layer": "target:last", "num_heads": 2}, "does not fit the draft's layer"),
        ({"family": "eagle3", "taps": [0, 2, 7]}, "the target has"),
        ({"family": "eagle3", "draft_vocab_size": 32000}, r"32000 tokens .* has \d+\n.*draft_vocab_size=null"),
        ({"family": "draft_lm", "layers": [0, 9]}, r"blocks 0\.\.3, not 9"),
        ({"family": "eagle3", "hidden_size": 16}, "init_head 'target' needs a draft as wide"),
        ({"family": "eagle3", "hidden_size": 16, "init_head": "random", "init_fc": "last"}, "init_fc 'last' needs"),
    ],
)
@pytest.mark.parametrize("stage", [build_run, prepare_store])
def test_a_draft_that_cannot_start_is_refused_before_its_data_is_made(
    stage: Callable[[Recipe, Said], object],
    drafter: dict[str, object],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    world, run = make_world(tmp_path), tmp_path / "run"
    asked = recipe(world, run, drafter=drafter, data={"answers": {"source": "target", "max_new_tokens": 8}})
    with pytest.raises(RecipeError, match=rf"drafter(\.\w+)?: .*{message}"):
        stage(load_recipe(asked), Said())
    assert not run.exists() and not (tmp_path / "cache").exists()


def test_a_start_from_another_draft_is_refused_before_data_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    world, run, first = make_world(tmp_path), tmp_path / "run", tmp_path / "first"
    parts = build_run(load_recipe(recipe(world, tmp_path / "other")), Said())
    other = {**parts.target.identity.to_dict(), "hidden_size": 16}
    save_draft(first, parts.drafter, target=other)

    def start(**drafter: object) -> None:
        answers = {"answers": {"source": "target", "max_new_tokens": 8}}
        asked = recipe(world, run, drafter={"family": "eagle3", "warm_start": str(first), **drafter}, data=answers)
        build_run(load_recipe(asked), Said())

    with pytest.raises(CheckpointError, match=r"differs from .* in hidden_size"):
        start(depth=3)
    save_draft(first, parts.drafter, target=parts.target.identity.to_dict(), replace=True)
    with pytest.raises(RecipeError, match=r"lora\.modules: this draft has no query; it has "):
        start(lora={"modules": ["query"]})
    with pytest.raises(CheckpointError, match=r"contradicts the draft that it starts from: .*num_layers"):
        start(num_layers=2)
    with pytest.raises(CheckpointError, match="of family eagle3, the recipe asks for medusa"):
        start(family="medusa")
    assert not run.exists()


def test_acceptance_is_measured_on_held_out_prompts_that_can_be_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    world, said = make_world(tmp_path), Said()
    tokenizer = world / "target" / "tokenizer_config.json"
    template = world / "target" / "chat_template.jinja"
    template.write_text(
        "{% for m in messages if m.role == 'system' %}{{ raise_exception('no system, please') }}{% endfor %}" + CHATML
    )
    assert "chat_template" not in read_json(tokenizer)

    def asked(text: str) -> dict[str, str]:
        return {"role": "user", "content": text}

    answer = {"role": "assistant", "content": "two three"}
    talks = {
        "refused": [{"role": "system", "content": "one"}, asked("one"), answer],
        "long": [asked("one " * 200), answer],
        "greets": [answer, asked("four five"), answer],
        "plain": [asked("six"), answer],
    }
    with (world / "conversations.jsonl").open("w") as file:
        for name, messages in talks.items():
            # As many of a kind as are held out and one: some are held out, whichever are chosen.
            for number in range(8):
                file.write(json.dumps({"id": f"{name}{number}", "messages": messages}) + "\n")
    config = {"data": {"held_out": 25}, "evaluation": {"prompts": 20}}
    parts = build_run(load_recipe(recipe(world, tmp_path / "run", **config)), said)
    greets = parts.target.tokenizer.apply_chat_template([answer, asked("four five")], add_generation_prompt=True)
    assert 2 <= len(parts.held_out) < 20 and max(map(len, parts.held_out)) < 128
    assert greets["input_ids"] in parts.held_out
    (line,) = (line for line in said.lines if "are passed over" in line)
    assert f"measured on {len(parts.held_out)} prompts; {25 - len(parts.held_out)} of those held out" in line
    everywhere = {**config, "evaluation": {"prompts": 20, "max_new_tokens": 256}}
    with pytest.raises(DataError, match=r"evaluation.prompts: acceptance can be measured on none of the 25"):
        build_run(load_recipe(recipe(world, tmp_path / "none", **everywhere)), Said())


def test_a_run_goes_on_upon_the_frozen_weights_that_it_was_begun_on_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Adapters that were trained on one draft would be added to another, which lies in its place by now."""
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    world, first = make_world(tmp_path), tmp_path / "first"
    parts = build_run(load_recipe(recipe(world, tmp_path / "run")), Said())
    assert "frozen" not in parts.fingerprint()  # all of it is trained, so all of it is in checkpoints
    start = {**parts.drafter.config.model_dump(), "warm_start": str(first)}

    def fingerprint(**drafter: object) -> dict[str, object]:
        asked = recipe(world, tmp_path / "more", drafter={**start, **drafter})
        return build_run(load_recipe(asked), Said()).fingerprint()

    for partly in ({"lora": {"rank": 2}}, {"train_head": False}):
        save_draft(first, parts.drafter, target=parts.target.identity.to_dict(), replace=True)
        before, again = fingerprint(**partly), fingerprint(**partly)
        with torch.no_grad():
            next(p for name, p in parts.drafter.named_parameters() if name == "lm_head.weight").mul_(2)
        save_draft(first, parts.drafter, target=parts.target.identity.to_dict(), replace=True)
        after = fingerprint(**partly)
        assert before == again and {key for key in after if after[key] != before[key]} == {"frozen"}
    assert "frozen" not in fingerprint()


def test_a_template_that_writes_what_the_target_has_no_row_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    world = make_world(tmp_path)
    save_target(world / "target", spare=200 - len(chat_tokenizer(CHATML)))
    with pytest.raises(TargetError, match=r"writes token \d+ \(.*\), the embedding has 200 rows"):
        build_run(load_recipe(recipe(world, tmp_path / "run")), Said())


def test_why_conversations_are_refused_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    world, said = make_world(tmp_path), Said()
    with (world / "conversations.jsonl").open("a") as file:
        for number in range(6):  # four are held out
            messages = [{"role": "user", "content": "one " * 200}, {"role": "assistant", "content": "two three"}]
            file.write(json.dumps({"id": f"long{number}", "messages": messages}) + "\n")
    parts = build_run(load_recipe(recipe(world, tmp_path / "run")), said)
    (reason,) = {reject.reason for reject in parts.corpus.rejects}
    assert len(parts.corpus.rejects) >= 2
    assert f"data: refused: {reason} ({len(parts.corpus.rejects)} conversations)" in said.lines


def test_more_held_out_than_trained_on_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A first try on few prompts, with the held_out of a recipe for many."""
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    world = make_world(tmp_path)
    count = len((world / "conversations.jsonl").read_text().splitlines())
    for held_out, much in ((count // 2, False), (count // 2 + 1, True)):
        said = Said()
        run = recipe(world, tmp_path / f"run{held_out}", data={"held_out": held_out}, evaluation={"prompts": 2})
        build_run(load_recipe(run), said)
        line = f"data: more conversations are held out than the {count - held_out} to train on; lower data.held_out"
        assert (line in said.lines) is much


def test_samples_are_cut_at_the_context_of_the_target(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    world, said = make_world(tmp_path), Said()
    config = world / "target" / "config.json"
    write_json(config, {**read_json(config), "max_position_embeddings": 40})
    parts = build_run(load_recipe(recipe(world, tmp_path / "run")), said)
    assert max(len(sample.ids) for sample in parts.corpus.samples) == 40
    assert "data: samples are cut at 40 tokens, the target's context, not at 128" in said.lines
