"""A GPU that is not there: tensors that claim to lie on "cuda:0" and are computed on the CPU, with a GPU's rules.

Real code runs with real numbers, and what a GPU would refuse is refused here: operations over several devices, reading
a value or copying from the host while a graph is recorded, launching a kernel on another device than the current one.
Graphs are recorded operation by operation and replayed, kernels are interpreted by Triton. What is not seen: the speed,
memory and rounding of a GPU, races between streams, and what its kernels refuse (alignment, head widths, dtypes).
"""

from __future__ import annotations

import contextlib
import ctypes
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# May read from one device and write to another.
_CROSSING = {"_to_copy", "copy_", "copy"}
# Take indices from the host, at the price of a copy.
_INDEXED = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# Wait for the device: they read values, or have shapes that depend on them.
_WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "unique_dim", "equal", "bincount"}
# Reduce or compare what lies in lists of tensors; 0-dim steps of optimisers may lie on the host.
_PINNED = {"_pin_memory", "is_pinned"}


# To torch itself the tensors are "lazy" ones that have the keys of CUDA: without CUDA it cannot run the backward pass
# of tensors on an accelerator, nor say which of its GPUs is the current one.
_GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>);
C10_REGISTER_GUARD_IMPL(Lazy, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::Lazy>);
"""
_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CUDA)


@cache
def _guard_devices() -> None:
    if torch.backends.cuda.is_built():
        pytest.skip("a torch with CUDA knows GPUs of its own, for which there is tests/gpu")
    compiler = next((path for path in map(shutil.which, ("g++", "clang++")) if path), None)
    if compiler is None:
        pytest.skip("NOTHING WAS CHECKED: a C++ compiler is needed (apt-get install g++)")
    include, libraries = (Path(torch.__file__).parent / name for name in ("include", "lib"))
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "guard.cpp", Path(folder) / "guard.so"
        source.write_text(_GUARD)
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        options = ["-std=c++20", "-O0", "-w", "-shared", "-fPIC", abi, f"-I{include}", f"-L{libraries}", "-lc10"]
        subprocess.run([compiler, str(source), *options, "-o", str(library)], check=True)
        ctypes.CDLL(str(library))


class OnCuda(Tensor):
    """A tensor on a GPU that is not there. `inner` holds its values."""

    inner: Tensor
    _device: torch.device

    @staticmethod
    def __new__(cls, inner: Tensor, device: torch.device) -> OnCuda:
        # Not one of inference mode: what a view is of was made outside of it.
        with torch.inference_mode(False):
            made: OnCuda = torch.Tensor._make_wrapper_subclass(
                cls,
                inner.size(),
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                layout=inner.layout,
                device=torch.device("lazy", device.index),
                _extra_dispatch_keys=_KEYS,
            )
        made.inner, made._device = inner, device
        return made

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def is_cuda(self) -> bool:
        return True

    def get_device(self) -> int:
        return self._device.index

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def record_stream(self, stream: Any) -> None:
        assert isinstance(stream, Stream)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], self.device

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], device: torch.device, size: Any, stride: Any) -> OnCuda:
        return OnCuda(inner["inner"], device)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"OnCuda({self.inner!r}, device={str(self.device)!r})"


class _Here(threading.local):
    """Of a thread: the current device, the stack of streams, and what is being recorded."""

    device = 0
    stream: Any = None
    recording: list[Callable[[], None]] | None = None


_here = _Here()
_launched: list[str] = []


def _device_of(value: Any) -> torch.device:
    """With its index, as tensors have it."""
    device = torch.device("cuda", value) if isinstance(value, int) else torch.device(value or "cuda")
    if device.type == "lazy":
        return torch.device("cuda", device.index)
    return torch.device("cuda", _here.device) if device.type == "cuda" and device.index is None else device


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    kwargs = dict(kwargs)
    ours: list[OnCuda] = []
    hosts: list[Tensor] = []
    for value in (args, *kwargs.values()):
        _sort(value, ours, hosts)
    asked = kwargs.get("device")
    kwargs.pop("pin_memory", None)
    goes = _device_of(asked) if asked is not None else None
    if not ours and (goes is None or goes.type != "cuda"):
        return func(*args, **kwargs)
    if asked is not None:
        kwargs["device"] = torch.device("cpu")
    _check(name, func, args, ours, hosts, goes)
    if name in _PINNED:
        return False if name == "is_pinned" else args[0]
    if name == "_fused_sdp_choice":
        return 0
    device = goes or ours[0].device
    by_inner = {id(x.inner): x for x in ours}
    target = _FLASH.get(name, func)
    if name in _FLASH:
        _launched.append(name)

    def compute() -> Any:
        return target(*_each(_inner, args), **{key: _each(_inner, value) for key, value in kwargs.items()})

    out = compute()

    def wrap(x: Any) -> Any:
        if not isinstance(x, Tensor) or device.type != "cuda":
            return x
        if id(x) in by_inner:
            return by_inner[id(x)]
        return x if any(x is host for host in hosts) else OnCuda(x, device)

    wrapped = _each(wrap, out)
    if _here.recording is not None:
        _record(compute, ours, wrapped)
    return wrapped


def _sort(value: Any, ours: list[OnCuda], hosts: list[Tensor]) -> None:
    """The tensors among arguments, by where they lie."""
    if isinstance(value, OnCuda):
        ours.append(value)
    elif isinstance(value, Tensor):
        hosts.append(value)
    elif isinstance(value, list | tuple):
        for item in value:
            _sort(item, ours, hosts)


def _each(change: Callable[[Any], Any], value: Any) -> Any:
    """Change what arguments or results are made of."""
    if isinstance(value, list | tuple):
        return type(value)(_each(change, item) for item in value)
    return change(value)


def _flat(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnCuda) else value


def _check(name: str, func: Any, args: Any, ours: list[OnCuda], hosts: list[Tensor], goes: torch.device | None) -> None:
    recording = _here.recording is not None
    if recording and name in _WAITS:
        raise RuntimeError(f"{name} waits for the device while a graph is recorded")
    if name in _INDEXED:
        bools = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
        if recording and (bools or hosts):
            raise RuntimeError(f"{name} by bools, or by what lies on the host, while a graph is recorded")
        if not isinstance(args[0], OnCuda):
            raise RuntimeError(f"{name}: indices on a GPU into a tensor on the CPU")
        hosts = [x for x in hosts if not any(x is i for i in args[1])]
    if name in _CROSSING:
        crosses = (bool(ours) and goes is not None and goes.type == "cpu") or bool(hosts)
        if recording and crosses and any(x.dim() or name == "_to_copy" for x in (*ours, *hosts)):
            raise RuntimeError(f"{name} between host and device while a graph is recorded")
        return
    devices = {x.device for x in ours} | ({goes} if goes is not None and ours else set())
    if len(devices) > 1:
        raise RuntimeError(f"{name} over {', '.join(sorted(map(str, devices)))}")
    if name.startswith(("_foreach", "_fused_adam")):
        # State steps of optimisers may lie on the host, except where they are fused.
        hosts = [x for x in hosts if x.dim() or name.startswith("_fused")]
    elif torch.Tag.pointwise in func.tags or name in ("where", "fill_", "fill", "masked_fill", "masked_fill_"):
        hosts = [x for x in hosts if x.dim()]
    if hosts:
        shapes = ", ".join(f"{tuple(x.shape)} on {x.device}" for x in (*ours, *hosts))
        raise RuntimeError(f"{name}: expected all tensors on one device: {shapes}")


def _record(compute: Callable[[], Any], ours: list[OnCuda], wrapped: Any) -> None:
    """Let a replay write anew what this operation made. Views and what was written in place follow by themselves."""
    before = {x.inner.untyped_storage()._cdata for x in ours}
    outs = [_inner(x) if isinstance(x, OnCuda) else None for x in _flat(wrapped)]

    def again() -> None:
        for old, new in zip(outs, _flat(compute()), strict=True):
            if old is not None and old.untyped_storage()._cdata not in before:
                old.copy_(new)

    assert _here.recording is not None
    _here.recording.append(again)


class PretendCuda(TorchDispatchMode):
    """Makes tensors on the GPU where they are asked for by device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_composite(func):
            with self:
                return func.decompose(*args, **(kwargs or {}))
        return _run(func, args, kwargs or {})


# torch's own autocast asks a tensor for a device that these do not have.
_PRODUCTS = {
    F.linear, F.scaled_dot_product_attention, torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.einsum,
    Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, Tensor.mm, Tensor.bmm,
}  # fmt: skip


class _Autocast(TorchFunctionMode):
    """Products on the GPU in autocast's dtype, where it is on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _PRODUCTS and torch.is_autocast_enabled("cuda"):
            dtype = torch.get_autocast_dtype("cuda")

            def cast(x: Any) -> Any:
                return x.to(dtype) if isinstance(x, OnCuda) and x.is_floating_point() else x

            args, kwargs = _each(cast, args), {key: _each(cast, value) for key, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


@cache
def _is_composite(func: Any) -> bool:
    """Whether it is made of others. Autograd takes it apart; in inference mode that is left to whoever gets it."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"))


# Flash attention, as its CUDA kernels are called: [B, T, H, D], or [total, H, D] with cumulative lengths.


def _runs(q: Tensor, lengths: Tensor | None) -> Iterator[tuple[Any, ...]]:
    if lengths is None:
        yield from ((row,) for row in range(len(q)))
    else:
        ends = lengths.tolist()
        assert lengths.dtype == torch.int32 and ends[0] == 0 and ends[-1] == len(q)
        yield from ((slice(a, b),) for a, b in pairwise(ends))


def _flash(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor | None, cu_k: Tensor | None, max_q: int, max_k: int,
    dropout: float, causal: bool, debug: bool, *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    assert q.dtype in (torch.float16, torch.bfloat16) and q.dtype == k.dtype == v.dtype and causal and not dropout
    assert all(x.stride(-1) == 1 and x.shape[-1] % 8 == 0 for x in (q, k, v))
    out = torch.empty_like(q)
    heads = q.shape[-2]
    lse = torch.empty((heads, len(q)) if cu_q is not None else (len(q), heads, q.shape[1]))
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    for at in _runs(q, cu_q):
        assert out[at].shape[0] <= max_q
        own = op(*(x[at].transpose(0, 1)[None] for x in (q, k, v)), 0.0, True, scale=scale)
        out[at] = own[0][0].transpose(0, 1)
        lse[(slice(None), *at) if cu_q is not None else at] = own[1][0]
    return out, lse, torch.zeros(2, dtype=torch.uint64), torch.zeros((), dtype=torch.uint64), torch.zeros(0)


def _flash_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_q: Tensor | None, cu_k: Tensor | None,
    max_q: int, max_k: int, dropout: float, causal: bool, seed: Tensor, offset: Tensor, *, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    assert {x.dtype for x in (grad, q, k, v, out)} == {q.dtype} and lse.dtype == torch.float32 and lse.is_contiguous()
    grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    for at in _runs(q, cu_q):
        own = lse[(slice(None), *at) if cu_q is not None else at]
        parts = op(*(x[at].transpose(0, 1)[None] for x in (grad, q, k, v, out)), own[None], 0.0, True, scale=scale)
        for whole, part in zip(grads, parts, strict=True):
            whole[at] = part[0].transpose(0, 1)
    return grads


_FLASH: dict[str, Any] = {"_flash_attention_forward": _flash, "_flash_attention_backward": _flash_backward}


# torch.cuda, as far as the package and its tests ask for it.


class Stream:
    """Work is done when it is asked for, so streams only have to be there."""

    def __init__(self, device: Any = None, **_: Any) -> None:
        self.device = _device_of(device)

    def wait_stream(self, other: Stream) -> None:
        assert isinstance(other, Stream)

    def wait_event(self, event: Event) -> None:
        assert event.recorded

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        _wait()


class Event:
    """A mark of a stream, with the host's clock."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._timed, self.recorded, self._at = enable_timing, False, 0.0

    def record(self, stream: Stream | None = None) -> None:
        self.recorded, self._at = True, time.perf_counter()

    def elapsed_time(self, other: Event) -> float:
        assert self._timed and other._timed and self.recorded and other.recorded
        return (other._at - self._at) * 1000

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        _wait()


class CUDAGraph:
    """Operations, to be done again."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self.operations: list[Callable[[], None]] | None = None

    def replay(self) -> None:
        assert self.operations is not None, "nothing was recorded"
        for operation in self.operations:
            operation()


@contextlib.contextmanager
def _graph(graph: CUDAGraph, pool: Any = None, stream: Stream | None = None, **_: Any) -> Iterator[None]:
    assert _here.recording is None
    if stream is not None and stream.device.index != _here.device:
        raise RuntimeError("a graph is recorded on another device than the current one")
    _here.recording = graph.operations = []
    try:
        yield
    finally:
        _here.recording = None


def _wait(device: Any = None) -> None:
    if _here.recording is not None:
        raise RuntimeError("a synchronisation while a graph is recorded")


@contextlib.contextmanager
def _on(device: Any) -> Iterator[None]:
    before = _here.device
    if device is not None and device != -1:
        _here.device = _device_of(device).index or 0
    try:
        yield
    finally:
        _here.device = before


@contextlib.contextmanager
def _in_stream(stream: Stream | None) -> Iterator[None]:
    before = _here.stream
    with _on(stream.device if stream is not None else None):
        _here.stream = stream
        try:
            yield
        finally:
            _here.stream = before


def _current_stream(device: Any = None) -> Stream:
    return _here.stream or Stream(device)


def _set_device(device: Any) -> None:
    _here.device = _device_of(device).index or 0


class _Properties:
    name, major, minor, multi_processor_count, total_memory = "Pretended", 9, 0, 4, 2**34


def _in_mode(run: Callable[[threading.Thread], None]) -> Callable[[threading.Thread], None]:
    """Modes are a thread's own: those that are started here have GPUs, too."""

    def begin(thread: threading.Thread) -> None:
        with PretendCuda():
            run(thread)

    return begin


def _launcher(run: Callable[..., Any]) -> Callable[..., Any]:
    """Triton's interpreter, given tensors of the GPU."""

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
        if not any(isinstance(x, OnCuda) for x in tensors):
            return run(kernel, *args, **kwargs)
        where = {x.device for x in tensors}
        if where != {torch.device("cuda", _here.device)}:
            raise RuntimeError(f"a kernel on {where}, launched while cuda:{_here.device} is current")

        _launched.append(kernel.fn.__name__)

        def compute() -> Any:
            plain = [x.inner if isinstance(x, OnCuda) else x for x in args]
            with torch.utils._python_dispatch._disable_current_modes():
                return run(kernel, *plain, **kwargs)

        if _here.recording is not None:
            _here.recording.append(compute)
        return compute()

    return launch


@contextlib.contextmanager
def pretended(devices: int = 1, triton: bool = True) -> Iterator[list[str]]:
    """While active, this process has GPUs.

    Args:
        devices: how many.
        triton: whether Triton is there to be asked for kernels.

    Yields:
        names of the kernels of ours, and of torch's flash attention, that were launched.
    """
    from triton.runtime.interpreter import InterpretedFunction

    from drafttrain.ops import backend

    _guard_devices()
    patch = pytest.MonkeyPatch()
    fake: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_bf16_supported": lambda *_, **__: True,
        "device_count": lambda: devices,
        "current_device": lambda: _here.device,
        "set_device": _set_device,
        "device": _on,
        "device_of": lambda x: _on(x.device if x.is_cuda else None),
        "get_device_name": lambda *_: _Properties.name,
        "get_device_properties": lambda *_: _Properties,
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: (2**34, 2**34),
        "memory_reserved": lambda *_: 0,
        "memory_allocated": lambda *_: 0,
        "max_memory_allocated": lambda *_: 0,
        "reset_peak_memory_stats": lambda *_: None,
        "empty_cache": lambda: None,
        "synchronize": _wait,
        "Stream": Stream,
        "Event": Event,
        "CUDAGraph": CUDAGraph,
        "graph": _graph,
        "graph_pool_handle": lambda: object(),
        "current_stream": _current_stream,
        "default_stream": Stream,
        "stream": _in_stream,
        "_sleep": lambda cycles: None,
        "set_sync_debug_mode": lambda mode: None,
    }
    for name, value in fake.items():
        patch.setattr(torch.cuda, name, value)
    patch.setattr(InterpretedFunction, "run", _launcher(InterpretedFunction.run))
    patch.setattr(threading.Thread, "run", _in_mode(threading.Thread.run))
    if not triton:
        patch.setattr(backend, "find_spec", lambda name: None)
    backend.have_triton.cache_clear()
    lifts = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    _here.device, _here.stream, _here.recording = 0, None, None
    _launched.clear()
    try:
        with PretendCuda(), _Autocast():
            yield _launched
    finally:
        torch._C._set_only_lift_cpu_tensors(lifts)
        patch.undo()
        backend.have_triton.cache_clear()
