"""Draft LMs: ordinary causal LMs."""

from __future__ import annotations

import json
from typing import Any

from torch import Tensor

from drafttrain.drafters.lm.hf import new_model, text_config_from
from drafttrain.errors import TargetError
from drafttrain.export.foreign.checkpoint import Checkpoint
from drafttrain.export.foreign.parts import Reading
from drafttrain.export.foreign.target import Target
from drafttrain.export.ir import DraftIR, Norms
from drafttrain.modeling.vocab_map import VocabMap
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.identity import tokenizer_hash
from drafttrain.targets.load import load_tokenizer

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


def read_lm(checkpoint: Checkpoint, target: Target) -> tuple[DraftIR, list[str]]:
    """A causal LM with the target's vocabulary."""
    reading = Reading.of(checkpoint, target)
    values = {key: value for key, value in reading.config.items() if key not in ("architectures", "auto_map")}
    text = text_config_from(values).get_text_config()
    vocab_size = int(target.identity["vocab_size"])
    if text.vocab_size != vocab_size:
        raise reading.error(
            f"the draft has {text.vocab_size} tokens, the target {vocab_size}",
            "a draft LM needs the target's tokenizer and vocabulary size",
        )
    check_tokenizer(checkpoint, target)
    _drop_tied(reading, new_model(text, "meta"))
    return lm_ir(reading, text, dict(reading.left)), reading.notes


def lm_ir(reading: Reading, text: Any, tensors: dict[str, Tensor]) -> DraftIR:
    """A draft LM from its Hugging Face config and tensors."""
    return DraftIR(
        family="draft_lm",
        tensors=tensors,
        taps=(),
        vocab_map=VocabMap.full(int(text.vocab_size)),
        arch=None,
        layers=int(text.num_hidden_layers),
        heads=1,
        norms=Norms(),
        lm_config=config_json(text),
        depth=1,
        target=reading.target.identity,
    )


def _drop_tied(reading: Reading, model: Any) -> None:
    """Second names of tied weights, which some checkpoints store."""
    seen: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = seen.setdefault(id(tensor), name)
        if first == name:
            continue
        if first not in reading.left and name in reading.left:
            reading.left[first] = reading.left[name]
        if name in reading.left:
            del reading.left[name]
            reading.notes.append(f"{name}: dropped, it is tied to {first}")


def config_json(text: Any) -> dict[str, Any]:
    """A Hugging Face config with every default, as JSON."""
    values: dict[str, Any] = json.loads(text.to_json_string(use_diff=False))
    return values


def check_tokenizer(checkpoint: Checkpoint, target: Target) -> None:
    """Refuse a folder that brings another tokenizer than the target's."""
    if not any((checkpoint.folder / name).exists() for name in _TOKENIZERS):
        return
    try:
        own = load_tokenizer(TargetConfig(model=str(checkpoint.folder)))
    except TargetError:
        return
    if tokenizer_hash(own) != target.identity["tokenizer_hash"]:
        raise Reading.of(checkpoint, target).error(
            f"its tokenizer is not that of {target.config.model}: the ids would mean other tokens",
            "give the target that the draft was made for",
        )
