"""A kernel launch as data, and what makes it callable."""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from gristmill.errors import DriverError
from gristmill.jit import Compilable, Kernel, Launch, Program, TritonProgram, kernel
from gristmill.jit.cutedsl import CuteProgram
from gristmill.ops.memory import give_back, is_lack

T = TypeVar("T")


@dataclass(frozen=True)
class KernelCall:
    """One launch of a kernel but for its stream and the values of its parameter struct."""

    program: Program
    name: str
    grid: int
    block: int
    shared: int
    params: struct.Struct
    cluster: int = 1
    cooperative: bool = False
    dependent: bool = False


def load(program: Compilable, name: str, device_index: int) -> Kernel:
    """The kernel on a device, compiled at first use.

    The driver needs memory to load one, and torch's allocator may have taken all there is.
    """
    try:
        return kernel(program, name, device_index)
    except DriverError as error:
        if not is_lack(error) or not give_back():
            raise
    return kernel(program, name, device_index)


def prepare(call: KernelCall, device_index: int) -> Launch:
    """`launch(stream, *values)` for this call on a device."""
    return load(call.program, call.name, device_index).prepare(
        grid=call.grid,
        block=call.block,
        shared=call.shared,
        cluster=call.cluster,
        cooperative=call.cooperative,
        dependent=call.dependent,
        params=call.params,
    )


def prepare_separate(
    program: TritonProgram | CuteProgram, device_index: int, *, grid: int, dependent: bool
) -> Launch:
    """`launch(stream, *values)` of a kernel that takes its parameters one by one.

    One of Triton's takes two more, `scratch` and 0: see `scratch_bytes`, and where a profiler's
    memory would be.
    """
    found = load(program, program.function, device_index)
    return found.prepare_separate(grid=grid, params=program.parameters(), dependent=dependent)


def scratch_bytes(program: TritonProgram, device_index: int) -> int:
    """Global memory that each block of a Triton kernel wants for itself; 0 if none."""
    return load(program, program.function, device_index).facts["scratch_bytes"]


def resident_programs(program: TritonProgram, device_index: int) -> int:
    """How many blocks of a Triton kernel one SM runs at once."""
    facts = load(program, program.function, device_index).facts
    return resident_blocks(program, device_index, facts["threads"], facts["shared"])


def current_stream(device_index: int) -> int:
    """The handle of torch's current stream on a device."""
    handle: int = torch._C._cuda_getCurrentRawStream(device_index)
    return handle


def resident_blocks(program: Compilable, device_index: int, threads: int, shared: int) -> int:
    """How many blocks of the program's first kernel one SM runs at once."""
    first = load(program, program.names[0], device_index)
    return _some(first.occupancy(threads, shared), first, f"{threads} threads, {shared} bytes")


def resident_clusters(
    program: Program, device_index: int, threads: int, shared: int, cluster: int
) -> int:
    """How many clusters of the program's first kernel the device runs at once."""
    first = load(program, program.names[0], device_index)
    count = first.max_active_clusters(threads, shared, cluster)
    return _some(count, first, f"clusters of {cluster} blocks of {threads} threads, {shared} bytes")


def _some(count: int, kernel: Kernel, what: str) -> int:
    """`count`, if the device can run any at all: found out before a plan is made, not after."""
    if count < 1:
        raise DriverError(f"{kernel.name}: this device has no room for {what} of shared memory")
    return count


def dense(output: torch.Tensor) -> torch.Tensor:
    """`output` if it is contiguous, else a contiguous tensor of its shape and dtype."""
    if output.is_contiguous():
        return output
    return torch.empty(output.shape, dtype=output.dtype, device=output.device)


def empty(count: int, dtype: torch.dtype, device_index: int) -> torch.Tensor:
    """A workspace from torch's allocator: stream-ordered, capturable."""
    return torch.empty(count, dtype=dtype, device=torch.device("cuda", device_index))


def zeros(count: int, device: torch.device) -> torch.Tensor:
    """A workspace of zeroed 32-bit words, from torch's allocator: stream-ordered, capturable."""
    return torch.zeros(count, dtype=torch.int32, device=device)


def on_device(device_index: int, run: Callable[..., T]) -> Callable[..., T]:
    """`run` with that device current: a kernel is launched into the current context."""
    if torch.cuda.device_count() < 2:
        return run

    def guarded(*args: Any) -> T:
        if torch._C._cuda_getDevice() == device_index:
            return run(*args)
        with torch.cuda.device(device_index):
            return run(*args)

    return guarded
