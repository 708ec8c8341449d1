"""From the text of a kernel to its launch: compile, cache, load, launch. Knows nothing of ops."""

from gristmill.jit.cache import load_or_compile
from gristmill.jit.kernel import Kernel, Launch, kernel
from gristmill.jit.nvrtc import Binary, compile_program
from gristmill.jit.program import Program
from gristmill.jit.resources import Resources, resource_usage

__all__ = [
    "Binary",
    "Kernel",
    "Launch",
    "Program",
    "Resources",
    "compile_program",
    "kernel",
    "load_or_compile",
    "resource_usage",
]
