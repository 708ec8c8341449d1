"""What the ops must answer, in fp64.

The formulas are written here a second time, from the documentation, so that the references are
judged as well; how far a result is from them is in `conformance_truth_core`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import conformance_truth_cross_entropy as entropy
import conformance_truth_fp8 as fp8
import conformance_truth_linear as linear
import conformance_truth_linear_cross_entropy as linear_entropy
import conformance_truth_moe as dense_experts
import conformance_truth_norms as norms
import conformance_truth_nvfp4 as nvfp4
import conformance_truth_softmax as softmax
import conformance_truth_topk_router as router
import torch
from conformance_truth_core import BEFORE_ROUNDING, Truth, accumulator_of, unit

Tensor = torch.Tensor


def truth_of(name: str, args: tuple[Any, ...]) -> list[Truth]:
    """What op `name` must give for `args` (not yet overwritten), in the order of `results_of`."""
    return TRUTHS[name](*args)


def results_of(name: str, args: tuple[Any, ...], returned: Any) -> list[Tensor]:
    """The results of a call as a list: what it returned, else what it has written."""
    if name == "fused_add_rms_norm_":
        return [args[0], args[1]]
    if name == "scale_gradient_":
        return [args[0]]
    if name == "cross_entropy_one_pass_":
        return [*returned, args[0]]
    return [returned] if isinstance(returned, Tensor) else list(returned)


def _exact(value: Tensor, accumulator: torch.dtype, *, bits: bool = False) -> Truth:
    value = value.double()
    return Truth(value, value, value.abs(), accumulator, exact=bits)


def _inverse(h: Tensor, eps: float | None, accumulator: torch.dtype) -> Tensor:
    eps = torch.finfo(accumulator).eps if eps is None else eps
    return torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)


def _rounded(low: Tensor, high: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    low, high = torch.minimum(low, high), torch.maximum(low, high)
    return low.to(dtype).double(), high.to(dtype).double()


def _computed(low: Tensor, high: Tensor, accumulator: torch.dtype) -> tuple[Tensor, Tensor]:
    """Products as the accumulator may hold them: off by two roundings, unless they fit exactly."""
    low, high = torch.minimum(low, high), torch.maximum(low, high)
    off = [end.abs() * 2 * unit(accumulator) for end in (low, high)]
    exact = [end.to(accumulator).double() == end for end in (low, high)]
    return torch.where(exact[0], low, low - off[0]), torch.where(exact[1], high, high + off[1])


def _rounded_on_the_way(
    normalised: Tensor,
    accumulator: torch.dtype,
    to: torch.dtype,
    factor: Tensor | None,
    product: torch.dtype,
) -> Truth:
    """`normalised`, rounded, times `factor`, rounded."""
    off = normalised.abs() * (BEFORE_ROUNDING * unit(accumulator))
    low, high = normalised, normalised
    if torch.finfo(to).eps > torch.finfo(accumulator).eps:
        low, high = _rounded(normalised - off, normalised + off, to)
    if factor is not None:
        low, high = low * factor.double(), high * factor.double()
        if torch.finfo(product).eps > torch.finfo(accumulator).eps:
            low, high = _rounded(*_computed(low, high, accumulator), product)
        low, high = torch.minimum(low, high), torch.maximum(low, high)
    return Truth(low, high, torch.maximum(low.abs(), high.abs()), accumulator)


def _rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
) -> list[Truth]:
    accumulator = accumulator_of(x.dtype)
    h = x.double()
    normalised = h * _inverse(h, eps, accumulator)
    if casting == "llama":
        factor, product = None, x.dtype
        if weight is not None:
            factor = weight.double() + weight_offset
            product = torch.promote_types(x.dtype, weight.dtype)
        return [_rounded_on_the_way(normalised, accumulator, x.dtype, factor, product)]
    if weight is None:
        return [_exact(normalised, accumulator)]
    value = normalised * (weight.double() + weight_offset)
    terms = normalised.abs() * (weight.double().abs() + abs(weight_offset))
    return [Truth(value, value, terms, accumulator)]


def _add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float | None,
    weight_offset: float,
    casting: str,
    out_dtype: torch.dtype | None,
) -> list[Truth]:
    dtype = torch.promote_types(x.dtype, residual.dtype)
    precise = accumulator_of(dtype)
    total = (x.to(precise) + residual.to(precise)).to(dtype)
    # The sum leaves no freedom: one addition in the accumulator, one rounding.
    return [
        *_rms_norm(total, weight, eps, weight_offset, casting, out_dtype),
        _exact(total, precise, bits=True),
    ]


def _fused_add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> list[Truth]:
    precise = accumulator_of(torch.promote_types(x.dtype, residual.dtype))
    total = x.to(precise) + residual.to(precise)
    h = total.double()
    normalised = h * _inverse(h, eps, precise)
    to = precise if weight is None else weight.dtype
    return [
        _rounded_on_the_way(normalised, precise, to, weight, to),
        _exact(total.to(residual.dtype), precise, bits=True),
    ]


def _rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    dsum: Tensor | None,
    eps: float | None,
    weight_offset: float,
    weight_grad: bool,
) -> list[Truth]:
    accumulator = accumulator_of(x.dtype)
    h, d = x.double(), dy.double()
    inverse = _inverse(h, eps, accumulator)
    g, g_terms = d, d.abs()
    if weight is not None:
        g = d * (weight.double() + weight_offset)
        g_terms = d.abs() * (weight.double().abs() + abs(weight_offset))
    dx = inverse * g - h * inverse**3 * (g * h).mean(-1, keepdim=True)
    mean_terms = (g_terms * h.abs()).mean(-1, keepdim=True)
    terms = inverse * g_terms + h.abs() * inverse**3 * mean_terms
    if dsum is not None:
        dx, terms = dx + dsum.double(), terms + dsum.double().abs()
    dweight = dweight_terms = h.new_empty(0)
    if weight_grad and weight is not None:
        products = (d * h * inverse).reshape(-1, h.shape[-1])
        dweight, dweight_terms = products.sum(0), products.abs().sum(0)
    return [
        Truth(dx, dx, terms, accumulator),
        Truth(dweight, dweight, dweight_terms, accumulator),
    ]


TRUTHS: dict[str, Callable[..., list[Truth]]] = {
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "fused_add_rms_norm_": _fused_add_rms_norm_,
    "rms_norm_backward": _rms_norm_backward,
    "rms_norm_fp8": fp8.forward(_rms_norm, tensors=2),
    "add_rms_norm_fp8": fp8.forward(_add_rms_norm, tensors=3),
    "layer_norm": norms.layer_norm,
    "add_layer_norm": norms.add_layer_norm,
    "layer_norm_backward": norms.layer_norm_backward,
    "layer_norm_fp8": fp8.forward(norms.layer_norm, tensors=3),
    "add_layer_norm_fp8": fp8.forward(norms.add_layer_norm, tensors=4),
    "cross_entropy": entropy.cross_entropy,
    "cross_entropy_one_pass": entropy.cross_entropy_one_pass,
    "cross_entropy_one_pass_": entropy.cross_entropy_one_pass,
    "cross_entropy_backward": entropy.cross_entropy_backward,
    "cross_entropy_shard": entropy.cross_entropy_shard,
    "scale_gradient_": entropy.scale_gradient_,
    "linear_cross_entropy": linear_entropy.forward,
    "linear_cross_entropy_backward": linear_entropy.backward,
    "linear": linear.linear,
    "linear_with_pre": linear.linear_with_pre,
    "matmul": linear.matmul,
    "moe": dense_experts.moe,
    "moe_backward": dense_experts.moe_backward,
    "nvfp4_linear": nvfp4.linear,
    "nvfp4_linear_backward": nvfp4.linear_backward,
    "nvfp4_moe": nvfp4.moe,
    "nvfp4_moe_backward": nvfp4.moe_backward,
    "softmax": softmax.softmax,
    "log_softmax": softmax.log_softmax,
    "softmax_backward": softmax.softmax_backward,
    "log_softmax_backward": softmax.log_softmax_backward,
    "topk_router": router.topk_router,
    "topk_router_backward": router.topk_router_backward,
}
