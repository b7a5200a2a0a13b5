"""An implementation is refused by name before anything runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drafttrain.errors import EngineError
from drafttrain.ops import backend
from drafttrain.ops.draft_topk import expand, select
from drafttrain.ops.kv_compact import kv_compact
from drafttrain.ops.soft_ce import soft_ce
from drafttrain.ops.tree_attention import pack, tree_attention
from drafttrain.ops.tree_walk import chain_family, walk_by_match, walk_by_rejection
from drafttrain.ops.ttt_attention import ttt_attention

ONE = torch.ones(1, dtype=torch.int64)
X = torch.zeros(1, 2, 3, 8)

CALLS: dict[str, Callable[[Any], object]] = {
    "tree_attention": lambda impl: tree_attention(X, X, X, pack(torch.ones(1, 3, 3).bool(), ONE), 1.0, impl=impl),
    "kv_compact": lambda impl: kv_compact(torch.zeros(1, 2, 1, 1, 4, 8), ONE, ONE[None], impl=impl),
    "draft_topk": lambda impl: expand(X, None, 2, impl=impl),
    "draft_topk's selection": lambda impl: select(X[0, 0], 2, impl=impl),
    "tree_walk": lambda impl: walk_by_match(ONE[None], ONE[None], ONE, ONE[None], 1, impl=impl),
    "tree_walk, sampled": lambda impl: walk_by_rejection(
        X[0], X[0], ONE[None], ONE, chain_family(1, X.device), ONE, X[0].double(), X[0].double(), impl=impl
    ),
    "soft_ce": lambda impl: soft_ce(X[0, 0], X[0, 0], impl=impl),
    "ttt_attention": lambda impl: ttt_attention(X, [X], [X], None, 1.0, impl=impl),
}


@pytest.mark.parametrize("op", CALLS)
def test_an_unknown_impl_is_refused_by_name(op: str) -> None:
    with pytest.raises(EngineError, match=f"{op.partition(',')[0].partition(chr(39))[0]}.*'cuda-graphs'"):
        CALLS[op]("cuda-graphs")


@pytest.mark.parametrize("op", [op for op in CALLS if op != "ttt_attention"])
def test_a_kernel_is_not_silently_replaced(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for on a CPU, or where Triton is missing."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(EngineError, match=r"cannot run on cpu|needs Triton"):
        CALLS[op]("triton")
    monkeypatch.setattr(backend, "have_triton", lambda: False)
    with pytest.raises(EngineError, match=r"needs Triton") as refused:
        CALLS[op]("triton")
    assert "drafttrain[kernels]" in str(refused.value)


def test_auto_takes_the_reference_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not backend.use_triton("op", "auto", torch.device("cpu"))
    assert backend.use_triton("op", "auto", torch.device("cuda")) == backend.have_triton()


def test_a_dtype_that_kernels_do_not_take() -> None:
    assert not backend.use_triton("op", "auto", torch.device("cuda"), torch.float64)
    if backend.have_triton():
        with pytest.raises(EngineError, match="float64"):
            backend.use_triton("op", "triton", torch.device("cuda"), torch.float64)
