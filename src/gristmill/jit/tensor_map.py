"""Tensor maps: what the copy engine of sm_90 and up is told about a matrix in global memory."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from gristmill.jit.driver import INVALID_CONTEXT, adopt_device, bindings, driver_error

BYTES = 128
_ALIGNMENT = 64
_KEPT = 64  # maps that a maker remembers

# Of the driver's enumerations.
TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
_SWIZZLE_128 = 3
_PROMOTE_TO_256 = 3


@functools.cache
def _encode() -> Callable[..., int]:
    """The driver's cuTensorMapEncodeTiled through ctypes, for the reason of `launch_function`."""
    bindings()
    function = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    function.restype = ctypes.c_int
    return function


def maps_of_rows(
    device_index: int,
    dtype: str,
    itemsize: int,
    columns: int,
    rows: int,
    stride: int,
    box: tuple[int, int],
) -> Callable[[int], bytes]:
    """`map_at(address)`: the map of a matrix of contiguous rows, `stride` elements apart.

    A copy takes a box of (rows, columns) whose rows are 128 bytes, stores those in the order that
    the tensor cores read (128-byte swizzle), and puts zeros for what lies outside the matrix. The
    address and the stride must be multiples of 16 bytes. The last maps are remembered: a model
    calls a layer with the same few buffers again and again. For any thread; one without a context
    gets that of the device, as with a launch.
    """
    dims = (ctypes.c_uint64 * 2)(columns, rows)
    strides = (ctypes.c_uint64 * 1)(stride * itemsize)
    boxes = (ctypes.c_uint32 * 2)(box[1], box[0])
    steps = (ctypes.c_uint32 * 2)(1, 1)
    kept: dict[int, bytes] = {}

    def map_at(address: int) -> bytes:
        found = kept.get(address)
        if found is None:
            found = make(address)
            if len(kept) >= _KEPT:
                kept.clear()
            kept[address] = found
        return found

    def make(address: int) -> bytes:
        memory = ctypes.create_string_buffer(BYTES + _ALIGNMENT)
        start = ctypes.addressof(memory)
        offset = -start % _ALIGNMENT
        code = encode(address, start + offset)
        if code == INVALID_CONTEXT and adopt_device(device_index):
            code = encode(address, start + offset)
        if code:
            raise driver_error(
                code,
                f"making a tensor map of {rows} rows of {columns} {dtype} at {address:#x}, "
                f"{stride} apart, in boxes of {box}",
            )
        return memory.raw[offset : offset + BYTES]

    def encode(address: int, destination: int) -> int:
        return _encode()(
            ctypes.c_void_p(destination),
            ctypes.c_int(TYPES[dtype]),
            ctypes.c_uint32(2),
            ctypes.c_void_p(address),
            dims,
            strides,
            boxes,
            steps,
            ctypes.c_int(0),  # not interleaved
            ctypes.c_int(_SWIZZLE_128),
            ctypes.c_int(_PROMOTE_TO_256),
            ctypes.c_int(0),  # zeros outside
        )

    return map_at
