"""gristmill's RMSNorm as a provider of the vLLM IR ops `rms_norm` and `fused_add_rms_norm`.

vLLM dispatches each norm of a model through an IR op, which has implementations by provider and an
order of priority. The functions here are one implementation of each op and the test of whether it
takes a call. Both must have the signature of vLLM's own implementation to the letter, and vLLM
hashes this file into the key of its compile cache.

vLLM's own semantics, which these give: sums in fp32, the variance of the sum before it is rounded,
the normalised value rounded to the weight's dtype, then the product to the dtype of x. A call that
gristmill's ops would round otherwise is left to vLLM.
"""

import sys
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gristmill.ops.direct import needs_grad
from gristmill.ops.rms_norm import fused_add_rms_norm_ as _fused_add_rms_norm_
from gristmill.ops.rms_norm import rms_norm as _rms_norm

PROVIDER = "gristmill"

# vLLM computes fp64 inputs in fp32, gristmill in fp64.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def register(
    rms_norm_op: Any, fused_add_rms_norm_op: Any, *, supported: bool, batch_invariant: bool = False
) -> None:
    """Make `gristmill` a provider of both IR ops, where it is none yet.

    Being one changes nothing: it runs where an order of priority names it.

    Args:
        batch_invariant: by the functions of norms_invariant.py.
    """
    given = sys.modules[__name__]
    if batch_invariant:
        given = import_module("gristmill.integrations.vllm.norms_invariant")
    if PROVIDER not in rms_norm_op.impls:
        rms_norm_op.register_impl(
            PROVIDER, supported=supported, supports_args=given.rms_norm_takes
        )(given.rms_norm)
    if PROVIDER not in fused_add_rms_norm_op.impls:
        fused_add_rms_norm_op.register_impl(
            PROVIDER,
            supported=supported,
            supports_args=given.fused_add_rms_norm_takes,
            inplace=True,
        )(given.fused_add_rms_norm)


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    # A weight wider than x: vLLM multiplies in fp32, hence rounds once. Equal dtypes of 16 bits: it
    # rounds before the product and after it, as Llama does.
    equal = weight is not None and weight.dtype == x.dtype
    casting = "llama" if equal and x.dtype != torch.float32 else "once"
    return _rms_norm(x, weight, epsilon, casting=casting)


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    _fused_add_rms_norm_(x, x_residual, weight, epsilon)
    return x, x_residual


# The tests below see fake tensors while vLLM compiles, and real ones at every eager call: they read
# dtypes and trailing dims only. Sizes that depend on the number of tokens stay unread, or a graph
# for all of them would become a graph for one.


def rms_norm_takes(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    # In a graph Inductor joins the norms of heads with the rotary embedding behind them, into two
    # kernels of 1.4 and 1.6 us; with ours they are four (H200, Qwen3-30B, 16 tokens, 2026-11-16).
    if x.dim() > 2 and isinstance(x, FakeTensor):
        return False
    return is_ours(x, weight, variance_size)


def is_ours(x: Tensor, weight: Tensor | None, variance_size: int | None) -> bool:
    """Whether our op gives what vLLM's does."""
    if variance_size is not None or not _are_rows(x):
        return False
    if weight is None:
        return True
    # With a weight narrower than x, or of the other 16-bit dtype, vLLM rounds to that on the way.
    return weight.dtype in (x.dtype, torch.float32) and _is_weight_of(x, weight)


def fused_add_rms_norm_takes(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> bool:
    if variance_size is not None or not _are_rows(x):
        return False
    # vLLM gives the sum in the dtype of x; in place it has that of the residual.
    if x_residual.dtype != x.dtype or not _can_be_overwritten(x, x_residual):
        return False
    if needs_grad(x, x_residual, weight):  # what works in place has no gradient
        return False
    return weight is None or (weight.dtype in DTYPES and _is_weight_of(x, weight))


def _are_rows(x: Tensor) -> bool:
    return x.dtype in DTYPES and x.dim() > 0


def _is_weight_of(x: Tensor, weight: Tensor) -> bool:
    return weight.dim() == 1 and weight.shape[0] == x.shape[-1]


def _can_be_overwritten(x: Tensor, x_residual: Tensor) -> bool:
    """Of one shape as far as may be asked, not one tensor twice, and neither of them expanded."""
    return (
        x is not x_residual
        and x.dim() == x_residual.dim()
        and x.shape[-1] == x_residual.shape[-1]
        and x.shape[1:] == x_residual.shape[1:]
        and not _is_expanded(x)
        and not _is_expanded(x_residual)
    )


def _is_expanded(tensor: Tensor) -> bool:
    # A symbolic stride is a product of sizes: not zero, and not to be asked.
    strides: tuple[Any, ...] = tensor.stride()
    return any(isinstance(stride, int) and stride == 0 for stride in strides)
