"""NVFP4 once more, slowly: scalars, loops and fractions, sharing no line with what it judges."""

from __future__ import annotations

import struct
from fractions import Fraction

import torch

E2M1 = tuple(Fraction(value) for value in ("0", "1/2", "1", "3/2", "2", "3", "4", "6"))


def e4m3_value(code: int) -> Fraction:
    exponent, mantissa = code >> 3, code & 7
    if exponent == 0:
        return Fraction(mantissa, 2**9)
    return Fraction(8 + mantissa) * Fraction(2) ** (exponent - 10)


E4M3 = tuple(e4m3_value(code) for code in range(127))  # 127 itself is NaN


def nearest(size: Fraction, table: tuple[Fraction, ...]) -> int:
    """The code of the nearest value; on a tie the even code, beyond the last the last."""
    return min(range(len(table)), key=lambda code: (abs(table[code] - size), code % 2))


def e2m1_code(value: float) -> int:
    sign = 8 if str(value).startswith("-") else 0
    return sign + nearest(abs(Fraction(value)), E2M1)


def e2m1_value(code: int) -> Fraction:
    return -E2M1[code & 7] if code & 8 else E2M1[code & 7]


def fp32(value: float) -> float:
    """Rounded to fp32. After one operation in fp64 that equals the operation in fp32."""
    return float(struct.unpack("f", struct.pack("f", value))[0])


def quantized_by_amax(matrix: list[list[float]]) -> tuple[list[list[int]], list[list[int]], float]:
    """Codes (N, K), scale codes (N, K / 16) and the global scale, by the formula of the docs."""
    amax = max(abs(value) for row in matrix for value in row)
    scale = fp32(amax / 2688) if amax else 1.0
    codes, block_scales = [], []
    for row in matrix:
        codes.append([0] * len(row))
        block_scales.append([0] * (len(row) // 16))
        for block in range(len(row) // 16):
            span = range(block * 16, block * 16 + 16)
            ratio = fp32(max(abs(row[k]) for k in span) / fp32(6 * scale))
            number = nearest(Fraction(ratio), E4M3)
            block_scales[-1][block] = number
            divisor = fp32(float(E4M3[number]) * scale)
            for k in span:
                codes[-1][k] = e2m1_code(fp32(row[k] / divisor)) if number else 0
    return codes, block_scales, scale


def values(codes: torch.Tensor, scales: torch.Tensor, row_scale: torch.Tensor) -> torch.Tensor:
    """What packed codes (N, K / 2) mean, in fp64, element by element."""
    rows, pairs = codes.shape
    result = torch.empty(rows, pairs * 2, dtype=torch.float64)
    for n in range(rows):
        for k in range(pairs * 2):
            byte = int(codes[n, k // 2])
            code = byte >> 4 if k % 2 else byte & 15
            scale = e4m3_value(int(scales.view(torch.uint8)[n, k // 16]))
            product = e2m1_value(code) * scale * Fraction(float(row_scale[n]))
            result[n, k] = float(product)
    return result
