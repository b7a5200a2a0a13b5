"""What the engine asks of a draft."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from drafttrain.engine.records import Request
from drafttrain.engine.sampling import RowStreams
from drafttrain.engine.tree import DynamicTree, TreeShape
from drafttrain.engine.verify import Proposal
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

    @property
    def emitted(self) -> int:
        """Tokens in the output so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def room(self) -> int:
        """Tokens it may still emit."""
        return self.limit - self.emitted


class Proposer(ABC):
    """Proposes chains or trees of tokens for rows 0 .. n-1.

    The engine calls, in this order: `reserve` once; `admit` when rows join behind the others; each round `propose`,
    then `observe` with what the target made of it; `move_row` when a row left and the last one takes its place.
    A proposer owns whatever state it keeps a row and never changes a `Row`.

    Attributes:
        name: as reports show it.
        feature_spec: what it reads of the target.
        tree: what it proposes; None = chains of the length that the engine asks for.
    """

    name: str
    feature_spec: FeatureSpec = FeatureSpec()
    tree: TreeShape | DynamicTree | None = None

    @abstractmethod
    def propose(self, rows: Sequence[Row], k: int) -> Proposal:
        """Tokens behind each row's root, up to k deep."""

    def reserve(self, rows: int, length: int) -> None:  # noqa: B027 (stateless drafts do nothing)
        """Allocate for `rows` rows of up to `length` tokens."""

    def admit(self, first_row: int, rows: Sequence[Row], features: dict[Tap, Tensor]) -> None:  # noqa: B027
        """Rows join at first_row ..; features: the prompt's, [m, L, H] a tap, right-padded."""

    def observe(  # noqa: B027
        self, rows: Sequence[Row], features: dict[Tap, Tensor], accepted: Tensor, path: Tensor | None = None
    ) -> None:
        """After a round. `rows` hold the accepted tokens and the new root already.

        Args:
            features: [n, T, H] a tap, at the old root and behind it along the chain or the path that was kept; the
                first accepted[b] + 1 are real.
            accepted: int64 [n] on the CPU.
            path: `Verdict.path` if a tree was proposed.
        """

    def move_row(self, source: int, destination: int) -> None:  # noqa: B027
        """Row `source` takes the place of `destination`."""

    def memory_bytes(self) -> int:
        """Weights and state the draft adds, in bytes."""
        return 0
