"""fp8 rows: e4m3 values with a scale a token and tap.

The scale is a power of two, kept as its exponent in one byte. A floating-point format loses nothing by that (the
spacing of its values is relative), and decoding to bfloat16 is exact: four significant bits times a power of two.
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 448.0  # of e4m3fn
# A sign-extended e4m3 byte, shifted by 4, has its fields where bfloat16 has them: S at 15, EEEE at 10..7, MMM at 6..4.
_FIELDS = 0x87F0 - 0x10000
_BIAS = 2.0 ** (127 - 7)


def encode_fp8(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Round rows to fp8.

    Args:
        rows: finite [L, H], any float dtype.

    Returns:
        uint8 [L, H], the bytes of float8_e4m3fn, and int8 [L], exponents: row = value * 2 ** exponent, where the
        largest value of a row lies between 224 and 448.
    """
    values = rows.float()
    largest = values.abs().amax(dim=-1)
    exponents = torch.frexp(largest / _LARGEST).exponent.clamp(-100, 120)
    scale = torch.ldexp(torch.ones_like(largest), -exponents)
    return (values * scale[:, None]).to(torch.float8_e4m3fn).view(torch.uint8), exponents.to(torch.int8)


def decode_fp8(codes: Tensor, exponents: Tensor) -> Tensor:
    """bfloat16 [L, H] of what `encode_fp8` gave, on the device of `codes`.

    Moves bits in place of converting: an order of magnitude quicker than `Tensor.to` on a CPU.
    """
    bits = codes.view(torch.int8).to(torch.int16)
    values = bits.bitwise_left_shift_(4).bitwise_and_(_FIELDS).view(torch.bfloat16)
    scale = torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.int()).bfloat16()
    # Two factors: their product may be beyond bfloat16.
    return values.mul_(_BIAS).mul_(scale[:, None])
