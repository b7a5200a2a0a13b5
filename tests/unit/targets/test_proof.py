"""What a target must show before it is used (case 43 of docs/cases.md)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drafttrain.errors import TargetError
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.targets.identity import TargetIdentity
from drafttrain.targets.model import TargetModel
from drafttrain.targets.proof import _close
from tests.support import VOCAB, tiny_hf


class _Tokenizer:
    eos_token_id = 2

    def __len__(self) -> int:
        return VOCAB


def load(dtype: torch.dtype, **changes: Any) -> TargetModel:
    return TargetModel(
        tiny_hf("llama", **changes).to(dtype), _Tokenizer(), TargetIdentity("tiny", "", "", "", VOCAB, VOCAB, 32, 4)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mask_that_is_not_obeyed_is_seen_in_every_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    load(dtype)
    own = StaticKVCache.mask

    def causal(self: StaticKVCache, window: int | None = None) -> torch.Tensor | None:
        mask = own(self, window)
        return None if mask is None else torch.ones_like(mask).tril()

    monkeypatch.setattr(StaticKVCache, "mask", causal)
    with pytest.raises(TargetError, match="behind the branches of a tree"):
        load(dtype)


def test_a_token_that_amplifies_rounding_refuses_no_coarse_target() -> None:
    states = torch.randn(1, 5, 32, generator=torch.Generator().manual_seed(0))
    one_off = states.clone()
    one_off[:, 3] += 0.5 * states[:, 0]
    assert _close(one_off.bfloat16(), states.bfloat16()) and not _close(one_off, states)
    assert not _close((1.5 * states).bfloat16(), states.bfloat16())
    assert not _close(states[:, :4], states)
