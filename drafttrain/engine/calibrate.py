"""What a static tree is shaped by: how often each of a draft's best tokens is right."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from drafttrain.drafters.medusa.model import MedusaDrafter
from drafttrain.engine.sampling import top_tokens
from drafttrain.errors import EngineError
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.taps import Tap


@torch.inference_mode()
def head_accuracies(
    target: CausalLM, drafter: MedusaDrafter, answers: Iterable[tuple[list[int], list[int]]], top: int = 10
) -> list[list[float]]:
    """Top-k accuracies of Medusa heads on the target's own answers (arXiv 2401.10774, section 2.3.3).

    Args:
        target: the model that answered.
        drafter: the heads, bound to it.
        answers: (prompt ids, answer ids); a calibration set, not the prompts that are reported on.
        top: ranks measured.

    Returns:
        For each head and rank, the share of places in which the head's token of that rank was the target's, given the
        true tokens before it; what `TreeShape.from_accuracies` takes.

    Raises:
        EngineError: no answer is long enough for the last head.
    """
    heads = drafter.max_depth
    hits = torch.zeros(heads, top, dtype=torch.float64)
    places = torch.zeros(heads, dtype=torch.float64)
    for prompt, answer in answers:
        ids = torch.tensor(prompt + answer, device=target.device)
        final = target(ids[None], taps=(Tap.final,)).taps[Tap.final][0]
        # Head i at t predicts t + 2 + i, behind the root t + 1, which is the answer's first token or a later one.
        first = len(prompt) - 1
        for head in range(heads):
            labels = ids[first + 2 + head :]
            if not len(labels):
                break
            readout = drafter.read(final[first : first + len(labels)], head)
            best = top_tokens(drafter.head(head)(readout), top)[1]
            hits[head, : best.shape[1]] += (best == labels[:, None]).sum(0).cpu()
            places[head] += len(labels)
    if not bool(places.all()):
        raise EngineError(
            f"no answer is long enough to calibrate {heads} heads",
            remedy=f"give answers of {heads + 1} tokens or more",
        )
    shares: list[list[float]] = (hits / places[:, None]).tolist()
    return shares
