"""The draft families by name. Importing this loads no torch: classes are imported when used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig

if TYPE_CHECKING:
    from drafttrain.drafters.base import Drafter

DrafterConfig = Annotated[Eagle3Config | Eagle1Config | MedusaConfig | DraftLMConfig, Field(discriminator="family")]

FAMILIES: dict[str, tuple[type[Eagle3Config | Eagle1Config | MedusaConfig | DraftLMConfig], str]] = {
    "eagle3": (Eagle3Config, "drafttrain.drafters.eagle.eagle3:Eagle3Drafter"),
    "eagle1": (Eagle1Config, "drafttrain.drafters.eagle.eagle1:Eagle1Drafter"),
    "medusa": (MedusaConfig, "drafttrain.drafters.medusa.model:MedusaDrafter"),
    "draft_lm": (DraftLMConfig, "drafttrain.drafters.lm.model:DraftLM"),
}
"""Family -> (config, "module:class")."""


def drafter_class(family: str) -> type[Drafter]:
    """The class of a family.

    Raises:
        KeyError: no such family.
    """
    module, _, name = FAMILIES[family][1].partition(":")
    found: type[Drafter] = getattr(import_module(module), name)
    return found
