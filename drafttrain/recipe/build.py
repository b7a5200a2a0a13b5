"""From a recipe to everything that training needs. Each stage leaves its result on disk and goes on from there."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from drafttrain.corpus.chat import ChatRenderer
from drafttrain.corpus.dataset import (
    Corpus,
    answer_counts,
    build_corpus,
    samples_of,
    split_held_out,
    token_counts,
)
from drafttrain.corpus.samples import lengths_of
from drafttrain.corpus.types import Conversation, Message, Reject, Sample
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.build import blocks_read, build_drafter, check_start, init_from_target, new_vocab_map
from drafttrain.drafters.eagle.eagle3 import Eagle3Drafter
from drafttrain.drafters.eagle.widen import widen_vocab
from drafttrain.drafters.lora import add_lora
from drafttrain.drafters.saving import check_target, frozen_weights, warm_start
from drafttrain.errors import DataError, RecipeError, StoreError, TargetError
from drafttrain.features.building import build_store, holds, identity_of, open_store, spot_check
from drafttrain.features.hybrid import HybridFeatures
from drafttrain.features.lock import WHOLE, Part
from drafttrain.features.recording import StateKeeper
from drafttrain.features.sources import FeatureSource, OnlineFeatures, StoredFeatures
from drafttrain.features.store import StoreIdentity
from drafttrain.files import size_text
from drafttrain.losses.objective import Objective
from drafttrain.modeling.taps import FeatureSpec
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.recipe.conversations import InProcess, data_hashes, prepare_conversations, what_was_left_out
from drafttrain.recipe.load import save_recipe
from drafttrain.recipe.provenance import collect_provenance, record_provenance
from drafttrain.recipe.schema import Recipe
from drafttrain.recipe.servers import ask_servers, check_servers
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.ends import load_ends
from drafttrain.targets.load import load_target
from drafttrain.targets.model import TargetModel

Data = tuple[Corpus, Sequence[Conversation]]
"""Training samples, and the conversations held out of them."""


class Reporter(Protocol):
    """Shows what a long build is doing."""

    def say(self, message: str) -> None:
        """A line."""
        ...

    def progress(self, task: str, done: int, total: int) -> None:
        """`done` of `total` units of a task."""
        ...


@dataclass(frozen=True)
class RunParts:
    """What a recipe stands for.

    Attributes:
        target: frozen.
        drafter: initialised, bound to the target, fp32.
        objective: the loss.
        features: what a store of the features of `corpus.samples` is for.
        corpus: training samples.
        held_out: token ids of prompts that are not trained on, at most `evaluation.prompts`.
        stop_ids: tokens that end an answer.
        coverage: share of the labels that the draft vocabulary can say.
        held_out_coverage: the same of the answers that were held out; None where there are none.
        data: name -> SHA-256 of the files that the data came from.
    """

    target: TargetModel
    drafter: Drafter
    objective: Objective
    features: StoreIdentity
    corpus: Corpus
    held_out: list[list[int]]
    stop_ids: frozenset[int]
    coverage: float
    held_out_coverage: float | None
    data: dict[str, str]

    @cached_property
    def _frozen(self) -> str | None:
        return frozen_weights(self.drafter)

    def fingerprint(self) -> dict[str, Any]:
        """What a checkpoint must share with the run that resumes it."""
        identity = self.target.identity
        return {
            "target": identity.weights_hash,
            "data": self.corpus.key,
            "drafter": self.drafter.config.model_dump(mode="json"),
            **({} if self._frozen is None else {"frozen": self._frozen}),
        }


def build_run(
    recipe: Recipe,
    report: Reporter,
    load: Callable[[TargetConfig], TargetModel] = load_target,
    data_first: Callable[[Callable[[], Data]], Data] = lambda work: work(),
    *,
    settled: bool = False,
) -> RunParts:
    """Run all stages before features: target, prompts, answers, samples, draft.

    Args:
        load: gives the target.
        data_first: runs the stage of the data; several processes let one write it before the others read it.
        settled: the data is what is there, see `prepare_conversations`: another process made it, or it was trained on.

    Raises:
        UserError: whatever a stage cannot use; what stages before left stays.
    """
    target = prepare_target(recipe, report, load)
    chat = _prepare_chat(recipe, target)
    corpus, held_out = data_first(lambda: prepare_corpus(recipe, target, chat, report, settled=settled))
    drafter, coverage = prepare_drafter(recipe, target, chat, corpus.samples)
    trainable = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    unseen = _held_out_coverage(drafter, chat, held_out, recipe.data.within(target.context).max_length)
    report.say(
        f"draft: {drafter.family}, {trainable:,} trainable parameters, draft vocabulary "
        f"{drafter.vocab_map.size} of {drafter.vocab_map.vocab_size} covers {coverage:.2%} of the labels"
        + ("" if unseen is None else f", {unseen:.2%} of the answers held out")
    )
    return RunParts(
        target=target,
        drafter=drafter,
        objective=Objective(recipe.loss),
        features=store_identity(recipe, target, chat, drafter),
        corpus=corpus,
        held_out=_measured_prompts(recipe, target, chat, held_out, report),
        stop_ids=chat.stop_ids,
        coverage=coverage,
        held_out_coverage=unseen,
        data=data_hashes(recipe),
    )


def prepare_target(
    recipe: Recipe, report: Reporter, load: Callable[[TargetConfig], TargetModel] = load_target
) -> TargetModel:
    """The target as every stage uses it."""
    report.say(f"loading the target {recipe.target.model} ({recipe.target.dtype})")
    target = load(recipe.target)
    # The engine would do it at its first use; before that, the target rounds otherwise, and a run that resumes
    # after its answers or a measurement would not see the features of an unbroken one.
    target.prepare_for_inference()
    return target


def _prepare_chat(recipe: Recipe, target: TargetModel) -> ChatRenderer:
    """The target's chat format, once all is checked that can be refused before answers are made."""
    _check_start(recipe, target)
    chat = ChatRenderer(target.tokenizer, recipe.data.template_kwargs, target.stop_ids)
    _check_template(chat, target)
    return chat


def _check_start(recipe: Recipe, target: TargetModel) -> None:
    """Answers take hours: a draft that cannot start from this target is refused before them."""
    config = recipe.drafter
    try:
        if config.warm_start:
            drafter = _warm_start(recipe, target, "meta")
        else:
            with target.blocks_at_hand(blocks_read(config, target.n_layers)):
                drafter = check_start(config, target)
        if config.lora is not None:
            add_lora(drafter, config.lora)
    except ValueError as error:
        raise RecipeError(str(error), where="drafter") from None


def _warm_start(recipe: Recipe, target: TargetModel, device: torch.device | str) -> Drafter:
    """The draft that the recipe goes on from, on the meta device without its weights."""
    start = recipe.drafter.warm_start
    assert start is not None
    drafter, meta = warm_start(recipe.drafter, start, device)
    # Other weights are what a draft is trained further for: a fine-tune of its target.
    check_target(meta, target.identity.to_dict(), where=start, other_weights=True)
    return drafter


def _check_template(chat: ChatRenderer, target: TargetModel) -> None:
    """A template that writes tokens for which the target has no row fails at some prompt; it is refused before any."""
    token = max(chat.prompt_ids([{"role": "user", "content": "a"}]))
    if token >= target.vocab_size:
        name = chat.tokenizer.convert_ids_to_tokens(token)
        raise TargetError(
            f"the chat template writes token {token} ({name}), the embedding has {target.vocab_size} rows",
            where=target.identity.name,
            remedy="use the tokenizer that the weights were trained with (target.tokenizer)",
        )


@dataclass(frozen=True)
class StoreParts:
    """What a store is built from, or checked against."""

    target: TargetModel
    identity: StoreIdentity
    samples: Sequence[Sample]


def prepare_store(recipe: Recipe, report: Reporter) -> StoreParts:
    """The stages before features, for a store without a training run; says how large the store will be.

    Raises:
        UserError: whatever a stage cannot use.
    """
    check_servers(recipe, store_path(recipe))
    ends = recipe.features.urls and recipe.target.placement == "elsewhere"
    target = prepare_target(recipe, report, load_ends if ends else load_target)
    chat = _prepare_chat(recipe, target)
    corpus, _ = prepare_corpus(recipe, target, chat, report)
    identity = store_identity(recipe, target, chat, _shape_of_draft(recipe, target))
    report.say(store_size(recipe, identity, corpus.samples))
    return StoreParts(target, identity, corpus.samples)


def prepare_corpus(
    recipe: Recipe, target: TargetModel, chat: ChatRenderer, report: Reporter, *, settled: bool = False
) -> Data:
    """Training samples, and the conversations held out of them.

    Args:
        settled: see `prepare_conversations`.
    """
    data = recipe.data

    def writer() -> InProcess:
        return InProcess.of(target, data.answers.batch_size)

    with _state_keeper(recipe, target, chat) as keeper:
        conversations = prepare_conversations(recipe, chat, writer, report.progress, keeper, settled=settled)
    if keeper is not None and keeper.kept:
        report.say(f"features: those of {keeper.kept} samples were recorded while the target answered")
    for line in what_was_left_out(recipe):
        report.say(line)
    # Answers lie in the order in which they were finished, which a resumed run does not repeat. The choice is the same
    # for every seed: runs that differ in it alone train on the same data.
    training, held_out = split_held_out(conversations, data.held_out)
    if note := data.cut_note(target.context):
        report.say(f"data: {note}")
    longest = data.within(target.context).max_length
    corpus = build_corpus(training, chat, max_length=longest, vocab_size=target.vocab_size, supervise=data.supervise)
    report.say(
        f"data: {len(corpus.samples)} samples of {corpus.tokens} tokens, {corpus.supervised / corpus.tokens:.0%} "
        f"supervised; {len(corpus.rejects)} conversations refused, {len(held_out)} held out"
    )
    for reason, count in Counter(reject.reason for reject in corpus.rejects).most_common(3):
        report.say(f"data: refused: {reason} ({count} conversation{'' if count == 1 else 's'})")
    if len(held_out) > len(training):
        report.say(f"data: more conversations are held out than the {len(training)} to train on; lower data.held_out")
    return corpus, held_out


def _state_keeper(
    recipe: Recipe, target: TargetModel, chat: ChatRenderer
) -> StateKeeper | AbstractContextManager[None]:
    """Of the target's states while it answers, where the recipe asks for one."""
    config = recipe.features
    if not config.record:
        return nullcontext()
    longest, supervise = recipe.data.within(target.context).max_length, recipe.data.supervise

    def samples(conversation: Conversation) -> Sequence[Sample]:
        found = samples_of(conversation, chat, max_length=longest, supervise=supervise)
        return [] if isinstance(found, Reject) else found

    identity = store_identity(recipe, target, chat, _shape_of_draft(recipe, target))
    return StateKeeper(store_path(recipe), identity, target, samples, shard_bytes=config.shard_mib << 20)


def _shape_of_draft(recipe: Recipe, target: TargetModel) -> Drafter:
    """The draft without weights.

    Raises:
        RecipeError: a draft that does not fit the target.
    """
    try:
        return build_drafter(recipe.drafter, target.config, device="meta")
    except ValueError as error:
        raise RecipeError(str(error), where="drafter") from None


def prepare_drafter(
    recipe: Recipe, target: TargetModel, chat: ChatRenderer, samples: Sequence[Sample]
) -> tuple[Drafter, float]:
    """The draft at its start, and the share of the training labels in its vocabulary.

    Raises:
        RecipeError: a draft that does not fit the target.
        CheckpointError: a warm start from a draft of another target or of other make.
    """
    torch.manual_seed(recipe.training_seed)
    counts = token_counts(samples, target.vocab_size)
    try:
        if recipe.drafter.warm_start:
            drafter = _warm_start(recipe, target, target.device)
            if isinstance(drafter, Eagle3Drafter) and drafter.config.widen_vocab:
                known = drafter.vocab_map.to("cpu").target_ids.tolist()
                wider = _fresh_map(recipe, target, chat, samples, counts, known)
                drafter = widen_vocab(drafter, wider, target.head())
            drafter.bind(target.embedding_weight, target.head())
        else:
            vocab_map = _fresh_map(recipe, target, chat, samples, counts)
            drafter = build_drafter(recipe.drafter, target.config, vocab_map, target.device)
            with target.blocks_at_hand(blocks_read(recipe.drafter, target.n_layers)):
                init_from_target(drafter, target)
        if recipe.drafter.lora is not None:
            add_lora(drafter, recipe.drafter.lora)
    except ValueError as error:
        raise RecipeError(str(error), where="drafter") from None
    return drafter, drafter.vocab_map.to("cpu").coverage(counts)


def _held_out_coverage(
    drafter: Drafter, chat: ChatRenderer, held_out: Sequence[Conversation], longest: int
) -> float | None:
    """What the vocabulary is worth on text that it was not chosen by: a token outside it is a sure rejection."""
    vocab = drafter.vocab_map.to("cpu")
    counts = answer_counts(held_out, chat, max_length=longest, vocab_size=vocab.vocab_size)
    return vocab.coverage(counts) if bool(counts.any()) else None


def _fresh_map(
    recipe: Recipe,
    target: TargetModel,
    chat: ChatRenderer,
    samples: Sequence[Sample],
    counts: Tensor,
    known: Sequence[int] = (),
) -> VocabMap:
    special = np.array(sorted(target.tokenizer.added_tokens_decoder), dtype=np.int32)
    seen = {int(token) for sample in samples for token in special[np.isin(special, sample.ids)]}
    return new_vocab_map(
        recipe.drafter,
        target.vocab_size,
        counts,
        always=sorted(chat.stop_ids | seen | set(known)),
        tokenizer_size=target.identity.tokenizer_size,
    )


def write_features(recipe: Recipe, parts: RunParts, report: Reporter, part: Part = WHOLE) -> None:
    """Bring the recipe's store up to date before training, where it has one that is read alone.

    Args:
        part: ranks write at once, each its own; then all have to wait for the last.

    Raises:
        StoreError: see `build_store`.
    """
    if recipe.features.stores:
        report.say(store_size(recipe, parts.features, parts.corpus.samples))
    if recipe.features.source == "offline":
        build_features(recipe, parts.target, parts.features, parts.corpus.samples, report, part)


def open_features(recipe: Recipe, parts: RunParts, report: Reporter, part: Part = WHOLE) -> FeatureSource:
    """The source that the recipe names, checked against the target. Close it when training is over.

    Raises:
        StoreError: a store that is foreign, damaged, or written to by another job.
        FeatureServerError: see `FeatureClient`.
    """
    config, target, samples = recipe.features, parts.target, parts.corpus.samples
    spec = parts.drafter.feature_spec
    # Over the whole vocabulary the loss finds the target's own token by itself.
    want_top1 = not parts.drafter.vocab_map.is_full
    if config.source == "online":
        return OnlineFeatures(target, spec, batch_tokens=config.batch_tokens, want_top1=want_top1)
    path = store_path(recipe)
    if config.source == "hybrid" and not holds(path, parts.features, samples):
        hybrid = HybridFeatures(path, parts.features, target, samples, config, part)
        report.say(f"features: {len(hybrid.missing)} of {len(samples)} samples are computed while training")
        return hybrid
    if config.stores:
        reader = open_store(path, parts.features, samples, config.verify)
        if target.runs:
            spot_check(reader, target, samples)
        return StoredFeatures(reader, config.workers)
    return ask_servers(recipe, spec, target, samples, report.say, want_top1=want_top1)


def build_features(
    recipe: Recipe,
    target: TargetModel,
    identity: StoreIdentity,
    samples: Sequence[Sample],
    report: Reporter,
    part: Part,
) -> bool:
    """Add to the recipe's store what it lacks, or this part's share of it; whether it is complete then.

    The first part leaves the recipe and where the rows come from beside them.
    """
    path = store_path(recipe)
    if holds(path, identity, samples):
        return True
    if not (target.runs or recipe.features.urls):
        raise StoreError(
            "lacks features of the recipe's samples, and the target is not here: target.placement is elsewhere",
            where=path,
            remedy="complete it first: drafttrain features build RECIPE, where the target fits, or with servers that "
            "run it (features.urls)",
        )

    def progress(done: int, total: int) -> None:
        report.progress("features", done, total)

    build = partial(build_store, path, identity, target, samples, recipe.features, progress, part)
    if recipe.features.urls:
        spec = FeatureSpec.of(identity.taps)
        with closing(ask_servers(recipe, spec, target, samples, report.say)) as servers:
            complete = build(servers.captured)
    else:
        complete = build()
    if part.index == 0:
        save_recipe(recipe, path)
        record_provenance(path, collect_provenance(target.identity.to_dict(), data_hashes(recipe)))
    return complete


def store_size(recipe: Recipe, identity: StoreIdentity, samples: Sequence[Sample]) -> str:
    """A line that says how large the recipe's store will be, before anything is written."""
    tokens = int(lengths_of(samples).sum())
    size = tokens * identity.bytes_per_token
    line = (
        f"features: store {store_path(recipe)}, {size_text(size)} for {tokens:,} tokens, "
        f"taps {', '.join(identity.taps)} in {identity.dtype}"
    )
    if size > os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") and recipe.training.shuffle_block is None:
        line += "; more than this machine's memory: training.shuffle_block=64 reads it in runs"
    return line


def store_path(recipe: Recipe) -> Path:
    """Folder of the feature store."""
    return Path(recipe.features.path) if recipe.features.path else Path(recipe.run_folder) / "features"


def store_identity(recipe: Recipe, target: TargetModel, chat: ChatRenderer, drafter: Drafter) -> StoreIdentity:
    """What the recipe's features depend on."""
    return identity_of(
        target.identity,
        drafter.feature_spec,
        dtype=recipe.features.dtype,
        compute_dtype=recipe.target.dtype,
        template_hash=chat.template_hash,
    )


def _measured_prompts(
    recipe: Recipe,
    target: TargetModel,
    chat: ChatRenderer,
    held_out: Sequence[Conversation],
    report: Reporter,
) -> list[list[int]]:
    """Token ids of the prompts that acceptance is measured on: the first ones held out that the engine can be asked.

    Raises:
        DataError: there is none.
    """
    wanted, answer = recipe.evaluation.prompts, recipe.evaluation.max_new_tokens
    longest = recipe.data.within(target.context).max_length
    room = longest if target.context is None else min(longest, target.context - answer)
    found: list[list[int]] = []
    refused: list[str] = []
    for conversation in held_out if wanted else ():
        try:
            ids = chat.prompt_ids(_opening(conversation), conversation.tools)
            if len(ids) > room:
                raise DataError(f"the prompt has {len(ids)} tokens, and there is room for {room}")
            found.append(ids)
        except DataError as error:
            refused.append(f"{error.what} (conversation {conversation.id})")
        if len(found) == wanted:
            break
    if refused and not found:
        raise DataError(
            f"acceptance can be measured on none of the {len(refused)} conversations held out; the first: {refused[0]}",
            where="evaluation.prompts",
            remedy="lower evaluation.max_new_tokens where the context is short, or set evaluation.prompts to 0",
        )
    if refused:
        report.say(
            f"data: acceptance is measured on {len(found)} prompts; {len(refused)} of those held out are passed over, "
            f"the first: {refused[0]}"
        )
    return found


def _opening(conversation: Conversation) -> list[Message]:
    """The messages before the first answer.

    Raises:
        DataError: nothing was asked, or nothing answered.
    """
    roles = [message.get("role") for message in conversation.messages]
    asked = next((index for index, role in enumerate(roles) if role in ("user", "tool")), len(roles))
    if "assistant" not in roles[asked:]:
        raise DataError("no turn of the user has an answer")
    return conversation.messages[: roles.index("assistant", asked)]
