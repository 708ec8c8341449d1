"""gristmill: GPU kernels for PyTorch, milled at run time."""

from __future__ import annotations

from gristmill import errors, nn, nvfp4
from gristmill.explain import explain
from gristmill.ops.inline import inline
from gristmill.ops.rms_norm import add_rms_norm, fused_add_rms_norm_, rms_norm
from gristmill.runners import Nvfp4LinearRunner, Nvfp4MoeRunner, register_runner
from gristmill.select import counters, use
from gristmill.version import __version__
from gristmill.warmup import warmup

__all__ = [
    "Nvfp4LinearRunner",
    "Nvfp4MoeRunner",
    "__version__",
    "add_rms_norm",
    "counters",
    "errors",
    "explain",
    "fused_add_rms_norm_",
    "inline",
    "nn",
    "nvfp4",
    "register_runner",
    "rms_norm",
    "use",
    "warmup",
]
