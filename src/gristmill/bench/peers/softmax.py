"""Softmax over the last dim, plain and causal ("top_left"): forward and backward.

Causal scores are `(..., sq, sk)`; column j of row i takes part if j <= i.

On CUDA, PyTorch's own gradient rounds dy * y to their dtype (`COARSE`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gristmill.bench.peers.peer import Builders, Function, Sets, compiled
from gristmill.ops.registry import OPS

COARSE = {"eager": frozenset({"softmax_bwd", "softmax_causal_bwd"})}


def plain_forward(x: Tensor) -> Tensor:
    """The formula as one would write it, accumulating in fp32."""
    h = x.float()
    terms = torch.exp(h - h.amax(-1, keepdim=True))
    return (terms / terms.sum(-1, keepdim=True)).to(x.dtype)


def plain_backward(dy: Tensor, y: Tensor) -> Tensor:
    grad, values = dy.float(), y.float()
    return (values * (grad - (grad * values).sum(-1, keepdim=True))).to(y.dtype)


def above(x: Tensor) -> Tensor:
    """True beyond the diagonal of the last two dims: who takes no part."""
    rows = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)
    return torch.arange(x.shape[-1], device=x.device) > rows


def plain_causal(x: Tensor) -> Tensor:
    return plain_forward(x.float().masked_fill(above(x), -torch.inf)).to(x.dtype)


def _eager_forward(sets: Sets) -> Function:
    def run(x: Tensor, *_: object) -> Tensor:
        return torch.softmax(x, -1)

    return run


def _eager_causal(sets: Sets) -> Function:
    mask = above(sets[0][0])  # one for all heads and all calls

    def run(x: Tensor, *_: object) -> Tensor:
        return torch.softmax(x.masked_fill(mask, -torch.inf), -1)

    return run


def _eager_backward(sets: Sets) -> Function:
    backward = torch.ops.aten._softmax_backward_data.default

    def run(dy: Tensor, y: Tensor, *_: object) -> Any:
        return backward(dy, y, -1, y.dtype)

    return run


def _inductor_forward(sets: Sets) -> Function:
    function = compiled(plain_forward)

    def run(x: Tensor, *_: object) -> Any:
        return function(x)

    return run


def _inductor_causal(sets: Sets) -> Function:
    function = compiled(plain_causal)

    def run(x: Tensor, *_: object) -> Any:
        return function(x)

    return run


def _inductor_backward(sets: Sets) -> Function:
    function = compiled(plain_backward)

    def run(dy: Tensor, y: Tensor, *_: object) -> Any:
        return function(dy, y)

    return run


# QuACK takes matrices only; a view of more dims as one costs the device nothing.
def _quack_forward(sets: Sets) -> Function:
    from quack.softmax import softmax_fwd

    def run(x: Tensor, *_: object) -> Any:
        return softmax_fwd(x) if x.dim() == 2 else softmax_fwd(x.flatten(0, -2)).view(x.shape)

    return run


def _quack_backward(sets: Sets) -> Function:
    from quack.softmax import softmax_bwd

    def run(dy: Tensor, y: Tensor, *_: object) -> Any:
        if y.dim() == 2:
            return softmax_bwd(dy, y)
        return softmax_bwd(dy.flatten(0, -2), y.flatten(0, -2)).view(y.shape)

    return run


def _liger_forward(sets: Sets) -> Function:
    from liger_kernel.ops.softmax import _softmax_forward

    def run(x: Tensor, *_: object) -> Any:
        return _softmax_forward(x)[0]

    return run


def _liger_backward(sets: Sets) -> Function:
    from liger_kernel.ops.softmax import _softmax_backward
    from liger_kernel.ops.utils import calculate_settings

    block, warps = calculate_settings(sets[0][0].shape[-1])

    def run(dy: Tensor, y: Tensor, *_: object) -> Any:
        return _softmax_backward(dy, y, block, warps, False)

    return run


def _our_forward(sets: Sets) -> Function:
    import gristmill

    def run(x: Tensor, *_: object) -> Any:
        return gristmill.softmax(x)

    return run


def _our_causal(sets: Sets) -> Function:
    import gristmill

    def run(x: Tensor, *_: object) -> Any:
        return gristmill.softmax(x, causal="top_left")

    return run


def _our_backward(sets: Sets) -> Function:
    return OPS["softmax_backward"].run


BUILDERS: Builders = {
    "gristmill": {
        "softmax": _our_forward,
        "softmax_bwd": _our_backward,
        "softmax_causal": _our_causal,
        "softmax_causal_bwd": _our_backward,
    },
    # The gradient of a causal softmax is that of any softmax: beyond the diagonal y is 0.
    "eager": {
        "softmax": _eager_forward,
        "softmax_bwd": _eager_backward,
        "softmax_causal": _eager_causal,
        "softmax_causal_bwd": _eager_backward,
    },
    "inductor": {
        "softmax": _inductor_forward,
        "softmax_bwd": _inductor_backward,
        "softmax_causal": _inductor_causal,
        "softmax_causal_bwd": _inductor_backward,
    },
    "quack": {
        "softmax": _quack_forward,
        "softmax_bwd": _quack_backward,
        "softmax_causal_bwd": _quack_backward,
    },
    "liger": {
        "softmax": _liger_forward,
        "softmax_bwd": _liger_backward,
        "softmax_causal_bwd": _liger_backward,
    },
}
