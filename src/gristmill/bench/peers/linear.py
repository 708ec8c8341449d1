"""Linear layers with their activation, without a bias, as language models have them.

Torch rounds the product to its dtype before the activation. Inductor is given the time to choose
among its own products (max-autotune), where it can fuse the activation. Quack tunes itself at the
first call; it has no exact gelu.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from gristmill.bench.peers.peer import Builders, Function, Sets, compiled

TASKS = ("linear", "linear_relu", "linear_silu", "linear_gelu")
ACTIVATION = 3  # its position in the arguments
_FUNCTIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: lambda h: h,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
}


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None) -> Tensor:
    """The layer as one would write it."""
    return _FUNCTIONS[activation](F.linear(x, weight, bias))


def _eager(sets: Sets) -> Function:
    return plain


def _inductor(sets: Sets) -> Function:
    activation = sets[0][ACTIVATION]
    # On a CPU the search takes minutes, and its times are there for ratios only.
    mode = "max-autotune-no-cudagraphs" if sets[0][0].is_cuda else None

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return plain(x, weight, bias, activation)

    function = compiled(layer, mode=mode)

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, *_: object) -> Any:
        return function(x, weight, bias)

    return run


def _quack(sets: Sets) -> Function:
    from quack.gemm_interface import gemm, gemm_act

    if sets[0][ACTIVATION] is None:

        def product(x: Tensor, weight: Tensor, bias: Tensor | None, *_: object) -> Any:
            return gemm(x, weight.t(), bias=bias)

        return product

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Any:
        done = gemm_act(x, weight.t(), bias=bias, activation=activation, store_preact=False)
        return done[1]

    return layer


def _ours(sets: Sets) -> Function:
    import gristmill

    return gristmill.linear


BUILDERS: Builders = {
    "gristmill": dict.fromkeys(TASKS, _ours),
    "eager": dict.fromkeys(TASKS, _eager),
    "inductor": dict.fromkeys(TASKS, _inductor),
    "quack": dict.fromkeys(TASKS[:3], _quack),
}
