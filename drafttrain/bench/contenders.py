"""From the lines of a suite to the drafts that are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from drafttrain.bench.drafts import Draft, DraftConfig
from drafttrain.bench.runner import Contender
from drafttrain.bench.suite import SuiteConfig
from drafttrain.drafters.base import Drafter
from drafttrain.drafters.lm.model import DraftLM
from drafttrain.drafters.saving import META, WEIGHTS, check_target, find_draft, load_draft, read_meta
from drafttrain.engine.calibration_file import read_skip
from drafttrain.engine.proposers import (
    CascadeProposer,
    EarlyExit,
    ModelReader,
    NGramProposer,
    OracleProposer,
    Proposer,
    Reader,
    ReaderProposer,
    RouterProposer,
    SkippedLayers,
    SuffixProposer,
    SyntheticProposer,
    build_proposer,
)
from drafttrain.engine.proposers.lookup import Lookup
from drafttrain.engine.records import Completion
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.engine.tree_config import TreeConfig
from drafttrain.errors import RecipeError, UserError
from drafttrain.targets.model import TargetModel


def files_used(suite: SuiteConfig) -> Iterator[Path]:
    """What a suite refers to besides the run: weights of other drafts, and what was calibrated."""
    yield from (Path(tree.file) for tree in suite.trees if tree.file is not None)
    yield from _files_of(suite.drafts)


def _files_of(drafts: Sequence[Draft]) -> Iterator[Path]:
    for entry in drafts:
        if isinstance(entry, str):
            continue
        if entry.draft is not None:
            yield from (find_draft(entry.draft) / name for name in (WEIGHTS, META))
        if entry.skip is not None:
            yield Path(entry.skip)
        if entry.tree is not None and entry.tree.file is not None:
            yield Path(entry.tree.file)
        yield from _files_of(entry.parts)


@dataclass(frozen=True)
class _Loaded:
    name: str
    family: str
    drafter: Drafter


class Contenders:
    """Builds a suite's drafts; what several of them use is loaded once.

    Args:
        target: what they draft for.
        suite: for the settings that they have to fit.
        run: name and folder of the draft under test, or None.
    """

    def __init__(self, target: TargetModel, suite: SuiteConfig, run: tuple[str, Path] | None) -> None:
        self.target, self.suite, self.run = target, suite, run
        self._loaded: dict[tuple[Path, torch.device], _Loaded] = {}

    def all(self) -> list[Contender]:
        """One a line, and one a tree of the draft under test.

        Raises:
            UserError: a draft that is missing, foreign, or cannot do what is asked.
        """
        made = []
        for index, entry in enumerate(self.suite.drafts):
            made.append(self._contender(entry, f"drafts.{index}"))
            if entry == "run":
                made += [
                    self._contender(DraftConfig(use="run", tree=tree), f"trees.{number}")
                    for number, tree in enumerate(self.suite.trees)
                ]
        if self.suite.typical:
            made = [
                replace(c, name=f"{c.name} (lossy)", variant=f"{c.variant} (lossy)" if c.variant else "") for c in made
            ]
        return made

    def _contender(self, entry: Draft, key: str) -> Contender:
        given = entry if isinstance(entry, DraftConfig) else DraftConfig(use=entry)
        try:
            return self._made(given)
        except UserError as error:
            if error.where is not None:
                raise
            raise RecipeError(error.what, where=f"{key} ({given})", remedy=error.remedy) from None

    def _made(self, given: DraftConfig) -> Contender:
        if given.use == "oracle" or given.synthetic is not None:
            return self._replay(given)
        proposer = self._proposer(given)
        family = given.kind
        if given.use == "run" or given.draft is not None:
            family = self._load(given).family
        elif given.use is not None:
            family = given.use
        variant = "" if given.tree is None or given.name is not None else str(given.tree)
        return Contender(given.name or proposer.name, family, proposer, variant=variant)

    def _replay(self, given: DraftConfig) -> Contender:
        outputs: dict[str, Sequence[int]] = {}

        def learn(completions: Sequence[Completion]) -> None:
            outputs.update({completion.id: completion.tokens for completion in completions})

        name = given.name or str(given)
        if given.synthetic is None:
            return Contender(name, "oracle", OracleProposer(outputs), learn)
        proposer = SyntheticProposer(outputs, self.target.vocab_size, given.synthetic, self.suite.seed)
        return Contender(name, "synthetic", proposer, learn)

    def _proposer(self, entry: Draft) -> Proposer:
        given = entry if isinstance(entry, DraftConfig) else DraftConfig(use=entry)
        match given.kind:
            case "cascade":
                return self._cascade(given)
            case "router":
                lookup = self._proposer(given.parts[0])
                assert isinstance(lookup, Lookup)
                options = {"min_match": given.min_match, "longest": given.longest}
                wanted = {key: value for key, value in options.items() if value is not None}
                return RouterProposer(lookup, self._proposer(given.parts[1]), name=given.name, **wanted)
            case "use" if given.use in ("ngram", "suffix"):
                return NGramProposer() if given.use == "ngram" else SuffixProposer()
            case "early_exit" | "skip":
                return ReaderProposer(self._reader(given), str(given), _built(given.tree), _sampled(given.tree))
            case "use" | "draft":
                loaded = self._load(given)
                name = loaded.name if given.device is None else f"{loaded.name} on {given.device}"
                name = name if given.tree is None else f"{name} {given.tree}"
                return build_proposer(loaded.drafter, name, _built(given.tree), _sampled(given.tree))
            case kind:
                raise RecipeError(f"{kind} replays the baseline and is no part of another draft")

    def _cascade(self, given: DraftConfig) -> Proposer:
        *cheaper, last = given.parts
        inner = cheaper[0] if len(cheaper) == 1 else DraftConfig(cascade=cheaper)
        return CascadeProposer(self._reader(last), self._proposer(inner), given.name)

    def _reader(self, entry: Draft) -> Reader:
        given = entry if isinstance(entry, DraftConfig) else DraftConfig(use=entry)
        if given.early_exit is not None:
            return EarlyExit(self.target, given.early_exit)
        if given.skip is not None:
            skipped = read_skip(given.skip, self.target.identity.to_dict())
            return SkippedLayers(self.target, skipped.attention, skipped.mlp, str(given))
        if given.use == "run" or given.draft is not None:
            loaded = self._load(given)
            if isinstance(loaded.drafter, DraftLM):
                loaded.drafter.prepare_for_inference()
                return ModelReader(loaded.drafter.lm, loaded.name)
        raise RecipeError(
            f"{given} cannot check another draft's tokens in one pass",
            remedy="let a draft LM, an early exit or skipped layers be checked by the target; "
            "for a lookup beside EAGLE or Medusa write router",
        )

    def _load(self, given: DraftConfig) -> _Loaded:
        if given.use == "run":
            assert self.run is not None
            name, folder = self.run
        else:
            assert given.draft is not None
            folder = find_draft(given.draft)
            name = given.name or Path(given.draft).name
        device = self._device(given)
        if (folder, device) not in self._loaded:
            if device != self.target.device and read_meta(folder).family != "draft_lm":
                raise RecipeError(
                    f"{name} reads the target's states and cannot be on {device}",
                    remedy="leave out device: only a draft LM, which reads tokens, can be elsewhere",
                )
            drafter, meta = load_draft(folder, device, self.target.dtype)
            check_target(meta, self.target.identity.to_dict(), where=folder)
            if meta.family == "medusa" and max(self.suite.k) > drafter.max_depth:
                raise RecipeError(
                    f"the suite asks for {max(self.suite.k)} draft tokens, the draft has {drafter.max_depth} Medusa "
                    "heads",
                    remedy=f"add k=[{drafter.max_depth}] to the command",
                )
            drafter.bind(self.target.embedding_weight, self.target.head())
            self._loaded[folder, device] = _Loaded(name, meta.family, drafter)
        return self._loaded[folder, device]

    def _device(self, given: DraftConfig) -> torch.device:
        """Where a draft runs.

        Raises:
            RecipeError: no such device here.
        """
        if given.device is None:
            return self.target.device
        try:
            # Asked of a tensor: "cuda" is one of several.
            return torch.empty(0, device=given.device).device
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            said = str(error).partition("\n")[0]
            raise RecipeError(f"no device {given.device!r} here: {said}", remedy="write cpu or cuda:0") from None


def _built(tree: TreeConfig | None) -> TreeShape | DynamicTree | None:
    return None if tree is None else tree.build()


def _sampled(tree: TreeConfig | None) -> bool:
    return tree is not None and tree.samples
