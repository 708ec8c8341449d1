"""Cross entropy over the last dim: forward, backward, and both together.

All tasks but `cross_entropy_train` are about the losses of single rows (reduction "none"), which is
what the libraries' kernels give. `cross_entropy_train` is the mean loss and its gradient through
each library's own function and autograd, as a training step calls them.

Torch's own op keeps log-probabilities in the logits' dtype: in 16 bits its losses are rounded to
that, and its gradients are off by some percent (`COARSE`). Liger's writes the gradient over
the logits and waits for the device in between: neither can be in a graph, so it takes no part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gristmill.bench.peers.peer import Builders, Function, Sets, ahead, compiled
from gristmill.ops.registry import OPS

TASKS = ("cross_entropy", "cross_entropy_bwd", "cross_entropy_fwd_bwd", "cross_entropy_train")
COARSE = {"eager": frozenset(TASKS)}
# Positions in the arguments of the backward op.
DLOSS, LOGITS, TARGET, STATS = 0, 2, 3, 4


def plain_forward(logits: Tensor, target: Tensor) -> Tensor:
    """The loss of each row as one would write it, in fp32."""
    values = logits.float()
    there = values.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    return torch.logsumexp(values, -1) - there


def plain_mean(logits: Tensor, target: Tensor) -> Tensor:
    return plain_forward(logits, target).mean()


def plain_backward(dloss: Tensor, logits: Tensor, target: Tensor, lse: Tensor) -> Tensor:
    share = torch.exp(logits.float() - lse.unsqueeze(-1))
    columns = torch.arange(logits.shape[-1], device=logits.device)
    there = columns == target.unsqueeze(-1)
    return (torch.where(there, share - 1, share) * dloss.unsqueeze(-1)).to(logits.dtype)


def _lse(args: tuple[Any, ...]) -> Tensor:
    """What other libraries' backward passes get in the place of our stats."""
    stats: Tensor = args[STATS]
    return stats[..., 0] + stats[..., 1].log()


def _eager_rows(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits, target, reduction="none")


def _through_autograd(loss: Function, sets: Sets) -> Function:
    """(loss, gradient) by autograd; the gradient that comes in is 1 for each loss."""
    leaves = ahead(sets, 0, lambda args: args[0].detach().requires_grad_())
    ones: list[Tensor] = []  # made at the first call, which is not timed

    def run(logits: Tensor, target: Tensor, *_: object) -> Any:
        leaf = leaves[logits.data_ptr()]
        with torch.enable_grad():
            value = loss(leaf, target)
            if not ones:
                ones.append(torch.ones_like(value))
            return value.detach(), *torch.autograd.grad(value, leaf, ones)

    return run


def _eager_forward(sets: Sets) -> Function:
    def run(logits: Tensor, target: Tensor, *_: object) -> Tensor:
        return _eager_rows(logits, target)

    return run


def _eager_backward(sets: Sets) -> Function:
    # What its forward saves, and the gradient of the loss in the dtype that its loss has.
    def forward(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor]:
        logits = args[LOGITS]
        logs = torch.log_softmax(logits, -1)
        return logs, args[DLOSS].to(logits.dtype), torch.zeros((), device=logits.device).to(logits)

    kept = ahead(sets, LOGITS, forward)
    no_reduction, ignored = 0, -100

    def run(dloss: Tensor, dlse: None, logits: Tensor, target: Tensor, *_: object) -> Any:
        logs, grad, total = kept[logits.data_ptr()]
        dlogs = torch.ops.aten.nll_loss_backward(
            grad, logs, target, None, no_reduction, ignored, total
        )
        return torch.ops.aten._log_softmax_backward_data(dlogs, logs, -1, logits.dtype)

    return run


def _eager_both(sets: Sets) -> Function:
    return _through_autograd(_eager_rows, sets)


def _eager_train(sets: Sets) -> Function:
    return _through_autograd(F.cross_entropy, sets)


def _inductor_forward(sets: Sets) -> Function:
    function = compiled(plain_forward)

    def run(logits: Tensor, target: Tensor, *_: object) -> Any:
        return function(logits, target)

    return run


def _inductor_backward(sets: Sets) -> Function:
    function = compiled(plain_backward)
    lses = ahead(sets, LOGITS, _lse)

    def run(dloss: Tensor, dlse: None, logits: Tensor, target: Tensor, *_: object) -> Any:
        return function(dloss, logits, target, lses[logits.data_ptr()])

    return run


def _inductor_both(sets: Sets) -> Function:
    return _through_autograd(compiled(plain_forward), sets)


def _inductor_train(sets: Sets) -> Function:
    return _through_autograd(compiled(plain_mean), sets)


def _quack_forward(sets: Sets) -> Function:
    from quack.cross_entropy import cross_entropy_fwd

    def run(logits: Tensor, target: Tensor, *_: object) -> Any:
        return cross_entropy_fwd(logits, target, return_lse=True)[0]

    return run


def _quack_backward(sets: Sets) -> Function:
    from quack.cross_entropy import cross_entropy_bwd

    lses = ahead(sets, LOGITS, _lse)

    def run(dloss: Tensor, dlse: None, logits: Tensor, target: Tensor, *_: object) -> Any:
        return cross_entropy_bwd(logits, target, dloss, lses[logits.data_ptr()])

    return run


def _quack_two_pass(sets: Sets) -> Function:
    from quack.cross_entropy import cross_entropy_bwd, cross_entropy_fwd

    ones = torch.ones(sets[0][1].shape, device=sets[0][1].device)

    def run(logits: Tensor, target: Tensor, *_: object) -> Any:
        loss, lse = cross_entropy_fwd(logits, target, return_lse=True)
        return loss, cross_entropy_bwd(logits, target, ones, lse)

    return run


def _quack_one_pass(sets: Sets) -> Function:
    from quack.cross_entropy import cross_entropy_fwd

    def run(logits: Tensor, target: Tensor, *_: object) -> Any:
        return cross_entropy_fwd(logits, target, return_dx=True)

    return run


def _quack_train(sets: Sets) -> Function:
    from quack.cross_entropy import cross_entropy

    return _through_autograd(cross_entropy, sets)


def _our_forward(sets: Sets) -> Function:
    import gristmill

    def run(logits: Tensor, target: Tensor, *_: object) -> Any:
        return gristmill.cross_entropy(logits, target, reduction="none")

    return run


def _our_backward(sets: Sets) -> Function:
    return OPS["cross_entropy_backward"].run


def _our_both(sets: Sets) -> Function:
    one_pass = OPS["cross_entropy_one_pass"].run

    def run(*args: Any) -> Any:
        loss, _, dlogits = one_pass(*args)
        return loss, dlogits

    return run


def _our_train(sets: Sets) -> Function:
    import gristmill

    def loss(logits: Tensor, target: Tensor) -> Any:
        return gristmill.cross_entropy(logits, target, one_pass=True)

    return _through_autograd(loss, sets)


BUILDERS: Builders = {
    "gristmill": {
        "cross_entropy": _our_forward,
        "cross_entropy_bwd": _our_backward,
        "cross_entropy_fwd_bwd": _our_both,
        "cross_entropy_train": _our_train,
    },
    "eager": {
        "cross_entropy": _eager_forward,
        "cross_entropy_bwd": _eager_backward,
        "cross_entropy_fwd_bwd": _eager_both,
        "cross_entropy_train": _eager_train,
    },
    "inductor": {
        "cross_entropy": _inductor_forward,
        "cross_entropy_bwd": _inductor_backward,
        "cross_entropy_fwd_bwd": _inductor_both,
        "cross_entropy_train": _inductor_train,
    },
    "quack": {
        "cross_entropy": _quack_forward,
        "cross_entropy_bwd": _quack_backward,
        "cross_entropy_fwd_bwd": {"two_pass": _quack_two_pass, "one_pass": _quack_one_pass},
        "cross_entropy_train": _quack_train,
    },
}
