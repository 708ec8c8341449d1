"""From the text of a kernel to its launch: compile, cache, load, launch. Knows nothing of ops."""

from gristmill.jit.binary import Binary
from gristmill.jit.cache import load_or_compile
from gristmill.jit.compilers import Compilable
from gristmill.jit.kernel import Kernel, Launch, kernel
from gristmill.jit.nvrtc import compile_program
from gristmill.jit.program import Program
from gristmill.jit.resources import Resources, resource_usage
from gristmill.jit.triton import TritonProgram

__all__ = [
    "Binary",
    "Compilable",
    "Kernel",
    "Launch",
    "Program",
    "Resources",
    "TritonProgram",
    "compile_program",
    "kernel",
    "load_or_compile",
    "resource_usage",
]
