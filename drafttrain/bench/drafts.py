"""The drafts of a suite, as one line of YAML each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, TypeAlias

from pydantic import Discriminator, Field, Tag, model_validator

from drafttrain.config import Config
from drafttrain.engine.tree_config import TreeConfig

DraftName = Literal["run", "ngram", "suffix", "oracle"]

_KINDS = ("use", "draft", "synthetic", "early_exit", "skip", "cascade", "router")
_TREES = ("use", "draft", "early_exit", "skip")


class DraftConfig(Config):
    """A draft: one of `use` to `router`.

    Attributes:
        use: a draft by its name, where it gets a tree.
        draft: another run, or its `draft` folder.
        synthetic: the rate at which the baseline's tokens are proposed right, to measure the engine alone.
        early_exit: blocks of the target that draft for it.
        skip: what `drafttrain calibrate --kind skip` wrote.
        cascade: stages, the cheapest first; each is checked by the next, the last one by the target.
        router: a lookup (ngram or suffix), and the draft that proposes where the lookup has found nothing.
        min_match, longest: of a router: tokens that have to match, and most tokens of a lookup's chain.
        tree: what the draft proposes instead of chains.
        device: of a draft LM, where it is not to be the target's, such as "cpu" beside a target on a GPU.
        name: as reports show it.
    """

    use: DraftName | None = None
    draft: str | None = None
    synthetic: float | None = Field(None, ge=0, le=1)
    early_exit: int | None = Field(None, ge=1)
    skip: str | None = None
    cascade: list[Draft] | None = Field(None, min_length=2)
    router: list[Draft] | None = Field(None, min_length=2, max_length=2)
    min_match: int | None = Field(None, ge=1)
    longest: int | None = Field(None, ge=1)
    tree: TreeConfig | None = None
    device: str | None = Field(None, min_length=1)
    name: str | None = Field(None, min_length=1)

    @model_validator(mode="after")
    def _is_one_draft(self) -> DraftConfig:
        given = [kind for kind in _KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise ValueError(f"give one of {', '.join(_KINDS)}, not {' and '.join(given) or 'none'}")
        kind = given[0]
        if kind != "router" and (self.min_match is not None or self.longest is not None):
            raise ValueError(f"min_match and longest belong to a router, not to {kind}")
        if self.tree is not None and (kind not in _TREES or self.use in ("ngram", "suffix", "oracle")):
            raise ValueError(f"{self.use or kind} proposes chains alone: leave out its tree")
        if self.device is not None and (kind not in ("use", "draft") or self.use not in (None, "run")):
            raise ValueError(f"{self.use or kind} runs where the target does: leave out its device")
        if self.router is not None and self.router[0] not in ("ngram", "suffix"):
            raise ValueError("a router begins with ngram or suffix, the lookup that is tried first")
        if self.cascade is not None:
            below = [str(stage) for entry in self.cascade[:-1] for stage in _stages(entry)]
            last = str(self.cascade[-1])
            if last in below or len(set(below)) < len(below):
                raise ValueError(f"the cascade {self} contains itself: list each stage once, the cheapest first")
            if isinstance(self.cascade[-1], DraftConfig) and self.cascade[-1].tree is not None:
                raise ValueError("the stages of a cascade propose chains: leave out the tree")
        return self

    @property
    def kind(self) -> str:
        """Which of them it is."""
        return next(kind for kind in _KINDS if getattr(self, kind) is not None)

    def __str__(self) -> str:
        match self.kind:
            case "use":
                text = str(self.use)
            case "draft":
                text = str(self.draft)
            case "cascade":
                text = " > ".join(f"({e})" if isinstance(e, DraftConfig) and e.cascade else str(e) for e in self.parts)
            case "router":
                text = " or ".join(map(str, self.parts))
            case kind:
                text = f"{kind.replace('_', ' ')} {getattr(self, kind)}"
        text = text if self.device is None else f"{text} on {self.device}"
        return text if self.tree is None else f"{text} {self.tree}"

    @property
    def parts(self) -> list[Draft]:
        """The drafts that it is made of."""
        return self.cascade or self.router or []


def _form(value: object) -> str:
    # Told apart before either is tried, so that a mistake in a mapping is not reported as a name that is none.
    return "a mapping" if isinstance(value, dict | DraftConfig) else "a name"


Draft: TypeAlias = Annotated[
    Annotated[DraftName, Tag("a name")] | Annotated[DraftConfig, Tag("a mapping")], Discriminator(_form)
]

DraftConfig.model_rebuild()


def _stages(entry: Draft) -> Iterator[Draft]:
    if isinstance(entry, DraftConfig) and entry.cascade is not None:
        for stage in entry.cascade:
            yield from _stages(stage)
    else:
        yield entry


def uses_run(entry: Draft) -> bool:
    """Whether the draft under test is in it."""
    if isinstance(entry, str):
        return entry == "run"
    return entry.use == "run" or any(uses_run(part) for part in entry.parts)


def distinct_drafts(drafts: list[Draft]) -> list[Draft]:
    """Refuse two lines that reports could not tell apart."""
    names = [entry.name or str(entry) if isinstance(entry, DraftConfig) else entry for entry in drafts]
    if len(set(names)) != len(names):
        raise ValueError(f"lists something twice: {names}")
    return drafts
