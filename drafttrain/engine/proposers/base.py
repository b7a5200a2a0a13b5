"""What the engine asks of a draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from drafttrain.engine.proposers.device_draft import DeviceDraft
from drafttrain.engine.records import Request
from drafttrain.engine.sampling import RowStreams
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.engine.verify import Proposal
from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import FeatureSpec, Tap


@dataclass
class Row:
    """A request in flight. `tokens` ends with the root: the last emitted token, which the target has not read yet."""

    request: Request
    tokens: list[int]
    limit: int
    """Tokens it may still emit when admitted."""
    streams: RowStreams | None
    writers: list[int] = field(default_factory=list)
    rounds: int = 0
    reason: str | None = None
    """Why it has ended."""
    error: EngineError | None = None
    drafted: int = 0
    """How many of the last tokens are drafts of a stage above, which the target may refuse yet; 0 in the engine."""

    @property
    def emitted(self) -> int:
        """Tokens in the output so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def room(self) -> int:
        """Tokens it may still emit."""
        return self.limit - self.emitted


class Reach(NamedTuple):
    """Most levels and most tokens of a row's proposal, and how many places of the engine's own cache behind a row's
    committed tokens drafting writes."""

    depth: int
    tokens: int
    scratch: int = 0


class Proposer(ABC):
    """Proposes chains or trees of tokens for rows 0 .. n-1.

    The engine calls, in this order: `attach` and `reserve` once; `admit` when rows join behind the others; each round
    `propose`, then `observe` with what the target made of it; `move_row` when a row left and the last one takes its
    place. A proposer owns whatever state it keeps a row and never changes a `Row`.

    Attributes:
        name: as reports show it.
        feature_spec: what it reads of the target.
        tree: what it proposes; None = chains of the length that the engine asks for.
        device: where its own state lies; None = beside the target.
        lazy: set before `reserve` by who may go without its proposals for a while: what `observe` tells is then kept,
            and only read when a proposal is asked for.
        sees_the_end: whether `observe` is called for a round in which all rows end, too.
    """

    name: str
    feature_spec: FeatureSpec = FeatureSpec()
    tree: TreeShape | DynamicTree | None = None
    device: torch.device | None = None
    lazy: bool = False
    sees_the_end: bool = False

    @abstractmethod
    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """Tokens behind each row's root, up to k deep."""

    def reach(self, k: int) -> Reach:
        """How deep and how wide proposals are when the engine asks for k tokens."""
        return Reach(k, k) if self.tree is None else Reach(self.tree.depth, self.tree.nodes)

    def attach(self, target: CausalLM, cache: StaticKVCache) -> None:  # noqa: B027 (most drafts need neither)
        """Hand over the engine's target and its cache, which drafts that are part of the target work in."""

    def bytes_needed(self, rows: int, length: int) -> int:
        """What `reserve` will allocate, in bytes."""
        return 0

    def reserve(self, rows: int, length: int) -> None:  # noqa: B027 (stateless drafts do nothing)
        """Allocate for `rows` rows of up to `length` tokens."""

    def admit(self, first_row: int, rows: Sequence[Row], features: dict[Tap, Tensor]) -> None:  # noqa: B027
        """Rows join at first_row ..; features: the prompt's, [m, L, H] a tap, right-padded."""

    def observe(  # noqa: B027
        self,
        rows: Sequence[Row],
        features: dict[Tap, Tensor],
        accepted: Tensor,
        path: Tensor | None = None,
        own: Tensor | None = None,
    ) -> None:
        """After a round. `rows` hold the accepted tokens and the new root already.

        Args:
            features: [n, T, H] a tap, at the old root and behind it along the chain or the path that was kept; the
                first accepted[b] + 1 are real.
            accepted: int64 [n] on the CPU.
            path: `Verdict.path` if a tree was proposed.
            own: bool [n] on the CPU: rows for which this proposer's tokens were used and not another's; None = all.
        """

    def move_row(self, source: int, destination: int) -> None:  # noqa: B027
        """Row `source` takes the place of `destination`."""

    def forget(self) -> None:  # noqa: B027 (few drafts learn)
        """Drop what was learnt from past requests."""

    def on_device(self, k: int) -> DeviceDraft | None:
        """What drafts up to k deep in greedy rounds that stay on the device, or None. After `reserve`."""
        return None

    def memory_bytes(self) -> int:
        """Weights and state the draft adds, in bytes."""
        return 0
