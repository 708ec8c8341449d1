"""gristmill: GPU kernels for PyTorch, milled at run time."""

from __future__ import annotations

from gristmill import errors, nn, nvfp4
from gristmill.distributed import vocab_parallel_cross_entropy
from gristmill.explain import explain
from gristmill.integrations.transformers import patch, unpatch
from gristmill.multikernel import MultiKernel
from gristmill.ops.cross_entropy import cross_entropy
from gristmill.ops.inline import inline
from gristmill.ops.layer_norm import add_layer_norm, layer_norm
from gristmill.ops.linear import linear, matmul
from gristmill.ops.linear_cross_entropy import linear_cross_entropy
from gristmill.ops.moe import moe
from gristmill.ops.rms_norm import add_rms_norm, fused_add_rms_norm_, rms_norm
from gristmill.ops.softmax import log_softmax, softmax
from gristmill.ops.topk_router import topk_router
from gristmill.runners import Nvfp4LinearRunner, Nvfp4MoeRunner, register_runner
from gristmill.select import batch_invariant, counters, report, use
from gristmill.tune import tune
from gristmill.version import __version__
from gristmill.warmup import warmup

__all__ = [
    "MultiKernel",
    "Nvfp4LinearRunner",
    "Nvfp4MoeRunner",
    "__version__",
    "add_layer_norm",
    "add_rms_norm",
    "batch_invariant",
    "counters",
    "cross_entropy",
    "errors",
    "explain",
    "fused_add_rms_norm_",
    "inline",
    "layer_norm",
    "linear",
    "linear_cross_entropy",
    "log_softmax",
    "matmul",
    "moe",
    "nn",
    "nvfp4",
    "patch",
    "register_runner",
    "report",
    "rms_norm",
    "softmax",
    "topk_router",
    "tune",
    "unpatch",
    "use",
    "vocab_parallel_cross_entropy",
    "warmup",
]
