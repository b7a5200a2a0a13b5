"""PyTorch's flash kernels for the step-0 keys, merged by log-sum-exp with each slot's own later keys.

Forward: the kernel gives out_0 and L_0 = logsumexp_j s_j over the step-0 keys. With d_k = scale q.k_k for the
steps k >= 1,
    L = log(exp L_0 + sum_k exp d_k),   out = exp(L_0 - L) out_0 + sum_k exp(d_k - L) v_k.

Backward: with p_j = exp(s_j - L) and delta = dout . out,
    ds_j = p_j (dout . v_j - delta),   dv_j = p_j dout
for step-0 and own keys alike. The flash backward computes exactly this from the `out` and `logsumexp` handed
to it, so it gets the merged ones; the own keys, elementwise in t, are done here in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from drafttrain.ops.ttt_attention.layout import SegmentLayout

_aten = torch.ops.aten


class _Kernel(Protocol):
    """Causal attention within documents."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q [B, Hq, T, D], k and v [B, Hkv, T, D] -> out [B, Hq, T, D], log-sum-exp fp32 [B, Hq, T]."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v, given the gradient of out, out and its log-sum-exp."""
        ...


class _CpuKernel:
    """`aten::_scaled_dot_product_flash_attention_for_cpu`, document by document.

    Splitting beats an additive mask, which computes masked tiles and throws them away (B=4, T=512, two
    documents a row: 11 ms against 20 ms forward on two threads).
    """

    def __init__(self, layout: SegmentLayout | None, scale: float) -> None:
        self.runs = None if layout is None or layout.single else layout.runs
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        op = _aten._scaled_dot_product_flash_attention_for_cpu.default
        if self.runs is None:
            whole: tuple[Tensor, Tensor] = op(q, k, v, 0.0, True, scale=self.scale)
            return whole
        out = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for row, start, end in self.runs:
            at = (slice(row, row + 1), slice(None), slice(start, end))
            out[at], lse[at] = op(q[at], k[at], v[at], 0.0, True, scale=self.scale)
        return out, lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        op = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        if self.runs is None:
            whole: tuple[Tensor, Tensor, Tensor] = op(grad, q, k, v, out, lse, 0.0, True, scale=self.scale)
            return whole
        grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        for row, start, end in self.runs:
            at = (slice(row, row + 1), slice(None), slice(start, end))
            grad_q[at], grad_k[at], grad_v[at] = op(
                grad[at], q[at], k[at], v[at], out[at], lse[at], 0.0, True, scale=self.scale
            )
        return grad_q, grad_k, grad_v


class _CudaKernel:
    """`aten::_flash_attention_forward`: dense for one document a row, variable-length for packed rows.

    The kernel's layout is [B, T, H, D], or [total, H, D] with cumulative lengths; fp16 and bf16 only.
    """

    def __init__(self, layout: SegmentLayout | None, scale: float, device: torch.device) -> None:
        self.packed = layout is not None and not layout.single
        self.lengths = layout.cumulative_lengths(device) if layout is not None and self.packed else None
        self.longest = layout.longest if layout is not None and self.packed else 0
        self.scale = scale
        self.state: tuple[Tensor, Tensor] | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        n_rows, _, length, _ = q.shape
        longest = self.longest or length
        out, lse, seed, offset, _ = _aten._flash_attention_forward.default(
            self._enter(q), self._enter(k), self._enter(v),
            self.lengths, self.lengths, longest, longest, 0.0, True, False, scale=self.scale,
        )  # fmt: skip
        self.state = (seed, offset)
        if self.packed:  # [Hq, total] -> [B, Hq, T]
            lse = lse.reshape(-1, n_rows, length).transpose(0, 1)
        return self._leave(out, n_rows, length), lse

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert self.state is not None, "backward before forward"
        n_rows, _, length, _ = q.shape
        longest = self.longest or length
        if self.packed:
            lse = lse.transpose(0, 1).flatten(1)
        grads = _aten._flash_attention_backward.default(
            *(self._enter(x) for x in (grad, q, k, v, out)), lse.contiguous(),
            self.lengths, self.lengths, longest, longest, 0.0, True, *self.state, scale=self.scale,
        )  # fmt: skip
        grad_q, grad_k, grad_v = (self._leave(part, n_rows, length) for part in grads)
        return grad_q, grad_k, grad_v

    def _enter(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        return x.flatten(0, 1).contiguous() if self.packed else x.contiguous()

    def _leave(self, x: Tensor, n_rows: int, length: int) -> Tensor:
        return x.reshape(n_rows, length, *x.shape[-2:]).transpose(1, 2)


class _Merged(torch.autograd.Function):
    """Inputs: kernel, scale, q, then k_0 .. k_K, then v_0 .. v_K."""

    @staticmethod
    def forward(ctx: Any, kernel: _Kernel, scale: float, q: Tensor, *keys_values: Tensor) -> Tensor:
        steps = len(keys_values) // 2
        ks, vs = keys_values[:steps], keys_values[steps:]
        out, lse = kernel.forward(q, ks[0], vs[0])
        if steps > 1:
            out_0, lse_0 = out, lse
            wide = lse.dtype  # fp32, or fp64 for fp64 inputs
            q_BHGTD = _grouped(q, ks[0]).to(wide)
            own = torch.stack([scale * (q_BHGTD * _key(k, wide)).sum(-1) for k in ks[1:]], dim=-1)
            lse_BHGT = torch.logaddexp(_grouped(lse_0, ks[0]), own.logsumexp(-1))
            weights = (own - lse_BHGT[..., None]).exp_()
            merged = _grouped(out_0, ks[0]).to(wide) * (_grouped(lse_0, ks[0]) - lse_BHGT).exp_()[..., None]
            for step, v in enumerate(vs[1:]):
                merged.addcmul_(weights[..., step, None], _key(v, wide))
            out, lse = merged.flatten(1, 2), lse_BHGT.flatten(1, 2)
        out = _side_by_side(out, q.dtype)
        ctx.kernel, ctx.scale = kernel, scale
        ctx.save_for_backward(q, out, lse, *keys_values)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        q, out, lse, *keys_values = ctx.saved_tensors
        steps = len(keys_values) // 2
        ks, vs = keys_values[:steps], keys_values[steps:]
        grad = grads[0].to(q.dtype).contiguous()
        grad_q, grad_k, grad_v = ctx.kernel.backward(grad, q, ks[0], vs[0], out, lse)
        grad_ks, grad_vs = [grad_k], [grad_v]
        if steps > 1:
            wide = lse.dtype
            q_BHGTD, lse_BHGT = _grouped(q, ks[0]).to(wide), _grouped(lse, ks[0])
            grad_BHGTD = _grouped(grad, ks[0]).to(wide)
            delta = (grad_BHGTD * _grouped(out, ks[0])).sum(-1)
            total = _grouped(grad_q, ks[0]).to(wide)
            for k, v in zip(ks[1:], vs[1:], strict=True):
                key = _key(k, wide)
                p = (ctx.scale * (q_BHGTD * key).sum(-1) - lse_BHGT).exp_()
                ds = p * ((grad_BHGTD * _key(v, wide)).sum(-1) - delta) * ctx.scale
                total = total.addcmul(ds[..., None], key)
                grad_ks.append((ds[..., None] * q_BHGTD).sum(2).to(k.dtype))
                grad_vs.append((p[..., None] * grad_BHGTD).sum(2).to(v.dtype))
            grad_q = total.flatten(1, 2).to(q.dtype)
        return None, None, grad_q, *grad_ks, *grad_vs


def _side_by_side(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, T, D] in `dtype`, the heads of a slot beside each other in memory: the product that follows reads them so,
    and keeps no copy of its own."""
    if x.dtype == dtype and x.transpose(1, 2).is_contiguous():
        return x
    n_rows, heads, length, width = x.shape
    return x.new_empty(n_rows, length, heads, width, dtype=dtype).transpose(1, 2).copy_(x)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """[B, Hq, T, ...] -> [B, Hkv, G, T, ...]: query heads of one key head are neighbours."""
    n_rows, heads, length, *rest = x.shape
    return x.reshape(n_rows, k.shape[1], heads // k.shape[1], length, *rest)


def _key(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, Hkv, T, D] -> [B, Hkv, 1, T, D] in `dtype`."""
    return x.to(dtype).unsqueeze(2)


def product_dtype(q: Tensor) -> torch.dtype:
    """What attention is computed in: autocast's dtype where it is on, else q's own."""
    kind = q.device.type
    return torch.get_autocast_dtype(kind) if kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind) else q.dtype


def supported(q: Tensor) -> bool:
    """Whether the device has a flash kernel for the dtype that q will have, and its head width."""
    if q.device.type == "cpu":
        return True
    if q.device.type == "cuda":
        return product_dtype(q) in (torch.float16, torch.bfloat16) and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    return False


def flash(q: Tensor, ks: Sequence[Tensor], vs: Sequence[Tensor], layout: SegmentLayout | None, scale: float) -> Tensor:
    """q [B, Hq, T, D], ks and vs [B, Hkv, T, D] each -> [B, Hq, T, D] in q's dtype; memory linear in T.

    Raises:
        ValueError: the device has no flash kernel for these tensors.
    """
    if not supported(q):
        raise ValueError(f"no flash kernel on {q.device.type} for {q.dtype} with head width {q.shape[-1]}")
    kernel = _CpuKernel(layout, scale) if q.device.type == "cpu" else _CudaKernel(layout, scale, q.device)
    out: Tensor = _Merged.apply(kernel, scale, q, *ks, *vs)  # type: ignore[no-untyped-call]
    return out
