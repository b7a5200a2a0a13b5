"""What training unrolls is what the engine drafts: same `step`, same readouts, for every family and switch."""

from __future__ import annotations

import pytest
import torch

from drafttrain.drafters.base import DraftInputs
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import Tap
from tests.draft_support import ROWS, documents, features_of, new_draft, packed, plain_target, serve_chains
from tests.support import tiny_target

DEPTHS = 4
EAGLES = {
    "eagle3": Eagle3Config(depth=DEPTHS, draft_vocab_size=30),
    "eagle3-norm-output": Eagle3Config(depth=DEPTHS, norm_output=True),
    "eagle3-fc-norm": Eagle3Config(depth=DEPTHS, fc_norm=True),
    "eagle3-3.1": Eagle3Config(depth=DEPTHS, fc_norm=True, norm_output=True),
    "eagle3-norm-before-fc": Eagle3Config(depth=DEPTHS, norm_before_fc=True),
    "eagle3-norm-before-residual": Eagle3Config(depth=DEPTHS, norm_before_residual=True),
    "eagle3-two-layers": Eagle3Config(depth=DEPTHS, num_layers=2),
    "eagle3-narrow": Eagle3Config(depth=DEPTHS, hidden_size=24, num_heads=6, num_kv_heads=3, init_head="random"),
    "eagle3-one-tap": Eagle3Config(depth=DEPTHS, taps=("pre_norm",)),
    "eagle3-from-block": Eagle3Config(depth=DEPTHS, init_layer="target:5", init_fc="last"),
    "eagle1": Eagle1Config(depth=DEPTHS),
}


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("name", list(EAGLES))
def test_eagle(name: str, seed: int) -> None:
    # In double precision: four steps of a draft without norms amplify what rounding leaves in single.
    target = plain_target(seed).double()
    draft = new_draft(EAGLES[name], target, seed)
    docs = documents(seed)
    batch = packed(target, docs, draft.feature_spec.taps)
    with torch.no_grad():
        unrolled = draft.unroll(batch, DEPTHS)
    flat = [ids for row in docs for ids in row]
    starts = [(row, sum(lengths[:i])) for row, lengths in enumerate(ROWS) for i in range(len(lengths))]
    for shift in range(4):
        # As far from the end of the document as the chain is long.
        ends = [min(shift * 3, len(ids) - DEPTHS - 1) for ids in flat]
        served = serve_chains(draft, target, flat, ends, DEPTHS)
        assert len(served) == DEPTHS
        for depth, readouts in enumerate(served):
            for (row, start), end, readout in zip(starts, ends, readouts, strict=True):
                torch.testing.assert_close(unrolled[depth].readout[row, start + end], readout, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["llama3-rope", "qwen3", "gemma2", "phi", "cohere", "llama-tied"])
def test_eagle3_of_other_targets(kind: str) -> None:
    target = tiny_target(kind, num_hidden_layers=6)
    draft = new_draft(Eagle3Config(depth=3), target)
    (ids,) = documents(rows=[[12]])[0]
    batch = packed(target, [[ids]], draft.feature_spec.taps)
    with torch.no_grad():
        unrolled = draft.unroll(batch, 3)
    for depth, readout in enumerate(serve_chains(draft, target, [ids], [6], 3)):
        torch.testing.assert_close(unrolled[depth].readout[0, 6], readout[0], rtol=1e-4, atol=2e-5)


def test_prefill_in_pieces_equals_one_pass() -> None:
    target = plain_target()
    draft = new_draft(Eagle3Config(), target)
    (ids,) = documents(rows=[[12]])[0]
    found = features_of(target, ids, draft.feature_spec.taps)
    features = torch.cat([found[tap] for tap in draft.feature_spec.taps], -1)[None, :-1]
    tokens = ids[None, 1:]
    cache = draft.new_cache(1, 32)
    assert isinstance(cache, StaticKVCache)
    whole, parts = [], []
    with torch.no_grad():
        for pieces, results in (([(0, 11)], whole), ([(0, 5), (5, 6), (6, 11)], parts)):
            cache.set_lengths(torch.tensor([0]))
            for start, end in pieces:
                cache.begin(1, end - start)
                inputs = DraftInputs(tokens[:, start:end], cache.positions(), features[:, start:end])
                results.append(draft.step(inputs, cache).readout)
                cache.commit(torch.tensor([end - start]))
    torch.testing.assert_close(torch.cat(parts, 1), torch.cat(whole, 1), rtol=1e-5, atol=1e-5)


def test_medusa() -> None:
    target = plain_target()
    draft = new_draft(MedusaConfig(num_heads=3, num_layers=2), target)
    batch = packed(target, documents(), ())
    unrolled = draft.unroll(batch, 3)
    assert [out.offset for out in unrolled] == [2, 3, 4]
    cache = StaticKVCache(0, 1, 1, 1, 1, torch.float32)
    for depth, out in enumerate(unrolled):
        inputs = DraftInputs(batch.tokens, batch.positions, batch.features[Tap.final], depth)
        torch.testing.assert_close(draft.step(inputs, cache).readout, out.readout)


@pytest.mark.parametrize("kind", ["llama", "qwen2-window", "gemma3", "phi3"])
def test_draft_lm(kind: str) -> None:
    target = tiny_target(kind)
    draft = new_draft(DraftLMConfig(layers=(0, 3)), target)
    docs = documents()
    batch = packed(target, docs, ())
    with torch.no_grad():
        (out,) = draft.unroll(batch, 1)
    assert (out.depth, out.offset) == (0, 1)
    flat = [ids for row in docs for ids in row]
    starts = [(row, sum(lengths[:i])) for row, lengths in enumerate(ROWS) for i in range(len(lengths))]
    cache = draft.new_cache(len(flat), 32)
    assert isinstance(cache, StaticKVCache)
    with torch.no_grad():
        cache.begin(len(flat), 2)
        first = draft.step(DraftInputs(torch.stack([ids[:2] for ids in flat]), cache.positions()), cache).readout
        cache.commit(torch.tensor([2, 2, 1, 2, 2]))
        third = torch.stack([ids[int(n)] for ids, n in zip(flat, cache.lengths, strict=True)])
        cache.begin(len(flat), 1)
        second = draft.step(DraftInputs(third[:, None], cache.positions()), cache).readout
    for i, (row, start) in enumerate(starts):
        torch.testing.assert_close(out.readout[row, start], first[i, 0], rtol=1e-4, atol=1e-4)
        slot = start + int(cache.lengths[i])
        torch.testing.assert_close(out.readout[row, slot], second[i, 0], rtol=1e-4, atol=1e-4)
