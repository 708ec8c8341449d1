"""Whether every variant that takes a call answers it as the documentation says.

- Where fp64 has a NaN there must be one, where it has an infinity the same; elsewhere the result
  is within the limits that conformance tests have, none wider.
- What does not fit the result's dtype is an infinity.
- Sums that overflow the accumulator on the way are not judged: how far they get depends on the
  order in which a kernel adds up.
- What is below the accumulator's smallest normal number on the way, 1e-38 for fp32, may be lost.
  Times infinity it is an infinity then, or NaN.
- NaN, infinities and other specials in some rows leave every bit of the other rows as it is
  without them.
- Nothing is written but results: not a bit of an argument, nor of what lies between its rows.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import cross_entropy_exact
import torch
from conformance_helpers import (
    composed,
    copied,
    memory,
    rows_of,
    run_by,
    same_bits,
    supporting,
    written,
)
from conformance_truth import results_of, truth_of
from conformance_truth_core import Truth, unit
from conformance_truth_topk_router import doubtful, lost_slopes
from fuzz_families import FAMILIES
from fuzz_plan import Arguments, Maker, Plan
from fuzz_values import Drawn

from gristmill.ops import nvfp4_common
from gristmill.ops.nvfp4_moe import slots
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.select.variant import Variant

# What a power of two is off by, in half units of the last place: the hardware's own is good to two
# units (`exp2_fast` in machine.cuh). The cases of the conformance tests meet no such power.
POWER = 4.0
# From the smallest of a row to its largest, in sizes of the mean: normal numbers stay below.
OUTLIER = 12.0
# What a variant may be off by, in errors of the reference, as in the conformance tests; and how
# small that error counts at least: rows with specials among ordinary numbers are hard on all.
FACTOR, LEAST, LEAST_WITH_SPECIALS = 2.0, 1.0, 4.0


@dataclass
class Outcome:
    """What came of one call: who ran it, and what was wrong, in words."""

    variants: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)


def judged(given: Plan, device: str) -> Outcome:
    """Run a call by every variant that takes it."""
    op, outcome = OPS[given.op], Outcome()
    args = FAMILIES[given.op].make(Maker(given, device))
    with mock.patch.object(cross_entropy_exact, "POWER", POWER):
        truths = truth_of(given.op, args)
    if given.op == "cross_entropy_shard":
        truths = [_of_largest(truths[0], args)]
    if given.op == "topk_router":
        truths = _certain_rows(args, truths)
    limits = [math.inf] * len(truths)
    family = FAMILIES[given.op]
    least = LEAST_WITH_SPECIALS if given.has_specials else max(LEAST, family.least)
    reference = family.reference[given.has_specials]
    # One NaN is enough for torch's own kernels to make more of them in the same row, or of sums
    # over all rows; that other rows stay as they are is asked for below.
    spoiled = not all(bool(one.low.isfinite().all()) for one in truths)
    plain = _without_specials(given, device, args)
    # The reference first: the others are measured by it.
    for variant in sorted(supporting(op, args), key=lambda one: one.name != "reference"):
        outcome.variants.append(variant.name)
        try:
            own, results = _run(op, variant.name, given, args)
        except Exception as error:
            outcome.mismatches.append(f"{variant.name}: {type(error).__name__}: {error}")
            continue
        outcome.mismatches += _checked(op, variant, args, own, results)
        rounding = composed(op, variant.name, args)
        if not (rounding and _jumps(op, args)):
            own_ways = Ways(
                rounding=rounding,
                lost=family.lost,
                # With a label smoothing of 1 the target has no share of an infinite distance.
                alike=bool(rounding)
                or family.alike
                or given.words.get("smoothing") == 1.0
                or _infinite_gradient(op, args),
                spoiled=spoiled and variant.name.startswith("library"),
                relu=variant.name == "library_fused",
                way=_on_the_way(given, args),
                repeated=_repeated(given, args) if variant.name == "library" else 0,
            )
            errors = _errors(given, args, truths, results, own_ways)
            if variant.name == "reference":
                limits = [FACTOR * max(least, min(one, reference)) for one in errors]
                bounds = [reference] * len(limits)
            else:
                bounds = limits
            for place, (error, bound) in enumerate(zip(errors, bounds, strict=True)):
                if not error <= bound:
                    words = f"result {place} is off by {error:.2f} roundings > {bound:.2f}"
                    outcome.mismatches.append(f"{variant.name}: {words}")
        if plain is not None:
            outcome.mismatches += _alone(op, variant, given, args, results, plain)
    return outcome


@dataclass(frozen=True)
class Ways:
    """What a variant may do in a way of its own.

    `rounding`: see `composed`. `lost`: see `Family`. `alike`: NaN and infinities, because sums of
    infinities depend on the order; or a tensor that says where. `spoiled`: there may be NaN where
    others have numbers. `relu`: cuBLASLt's relu makes 0 of NaN. `way`: by how much a number on the
    way to the first result is larger than its terms. `repeated`: so many equal rows are added up,
    one after another.
    """

    rounding: bool | torch.dtype = False
    lost: float = 0.0
    alike: bool | torch.Tensor = False
    spoiled: bool = False
    relu: bool = False
    way: float = 1.0
    repeated: int = 0


def error_of(truth: Truth, actual: torch.Tensor, ways: Ways) -> float:
    """The largest error in roundings; infinite where something is no number that should be one."""
    rounding = ways.rounding
    if actual.numel() == 0:
        return 0.0
    if not actual.dtype.is_floating_point:
        return 0.0 if torch.equal(actual.double(), truth.low) else math.inf
    low, high = truth.low, truth.high
    if rounding and truth.composed_range is not None:
        low, high = truth.composed_range
    each, terms = truth.accumulator, truth.terms
    if rounding:
        each = rounding if isinstance(rounding, torch.dtype) else actual.dtype
        terms = terms if truth.composed_terms is None else truth.composed_terms
    value, info = actual.double(), torch.finfo(actual.dtype)
    wrong = (low.isnan() | high.isnan()) & ~value.isnan()
    wrong = wrong | (low.isinf() & (low == high) & (value != low))
    if ways.alike is not False:
        wrong = wrong & (value.isfinite() | ~torch.as_tensor(ways.alike, device=value.device))
    if ways.relu:
        wrong = wrong & (value != 0)
    overflows = truth.terms > torch.finfo(truth.accumulator).max / 4 / ways.way
    judged = low.isfinite() & high.isfinite() & ~overflows
    if ways.spoiled:
        judged = judged & ~value.isnan()
    top = 2.0 ** math.ceil(math.log2(info.max)) if actual.dtype != torch.float64 else info.max
    low, high, value = (one.clamp(-top, top) for one in (low, high, value))
    error = (low - value).clamp(min=0) + (value - high).clamp(min=0)
    size = torch.maximum(low.abs(), high.abs()).clamp(min=info.tiny)
    allowed = unit(actual.dtype) * size + unit(each) * torch.where(terms.isnan(), 0.0, terms)
    allowed = allowed + max(ways.lost, torch.finfo(truth.accumulator).tiny)
    share = error / allowed
    if truth.exact:
        share = torch.where(error > 0, math.inf, error)  # NaN stays
    share = torch.where(judged, torch.where(share.isnan(), math.inf, share), 0.0)
    return float(torch.where(wrong, math.inf, share).max())


def _run(
    op: Op, variant: str, given: Plan, args: Arguments
) -> tuple[Arguments, list[torch.Tensor]]:
    """By one variant, on copies of the arguments: these, and the results."""
    own = copied(args)
    with ExitStack() as stack:
        if "piece" in given.words:
            patched = mock.patch.object(nvfp4_common, "PIECE_BYTES", given.piece)
            stack.enter_context(patched)
            stack.enter_context(mock.patch.object(slots, "NARROW", 16))
        return own, results_of(op.name, own, run_by(op, variant, own))


def _errors(
    given: Plan,
    args: Arguments,
    truths: list[Truth],
    results: list[torch.Tensor],
    ways: Ways,
) -> list[float]:
    if given.op == "topk_router":
        sure = ~doubtful(*args)
        results = [one[sure] for one in results]
    if given.op == "cross_entropy_shard":
        results = [_about_largest(truths[0], results[0])]
    errors = []
    for place, (truth, result) in enumerate(zip(truths, results, strict=True)):
        if ways.repeated and place not in FAMILIES[given.op].results:
            truth = replace(truth, terms=truth.terms * max(1.0, ways.repeated / 4))
        own = ways if place == 0 else replace(ways, way=1.0)
        errors.append(error_of(truth, result, own))
    return errors


def _on_the_way(given: Plan, args: Arguments) -> float:
    """How much larger than the terms of a loss something may be that they are made of.

    Distances are added up before the share of each class is taken of the sum, and rows before they
    are counted; of a z_loss lse is squared first; a small weight is multiplied by a distance that
    may be infinite. Near the largest number these overflow, as in torch's own.
    """
    words = given.words
    if not given.op.startswith(("cross_entropy", "linear_cross_entropy")) or "shard" in given.op:
        return 1.0
    if given.op.endswith("_backward"):
        return 1.0
    logits = args[0]
    classes = words["classes"] if "classes" in words else logits.shape[-1]
    rows = max(1, math.prod(logits.shape[:-1])) if words["reduction"] != "none" else 1
    smoothing, z_loss = words["smoothing"], words["z_loss"]
    if given.op.startswith("cross_entropy") and args[2] is not None and args[2].numel():
        rows *= max(1.0, 1 / max(float(args[2].double().abs().min()), 1e-30))
    return rows * max(classes / smoothing if smoothing else 1.0, 1 / z_loss if z_loss else 1.0)


def _repeated(given: Plan, args: Arguments) -> int:
    """So many rows of a gradient are the same: expanded ones, as `sum` hands them back.

    torch's own kernels for a CPU add up rows one after another. Of equal ones all roundings between
    two powers of two go the same way: of K rows the sum is off by up to K / 2 half units, and not
    by a walk of them, sqrt(K) / 3. Limits are at least 2 of what is counted here, K / 4.
    """
    dy = given.words.get("dy")
    if not isinstance(dy, Drawn) or dy.layout != "expanded":
        return 0
    return math.prod(args[0].shape[:-1])


def _certain_rows(args: Arguments, truths: list[Truth]) -> list[Truth]:
    """Without the rows in which biased scores are so close that fp32 decides on their order."""
    sure = ~doubtful(*args)
    parts = ("low", "high", "terms")
    return [replace(one, **{name: getattr(one, name)[sure] for name in parts}) for one in truths]


def _infinite_gradient(op: Op, args: Arguments) -> bool | torch.Tensor:
    """Of a loss: a share of zero makes NaN of it, or it is left out where there is no smoothing.

    Of a router's weights: in rows where it meets a score that may be lost.
    """
    if op.name == "topk_router_backward":
        return lost_slopes(*args).unsqueeze(-1)
    return op.name == "cross_entropy_backward" and bool(args[0].isinf().any())


def _of_largest(truth: Truth, args: Arguments) -> Truth:
    """What a shard may be off by, once its sum of powers is told from the largest logit itself.

    The size of the largest has no part in that then, but for what takes the sum from one number to
    the other. The sum of all logits is one of distances from some of them, for it is a distance
    that smoothing makes of it: in a row of small numbers beside a huge one those are what rounds.
    """
    logits, *_, softcap, sums = args
    terms = truth.terms.clone()
    total, largest = truth.low[..., 1], truth.low[..., 0].abs()
    terms[..., 1] -= torch.where(largest.isfinite(), total * (largest - POWER).clamp(min=0), 0.0)
    if sums:
        v = logits.double() if softcap is None else softcap * torch.tanh(logits.double() / softcap)
        distances = (v.amax(-1) - v.amin(-1)) * v.shape[-1]
        outlier = distances > OUTLIER * terms[..., 3]
        terms[..., 3] = torch.where(outlier, distances, terms[..., 3])
    return replace(truth, terms=terms)


def _about_largest(truth: Truth, numbers: torch.Tensor) -> torch.Tensor:
    """A shard with its sum of powers told from the true largest logit.

    The kernels take exponents to base 2. The largest logit that they answer went there and back,
    and is off by up to two roundings, for 6e7 by 4; the sum is that of distances from the number
    answered, so that it is off by e^4, and both together give the logarithm of all that is right.
    """
    largest = truth.low[..., 0]
    moved = numbers.double()[..., 0] - largest
    told = numbers.double()
    told[..., 1] *= torch.where(moved.isfinite(), moved, 0.0).exp()
    return told.to(numbers.dtype)


def _jumps(op: Op, args: Arguments) -> bool:
    """Whether the gradient jumps at a limit, which products rounded on the way may cross."""
    return op.name in ("moe_backward", "nvfp4_moe_backward") and args[-4] is not None


def _checked(
    op: Op, variant: Variant, args: Arguments, own: Arguments, results: list[torch.Tensor]
) -> list[str]:
    """Strides and dtypes as promised; arguments as they were."""
    found = []
    promised = op.outputs(*args)
    if promised is not None:
        wanted = [promised] if isinstance(promised, torch.Tensor) else list(promised)
        for place, (want, result) in enumerate(zip(wanted, results, strict=False)):
            got = (result.shape, result.stride(), result.dtype)
            if got != (want.shape, want.stride(), want.dtype):
                found.append(f"{variant.name}: result {place} has {got}")
    for place, (before, after) in enumerate(zip(args, own, strict=True)):
        kept = isinstance(before, torch.Tensor) and place not in written(op)
        if kept and not torch.equal(memory(before), memory(after)):
            found.append(f"{variant.name}: argument {place} was written to")
    return found


def _without_specials(given: Plan, device: str, args: Arguments) -> Arguments | None:
    """The same call with ordinary numbers; None where rows have no other, or all are the same."""
    family = FAMILIES[given.op]
    lead = rows_of(OPS[given.op], args).shape[:-1]
    if not lead.numel() or lead.numel() == 1:
        return None
    plain = family.make(Maker(given, device, ordinary=True))
    changed = False
    for place, (one, other) in enumerate(zip(args, plain, strict=True)):
        if not isinstance(one, torch.Tensor) or same_bits(one, other):
            continue
        if place not in family.rows or one.shape[: len(lead)] != lead:
            return None
        changed = True
    return plain if changed else None


def _alone(
    op: Op,
    variant: Variant,
    given: Plan,
    args: Arguments,
    results: list[torch.Tensor],
    plain: Arguments,
) -> list[str]:
    """Rows that are as they were give what they gave."""
    if variant.indeterminate(op.problem(*args)) is not None:
        return []
    family = FAMILIES[given.op]
    lead = rows_of(op, args).shape[:-1]
    same = torch.ones(lead, dtype=torch.bool, device=args[family.rows[0]].device)
    for place in family.rows:
        one, other = args[place], plain[place]
        if isinstance(one, torch.Tensor) and one.shape[: len(lead)] == lead:
            same &= _equal_bits(one, other).view(*lead, -1).all(-1)
    _, before = _run(op, variant.name, given, plain)
    found = []
    for place in family.results:
        one, other = results[place], before[place]
        if one.shape[: len(lead)] != lead or one.numel() == 0:
            continue
        if not bool((_equal_bits(one, other).view(*lead, -1).all(-1) | ~same).all()):
            words = "has rows that change with what stands in others"
            found.append(f"{variant.name}: result {place} {words}")
    return found


def _equal_bits(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    as_integers: Any = integers[one.element_size()]
    bits = [tensor.resolve_neg().contiguous().view(as_integers) for tensor in (one, other)]
    return bits[0] == bits[1]
