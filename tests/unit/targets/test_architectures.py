"""Architectures that are odd in some way: each gives what transformers gives, or is refused in one clear sentence."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import NGramProposer, OracleProposer
from drafttrain.engine.records import Request
from drafttrain.errors import TargetError
from drafttrain.modeling.taps import Tap
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.ends import load_ends
from drafttrain.targets.identity import TargetIdentity
from drafttrain.targets.load import load_target
from drafttrain.targets.model import TargetModel
from tests.architectures import NAMED, REFUSED, VOCAB, WORKS, odd_hf
from tests.chats import CHATML, chat_tokenizer
from tests.support import KINDS, RAGGED_PROMPTS

ATOL = 3e-5


class _Tokenizer:
    """The part of a tokenizer that a target asks for."""

    eos_token_id = 2

    def __len__(self) -> int:
        return VOCAB


def _target(name: str, **changes: object) -> TargetModel:
    """Past its proof: a forward, taps, head, cache and tree mask that equal transformers'."""
    hf = odd_hf(name, **changes)
    config = hf.config.get_text_config()
    identity = TargetIdentity(name, "", "", "", VOCAB, VOCAB, config.hidden_size, config.num_hidden_layers)
    return TargetModel(hf, _Tokenizer(), identity)


@pytest.mark.parametrize("name", WORKS)
def test_states_logits_and_greedy_output_are_transformers_own(name: str) -> None:
    """Cases 24, 26, 29 and 32 of docs/cases.md."""
    target = _target(name)
    ids = torch.randint(3, VOCAB, (2, 24), generator=torch.Generator().manual_seed(1))
    target.hf.set_attn_implementation("eager")
    with torch.inference_mode():
        theirs = target.hf(ids, output_hidden_states=True, use_cache=False)
        generated = [
            target.hf.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :].tolist()
            for prompt in RAGGED_PROMPTS[:3]
        ]
        target.hf.set_attn_implementation("drafttrain")
        ours = target(ids, taps=[Tap.block(i) for i in range(target.n_layers)])
        logits = target.lm_head(ours.final)
    torch.testing.assert_close(logits, theirs.logits, atol=ATOL * float(theirs.logits.abs().max()), rtol=0)
    for index, state in enumerate(theirs.hidden_states[:-1]):
        found = ours.taps[Tap.block(index)]
        torch.testing.assert_close(found, state, atol=ATOL * float(state.abs().max()), rtol=0)
    requests = [Request(str(i), prompt, 12, stop_ids=target.stop_ids) for i, prompt in enumerate(RAGGED_PROMPTS[:3])]
    plain = [done.tokens for done in Engine(target, max_length=32).generate(requests)]
    assert plain == generated
    oracle = OracleProposer({str(i): tokens for i, tokens in enumerate(plain)})
    for proposer in (NGramProposer(), oracle):
        engine = Engine(target, proposer, k=3, max_batch=3, max_length=32)
        assert [done.tokens for done in engine.generate(requests)] == plain
    assert sum(record.accepted for record in engine.records) > 0


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_by_name(name: str) -> None:
    with pytest.raises(TargetError, match=REFUSED[name][2]) as refusal:
        _target(name)
    assert refusal.value.remedy


def test_every_kind_that_the_docs_name_is_tried_here() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs" / "targets.md").read_text(encoding="utf-8")
    parts = dict(zip(("works", "refused"), page.split("## What ")[1:3], strict=True))
    for part, column, known in (("works", 1, {**WORKS, **KINDS}), ("refused", 0, REFUSED)):
        rows = [line.strip("| ").split(" | ") for line in parts[part].splitlines() if line.startswith("| ")][1:]
        names = [name for row in rows for name in row[column].split(", ")]
        assert len(names) == len(set(names)) > 10
        assert {name: NAMED.get(name) in known for name in names} == dict.fromkeys(names, True)
        assert {name for name, model in NAMED.items() if model in known} == set(names)


def test_encoder_decoders_are_refused(tmp_path: Path) -> None:
    hf = T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2))
    hf.save_pretrained(tmp_path)
    chat_tokenizer(CHATML).save_pretrained(tmp_path)
    with pytest.raises(TargetError, match=r"cannot load its weights: Unrecognized configuration class .*T5Config"):
        load_target(TargetConfig(model=str(tmp_path), device="cpu"))


def _saved(folder: Path, name: str, **changes: object) -> TargetConfig:
    tokenizer = chat_tokenizer(CHATML)
    odd_hf(name, vocab_size=len(tokenizer), **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return TargetConfig(model=str(folder), dtype="float32", device="cpu")


@pytest.mark.parametrize("name", ["gemma4", "deepseek-v3", "cohere2-nope", "granite-multipliers"])
def test_the_ends_of_odd_targets(name: str, tmp_path: Path) -> None:
    config = _saved(tmp_path, name, **({"hidden_size_per_layer_input": 0} if name == "gemma4" else {}))
    whole, ends = load_target(config), load_ends(config)
    states = torch.randn(2, 3, whole.hidden_size)
    torch.testing.assert_close(ends.lm_head(states), whole.lm_head(states))
    torch.testing.assert_close(ends.final_norm(states), whole.final_norm(states))
    assert ends.n_layers == whole.n_layers == 4


def test_blocks_with_embeddings_of_their_own_cannot_be_elsewhere(tmp_path: Path) -> None:
    config = _saved(tmp_path, "gemma4", vocab_size_per_layer_input=len(chat_tokenizer(CHATML)))
    with pytest.raises(TargetError, match=r"embeddings of their own[\s\S]*placement=whole"):
        load_ends(config)


def test_a_window_that_the_architecture_does_not_know(caplog: pytest.LogCaptureFixture) -> None:
    """transformers keeps the key and computes full attention."""
    with_key, without = _target("olmo2", sliding_window=6), _target("olmo2")
    ids = torch.arange(3, 23)[None]
    torch.testing.assert_close(with_key(ids).final, without(ids).final)
    assert "sliding_window has no effect in Olmo2Config" in caplog.text


@pytest.mark.parametrize("name", ["phi3-longrope", "llama-dynamic"])
def test_length_dependent_rotary_bases_do_not_couple_rows(name: str) -> None:
    """A row at the end of the context is drafted for beside another: neither changes (case 32 of docs/cases.md)."""
    target = _target(name, max_position_embeddings=64)
    requests = [Request("long", [5, 9, 13] * 18, 20), Request("short", [4, 5], 40)]
    plain = [Engine(target, max_length=128).generate([request])[0] for request in requests]
    assert target.context == 64 and [done.reason for done in plain] == ["context", "length"]
    engine = Engine(target, OracleProposer({done.id: done.tokens for done in plain}), k=6, max_batch=2, max_length=128)
    assert [done.tokens for done in engine.generate(requests)] == [done.tokens for done in plain]


def test_what_layers_cache_is_measured() -> None:
    """Latents of latent attention, heads of two widths, nothing in layers that read another's."""
    latent = _target("deepseek-v3").new_cache(1, 10)
    assert [(k.shape[1:], v.shape[1:]) for k, v in zip(latent.k, latent.v, strict=True)] == [
        ((1, 10, 8), (1, 10, 4))
    ] * 4
    shared = _target("gemma4-shared-kv")
    cache = shared.new_cache(2, 10)
    assert [tuple(k.shape) for k in cache.k] == [(2, 2, 10, 8), (2, 2, 10, 16), (2, 0, 10, 0), (2, 0, 10, 0)]
    assert cache.bytes() == shared.cache_bytes(2, 10)
