"""A machine that lacks a compiler or a driver: what a process there does."""

from __future__ import annotations

import struct
import sys
from pathlib import Path
from typing import Any

from fault_helpers import ARCH, fresh, heard_warnings, is_right, program

from gristmill.errors import GristmillError
from gristmill.jit import bundle, cache, counters
from gristmill.jit.kernel import kernel
from gristmill.jit.program import Program

PARAMS = struct.Struct("QQqf")
SOURCES = Path(__file__).parent.parent / "jit" / "sources"


def remove_compiler(how: str) -> None:
    """Let NVRTC be missing: its bindings, its library, or all but an old one."""
    if how == "no bindings":
        sys.modules["cuda.bindings.nvrtc"] = None  # type: ignore[assignment]
        return
    from cuda.bindings import nvrtc

    def version() -> tuple[Any, int, int]:
        if how == "no library":
            raise RuntimeError("Failed to dlopen libnvrtc.so.13")
        return nvrtc.nvrtcResult.NVRTC_SUCCESS, 12, 9

    nvrtc.nvrtcVersion = version


def load_without_compiler(
    how: str, home: str, layers: str, jit: str, sources: str, numbers: int
) -> dict[str, Any]:
    """What becomes of each kernel."""
    remove_compiler(how)
    fresh(home, GRISTMILL_CACHE_LAYERS=layers, GRISTMILL_JIT=jit)
    results = []
    with heard_warnings() as heard:
        for number in range(numbers):
            one = program(sources, number)
            try:
                right = is_right(cache.load_or_compile(one, ARCH), one)
                results.append("right" if right else "wrong")
            except GristmillError as error:
                results.append(f"{type(error).__name__}: {error}")
    values = counters.snapshot()
    return {
        "results": results,
        "warnings": heard,
        "hits": values["disk_hits"],
        "layer hits": values["layer_hits"],
        "home": Path(home).exists(),
    }


def _launch() -> int:
    """Load a kernel and launch it twice; how many launches the driver has seen."""
    import ctypes

    fill = kernel(Program("probe.cu", ("fill<2>", "fill<3>"), root=SOURCES), "fill<2>", 0)
    launch = fill.prepare(grid=7, block=128, params=PARAMS)
    launch(0, 11, 12, -13, 1.5)
    launch(0, 11, 12, -13, 1.5)
    return ctypes.c_int.in_dll(ctypes.CDLL("libcuda.so.1"), "launches").value


def make_bundle(home: str, path: str) -> int:
    """Compile what is launched, for the architecture of the driver that is there."""
    from gristmill.jit.driver import architecture

    fresh(home)
    one = Program("probe.cu", ("fill<2>", "fill<3>"), root=SOURCES)
    bundle.write(Path(path), [cache.encoded(one, architecture(0))])
    return _launch()


def launch_from_bundle(home: str, path: str) -> dict[str, Any]:
    """The same where no compiler is, and none may be used."""
    remove_compiler("no bindings")
    fresh(home, GRISTMILL_CACHE_LAYERS=path, GRISTMILL_JIT="off")
    launches = _launch()
    values = counters.snapshot()
    return {
        "launches": launches,
        "layer hits": values["layer_hits"],
        "compiles": values["compiles"],
        "home": Path(home).exists(),
    }


def load_without_driver(home: str) -> str:
    fresh(home)
    try:
        _launch()
    except GristmillError as error:
        return f"{type(error).__name__}: {error}"
    return "launched"


def call_without_compiler(how: str, home: str) -> dict[str, Any]:
    """An op on a GPU: what it gives, what it says, and what `use` says."""
    import torch

    import gristmill
    from gristmill.errors import CompilerUnavailable, VariantUnavailable

    remove_compiler(how)
    fresh(home)
    x = torch.randn(4, 4096, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16)
    wanted = torch.nn.functional.rms_norm(x.float(), (4096,), weight.float(), 1e-6)
    with heard_warnings() as heard:
        for _ in range(3):
            found = gristmill.rms_norm(x, weight, 1e-6)
    error = (found.float() - wanted).abs().max().item()
    named = ""
    try:
        with gristmill.use("rms_norm", "cuda_block"):
            gristmill.rms_norm(x, weight, 1e-6)
    except (CompilerUnavailable, VariantUnavailable) as refusal:
        named = f"{type(refusal).__name__}: {refusal}"
    return {"error": error, "warnings": heard, "named": named, "home": Path(home).exists()}
