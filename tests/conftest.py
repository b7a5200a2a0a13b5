"""Settings of every test: no network, one thread, GPU tests only where there is a GPU."""

from __future__ import annotations

import os

# Before torch and transformers are imported: tiny models are fastest on one thread, and no test may reach for a hub.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton reads it when it is first imported, which torch, peft and DeepSpeed do, too. A GPU runs kernels itself, unless
# it is hidden.
if not os.path.exists("/dev/nvidiactl") or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
from hypothesis import settings

# A busy machine is slow, not wrong: no test asserts absolute times.
settings.register_profile("no-deadline", deadline=None)
settings.load_profile("no-deadline")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run."""
    gpu_tests = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_tests:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_tests:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
