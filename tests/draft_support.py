"""Documents, packed batches and serving chains for tests of drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from drafttrain.drafters.base import DraftBatch, Drafter, DraftInputs
from drafttrain.drafters.build import build_drafter, init_from_target
from drafttrain.drafters.registry import DrafterConfig
from drafttrain.modeling.causal_lm import CausalLM
from drafttrain.modeling.kv_cache import StaticKVCache
from drafttrain.modeling.taps import Tap
from drafttrain.modeling.vocab_map import VocabMap
from tests.support import VOCAB, tiny_target

# Packed with a short one first, alone with padding behind, and filling the row.
ROWS = [[5, 9, 5], [13], [20]]
LENGTH = 20


def new_draft(config: DrafterConfig, target: CausalLM, seed: int = 0, vocab_map: VocabMap | None = None) -> Drafter:
    """A draft bound to `target`, its weights spread so far that every part matters."""
    torch.manual_seed(seed)
    draft = build_drafter(config, target.config, vocab_map)
    init_from_target(draft, target)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            if weight.dim() == 1:
                weight.add_(0.3 * torch.randn_like(weight))
            elif "lm_head" not in name and "embed" not in name and draft.family != "draft_lm":
                weight.add_(0.2 * torch.randn_like(weight))
    return draft.to(target.dtype).eval()


def documents(seed: int = 0, rows: list[list[int]] | None = None) -> list[list[Tensor]]:
    """Random token ids, a list of documents for each row."""
    generator = torch.Generator().manual_seed(seed)
    return [[torch.randint(3, VOCAB, (n,), generator=generator) for n in row] for row in rows or ROWS]


def features_of(target: CausalLM, ids: Tensor, taps: tuple[Tap, ...]) -> dict[Tap, Tensor]:
    """The target's states of one document [L] -> [L, H] each."""
    with torch.no_grad():
        out = target(ids[None], taps=taps)
    return {tap: out.taps[tap][0] for tap in taps}


def packed(target: CausalLM, docs: list[list[Tensor]], taps: tuple[Tap, ...], length: int = LENGTH) -> DraftBatch:
    """A batch whose rows hold the documents one behind the other, padded with junk."""
    wanted = tuple(dict.fromkeys((*taps, Tap.final)))
    count = len(docs)
    batch = DraftBatch(
        tokens=torch.full((count, length), 7),
        positions=torch.zeros(count, length, dtype=torch.int64),
        segments=torch.full((count, length), -1),
        spans=torch.zeros(count, length, dtype=torch.int64),
        features={tap: torch.full((count, length, target.hidden_size), 3.0, dtype=target.dtype) for tap in wanted},
    )
    for row, parts in enumerate(docs):
        start = 0
        for number, ids in enumerate(parts):
            place = slice(start, start + len(ids))
            batch.tokens[row, place] = ids
            batch.positions[row, place] = torch.arange(len(ids))
            batch.segments[row, place] = number
            batch.spans[row, place] = number + 1
            for tap, value in features_of(target, ids, wanted).items():
                batch.features[tap][row, place] = value
            start += len(ids)
    return batch


@torch.no_grad()
def serve_chains(draft: Drafter, target: CausalLM, docs: list[Tensor], ends: list[int], depths: int) -> list[Tensor]:
    """Draft as the engine does, all documents in one ragged cache.

    Document i is prefilled up to slot ends[i]; deeper steps are fed with its own next tokens.

    Returns:
        for each depth the readouts [documents, H] of the chain that starts at slot ends[i].
    """
    draft.prepare_for_inference()
    cache = draft.new_cache(len(docs), 64)
    assert isinstance(cache, StaticKVCache)
    counts = torch.tensor([end + 1 for end in ends])
    longest = int(counts.max())
    tokens = torch.full((len(docs), longest), 5)
    taps = draft.feature_spec.taps
    width = sum(target.hidden_size for _ in taps)
    features = torch.full((len(docs), longest, width), -2.0, dtype=target.dtype)
    for row, (ids, end) in enumerate(zip(docs, ends, strict=True)):
        found = features_of(target, ids, taps)
        tokens[row, : end + 1] = ids[1 : end + 2]
        features[row, : end + 1] = torch.cat([found[tap][: end + 1] for tap in taps], -1)
    cache.begin(len(docs), longest)
    out = draft.step(DraftInputs(tokens, cache.positions(), features), cache)
    cache.commit(counts)
    assert out.hidden is not None
    index = torch.arange(len(docs))
    state, readouts = out.hidden[index, counts - 1][:, None], [out.readout[index, counts - 1]]
    for depth in range(1, depths):
        cache.begin(len(docs), 1, offset=depth - 1)
        fed = torch.stack([ids[end + 1 + depth] for ids, end in zip(docs, ends, strict=True)])[:, None]
        out = draft.step(DraftInputs(fed, cache.positions(), state, depth), cache)
        assert out.hidden is not None
        state = out.hidden
        readouts.append(out.readout[:, 0])
    return readouts


def plain_target(seed: int = 0, **changes: object) -> CausalLM:
    """A tiny Llama with six blocks, so that the default taps differ."""
    return tiny_target("llama", seed, num_hidden_layers=6, **changes)
