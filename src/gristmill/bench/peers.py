"""Gristmill and the implementations it is measured against, each behind one small adapter.

A peer takes part when it can be imported and runs on the device. Every adapter function takes the
op's positional arguments (for a backward also `rstd`, see `inputs.saved`) and does the same work:
the same inputs read, the same outputs written, casting once. Where a peer has a faster mode with
another contract (writing over its input), the functional mode is the one measured.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.bench.inputs import Arguments
from gristmill.bench.suites import OPS, known
from gristmill.ops.registry import OPS as REGISTRY

Function = Callable[..., Any]
Sets = Sequence[Arguments]


@dataclass(frozen=True)
class Peer:
    """One library: how to find it, and per task name a builder of the function to call.

    A builder is called once per task with all sets of arguments that will be used, so that it can
    import or allocate outside what is timed; it returns what is called with each set.
    """

    name: str
    package: str
    module: str
    builders: Mapping[str, Callable[[Sets], Function]]
    cpu: bool = False

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot take part here, or None."""
        if device.type == "cpu" and not self.cpu:
            return "needs a GPU"
        try:
            importlib.import_module(self.module)
        except Exception as error:  # a broken install fails in any way it likes
            first = (str(error).strip() or type(error).__name__).splitlines()[0]
            return f"cannot be imported: {first}"
        return None

    def version(self) -> str:
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "unknown"


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


def _compiled(function: Function) -> Function:
    # Every problem gets code of its own, as a model with one shape would: past a few shapes Dynamo
    # would otherwise make the sizes symbolic, and then stop compiling altogether.
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, dynamic=False)


def _inductor_forward(sets: Sets) -> Function:
    compiled = _compiled(plain_forward)

    def run(x: Tensor, weight: Tensor, eps: float, *_: object) -> Any:
        return compiled(x, weight, eps)

    return run


def _inductor_add(sets: Sets) -> Function:
    compiled = _compiled(plain_add)

    def run(x: Tensor, residual: Tensor, weight: Tensor, eps: float, *_: object) -> Any:
        return compiled(x, residual, weight, eps)

    return run


def _inductor_backward(sets: Sets) -> Function:
    compiled = _compiled(plain_backward)

    def run(dy: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
        return compiled(dy, x, weight, rest[-1])

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
    backward = REGISTRY["rms_norm_backward"].run

    def run(*args: Any) -> Any:
        return backward(*args[:-1])  # all but rstd

    return run


def _peer(
    name: str, package: str, module: str, functions: Sequence[Any], *, cpu: bool = False
) -> Peer:
    return Peer(name, package, module, dict(zip(OPS, functions, strict=False)), cpu)


GRISTMILL = _peer(
    "gristmill", "gristmill", "gristmill", (_our_forward, _our_add, _our_backward), cpu=True
)
PEERS = {
    peer.name: peer
    for peer in (
        _peer("eager", "torch", "torch", (_eager_forward, _eager_add, _eager_backward), cpu=True),
        _peer(
            "inductor",
            "torch",
            "torch._inductor",
            (_inductor_forward, _inductor_add, _inductor_backward),
            cpu=True,
        ),
        _peer(
            "quack",
            "quack-kernels",
            "quack.rmsnorm",
            (_quack_forward, _quack_add, _quack_backward),
        ),
        _peer(
            "liger",
            "liger-kernel",
            "liger_kernel.ops.rms_norm",
            (_liger_forward, _liger_add, _liger_backward),
        ),
        _peer(
            "flashinfer",
            "flashinfer-python",
            "flashinfer.norm",
            (_flashinfer_forward, _flashinfer_add),
        ),
    )
}


def choose(names: Sequence[str], device: torch.device) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can take part, and for each of the others the reason.

    No names means all. `none` means none, for a quick look at gristmill alone.
    """
    if list(names) == ["none"]:
        return [], {}
    wanted = [PEERS[known("peer", name, PEERS)] for name in names] or list(PEERS.values())
    reasons = {peer.name: peer.missing(device) for peer in wanted}
    here = [peer for peer in wanted if reasons[peer.name] is None]
    return here, {name: reason for name, reason in reasons.items() if reason is not None}
