"""Every error gristmill raises on purpose.

Each derives from `GristmillError` and from the built-in error that a caller of PyTorch would
expect, so both `except GristmillError` and `except ValueError` work.
"""

from __future__ import annotations


class GristmillError(Exception):
    """The base of all errors below."""


class ArgumentError(GristmillError, ValueError):
    """An argument of an op has a value, shape, stride or device that the op does not take."""


class DtypeError(GristmillError, TypeError):
    """An argument of an op has a type or dtype that the op does not take."""


class SettingsError(GristmillError, ValueError):
    """A GRISTMILL_* environment variable has a value that is not allowed."""


class UnknownVariant(GristmillError, ValueError):  # noqa: N818 - reads as what it says
    """A variant or an op was named that does not exist."""


class VariantUnavailable(GristmillError, RuntimeError):  # noqa: N818
    """A variant was asked for by name and cannot run this call; the message says why."""


class CompilerUnavailable(GristmillError, RuntimeError):  # noqa: N818
    """A compiler (NVRTC, Triton, the CuTe DSL) cannot be used here; the message says what to do."""


class CompileError(GristmillError, RuntimeError):
    """A compiler (NVRTC, Triton, the CuTe DSL) refused a program.

    `log` is the compiler's whole output, `source_line` the offending line with its file and number
    ("" where the log names none), `program` the file that was compiled.
    """

    def __init__(self, message: str, *, log: str = "", source_line: str = "", program: str = ""):
        super().__init__(message)
        self.log = log
        self.source_line = source_line
        self.program = program


class KernelNotCached(GristmillError, RuntimeError):  # noqa: N818
    """Compiling is forbidden (GRISTMILL_JIT=off) and a kernel is in no cache."""


class BundleError(GristmillError, ValueError):
    """A bundle of kernels is damaged, is no bundle, or may not be trusted; the message says why."""


class DriverError(GristmillError, RuntimeError):
    """The CUDA driver refused a call, or is not there. `code` and `name` are the driver's own."""

    def __init__(self, message: str, *, code: int = 0, name: str = ""):
        super().__init__(message)
        self.code = code
        self.name = name

    @property
    def is_lack_of_memory(self) -> bool:
        """Whether there was no memory left on the device: at another time there may be some."""
        return self.code == 2  # CUDA_ERROR_OUT_OF_MEMORY


class DoubleBackwardError(GristmillError, RuntimeError):
    """The gradient of a gradient was asked of an op that has none."""


class GradientConsumed(GristmillError, RuntimeError):  # noqa: N818
    """A gradient made by a one-pass op was asked for twice; it was handed out the first time."""


class CheckpointError(GristmillError, ValueError):
    """A checkpoint cannot be read or written; the message names the file and the tensor."""


class NoGradientError(ArgumentError, RuntimeError):
    """A gradient was asked of an op that has none; the message says what to do instead."""


class UnknownRunner(GristmillError, RuntimeError):  # noqa: N818
    """No runner with this id is registered in this process, or it was freed."""


class TableError(GristmillError, ValueError):
    """A tuning table cannot be read or written."""


class RanksDisagree(GristmillError, RuntimeError):  # noqa: N818
    """Ranks of one job would run different kernels; the message names ranks and differences."""
