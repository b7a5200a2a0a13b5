"""What a target must show before it is used: that our way of running it gives what transformers gives."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from drafttrain.errors import TargetError, UserError
from drafttrain.modeling.attention import ATTENTION_NAME
from drafttrain.modeling.taps import Tap

if TYPE_CHECKING:
    from drafttrain.targets.model import TargetModel

_TOKENS, _BRANCH = 8, 3
_REMEDY = "docs/targets.md lists the architectures that work and those that cannot; please report one that should"


@torch.inference_mode()
def prove(target: TargetModel) -> None:
    """Run a few tokens: plainly, by transformers with its own attention and masks, and as a tree through a cache.

    A target of NaN says one token for ever, which a draft learns at once: it would be measured as a triumph. One whose
    mask, positions or cache are not what we think gives other tokens than it does elsewhere, and nothing shows it.

    Raises:
        TargetError: weights that give NaN, or an architecture that our forward, taps, head or cache do not reproduce.
    """
    name = type(target.hf).__name__
    try:
        _prove(target, name)
    except (UserError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if dist.is_initialized() and dist.get_world_size() > 1:
            raise  # another rank may be what failed
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise TargetError(f"{name} does not run here: {first}", where=target.identity.name, remedy=_REMEDY) from error


def _prove(target: TargetModel, name: str) -> None:
    where = target.identity.name
    ids = torch.arange(_TOKENS, device=target.device)[None] % target.vocab_size
    out = target(ids, taps=[*(Tap.block(i) for i in range(target.n_layers)), Tap.pre_norm])
    if not bool(torch.isfinite(out.final).all()):
        raise TargetError(
            f"its forward gives NaN or Inf in {str(target.dtype).removeprefix('torch.')}",
            where=where,
            remedy="its weights are damaged, or overflow this dtype: try the dtype bfloat16 or float32",
        )
    for tap, state in out.taps.items():
        if state.shape != out.final.shape:
            raise TargetError(
                f"the state of {name} at tap {tap} is {list(state.shape)}, where a draft reads {list(out.final.shape)}",
                where=where,
                remedy=_REMEDY,
            )
    target.hf.set_attn_implementation("eager")
    try:
        theirs = target.hf(input_ids=ids, use_cache=False).logits
    finally:
        target.hf.set_attn_implementation(ATTENTION_NAME)
    as_tree = _as_tree(target, ids)
    before, behind = slice(0, _BRANCH), slice(_BRANCH, None)
    for what, ours, expected in (
        ("the logits of {} are not its head applied to its final state", target.lm_head(out.final), theirs),
        (
            "the final state of {} is not its norm of the last block",
            target.final_norm(out.taps[Tap.pre_norm]),
            out.final,
        ),
        ("{} gives other states with a cache and the mask of a tree", as_tree[:, before], out.final[:, before]),
        ("{} gives other states behind the branches of a tree", as_tree[:, behind], out.final[:, behind]),
    ):
        if not _close(ours, expected):
            raise TargetError(what.format(name), where=where, remedy=_REMEDY)


def _as_tree(target: TargetModel, ids: Tensor) -> Tensor:
    """Final states of `ids`, with a token of another branch among them that none of the later ones may see."""
    path = [*range(_BRANCH), *range(_BRANCH + 1, _TOKENS + 1)]
    tokens = torch.cat([ids[:, :_BRANCH], ids[:, :1], ids[:, _BRANCH:]], 1)
    sees = torch.ones(_TOKENS + 1, _TOKENS + 1, dtype=torch.bool).tril()
    sees[_BRANCH + 1 :, _BRANCH] = False
    cache = target.new_cache(1, _TOKENS + 1)
    cache.begin(1, _TOKENS + 1, tail_mask=sees)
    final: Tensor = target(tokens, cache=cache).final
    return final[:, path]


def _close(ours: Tensor, theirs: Tensor) -> bool:
    """Whether rows [1, T, ...] agree; where numbers are coarse, whether most do: some tokens amplify any rounding."""
    ours, wide = ours.float(), theirs.float()
    if ours.shape != wide.shape:
        return False
    off = (ours - wide).norm(dim=-1) / wide.norm(dim=-1).clamp(min=1e-6)
    if theirs.dtype in (torch.float32, torch.float64):
        return bool(off.max() <= 1e-2)
    return bool(off.median() <= 0.2)
