"""The base of every configuration section."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

LEAST_TEMPERATURE = 1e-5
"""The lowest temperature that is sampled at. All mass is at the argmax by then, and logits over a much lower one leave
the range of fp32. vLLM's sampler takes what lies below it for greedy; here it is refused, so that no result says a
temperature that nothing was sampled at."""


class Config(BaseModel):
    """Immutable; a key that is not declared is an error, never ignored, and so is a number that is not finite."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False, protected_namespaces=()
    )


def is_temperature(value: float) -> bool:
    """Whether it is 0 (greedy), or high enough to sample at."""
    return value == 0 or LEAST_TEMPERATURE <= value < float("inf")


def _greedy_or_sampled(value: float) -> float:
    if 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"got {value:g}, must be 0 (greedy) or at least {LEAST_TEMPERATURE:g}")
    return value


Temperature = Annotated[float, Field(ge=0), AfterValidator(_greedy_or_sampled)]
"""0 is greedy; temperatures between 0 and `LEAST_TEMPERATURE` are refused, not taken for 0."""

Place = Annotated[str, Field(min_length=1), AfterValidator(os.path.expanduser)]
"""A file or folder; `~` is the user's home, as in a shell, and no folder of that name."""
