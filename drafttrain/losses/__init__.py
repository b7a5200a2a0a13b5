"""What a draft is trained on: which labels count, the terms of the loss, and their weighted sum."""

from drafttrain.losses.config import LossConfig, TermConfig
from drafttrain.losses.objective import Objective, ObjectiveOutput
from drafttrain.losses.supervision import label_mask, supervised

__all__ = ["LossConfig", "Objective", "ObjectiveOutput", "TermConfig", "label_mask", "supervised"]
