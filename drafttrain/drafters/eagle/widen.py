"""More words for a draft that was trained with fewer."""

from __future__ import annotations

import torch

from drafttrain.drafters.eagle.eagle3 import Eagle3Drafter
from drafttrain.modeling.head import Head
from drafttrain.modeling.vocab_map import VocabMap

_PER_TOKEN = ("lm_head.weight", "d2t", "t2d")


@torch.no_grad()
def widen_vocab(drafter: Eagle3Drafter, wider: VocabMap, target_head: Head) -> Eagle3Drafter:
    """The same draft over a larger vocabulary: its own rows of the head stay, the others come from the target's.

    Args:
        drafter: trained over the vocabulary that `wider` contains; H wide.
        wider: the new vocabulary.
        target_head: [V, H].

    Raises:
        ValueError: `wider` lacks a token of the draft's, or the draft is not as wide as the target.
    """
    own = drafter.vocab_map.to("cpu")
    rows = wider.to_draft[own.target_ids]
    if bool((rows < 0).any()):
        raise ValueError("the wider draft vocabulary lacks tokens of the saved one")
    if drafter.arch.hidden_size != target_head.weight.shape[1]:
        raise ValueError("widen_vocab needs a draft as wide as the target: its new rows are the target's")
    weight = drafter.lm_head.weight
    wide = Eagle3Drafter.from_saved(drafter.config, drafter.saved_arch(), wider, weight.device)
    state = drafter.state_dict()
    wide.load_state_dict({name: value for name, value in state.items() if name not in _PER_TOKEN}, strict=False)
    ids = wider.target_ids.to(target_head.weight.device)
    wide.lm_head.weight.copy_(target_head.weight[ids].float() * target_head.scale)
    wide.lm_head.weight[rows.to(weight.device)] = weight
    wide.train(drafter.training)
    return wide
