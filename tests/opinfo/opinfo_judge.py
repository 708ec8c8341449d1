"""Runs a call by every variant that takes it, and holds it against torch in fp64.

- Where torch has a NaN in fp64 there must be one, where it has an infinity the same one. What does
  not fit the result's dtype is an infinity.
- Elsewhere errors are counted in roundings, as in the conformance tests, and limited as there: by
  twice those of the reference, whose own are limited, too.
- Of extreme values a result is judged where torch's own, in the sample's dtype and on the same
  device, is as exact, and where its sums cannot overflow on the way: how far they get depends on
  the order. Nor in rows that leave the accumulator's range on the way (`Call.reach`), whose limits
  are documented: torch may go another way. In gradients infinities and NaN are alike: it depends on
  how a formula is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import cross_entropy_exact
import torch
from conformance_helpers import composed
from conformance_truth_core import Truth, accumulator_of, unit
from opinfo_call import Call, listed
from opinfo_layouts import GRADIENTS, LAYOUTS, LAZY, SHARED, VALUES, Layout, dense

import gristmill as gm
from gristmill.errors import GristmillError, VariantUnavailable
from gristmill.ops.registry import OPS

Tensor = torch.Tensor

# As in the fuzz judge: of the reference, of ordinary numbers and with extreme ones among them; and
# how small its error counts at least.
REFERENCE, REFERENCE_WITH_EXTREMES = 4.0, 6.0
# What a power of two is off by, in half units of the last place: see there.
POWER = 4.0
FACTOR, LEAST, LEAST_WITH_EXTREMES = 2.0, 1.0, 4.0


@dataclass(frozen=True)
class Given:
    """The arguments of one call, dense and on the CPU, and what torch makes of them in fp64."""

    tensors: tuple[Any, ...]
    dys: list[Tensor]
    truths: list[Truth]
    results: int
    lost: list[Tensor | None]
    beyond: list[Tensor | None]


def mismatches(
    call: Call, lay: str, device: str, variants: Callable[[str], Sequence[str]] | None = None
) -> Iterator[str]:
    """What is wrong with a call in one layout or with one kind of values."""
    given = _given(call, lay, device)
    for at in _places(call, lay):
        own = given if lay not in SHARED else _given(call, lay, device, at)
        words = f"{call.sample} {str(call.dtype).removeprefix('torch.')} {lay}"
        words += "" if at is None else f" of {[*call.names, 'dy'][at]}"
        limits = [math.inf] * len(own.truths)
        for name in ("reference", *(variants or named)(call.ops)):
            try:
                found = _run(call, own, lay, at, name, device)
            except (AssertionError, GristmillError, RuntimeError, TypeError) as error:
                if type(error) is RuntimeError and _torch_raises(call, own, lay, at, device):
                    continue
                lines = str(error).strip().splitlines() or [""]
                yield f"{words} by {name}: {type(error).__name__}: {lines[0][:300]}"
                continue
            errors = _errors(call, own, found, name, device)
            if name == "reference":
                extreme = lay in (*VALUES, *GRADIENTS)
                # Sums of equal numbers are rounded the same way again and again.
                least = LEAST_WITH_EXTREMES if extreme or lay in SHARED else LEAST
                most = REFERENCE_WITH_EXTREMES if extreme else REFERENCE
                limits = [FACTOR * max(least, min(one or 0.0, most)) for one in errors]
                bounds = [most] * len(limits)
            else:
                bounds = limits
            for place, (error, bound) in enumerate(zip(errors, bounds, strict=True)):
                if error is not None and not error <= bound:
                    kind = "result" if place < own.results else "gradient"
                    which = place if kind == "result" else place - own.results
                    yield f"{words} by {name}: {kind} {which} is off by {error:.3g} > {bound:.3g}"


def judged(call: Call, lay: str, device: str) -> list[bool]:
    """Of each result, then of each gradient: whether any element of it is judged."""
    given = _given(call, lay, device)
    found = []
    for truth, lost, beyond in zip(given.truths, given.lost, given.beyond, strict=True):
        known = (truth.low == truth.high) | truth.low.isnan()
        known |= truth.low.isfinite() & truth.high.isfinite()
        for apart in (lost, beyond):
            known = known if apart is None else known & ~apart
        found.append(bool(known.any()))
    return found


def named(ops: tuple[str, ...]) -> list[str]:
    """All variants of some ops, but the reference."""
    names = [variant.name for op in ops for variant in OPS[op].variants]
    return [name for name in dict.fromkeys(names) if name != "reference"]


def _places(call: Call, lay: str) -> list[int | None]:
    """Which tensor lies so, None for all of them, and one beyond them for what comes back."""
    one_by_one = [at for at, one in enumerate(call.tensors) if one is not None]
    one_by_one += [len(call.tensors)] if call.grads else []
    if lay == "zero tensor" or lay in GRADIENTS:
        return [len(call.tensors)] if call.grads else []
    return [None, *one_by_one] if lay in LAZY or lay in SHARED else [None]


def _layout(call: Call, lay: str, at: int | None, place: int) -> Layout:
    if lay not in LAYOUTS or at not in (None, place):
        return dense
    return LAYOUTS[lay]


def _lay(layout: Layout, values: Any) -> Any:
    """None stays; bools have no sign."""
    if values is None:
        return None
    return (
        dense(values) if values.dtype == torch.bool and layout in LAZY.values() else layout(values)
    )


def _given(call: Call, lay: str, device: str, at: int | None = None) -> Given:
    """With the numbers that there are once they lie as they are told to."""
    tensors = list(call.tensors)
    if lay in VALUES:
        tensors[0] = VALUES[lay](tensors[0])
    if lay in SHARED:
        for place, one in enumerate(tensors):
            if one is not None:
                tensors[place] = _lay(_layout(call, lay, at, place), one)
    tensors = [_plain(one) for one in tensors]
    leaves = [
        one.double().requires_grad_(place in call.grads)
        if one is not None and one.is_floating_point()
        else one
        for place, one in enumerate(tensors)
    ]
    outs = listed(call.torchs(*leaves))
    own = accumulator_of(call.dtype) if call.wide else call.dtype
    dys = []
    if call.grads:
        generator = torch.Generator().manual_seed(7)
        for out in outs:
            if out.requires_grad:
                dy = torch.randn(out.shape, generator=generator).to(own)
                if lay in GRADIENTS:
                    dy = GRADIENTS[lay](dy) if dy.dim() else GRADIENTS[lay](dy.view(1)).view(())
                    dy = dy / 8 ** len(dys)  # what comes back through two results is added up
                elif lay in SHARED:
                    dy = _layout(call, lay, at, len(tensors))(dy)
                dys.append(_plain(dy))
    grads = _gradients(call, outs, leaves, [dy.double() for dy in dys])
    values = [one.detach() for one in (*outs, *grads)]
    with mock.patch.object(cross_entropy_exact, "POWER", POWER):
        terms = call.terms(tuple(tensors), dys, values[: len(outs)])
    truths = [_of_torch(value, truth, call) for value, truth in zip(values, terms, strict=True)]
    lost: list[Tensor | None] = [None] * len(truths)
    beyond = list(lost)
    if lay in VALUES or lay in GRADIENTS:
        lost = _lost(call, tensors, dys, truths, device)
        if call.reach is not None:
            reached = call.reach(tuple(tensors), dys, values[: len(outs)])
            beyond = [_beyond(*pair) for pair in zip(truths, reached, strict=True)]
    return Given(tuple(tensors), dys, truths, len(outs), lost, beyond)


def _beyond(truth: Truth, reached: Tensor) -> Tensor:
    """With room for another order of sums; what is infinite itself has a result to be judged."""
    over = (reached > torch.finfo(truth.accumulator).max / 4) & reached.isfinite()
    return over.expand(truth.low.shape)


def _lost(
    call: Call, tensors: Sequence[Any], dys: list[Tensor], truths: list[Truth], device: str
) -> list[Tensor | None]:
    """Where torch itself, in the sample's dtype, is not what it is in fp64."""
    leaves = [
        one if one is None else one.to(device).requires_grad_(place in call.grads)
        for place, one in enumerate(tensors)
    ]
    outs = listed(call.torchs(*leaves))
    made = iter(dys)
    own = [next(made).to(device).to(out.dtype) for out in outs if out.requires_grad]
    grads = _gradients(call, outs, leaves, own)
    found: list[Tensor | None] = []
    for place, (truth, torchs) in enumerate(zip(truths, (*outs, *grads), strict=True)):
        lost = shares(truth, torchs.detach().cpu(), alike=False) > REFERENCE_WITH_EXTREMES
        if call.sums or (place >= len(outs) and not call.edges):
            lost |= truth.terms.abs() > torch.finfo(truth.accumulator).max / 4
        found.append(lost)
    return found


def _plain(value: Any) -> Any:
    """Nothing lazy, nothing shared."""
    if value is None:
        return None
    if value._is_zerotensor():
        return torch.zeros(value.shape, dtype=value.dtype)
    return dense(value.resolve_neg().resolve_conj())


def _gradients(call: Call, outs: list[Tensor], leaves: Sequence[Any], dys: list[Any]) -> list[Any]:
    wanted = [leaves[at] for at in call.grads]
    if not wanted:
        return []
    made = [one for one in outs if one.requires_grad]
    grads = torch.autograd.grad(made, wanted, dys, allow_unused=True)
    return [
        torch.zeros_like(leaf) if grad is None else grad
        for grad, leaf in zip(grads, wanted, strict=True)
    ]


def _of_torch(value: Tensor, truth: Truth, call: Call) -> Truth:
    """What torch says, as sure as rounding on the way leaves it, and the sizes of its terms."""
    assert value.shape == truth.terms.shape, (value.shape, truth.terms.shape)
    low = high = value.double()
    if call.ops[0].startswith(("linear_cross_entropy", "fused_add")):
        known = truth.low.isfinite() & truth.high.isfinite() & value.isfinite()
        low = torch.where(known, torch.minimum(low, truth.low), low)
        high = torch.where(known, torch.maximum(high, truth.high), high)
        # Logits that are rounded to a dtype may not fit it.
        over = value.isfinite() & ~(truth.low.isfinite() & truth.high.isfinite())
        low, high = torch.where(over, truth.low, low), torch.where(over, truth.high, high)
    accumulator = truth.accumulator
    if accumulator == torch.float64 and call.dtype != torch.float64:
        accumulator = torch.float32
    return replace(truth, low=low, high=high, accumulator=accumulator, composed_range=None)


# --- running


class _Handed(torch.autograd.Function):
    """A tensor as it lies, which is no leaf: what may be overwritten."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, box: list[Tensor]) -> Tensor:
        return box[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        return gradient.clone(), None


@contextmanager
def _forced(ops: Sequence[str], name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for op in ops:
            if any(variant.name == name for variant in OPS[op].variants):
                stack.enter_context(gm.use(op, name))
        yield


def _run(
    call: Call, given: Given, lay: str, at: int | None, name: str, device: str
) -> list[Tensor | None]:
    """Results and gradients by one variant; None where it does not take the call."""
    tensors = []
    for place, one in enumerate(given.tensors):
        moved = None if one is None else one.to(device)
        tensors.append(_lay(_layout(call, lay, at, place), moved))
    leaves: list[Any] = list(tensors)
    for place in call.grads:
        leaves[place] = leaves[place].detach()
        if place in call.written:
            leaves[place] = given.tensors[place].to(device)
        leaves[place].requires_grad_()
    handed = [
        _Handed.apply(leaf, [own]) if leaf is not own and place in call.written else leaf
        for place, (leaf, own) in enumerate(zip(leaves, tensors, strict=True))
    ]
    shared = [place for place in call.written if _shares(tensors[place])]
    nothing: list[Tensor | None] = [None] * len(given.truths)
    try:
        with _forced(call.ops, name), torch.set_grad_enabled(bool(call.grads)):
            outs = listed(call.ours(*handed))
    except VariantUnavailable:
        return nothing
    except GristmillError:
        if shared:
            return nothing
        raise
    assert not shared, f"{call.names[shared[0]]} is written, and shares memory with itself"
    dys = _returned(call, given, lay, at, outs, device)
    found: list[Tensor | None] = [_checked(out, call, place) for place, out in enumerate(outs)]
    if call.grads:
        try:
            with _forced(call.ops, name):
                grads = _gradients(call, outs, leaves, dys)
        except VariantUnavailable:
            grads = [None] * len(call.grads)
        for leaf, grad in zip((leaves[at] for at in call.grads), grads, strict=True):
            assert grad is None or (grad.shape, grad.dtype) == (leaf.shape, leaf.dtype)
        found += grads
    for place, (before, after) in enumerate(zip(given.tensors, tensors, strict=True)):
        if before is not None and place not in call.written:
            kept = _same(before, after.detach().resolve_neg().cpu())
            assert kept, f"{call.names[place]} was written to"
    return found


def _torch_raises(call: Call, given: Given, lay: str, at: int | None, device: str) -> bool:
    """Whether torch cannot take tensors that lie so: its gelu_backward on a CPU some overlaps."""
    torchs = replace(call, ours=call.torchs, written=(), wide=False)
    try:
        _run(torchs, given, lay, at, "reference", device)
    except RuntimeError:
        return True
    except AssertionError:  # another dtype
        return False
    return False


def _checked(out: Tensor, call: Call, place: int) -> Tensor:
    own = accumulator_of(call.dtype) if call.wide else call.dtype
    assert not out.is_floating_point() or out.dtype == own, f"result {place} has {out.dtype}"
    return out.detach()


def _returned(
    call: Call, given: Given, lay: str, at: int | None, outs: list[Tensor], device: str
) -> list[Tensor]:
    layout = _layout(call, lay, at, len(given.tensors))
    if lay == "zero tensor":
        layout = GRADIENTS[lay]
    made = [one for one in outs if one.requires_grad]
    assert len(made) == len(given.dys)
    return [layout(dy.to(device)) for dy in given.dys]


def _shares(tensor: Tensor) -> bool:
    """Whether two elements lie in one place."""
    where = torch.zeros(tensor.shape, dtype=torch.long)
    for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        steps = torch.arange(size) * stride
        where += steps.view(-1, *[1] * (tensor.dim() - dim - 1))
    return where.numel() != where.unique().numel()


def _same(one: Tensor, other: Tensor) -> bool:
    """Every bit, NaNs too."""
    if not one.is_floating_point():
        return torch.equal(one, other)
    integers: dict[int, Any] = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    kind = integers[one.element_size()]
    return torch.equal(one.contiguous().view(kind), other.contiguous().view(kind))


# --- judging


def _errors(
    call: Call, given: Given, found: list[Tensor | None], name: str, device: str
) -> list[float | None]:
    example = torch.empty(0, dtype=call.dtype)
    args = (example, example, None, None)
    back = "rms_norm_backward" if "rms_norm" in call.ops[0] else call.ops[0]
    back = "layer_norm_backward" if "layer_norm" in call.ops[0] else back
    errors: list[float | None] = []
    for place, (truth, actual) in enumerate(zip(given.truths, found, strict=True)):
        if actual is None:
            errors.append(None)
            continue
        op = call.ops[0] if place < given.results else back
        ways = composed(OPS[op], name, args, device)
        off = shares(truth, actual.cpu(), rounding=ways, alike=place >= given.results)
        beyond = None if name == "reference" and call.scaled else given.beyond[place]
        for apart in (given.lost[place], beyond):
            off = off if apart is None else off.masked_fill(apart, 0.0)
        errors.append(float(off.detach().max()) if off.numel() else 0.0)
    return errors


def shares(
    truth: Truth, actual: Tensor, *, rounding: bool | torch.dtype = False, alike: bool
) -> Tensor:
    """Errors in roundings; infinite where something is no number that should be one, or is one.

    `alike`: infinities and NaN are.
    """
    assert actual.shape == truth.low.shape, (actual.shape, truth.low.shape)
    low, high, value = truth.low, truth.high, actual.double()
    if not actual.dtype.is_floating_point:
        return torch.where(value == low, 0.0, math.inf)
    each, terms = truth.accumulator, truth.terms
    all_terms = terms if truth.composed_terms is None else truth.composed_terms
    if rounding:
        each = rounding if isinstance(rounding, torch.dtype) else actual.dtype
        terms = all_terms
    info = torch.finfo(actual.dtype)
    wrong = low.isnan() & ~value.isnan()
    wrong = wrong | (low.isinf() & (low == high) & (value != low))
    if alike:
        wrong = wrong & value.isfinite()
    judged = low.isfinite() & high.isfinite()
    if alike:  # nor fits the dtype
        judged = judged & (actual.isfinite() | (low.abs() <= info.max))
    top = 2.0 ** math.ceil(math.log2(info.max)) if actual.dtype != torch.float64 else info.max
    low, high, value = (one.clamp(-top, top) for one in (low, high, value))
    error = (low - value).clamp(min=0) + (value - high).clamp(min=0)
    size = torch.maximum(low.abs(), high.abs()).clamp(min=info.tiny)
    terms, all_terms = (one.abs().nan_to_num(0.0, math.inf) for one in (terms, all_terms))
    allowed = unit(actual.dtype) * size + unit(each) * terms
    allowed = allowed + torch.finfo(accumulator_of(truth.accumulator)).tiny
    # Torch rounds in fp64: of what cancels, all of that is left.
    allowed = allowed + unit(torch.float64) * all_terms
    share = torch.where(judged, (error / allowed).nan_to_num(math.inf), 0.0)
    return torch.where(wrong, math.inf, share)
