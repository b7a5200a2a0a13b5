"""Kernels run on the GPU where there is one, and are interpreted on the CPU where there is none."""

from __future__ import annotations

import pytest
import torch

from drafttrain.ops.backend import have_triton


@pytest.fixture(autouse=True)
def _triton() -> None:
    if not have_triton():
        pytest.skip("NO KERNEL WAS CHECKED: Triton is not installed (pip install 'drafttrain[kernels]')")


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where the kernels run."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
