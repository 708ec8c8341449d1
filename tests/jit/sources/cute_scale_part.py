"""A file that another one imports from."""

from __future__ import annotations

from cutlass import Float32, cute


@cute.jit
def scaled(value: Float32, factor: Float32):
    return value * factor
