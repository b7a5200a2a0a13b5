"""Combinations of sections that cannot work, found before anything is loaded.

A check names the sections it looks at as its parameters and runs when these are valid by themselves.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

from drafttrain.corpus.config import DataConfig
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.features.config import FeaturesConfig
from drafttrain.losses.config import LossConfig
from drafttrain.recipe.problems import Problem
from drafttrain.recipe.training_config import EvaluationConfig, TrainingConfig
from drafttrain.targets.config import TargetConfig

AnyDrafter = Eagle3Config | Eagle1Config | MedusaConfig | DraftLMConfig


def check_sections(sections: Mapping[str, Any]) -> Iterator[Problem]:
    """Problems between sections; `sections` holds the valid ones by name."""
    for check in _CHECKS:
        names = inspect.signature(check).parameters
        if all(name in sections for name in names):
            yield from check(**{name: sections[name] for name in names})


def _samples_fit_rows(data: DataConfig, training: TrainingConfig) -> Iterator[Problem]:
    if data.max_length > training.row_length:
        yield Problem(
            ("data", "max_length"),
            f"samples of up to {data.max_length} tokens do not fit training.row_length {training.row_length}",
        )


def _answers_fit_samples(data: DataConfig) -> Iterator[Problem]:
    if data.path is None and data.answers.source != "given" and data.answers.max_new_tokens >= data.max_length:
        yield Problem(
            ("data", "answers", "max_new_tokens"),
            f"answers of {data.answers.max_new_tokens} tokens do not fit data.max_length {data.max_length}",
        )


def _written_prompts_have_no_answers(data: DataConfig) -> Iterator[Problem]:
    for index, source in enumerate(data.prompts):
        if source.source == "self" and data.answers.source == "given":
            yield Problem(
                ("data", "prompts", index, "source"),
                "prompts that the target writes have no answers: data.answers.source cannot be 'given'",
            )


def _written_prompts_differ(data: DataConfig) -> Iterator[Problem]:
    """The same words again would be trained on and held out at once."""
    seen: dict[tuple[float, ...], int] = {}
    for index, source in enumerate(data.prompts):
        if source.source != "self":
            continue
        first = seen.setdefault((source.seed, source.temperature, source.top_p, source.max_new_tokens), index)
        if first != index:
            yield Problem(
                ("data", "prompts", index, "seed"),
                f"the target would write the prompts of data.prompts.{first} again: give this source another seed",
            )


def _measured_prompts_are_held_out(data: DataConfig, evaluation: EvaluationConfig) -> Iterator[Problem]:
    if evaluation.prompts > data.held_out:
        yield Problem(
            ("evaluation", "prompts"),
            f"{evaluation.prompts} prompts are to be measured, data.held_out keeps {data.held_out} apart",
        )


def _drafts_are_deep_enough(drafter: AnyDrafter, evaluation: EvaluationConfig) -> Iterator[Problem]:
    if isinstance(drafter, MedusaConfig) and evaluation.k > drafter.num_heads:
        yield Problem(
            ("evaluation", "k"),
            f"{evaluation.k} draft tokens need as many heads, drafter.num_heads is {drafter.num_heads}",
        )


def _terms_have_inputs(drafter: AnyDrafter, loss: LossConfig) -> Iterator[Problem]:
    for index, term in enumerate(loss.terms):
        if term.name == "smooth_l1" and not isinstance(drafter, Eagle1Config):
            yield Problem(
                ("loss", "terms", index, "name"),
                f"'smooth_l1' compares predicted features, which family {drafter.family!r} does not predict",
            )


def _stores_hold_what_is_read(drafter: AnyDrafter, features: FeaturesConfig) -> Iterator[Problem]:
    if isinstance(drafter, DraftLMConfig) and features.stores:
        yield Problem(
            ("features", "source"),
            "a draft LM reads tokens, not features: a store would serve its labels alone; use 'online'",
        )


def _recorded_states_are_of_answers(
    data: DataConfig, features: FeaturesConfig, target: TargetConfig
) -> Iterator[Problem]:
    answers_here = data.path is None and data.answers.source == "target" and target.placement == "whole"
    if features.record and not (answers_here and features.stores and not features.urls):
        yield Problem(
            ("features", "record"),
            "there is nothing to record: it takes a store (features.source: offline or hybrid) without urls, and a "
            "target that answers in this process (data.answers.source: target)",
        )


def _targets_do_what_they_can(
    target: TargetConfig, data: DataConfig, features: FeaturesConfig, evaluation: EvaluationConfig
) -> Iterator[Problem]:
    if target.placement == "whole":
        return
    where = ("target", "placement")
    which = "a target in shards" if target.placement == "zero3" else "a target elsewhere"
    if data.path is None and data.answers.source == "target":
        yield Problem(
            where,
            f"{which} does not write answers: let a server write them (data.answers.source: server), "
            "or name finished conversations (data.path)",
        )
    if data.path is None and any(source.source == "self" for source in data.prompts):
        yield Problem(where, f"{which} does not write prompts: write them first with `drafttrain prompts`")
    if target.placement == "elsewhere":
        if not features.served and features.source != "offline":
            yield Problem(
                where, f"{which} computes nothing here: use features.source 'stream' or 'vllm', or a finished store"
            )
        if evaluation.prompts:
            yield Problem(where, f"{which} cannot be drafted for while training: set evaluation.prompts to 0")
        return
    if features.source != "online":
        yield Problem(where, f"{which} computes features as they are needed: use features.source 'online'")
    if target.device != "auto":
        yield Problem(("target", "device"), f"{which} lies on all ranks' devices: device must be 'auto'")


def _targets_in_shards_keep_step(target: TargetConfig, training: TrainingConfig) -> Iterator[Problem]:
    if target.placement == "zero3" and training.prefetch:
        yield Problem(
            ("training", "prefetch"),
            "a target in shards is run by all ranks together and cannot run ahead of them: leave prefetch out",
        )


_CHECKS = (
    _samples_fit_rows,
    _answers_fit_samples,
    _written_prompts_have_no_answers,
    _written_prompts_differ,
    _measured_prompts_are_held_out,
    _drafts_are_deep_enough,
    _terms_have_inputs,
    _stores_hold_what_is_read,
    _recorded_states_are_of_answers,
    _targets_do_what_they_can,
    _targets_in_shards_keep_step,
)
