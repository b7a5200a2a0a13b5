"""On a CPU a token's states have the same bits whatever is computed beside it: speculation is exact in bf16, too."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import NGramProposer, OracleProposer
from drafttrain.engine.records import Request
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.ops.packed_linear import pack
from tests.support import RAGGED_PROMPTS, VOCAB, tiny_hf

pytestmark = pytest.mark.skipif(
    pack(torch.eye(16)) is None or torch.backends.cpu.get_cpu_capability() != "AVX512",
    reason="that products of few rows round alike was measured with oneDNN on AVX-512",
)
DTYPES = [torch.float32, torch.bfloat16]
LENGTH = 1024


@cache
def _target(kind: str, dtype: torch.dtype, head_dim: int | None = None) -> CausalLM:
    # A product of 2,048 terms is one where a row alone is summed in another order than two.
    shape = {} if head_dim is None else {"head_dim": head_dim}
    hf = tiny_hf(kind, intermediate_size=2048, max_position_embeddings=LENGTH, num_hidden_layers=2, **shape)
    target = CausalLM(hf.to(dtype)).requires_grad_(False).eval()
    target.prepare_for_inference()
    return target


def _logits(target: CausalLM, ids: list[int], steps: list[int], beside: tuple[int, ...] = ()) -> Tensor:
    """Of every token of `ids`, [T, V], which are read in these steps, beside other texts that begin with as many tokens
    as `beside` says."""
    others = torch.randint(VOCAB, (len(beside), LENGTH), generator=torch.Generator().manual_seed(0))
    rows = torch.zeros(1 + len(beside), LENGTH, dtype=torch.int64)
    rows[0, : len(ids)], rows[1:] = torch.tensor(ids), others
    kv = target.new_cache(len(rows), LENGTH)
    found = []
    with torch.inference_mode():
        for step in steps:
            first = not found
            counts = torch.tensor([step, *(beside if first else [step] * len(beside))])
            width = int(counts.max())
            places = (kv.lengths[:, None] + torch.arange(width)).clamp(max=LENGTH - 1)
            kv.begin(len(rows), width)
            states = target(rows.gather(1, places), cache=kv).final
            found.append(target.lm_head(states)[0, :step])
            kv.commit(counts)
    return torch.cat(found)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral-window"])
@pytest.mark.parametrize("prompt", [20, 122, 186, 250, 380, 508])
def test_neither_steps_nor_neighbours_change_a_bit(kind: str, dtype: torch.dtype, prompt: int) -> None:
    target = _target(kind, dtype)
    ids = torch.randint(VOCAB, (prompt + 12,), generator=torch.Generator().manual_seed(prompt)).tolist()
    one_by_one = _logits(target, ids, [prompt, *[1] * 12])
    assert torch.equal(_logits(target, ids, [prompt, 5, 7]), one_by_one)
    assert torch.equal(_logits(target, ids, [prompt // 2, prompt - prompt // 2, 12]), one_by_one)
    assert torch.equal(_logits(target, ids, [prompt, 5, 7], beside=(9, prompt + 40)), one_by_one)
    assert torch.equal(_logits(target, ids, [prompt, *[1] * 12], beside=(3, 150, 70)), one_by_one)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
def test_heads_of_usual_widths(head_dim: int, dtype: torch.dtype) -> None:
    target = _target("llama", dtype, head_dim)
    for prompt in (60, 200, 250, 380, 508, 900):
        ids = torch.randint(VOCAB, (prompt + 12,), generator=torch.Generator().manual_seed(prompt)).tolist()
        one_by_one = _logits(target, ids, [prompt, *[1] * 12])
        assert torch.equal(_logits(target, ids, [prompt, 5, 7]), one_by_one), prompt
        assert torch.equal(_logits(target, ids, [prompt, 5, 7], beside=(9, prompt + 40)), one_by_one), prompt


@pytest.mark.parametrize("batch", [1, 7])
@pytest.mark.parametrize("draft", ["oracle", "ngram"])
def test_a_chain_gives_the_plain_text_in_bf16(draft: str, batch: int) -> None:
    target = _target("llama", torch.bfloat16)
    requests = [Request(str(i), prompt * 9, 80) for i, prompt in enumerate(RAGGED_PROMPTS)]
    alone = Engine(target, max_batch=1, max_length=256)
    plain = [alone.generate([request])[0].tokens for request in requests]
    proposer = (
        NGramProposer() if draft == "ngram" else OracleProposer({r.id: p for r, p in zip(requests, plain, strict=True)})
    )
    engine = Engine(target, proposer, k=4, max_batch=batch, max_length=256)
    assert [c.tokens for c in engine.generate(requests)] == plain
    if draft == "oracle":
        assert all(r.accepted == r.proposed for r in engine.records)
