"""Building drafts from configs alone."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from drafttrain.drafters.build import build_drafter, new_vocab_map
from drafttrain.drafters.eagle.config import Eagle1Config, Eagle3Config
from drafttrain.drafters.lm.config import DraftLMConfig
from drafttrain.drafters.medusa.config import MedusaConfig
from drafttrain.drafters.registry import FAMILIES, DrafterConfig, drafter_class
from tests.support import VOCAB, tiny_hf

CONFIGS = [
    Eagle3Config(draft_vocab_size=20),
    Eagle1Config(),
    MedusaConfig(),
    DraftLMConfig(),
    DraftLMConfig(init="scratch", num_layers=2),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.family)
@pytest.mark.parametrize("kind", ["llama", "llama-tied", "gemma3"])
def test_the_meta_device_counts_the_same(config: DrafterConfig, kind: str) -> None:
    text = tiny_hf(kind).config
    real, counted = build_drafter(config, text), build_drafter(config, text, device="meta")
    assert all(weight.is_meta for weight in counted.parameters())
    shapes = [{n: w.shape for n, w in draft.named_parameters()} for draft in (real, counted)]
    assert shapes[0] == shapes[1]
    assert real.training and all(weight.dtype == torch.float32 for weight in real.parameters())


def test_registry() -> None:
    adapter: TypeAdapter[DrafterConfig] = TypeAdapter(DrafterConfig)
    for family, (config, _) in FAMILIES.items():
        assert drafter_class(family).family == family
        assert config.model_fields["family"].default == family
    assert isinstance(adapter.validate_python({"family": "medusa"}), MedusaConfig)
    with pytest.raises(ValidationError, match="eagle3"):
        adapter.validate_python({"family": "eagle"})


def test_reading_configs_loads_no_torch() -> None:
    code = "import sys, drafttrain.drafters.registry; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_vocabulary_of_a_config() -> None:
    counts = torch.zeros(VOCAB)
    counts[40:50] = 3
    mapping = new_vocab_map(Eagle3Config(draft_vocab_size=12), VOCAB, counts, always=[2], tokenizer_size=60)
    assert mapping.target_ids.tolist() == [0, 2, *range(40, 50)]
    assert new_vocab_map(Eagle3Config(), VOCAB, counts).is_full
    assert new_vocab_map(MedusaConfig(), VOCAB, counts).is_full
    assert build_drafter(Eagle3Config(draft_vocab_size=12), tiny_hf().config).vocab_map.size == 12
