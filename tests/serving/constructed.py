"""A target that counts, and drafts of every family that count as they are told: acceptance is known in advance."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from drafttrain.drafters.base import Drafter
from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.export.prove.server import Counters
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.vocab_map import VocabMap
from tests.serving.cases import K, Tiny
from tests.support import tiny_hf

SIZE = 64  # tokens, and the width: states are one-hot
PROMPTS, STOP, NEW = [[5, 6, 7], [11]], 19, 25
OUTPUTS = [list(range(8, 20)), list(range(12, 20))]
SAID = [1, 3, *range(5, 59)]  # by the draft with a vocabulary of its own
Rule = Callable[[int], int]
"""Token -> the one that follows."""


def following(x: int) -> int:
    """What the target says behind x."""
    return (x + 1) % SIZE


def _wrong(x: int) -> int:
    return (x + 2) % SIZE


RULES: dict[str, Rule] = {
    "all": following,
    "none": _wrong,
    "alternating": lambda x: following(x) if x % 2 == 0 else _wrong(x),
}
# The prefill says 8 and 12: even, as every root is from then on where every other token is accepted. The stop token is
# the twelfth and the eighth of the outputs; a round of "all" has it among its accepted tokens, and the server counts
# those behind it, too.
COUNTS = {
    "all": Counters(5, 15, 15, [5, 5, 5]),
    "none": Counters(18, 54, 0, [0, 0, 0]),
    "alternating": Counters(10, 30, 10, [10, 0, 0]),
}
CONFIGS: dict[str, DrafterConfig] = {
    "eagle3": Eagle3Config(draft_vocab_size=len(SAID)),
    "eagle1": Eagle1Config(depth=K),
    "medusa": MedusaConfig(num_heads=K),
    "medusa-shared": MedusaConfig(num_heads=K, head="target"),
    "draft_lm": DraftLMConfig(layers=(0,)),
}


def counting_target(folder: Path) -> Tiny:
    """A Llama that says x + 1 after x, wrapping around.

    Its blocks are silent: the embedding is one-hot, so that every tap is e_x, the last state 8 e_x, and the head's rows
    are the embedding's, moved.
    """
    hf = tiny_hf(
        "llama",
        vocab_size=SIZE,
        hidden_size=SIZE,
        intermediate_size=SIZE,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )
    with torch.no_grad():
        for name, weight in hf.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.zero_()
        hf.get_input_embeddings().weight.copy_(torch.eye(SIZE))
        hf.get_output_embeddings().weight.copy_(_moving(following))
    hf.save_pretrained(folder)
    target = CausalLM(hf).requires_grad_(False).eval()
    return Tiny(target, folder, PROMPTS, [])


def constructed(name: str, rule: Rule, target: CausalLM) -> Drafter:
    """A draft of `CONFIGS` that says rule(x) after x, wherever in a chain."""
    vocab_map = VocabMap.from_ids(SAID, SIZE) if name == "eagle3" else None
    draft = build_drafter(CONFIGS[name], target.config, vocab_map)
    init_from_target(draft, target)
    weights = dict(draft.named_parameters())
    with torch.no_grad():
        for weight in weights.values():
            if weight.dim() == 2 and draft.family != "draft_lm":
                weight.zero_()
        _SET[name](weights, rule)
    return draft.eval()


def _moving(rule: Rule, scale: float = 1.0) -> Tensor:
    """The matrix that takes e_x to scale * e_rule(x)."""
    matrix = torch.zeros(SIZE, SIZE)
    matrix[[rule(x) for x in range(SIZE)], torch.arange(SIZE)] = scale
    return matrix


def _eagle3(weights: dict[str, Tensor], rule: Rule) -> None:
    """fc takes one of the taps, e_x; each step of the layer moves the state on, and the head says what follows."""
    weights["fc.weight"][:, 2 * SIZE :] = torch.eye(SIZE)
    # The state e_x is normed to 8 e_x, and silu(8) * 8 times this moves it by a whole step.
    step = 1 / (torch.nn.functional.silu(torch.tensor(8.0)) * 8)
    weights["midlayer.mlp.gate_proj.weight"].copy_(torch.eye(SIZE))
    weights["midlayer.mlp.up_proj.weight"].copy_(torch.eye(SIZE))
    weights["midlayer.mlp.down_proj.weight"].copy_((_moving(following) - torch.eye(SIZE)) * step)
    weights["lm_head.weight"].copy_(_moving(rule)[SAID])


def _eagle1(weights: dict[str, Tensor], rule: Rule) -> None:
    """fc makes of the token's embedding the state behind which the target's head says what the rule says."""
    weights["fc.weight"][:, :SIZE] = _moving(lambda x: rule(x) - 1)


def _medusa(weights: dict[str, Tensor], rule: Rule) -> None:
    for i in range(K):
        weights[f"lm_heads.{i}.weight"].copy_(_moving(lambda x, i=i: rule((x + 1 + i) % SIZE)))


def _medusa_shared(weights: dict[str, Tensor], rule: Rule) -> None:
    """8 e_x + silu(32 e_y): the target's head, which all heads read, says what follows y."""
    for i in range(K):
        weights[f"blocks.{i}.layers.0.weight"].copy_(_moving(lambda x, i=i: rule((x + 1 + i) % SIZE) - 1, 4.0))


def _lm(weights: dict[str, Tensor], rule: Rule) -> None:
    """The target's first block, silent too, with another head."""
    weights["lm.hf.lm_head.weight"].copy_(_moving(rule))


_SET = {"eagle3": _eagle3, "eagle1": _eagle1, "medusa": _medusa, "medusa-shared": _medusa_shared, "draft_lm": _lm}
