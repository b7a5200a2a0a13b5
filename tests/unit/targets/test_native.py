"""What `auto` stands for on machines of several kinds."""

from __future__ import annotations

import pytest
import torch

from drafttrain.targets.config import TargetConfig
from drafttrain.targets.native import native_dtype, settled

XEON_OF_2017 = {"avx512_f": True, "avx512_bf16": False, "amx_bf16": False}


@pytest.mark.parametrize(
    ("has", "dtype"),
    [
        (XEON_OF_2017, "float32"),
        ({**XEON_OF_2017, "avx512_bf16": True}, "bfloat16"),
        ({**XEON_OF_2017, "amx_bf16": True}, "bfloat16"),
        ({"neon": True, "bf16": False}, "float32"),
        ({"neon": True, "bf16": True}, "bfloat16"),
        ({"architecture": "riscv64"}, "float32"),
    ],
)
def test_a_cpu(monkeypatch: pytest.MonkeyPatch, has: dict[str, object], dtype: str) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: has)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert native_dtype("cpu") == native_dtype("auto") == dtype
    assert settled(TargetConfig(model="m")).dtype == dtype
    assert settled(TargetConfig(model="m", dtype="float16")).dtype == "float16"


@pytest.mark.parametrize("has", [True, False])
def test_a_gpu_is_asked_whether_it_computes_in_it(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    asked = []
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {**XEON_OF_2017, "avx512_bf16": not has})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "is_bf16_supported", lambda including_emulation: asked.append(including_emulation) or has
    )
    assert native_dtype("auto") == native_dtype("cuda:1") == ("bfloat16" if has else "float32")
    assert native_dtype("cpu") == ("float32" if has else "bfloat16")
    assert asked == [False, False]
