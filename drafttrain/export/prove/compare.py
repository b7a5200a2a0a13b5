"""The verdict: does the server's speculation change nothing, and does it accept what the bundled engine accepts?"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from drafttrain.export.prove.bundled import BundledRun
from drafttrain.export.prove.server import Counters, ServerRun

NEAR_TIE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
"""Logit gap up to which the order of additions decides which token is the best: some units in the last place of logits
of a usual size (10 to 30)."""
_Z = 2.576
"""Of the 99 % interval: a proof has several positions and runs often."""


@dataclass(frozen=True)
class Difference:
    """Where two greedy outputs part.

    Attributes:
        prompt, index: which output, and the token in it; both from 0.
        plain, speculative: the tokens; None where the output had ended.
        gap: logit gap of the plain run there, None where it is not known.
        near_tie: whether rounding explains it.
    """

    prompt: int
    index: int
    plain: int | None
    speculative: int | None
    gap: float | None
    near_tie: bool


@dataclass(frozen=True)
class Position:
    """Acceptance at one depth.

    Attributes:
        depth: from 1.
        server, bundled: shares of rounds in which it was accepted.
        low, high: 99 % Wilson interval around the bundled engine's.
        within: the server's lies in it.
    """

    depth: int
    server: float
    bundled: float
    low: float
    high: float
    within: bool


@dataclass(frozen=True)
class Proof:
    """What was compared, and the verdict.

    Attributes:
        setting: engine, versions, dtype, prompts, k: whatever is needed to repeat it.
        server, bundled: counters of both sides.
        differences: speculative against plain output of the same server.
        against_bundled: the server's plain output against the bundled engine's; for information.
        positions: acceptance by depth.
        problems: why it is no proof; empty when it is one.
    """

    setting: dict[str, Any]
    server: Counters
    bundled: Counters
    differences: list[Difference]
    against_bundled: list[Difference]
    positions: list[Position]
    problems: list[str] = field(default_factory=list)

    @property
    def proven(self) -> bool:
        """Whether nothing speaks against it."""
        return not self.problems

    @property
    def same_counts(self) -> bool:
        """Whether both engines counted the very same at every depth."""
        return self.server == self.bundled

    def to_json(self) -> dict[str, Any]:
        """For `proof.json`."""
        return {"schema": 1, "proven": self.proven, "same_counts": self.same_counts, **asdict(self)}


def compare(plain: ServerRun, speculative: ServerRun, bundled: BundledRun, setting: dict[str, Any]) -> Proof:
    """Judge a server's runs.

    Args:
        plain, speculative: of the same server on the same prompts.
        bundled: of the bundled engine on them.
        setting: kept in the proof; its `dtype` says what a near-tie is.
    """
    assert plain.gaps is not None and speculative.counters is not None
    tolerance = NEAR_TIE[setting["dtype"]]
    differences = find_differences(plain.outputs, speculative.outputs, plain.gaps, tolerance)
    server, ours = speculative.counters, bundled.counters
    positions = compare_positions(server, ours)
    problems = [
        f"prompt {d.prompt}: token {d.index} is {d.speculative} with speculation and {d.plain} without"
        + ("" if d.gap is None else f", and that is no near-tie (gap {d.gap:.4f})")
        for d in differences
        if not d.near_tie
    ]
    problems += [
        f"depth {p.depth}: the server accepts {p.server:.3f}, the bundled engine {p.bundled:.3f} "
        f"[{p.low:.3f}, {p.high:.3f}]"
        for p in positions
        if not p.within
    ]
    if server.accepted == 0:
        problems.append("the server accepted no token at all, which proves nothing about the draft")
    against = find_differences(plain.outputs, bundled.outputs, plain.gaps, tolerance)
    return Proof(setting, server, ours, differences, against, positions, problems)


def find_differences(
    plain: list[list[int]], other: list[list[int]], gaps: list[list[float]], tolerance: float
) -> list[Difference]:
    """The first difference of each pair of outputs.

    Args:
        gaps: of `plain`, one a token.
        tolerance: the largest gap of a near-tie.
    """
    found = []
    for prompt, (one, two, gap) in enumerate(zip(plain, other, gaps, strict=True)):
        index = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
        if index == len(one) == len(two):
            continue
        here = gap[index] if index < len(gap) else None
        both = index < min(len(one), len(two))
        found.append(
            Difference(
                prompt,
                index,
                one[index] if index < len(one) else None,
                two[index] if index < len(two) else None,
                here,
                both and here is not None and here <= tolerance,
            )
        )
    return found


def compare_positions(server: Counters, bundled: Counters) -> list[Position]:
    """Acceptance by depth, the bundled engine's with its interval."""
    positions = []
    depths = max(len(server.per_position), len(bundled.per_position))
    for index in range(depths):
        theirs, ours = _share(server, index), _share(bundled, index)
        low, high = wilson(bundled.per_position[index] if index < len(bundled.per_position) else 0, bundled.drafts)
        positions.append(Position(index + 1, theirs, ours, low, high, low <= theirs <= high))
    return positions


def _share(counters: Counters, index: int) -> float:
    accepted = counters.per_position[index] if index < len(counters.per_position) else 0
    return accepted / counters.drafts if counters.drafts else 0.0


def wilson(successes: int, trials: int, z: float = _Z) -> tuple[float, float]:
    """Wilson's interval of a binomial share; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    share = successes / trials
    centre = (share + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    # Rounding must not push the ends past a share of 0 or 1 itself.
    return min(share, max(0.0, centre - half)), max(share, min(1.0, centre + half))
