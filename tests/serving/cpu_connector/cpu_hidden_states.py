"""vLLM's own `ExampleHiddenStatesConnector`, made to run on its CPU build; loaded in the server as
`kv_connector_module_path`.

It copies through `torch.cuda.Stream`, `torch.cuda.Event` and pinned memory, which a torch without CUDA does not have.
On a CPU every operation is done when it returns, so that stand-ins that do nothing are right. They replace the name
`torch` in that one module of vLLM, nowhere else.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1 import example_hidden_states_connector as module
from vllm.distributed.kv_transfer.kv_connector.v1.example_hidden_states_connector import ExampleHiddenStatesConnector

__all__ = ["ExampleHiddenStatesConnector"]


class Event:
    """Of work that is done."""

    def record(self, stream: object = None) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing is under way."""


class Stream:
    """The only one there is."""

    def wait_event(self, event: Event) -> None:
        """Nothing is under way."""


class Cuda:
    """What the connector uses of `torch.cuda`."""

    Event, Stream, stream = Event, Stream, nullcontext


class Torch:
    """`torch`, but for CUDA and pinned memory."""

    cuda = Cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty_like(self, like: torch.Tensor, *, device: str, pin_memory: bool) -> torch.Tensor:
        return torch.empty_like(like, device=device)


module.torch = Torch()
