"""LayerNorm: forward, with residual, backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.bench.peers.peer import Builders, Function, Sets, ahead, compiled
from gristmill.ops.registry import OPS


def plain_forward(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The formula as one would write it, accumulating in fp32."""
    h = x.float()
    variance, mean = torch.var_mean(h, -1, correction=0, keepdim=True)
    h = (h - mean) * torch.rsqrt(variance + eps)
    return (h * weight.float() + bias.float()).to(x.dtype)


def plain_add(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return plain_forward(total, weight, bias, eps), total


def plain_backward(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    scale = rstd.unsqueeze(-1)
    normed = (x.float() - mean.unsqueeze(-1)) * scale
    grad = dy.float()
    scaled = grad * weight.float()
    along = (scaled * normed).mean(-1, keepdim=True)
    dx = (scaled - scaled.mean(-1, keepdim=True) - normed * along) * scale
    dweight, dbias = (grad * normed).sum(0), grad.sum(0)
    return dx.to(x.dtype), dweight.to(weight.dtype), dbias.to(weight.dtype)


def _eager_forward(sets: Sets) -> Function:
    def run(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *_: object) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    return run


def _eager_add(sets: Sets) -> Function:
    def run(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, *_: object
    ) -> Any:
        total = x + residual
        return F.layer_norm(total, (x.shape[-1],), weight, bias, eps), total

    return run


def _eager_backward(sets: Sets) -> Function:
    # Torch's own forward saves mean and 1/std in dtypes and shapes of its own, by device.
    def forward(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
        _, x, weight, _, eps, *_ = args
        bias = torch.zeros_like(weight)
        _, mean, rstd = torch.native_layer_norm(x, weight.shape, weight, bias, eps)
        return mean, rstd, bias

    kept = ahead(sets, 1, forward)

    def run(dy: Tensor, x: Tensor, weight: Tensor, *_: object) -> Any:
        mean, rstd, bias = kept[x.data_ptr()]
        return torch.ops.aten.native_layer_norm_backward(
            dy, x, [x.shape[-1]], mean, rstd, weight, bias, [True, True, True]
        )

    return run


def _inductor_forward(sets: Sets) -> Function:
    function = compiled(plain_forward)

    def run(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *_: object) -> Any:
        return function(x, weight, bias, eps)

    return run


def _inductor_add(sets: Sets) -> Function:
    function = compiled(plain_add)

    def run(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, *_: object
    ) -> Any:
        return function(x, residual, weight, bias, eps)

    return run


def _inductor_backward(sets: Sets) -> Function:
    function = compiled(plain_backward)

    def run(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
        return function(dy, x, weight, *rest[-2:])

    return run


def _quack_forward(sets: Sets) -> Function:
    from quack.rmsnorm import layernorm_fwd

    # It takes weights and biases of fp32 only: they are converted ahead.
    whole = ahead(sets, 0, lambda args: (args[1].float(), args[2].float()))

    def run(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *_: object) -> Any:
        return layernorm_fwd(x, *whole[x.data_ptr()], eps=eps)

    return run


def _quack_backward(sets: Sets) -> Function:
    from quack.rmsnorm import layernorm_bwd

    def run(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
        mean, rstd = rest[-2:]
        return layernorm_bwd(x, weight, dy, rstd, mean, has_bias=True)

    return run


def _liger_forward(sets: Sets) -> Function:
    from liger_kernel.ops.layer_norm import layer_norm_forward

    def run(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *_: object) -> Any:
        return layer_norm_forward(x, weight, bias, eps)[0]

    return run


def _liger_backward(sets: Sets) -> Function:
    from liger_kernel.ops.layer_norm import layer_norm_backward

    biases = ahead(sets, 1, lambda args: torch.zeros_like(args[2]))

    def run(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
        return layer_norm_backward(dy, x, weight, biases[x.data_ptr()], *rest[-2:])

    return run


def _our_forward(sets: Sets) -> Function:
    import gristmill

    def run(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *_: object) -> Any:
        return gristmill.layer_norm(x, weight, bias, eps)

    return run


def _our_add(sets: Sets) -> Function:
    import gristmill

    def run(
        x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, *_: object
    ) -> Any:
        return gristmill.add_layer_norm(x, residual, weight, bias, eps)

    return run


def _our_backward(sets: Sets) -> Function:
    backward = OPS["layer_norm_backward"].run

    def run(*args: Any) -> Any:
        return backward(*args[:-2])  # all but mean and 1/std

    return run


BUILDERS: Builders = {
    "gristmill": {
        "layer_norm": _our_forward,
        "add_layer_norm": _our_add,
        "layer_norm_bwd": _our_backward,
    },
    "eager": {
        "layer_norm": _eager_forward,
        "add_layer_norm": _eager_add,
        "layer_norm_bwd": _eager_backward,
    },
    "inductor": {
        "layer_norm": _inductor_forward,
        "add_layer_norm": _inductor_add,
        "layer_norm_bwd": _inductor_backward,
    },
    "quack": {"layer_norm": _quack_forward, "layer_norm_bwd": _quack_backward},
    "liger": {"layer_norm": _liger_forward, "layer_norm_bwd": _liger_backward},
}
