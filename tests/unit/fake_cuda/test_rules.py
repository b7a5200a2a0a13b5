"""What the GPU that is not there refuses: negative controls of the other tests of this folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from drafttrain.engine.graphs import Graph
from drafttrain.errors import EngineError
from drafttrain.ops.draft_topk.triton import select
from tests.pretend_cuda import OnCuda, pretended

CUDA = torch.device("cuda:0")


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    with pretended(devices=2):
        yield


@pytest.mark.parametrize(
    "mix",
    [
        lambda x: x + torch.ones(3),
        lambda x: x[None] @ torch.ones(3, 3),
        lambda x: torch.cat([x, torch.ones(1)]),
        lambda x: x.gather(0, torch.tensor([1])),
        lambda x: F.embedding(torch.tensor([1]), x[:, None]),
        lambda x: torch.ones(3)[x.long()],
        lambda x: torch.where(x > 0, x, torch.ones(3)),
        lambda x: x + x.to("cuda:1"),
    ],
)
def test_tensors_of_two_devices_do_not_meet(mix: Callable[[Tensor], Tensor]) -> None:
    with pytest.raises(RuntimeError, match=r"one device|over cuda|on a GPU"):
        mix(torch.ones(3, device="cuda"))


def test_what_a_gpu_takes_from_the_host() -> None:
    """Scalars of elementwise operations, and indices."""
    x = torch.arange(4.0, device="cuda")
    assert (x * torch.tensor(2.0)).tolist() == [0, 2, 4, 6]
    assert x[torch.tensor([1, 3])].tolist() == [1, 3] and x[torch.tensor([0, 1]), None].device == CUDA
    x[torch.tensor([0])] = 9
    assert x.tolist() == [9, 1, 2, 3] and float(x.sum()) == 15


@pytest.mark.parametrize(
    "work",
    [
        lambda x: x[0].item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x[torch.tensor([1])],
        lambda x: x.cpu(),
        lambda x: torch.tensor([1.0], device="cuda") + x,
        lambda x: torch.ones(3).to("cuda") + x,
        lambda x: torch.cuda.synchronize(),
    ],
)
def test_what_cannot_be_recorded(work: Callable[[Tensor], object]) -> None:
    x = torch.ones(3, device="cuda")
    with pytest.raises(EngineError, match="cannot be recorded"):
        Graph(lambda: work(x), CUDA)()


def test_a_graph_does_again_what_was_recorded_and_no_more() -> None:
    x, calls = torch.ones(4, device="cuda"), []

    def work() -> Tensor:
        calls.append(x)
        kept.add_(x)
        return (x * 2).view(2, 2)

    kept = torch.zeros(4, device="cuda")
    graph = Graph(work, CUDA)
    assert graph().tolist() == [[2, 2], [2, 2]]
    before = len(calls)
    x.fill_(3.0)
    assert graph().tolist() == [[6, 6], [6, 6]] and len(calls) == before


def test_a_kernel_runs_on_the_current_device_alone() -> None:
    score = torch.tensor([[1.0, 3.0, 2.0]])
    assert select(score.to("cuda"), 2).tolist() == [[1, 2]]
    with pytest.raises(RuntimeError, match="launched while cuda:0 is current"):
        select(score.to("cuda:1"), 2)


def test_modules_and_gradients() -> None:
    layer = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3))
    layer[1].weight = nn.Parameter(layer[0].weight.detach().t().clone())
    layer.to("cuda")
    loss = layer(torch.ones(2, 3, device="cuda")).square().sum()
    loss.backward()
    assert all(isinstance(p.grad, OnCuda) and p.grad.device == CUDA for p in layer.parameters())
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert layer(torch.ones(2, 3, device="cuda")).dtype == torch.bfloat16
