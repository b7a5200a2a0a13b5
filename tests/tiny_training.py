"""Tiny random targets and samples, built in-process."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from drafttrain.corpus.types import Sample
from drafttrain.drafters.base import DraftBatch
from drafttrain.features.sources import FeatureSource
from drafttrain.modeling.causal_lm import CausalLM

VOCAB, HIDDEN, LAYERS = 64, 32, 4


def tiny_target(seed: int = 0, dtype: torch.dtype = torch.float32, vocab: int = VOCAB) -> CausalLM:
    """A frozen random Llama."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )
    target = CausalLM(LlamaForCausalLM(config).to(dtype)).eval()
    target.requires_grad_(False)
    return target


def samples(count: int, seed: int = 0, shortest: int = 6, longest: int = 20, vocab: int = VOCAB) -> list[Sample]:
    """Random documents with one assistant span each, of at least four tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        length = int(rng.integers(shortest, longest + 1))
        first = int(rng.integers(1, length - 3))
        ids = rng.integers(0, vocab, length).astype(np.int32)
        made.append(Sample(f"s{index}", ids, [(first, length - 1)]))
    return made


class Spoiled:
    """A source whose features of some samples are multiplied by `factor`, which may be NaN."""

    def __init__(self, source: FeatureSource, names: Collection[str], factor: float) -> None:
        self.source, self.names, self.factor = source, set(names), factor

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def batch(self, rows: list[list[Sample]], device: torch.device) -> DraftBatch:
        batch = self.source.batch(rows, device)
        for index, row in enumerate(rows):
            if any(sample.id in self.names for sample in row):
                for value in batch.features.values():
                    value[index] *= self.factor
        return batch
