"""The CUDA driver: its bindings, its errors, and the context of each device.

Loaded at the first use of a kernel, never at import. Everything goes through cuda-bindings but the
launch itself (see `launch_function`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

from gristmill.errors import DriverError
from gristmill.jit.once import Once
from gristmill.jit.optional import required
from gristmill.jit.program import arch_of

INVALID_CONTEXT = 201  # the thread that calls has none, or that of another device
_NOT_INITIALIZED = 3

_contexts: Once[int, Any] = Once()
_initialised_in = 0  # the process that did; a fork of it cannot use the driver


@functools.cache
def bindings() -> Any:
    """The module `cuda.bindings.driver`, with the driver initialised. Errors are not remembered."""
    driver = required(
        "cuda.bindings.driver", "cuda-bindings", 'install it with: pip install "gristmill[nvrtc]"'
    )
    global _initialised_in
    try:
        (status,) = driver.cuInit(0)
    except Exception as error:  # the bindings have no common error for a library that is not there
        reason = " ".join(str(error).split())
        raise DriverError(f"the CUDA driver cannot be loaded: {reason}") from error
    if status != driver.CUresult.CUDA_SUCCESS:
        raise DriverError(
            f"the CUDA driver cannot be initialised: {status.name}",
            code=int(status),
            name=status.name,
        )
    _initialised_in = os.getpid()
    return driver


def checked(result: tuple[Any, ...], what: str) -> Any:
    """The value of a driver call that returned `result`, or a DriverError saying `what` failed."""
    status, *values = result
    if int(status) != 0:
        raise driver_error(int(status), what)
    return values[0] if len(values) == 1 else tuple(values)


def driver_error(code: int, what: str) -> DriverError:
    """The error for a driver's result code."""
    driver = bindings()
    try:
        name = driver.CUresult(code).name
        text = driver.cuGetErrorString(driver.CUresult(code))[1].decode()
    except ValueError:  # a driver newer than the bindings
        name, text = f"CUDA error {code}", "unknown to the installed cuda-bindings"
    if code == _NOT_INITIALIZED and os.getpid() != _initialised_in:
        text = "this process was forked after CUDA was initialised; start it with spawn"
    return DriverError(f"{what}: {name} ({text})", code=code, name=name)


@contextlib.contextmanager
def current_device(index: int) -> Iterator[None]:
    """Make a device's primary context, the one torch uses, current for a block of driver calls."""
    driver = bindings()
    checked(driver.cuCtxPushCurrent(_context(index)), f"entering the context of device {index}")
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


def adopt_device(index: int) -> bool:
    """Give this thread the device's context if it has none; False if it has one already.

    A thread has no context until it first uses the CUDA runtime, and the driver alone, unlike the
    runtime, does not give it one.
    """
    driver = bindings()
    if int(checked(driver.cuCtxGetCurrent(), "asking for the current context")) != 0:
        return False
    checked(driver.cuCtxSetCurrent(_context(index)), f"entering the context of device {index}")
    return True


@functools.cache
def architecture(index: int) -> str:
    """The target that kernels for this device are compiled for, such as "sm_90a"."""
    driver = bindings()
    device = checked(driver.cuDeviceGet(index), f"looking for CUDA device {index}")
    attribute = driver.CUdevice_attribute
    major, minor = (
        checked(driver.cuDeviceGetAttribute(each, device), f"asking CUDA device {index}")
        for each in (
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
        )
    )
    return arch_of((major, minor))


@functools.cache
def launch_function() -> Callable[..., int]:
    """The driver's cuLaunchKernelEx, called through ctypes.

    Of the ways to call it from Python this is the cheapest: 0.64 us of host time with a driver
    that does nothing, against 0.82 through cuda-bindings, which builds a helper object, two
    integers and an enum for each call (Python 3.11, 8 packed values). Python's lock is released
    meanwhile: a launch waits while the device's queue is full.
    """
    bindings()
    # The library is loaded by now; this only finds it again.
    function = ctypes.CDLL("libcuda.so.1").cuLaunchKernelEx
    function.restype = ctypes.c_int
    return function


def _context(index: int) -> Any:
    return _contexts.get(index, functools.partial(_retain, index))


def _retain(index: int) -> Any:
    driver = bindings()
    device = checked(driver.cuDeviceGet(index), f"looking for CUDA device {index}")
    # Never released: kernels live as long as the process, as torch's own do.
    return checked(driver.cuDevicePrimaryCtxRetain(device), f"opening CUDA device {index}")
