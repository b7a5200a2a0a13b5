"""What a rule is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from drafttrain.export.doctor.case import Case
from drafttrain.export.doctor.finding import Finding


@dataclass(frozen=True)
class Rule:
    """An entry of the table.

    Attributes:
        id: as reports and `--ignore` name it.
        check: the findings of a case; does not change anything.
        families: of drafts that it is for; empty for all, folders that are no draft included.
        needs_target: whether it says nothing without one.
    """

    id: str
    check: Callable[[Case], Iterable[Finding]]
    families: tuple[str, ...] = ()
    needs_target: bool = False

    def applies(self, case: Case) -> bool:
        """Whether it has anything to say about this case."""
        if self.needs_target and case.target is None:
            return False
        return not self.families or case.draft.family in self.families


def unfilled_norm(case: Case) -> str:
    """What becomes of a norm that the engine has and the folder does not."""
    if case.engine == "vllm":
        return "vLLM fills it with ones without a word"
    return f"{case.engine_name} has a place for it that nothing fills"
