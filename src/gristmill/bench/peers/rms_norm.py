"""RMSNorm: forward, with residual, backward."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.bench.peers.peer import Builders, Function, Sets, compiled
from gristmill.ops.registry import OPS


def plain_forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The formula as one would write it, accumulating in fp32."""
    h = x.float()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return (h * weight.float()).to(x.dtype)


def plain_add(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return plain_forward(total, weight, eps), total


def plain_backward(dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    scale = rstd.unsqueeze(-1)
    normed = x.float() * scale
    grad = dy.float()
    scaled = grad * weight.float()
    dx = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * scale
    return dx.to(x.dtype), (grad * normed).sum(0).to(weight.dtype)


def _eager_forward(sets: Sets) -> Function:
    def run(x: Tensor, weight: Tensor, eps: float, *_: object) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)

    return run


def _eager_add(sets: Sets) -> Function:
    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *_: object) -> Any:
        total = x + residual
        return F.rms_norm(total, (x.shape[-1],), weight, eps), total

    return run


def _eager_backward(sets: Sets) -> Function:
    if sets[0][0].is_cuda and hasattr(torch.ops.aten, "_fused_rms_norm_backward"):
        fused = torch.ops.aten._fused_rms_norm_backward.default

        # As its forward saves it; shaped ahead, so that this is not in the host's time.
        columns = {one[-1].data_ptr(): one[-1].unsqueeze(-1) for one in sets}

        def run(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
            rstd = columns[rest[-1].data_ptr()]
            return fused(dy, x, [x.shape[-1]], rstd, weight, [True, True])

        return run

    # No such kernel here: the backward of torch's own forward, on graphs that are built ahead, so
    # that the forward is not in the time.
    graphs = {}
    for _, x, weight, _, eps, *_ in sets:
        leaves = (x.detach().requires_grad_(), weight.detach().requires_grad_())
        graphs[x.data_ptr()] = (F.rms_norm(leaves[0], weight.shape, leaves[1], eps), leaves)

    def run_autograd(dy: Tensor, x: Tensor, *_: object) -> Any:
        y, leaves = graphs[x.data_ptr()]
        return torch.autograd.grad(y, leaves, dy, retain_graph=True)

    return run_autograd


def _inductor_forward(sets: Sets) -> Function:
    function = compiled(plain_forward)

    def run(x: Tensor, weight: Tensor, eps: float, *_: object) -> Any:
        return function(x, weight, eps)

    return run


def _inductor_add(sets: Sets) -> Function:
    function = compiled(plain_add)

    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *_: object) -> Any:
        return function(x, residual, weight, eps)

    return run


def _inductor_backward(sets: Sets) -> Function:
    function = compiled(plain_backward)

    def run(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
        return function(dy, x, weight, rest[-1])

    return run


def _quack_forward(sets: Sets) -> Function:
    from quack.rmsnorm import rmsnorm_fwd

    def run(x: Tensor, weight: Tensor, eps: float, *_: object) -> Any:
        return rmsnorm_fwd(x, weight, eps=eps)[0]

    return run


def _quack_add(sets: Sets) -> Function:
    from quack.rmsnorm import rmsnorm_fwd

    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *_: object) -> Any:
        return rmsnorm_fwd(x, weight, residual=residual, eps=eps)[:2]

    return run


def _quack_backward(sets: Sets) -> Function:
    from quack.rmsnorm import rmsnorm_bwd

    def run(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
        return rmsnorm_bwd(x, weight, dy, rest[-1])[:2]

    return run


# Liger's "gemma" casting is our "once": everything in fp32, rounded at the end.
def _liger_forward(sets: Sets) -> Function:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    def run(x: Tensor, weight: Tensor, eps: float, *_: object) -> Any:
        return rms_norm_forward(x, weight, eps, 0.0, "gemma", None)[0]

    return run


def _liger_add(sets: Sets) -> Function:
    from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward

    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *_: object) -> Any:
        return fused_add_rms_norm_forward(x, residual, weight, eps, 0.0, "gemma")[:2]

    return run


def _liger_backward(sets: Sets) -> Function:
    from liger_kernel.ops.rms_norm import _str_to_casting_mode, rms_norm_backward
    from liger_kernel.ops.utils import calculate_settings

    casting = _str_to_casting_mode["gemma"]

    def run(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
        block, warps = calculate_settings(x.shape[-1])
        return rms_norm_backward(
            dy, x, weight, rest[-1], 0.0, casting, block, warps, in_place=False, row_mode=None
        )

    return run


def _flashinfer_forward(sets: Sets) -> Function:
    from flashinfer.norm import rmsnorm

    def run(x: Tensor, weight: Tensor, eps: float, *_: object) -> Any:
        return rmsnorm(x, weight, eps)

    return run


def _flashinfer_add(sets: Sets) -> Function:
    from flashinfer.norm import fused_add_rmsnorm

    # It writes over both inputs, which are shared with every other implementation: it gets copies.
    own = {x.data_ptr(): (x.clone(), residual.clone()) for x, residual, *_ in sets}

    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *_: object) -> Any:
        y, total = own[x.data_ptr()]
        fused_add_rmsnorm(y, total, weight, eps)
        return y, total

    return run


def _our_forward(sets: Sets) -> Function:
    import gristmill

    def run(x: Tensor, weight: Tensor, eps: float, *_: object) -> Any:
        return gristmill.rms_norm(x, weight, eps)

    return run


def _our_add(sets: Sets) -> Function:
    import gristmill

    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *_: object) -> Any:
        return gristmill.add_rms_norm(x, residual, weight, eps)

    return run


def _our_backward(sets: Sets) -> Function:
    backward = OPS["rms_norm_backward"].run

    def run(*args: Any) -> Any:
        return backward(*args[:-1])  # all but rstd

    return run


BUILDERS: Builders = {
    "gristmill": {
        "rms_norm": _our_forward,
        "add_rms_norm": _our_add,
        "rms_norm_bwd": _our_backward,
    },
    "eager": {
        "rms_norm": _eager_forward,
        "add_rms_norm": _eager_add,
        "rms_norm_bwd": _eager_backward,
    },
    "inductor": {
        "rms_norm": _inductor_forward,
        "add_rms_norm": _inductor_add,
        "rms_norm_bwd": _inductor_backward,
    },
    "quack": {
        "rms_norm": _quack_forward,
        "add_rms_norm": _quack_add,
        "rms_norm_bwd": _quack_backward,
    },
    "liger": {
        "rms_norm": _liger_forward,
        "add_rms_norm": _liger_add,
        "rms_norm_bwd": _liger_backward,
    },
    "flashinfer": {
        "rms_norm": _flashinfer_forward,
        "add_rms_norm": _flashinfer_add,
    },
}
