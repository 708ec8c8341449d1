"""Cross entropy over logits that are sharded on the vocabulary.

Each rank reads its own shard once and sends a few numbers for each row; what comes back is
combined in the order of the ranks, by the same operations on the same numbers, so that every rank
has the same bits. The backward pass sends nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import torch
import torch.distributed as dist

from gristmill.distributed.modes import keep_modes, modes_of
from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops import checks
from gristmill.ops.cross_entropy import (
    CROSS_ENTROPY_BACKWARD,
    CROSS_ENTROPY_SHARD,
    cross_entropy,
    semantics,
)

NAME = "vocab_parallel_cross_entropy"
# The first since torch 2.13, which warns of the other.
_ALL_GATHER = (
    "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
)


class Options(NamedTuple):
    """Where this rank's classes are among all, and what the loss is."""

    first_class: int
    classes: int
    ignore_index: int
    label_smoothing: float
    z_loss: float
    softcap: float | None
    reduction: str
    return_lse: bool


@overload
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    first_class: int | None = ...,
    classes: int | None = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float | None = ...,
    reduction: str = ...,
    return_lse: Literal[False] = ...,
) -> torch.Tensor: ...


@overload
def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = ...,
    first_class: int | None = ...,
    classes: int | None = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    z_loss: float = ...,
    softcap: float | None = ...,
    reduction: str = ...,
    return_lse: bool,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]: ...


def vocab_parallel_cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    group: dist.ProcessGroup | None = None,
    first_class: int | None = None,
    classes: int | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    r"""Cross entropy of logits whose classes are spread over the ranks of a process group.

    With m the largest logit of a row on rank r, s its sum of exp(v - m), and v_t the logit of the
    target, which one rank has:

    .. math:: M = \max_r m_r, \quad \mathrm{lse} = M + \log \sum_r s_r e^{m_r - M}, \quad
              \mathrm{loss} = \mathrm{lse} - v_t

    One all-gather of three numbers a row (four with label smoothing); none in the backward pass.
    For it, M and the sum of the :math:`s_r e^{m_r - M}` are saved separately, so that logits of any
    size are accurate.

    Args:
        logits: ``(..., V_local)``: this rank's classes, which follow those of the rank before it.
        target: class numbers among all classes, of shape ``logits.shape[:-1]``, int64 or int32;
            the same on every rank.
        group: the process group; None is the default one.
        first_class, classes: the number of the first class of this shard, and of classes in all.
            By default every rank has as many as this one. Shards of different sizes need both, on
            every rank. Shards that overlap or leave a gap give NaN on every rank.
        ignore_index, label_smoothing, z_loss, softcap, reduction, return_lse: as in
            :func:`gristmill.cross_entropy`.

    Returns:
        The loss, or ``(loss, lse)``, as :func:`gristmill.cross_entropy` of all the logits gives
        them, to about two units in the last place; the same bits on every rank. Every rank's
        logits get their own gradient. Differentiable once.
    """
    ranks, rank = _place(group)
    _check(logits, target)
    local = logits.shape[-1]
    first, total = _shard(ranks, rank, local, first_class, classes)
    options = Options(
        first, total, ignore_index, label_smoothing, z_loss, softcap, reduction, return_lse
    )
    semantics.check_options(NAME, logits, None, *options[2:7])
    checks.boolean(NAME, "return_lse", return_lse)
    if ranks == 1:
        return cross_entropy(
            logits,
            target,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            softcap=softcap,
            reduction=reduction,
            return_lse=return_lse,
        )
    loss, lse = _Function.apply(logits, target, group, options)  # type: ignore[no-untyped-call]
    return (loss, lse) if return_lse else loss


def _place(group: Any) -> tuple[int, int]:
    """How many ranks the group has, and which this one is."""
    if not dist.is_available() or not dist.is_initialized():
        raise ArgumentError(
            f"{NAME}: there is no process group; call torch.distributed.init_process_group first, "
            f"or use cross_entropy where one process has all classes"
        )
    # What new_group gives to those it leaves out is a number.
    outside = group == dist.GroupMember.NON_GROUP_MEMBER
    if group is not None and not outside and not isinstance(group, dist.ProcessGroup):
        hint = "; of a DeviceMesh, take mesh.get_group()" if hasattr(group, "get_group") else ""
        raise DtypeError(
            f"{NAME}: group must be None or a torch.distributed.ProcessGroup, got "
            f"{type(group).__name__}{hint}"
        )
    rank = -1 if outside else dist.get_rank(group)
    if rank < 0:
        raise ArgumentError(f"{NAME}: this process is not in group; only its ranks may call this")
    return dist.get_world_size(group), rank


def _check(logits: Any, target: Any) -> None:
    for name, value in (("logits", logits), ("target", target)):
        if type(value).__module__.startswith("torch.distributed.tensor"):
            raise DtypeError(
                f"{NAME}: {name} must be this rank's shard as a plain tensor, got a "
                f"{type(value).__name__}; pass {name}.to_local(), or DTensors to cross_entropy"
            )
    semantics.check_rows(NAME, logits, target)


def _shard(ranks: int, rank: int, local: int, first_class: Any, classes: Any) -> tuple[int, int]:
    """Where this rank's classes begin, and how many there are on all ranks."""
    if first_class is None and classes is None:
        return rank * local, ranks * local
    for name, value in (("first_class", first_class), ("classes", classes)):
        if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
            raise DtypeError(
                f"{NAME}: {name} must be an integer, and first_class and classes be given "
                f"together, got {type(value).__name__}"
            )
    if first_class < 0 or first_class + local > classes:
        raise ArgumentError(
            f"{NAME}: a shard of {local} classes from first_class on must lie within 0 to classes, "
            f"got first_class {first_class} of classes {classes}"
        )
    if ranks == 1 and local != classes:
        raise ArgumentError(
            f"{NAME}: the group has one rank, so its {local} classes must be all, got classes "
            f"{classes}"
        )
    return first_class, classes


class _Function(torch.autograd.Function):
    """The forward with its all-gather, and the backward without any."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        group: dist.ProcessGroup | None,
        options: Options,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        own = shard_numbers(logits, target, options)
        numbers = gather_numbers(own, logits.shape[-1], (group,), options)
        loss, lse, denominators, stats = combined(numbers, target, options)
        keep(ctx, (logits, target, stats, denominators, None), options)
        return loss, lse

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return logits_gradient(ctx, *gradients), None, None, None


def keep(ctx: Any, tensors: tuple[torch.Tensor | None, ...], options: Options) -> None:
    """For `logits_gradient`: logits, target, stats, denominators and the weights of classes."""
    ctx.save_for_backward(*tensors)
    ctx.options = options
    keep_modes(ctx)
    ctx.set_materialize_grads(False)


def logits_gradient(
    ctx: Any, dloss: torch.Tensor | None, dlse: torch.Tensor | None
) -> torch.Tensor:
    """Of this rank's logits; the denominators are those of all rows, so that nothing is sent."""
    logits, target, stats, denominators, weight = ctx.saved_tensors
    options: Options = ctx.options
    if dloss is None:
        dloss = stats.new_zeros(target.shape if options.reduction == "none" else ())
    tensors = (dloss, dlse, logits, target, stats, denominators, weight)
    more = (*options[2:7], options.first_class, options.classes)
    with modes_of(ctx):
        dlogits: torch.Tensor = CROSS_ENTROPY_BACKWARD.call_in_backward(tensors, (*tensors, *more))
    return dlogits


def shard_numbers(logits: torch.Tensor, target: torch.Tensor, options: Options) -> torch.Tensor:
    """What this rank's classes add to the loss of each row: see `cross_entropy_shard`."""
    sums = options.label_smoothing > 0
    args = (logits, target, *options[:3], options.softcap, sums)
    if torch.compiler.is_compiling():
        own: torch.Tensor = CROSS_ENTROPY_SHARD.overload(*args)
    else:
        own = CROSS_ENTROPY_SHARD.call((logits, target), args)
    return own


def gather_numbers(
    own: torch.Tensor, local: int, groups: Sequence[dist.ProcessGroup | None], options: Options
) -> torch.Tensor:
    """The numbers of all ranks, ``(ranks, rows + 1, numbers)``, in the order of their classes.

    Classes may be shared out over several groups, one within the other; the outermost comes first.
    In the last row each rank says where its shard is: shards that do not fit together could
    otherwise not be told from right ones, but for a wait for the device.
    """
    numbers = own.shape[-1]
    rows = own.numel() // numbers
    got = own.new_empty((rows + 1, numbers))
    got[:rows] = own.view(rows, numbers)
    # Exact in fp32 up to 16 million classes.
    for place, value in enumerate((options.first_class, local, options.classes)):
        got[rows, place] = value
    got[rows, 3:] = 0.0
    for group in reversed(groups):
        sent, ranks = got, dist.get_world_size(group)
        got = own.new_empty((ranks * len(sent), numbers))
        getattr(dist, _ALL_GATHER)(got, sent, group=group)
    return got.view(-1, rows + 1, numbers)


def combined(
    gathered: torch.Tensor, target: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, lse, denominators and stats from the numbers of all ranks."""
    dtype = gathered.dtype
    loss, lse, stats = by_row(gathered, target, options)
    denominators = gathered.new_empty(0)
    if options.reduction != "none":
        loss = loss.sum()
    if options.reduction == "mean":
        count = (target != options.ignore_index).sum()
        loss = loss / count
        denominators = count.to(dtype).expand(2).contiguous()
    return rounded(loss, dtype), rounded(lse, dtype), denominators, rounded(stats, dtype)


def rounded(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`tensor.to(dtype)`, but for nothing at all where it has that dtype.

    In an autograd function that torch 2.11 compiles, what `to` passes through is a result twice
    over, once as itself and once as what was kept on the way, and its gradient is lost: 0.
    """
    return tensor if tensor.dtype == dtype else tensor.to(dtype)


def by_row(
    gathered: torch.Tensor, target: torch.Tensor, options: Options
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss, lse and stats of each row, from the numbers of all ranks, added up in their order.

    In fp64, to be rounded once: these are few numbers, and what is left of a difference to the
    unsharded op is that op's own rounding.
    """
    numbers = rounded(gathered, torch.float64)
    fits = _fit(numbers[:, -1, :3], options.classes)
    largest, sums, logits, *totals = numbers[:, :-1].unbind(-1)
    base = _never_infinite(largest.amax(0))
    total = _added(sums * torch.exp(largest - base))
    log_sum = total.log()
    lse = torch.where(fits, base + log_sum, torch.nan).view(target.shape)
    stats = torch.where(fits, torch.stack((base, total), -1), torch.nan).view(*target.shape, 2)
    # One rank has the target, the others have 0. What logits have in common goes first.
    loss = (base - _added(logits)) + log_sum
    smoothing = options.label_smoothing
    if totals:
        # Each rank sums distances from its own largest logit.
        local = numbers[:, -1, 1].unsqueeze(-1)
        distances = _added(totals[0] + local * (_never_infinite(largest) - base))
        loss = (1.0 - smoothing) * loss + smoothing * (log_sum - distances / options.classes)
    ignored = target == options.ignore_index
    loss = torch.where(fits, loss, torch.nan).view(target.shape).masked_fill(ignored, 0.0)
    counted = lse.masked_fill(ignored, 0.0)
    if options.z_loss:
        loss = loss + options.z_loss * counted.square()
    return loss, lse if options.return_lse else counted, stats


def _never_infinite(largest: torch.Tensor) -> torch.Tensor:
    """The largest logit, with -infinity replaced by 0: subtracting it would give NaN."""
    return largest.masked_fill(largest == -torch.inf, 0.0)


def _fit(places: torch.Tensor, classes: int) -> torch.Tensor:
    """Whether the shards follow each other from the first class to the last: a bool tensor."""
    first, local, counted = places.unbind(-1)
    ends = first + local
    follows = (first[1:] == ends[:-1]).all() & (first[0] == 0)
    return follows & (ends[-1] == classes) & (counted == classes).all()


def _added(numbers: torch.Tensor) -> torch.Tensor:
    """The sum over ranks, one after the other: the same bits wherever it is taken."""
    total = numbers[0]
    for one in numbers[1:]:
        total = total + one
    return total
