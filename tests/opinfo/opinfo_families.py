"""Calls of our functions made of samples: one function a family, and how its results are judged.

Each takes the tensors and options that torch's function is called with, and gives a `Call`. What
our function does not offer raises there as it would for a user.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import conformance_truth_linear_cross_entropy as linear_entropy
import cross_entropy_exact as exact
import torch
import torch.nn.functional as F
from conformance_truth import truth_of
from conformance_truth_core import Truth, accumulator_of, unit
from opinfo_call import Call, Tensors, listed, without_none

import gristmill as gm
from gristmill.ops.registry import OPS

Tensor = torch.Tensor
NONE = float("-inf")


def _call(sample: str, ours: Any, torchs: Any, tensors: Tensors, names: str, **rest: Any) -> Call:
    words = tuple(names.split())
    rest["grads"] = without_none(tensors, rest.get("grads", (0,)))
    return Call(sample, ours, torchs, tensors, words, **rest)


# --- norms: `normalized_shape` is the last dim, several are flattened into one


def _norm_terms(op: str, options: tuple[Any, ...], tensors: Tensors, dys: Any, outs: Any) -> Any:
    x, *vectors = tensors
    back: tuple[Any, ...] = (dys[0], x, vectors[0], None, options[0], 0.0, vectors[0] is not None)
    if op == "layer_norm":
        back = (*back, None if vectors[1] is None else vectors[1].dtype)
    rest = (options[0], 0.0, *options[1:], None)
    grads = truth_of(f"{op}_backward", back)
    return [*truth_of(op, (x, *vectors, *rest)), *_there(grads, (x, *vectors))]


def _norm_reach(op: str, summed: bool, tensors: Tensors, dys: Any, outs: Any) -> list[Tensor]:
    """Squares are added up in fp32, of distances from the mean, which is a sum itself, and rounded;
    a weight's gradient is a sum over all rows, that of layer_norm's bias has no part of x."""
    x = tensors[0] + tensors[1] if summed else tensors[0]
    rounding, x = torch.finfo(accumulator_of(x.dtype)).eps, x.double()
    parts, total = x, x.abs().sum(-1, keepdim=True)
    if op == "layer_norm":
        parts = (x - x.mean(-1, keepdim=True)).abs() + rounding * x.abs()
    row = parts.square().sum(-1, keepdim=True)
    row = torch.maximum(row, total) if op == "layer_norm" else row
    of_inputs = [row, row] if summed else [row]
    results = [row, torch.zeros_like(row)] if summed else [row]
    vectors = tensors[len(of_inputs) :]
    of_vectors = [_most(row), row.new_zeros(())][: len(vectors)]
    return [*results, *of_inputs, *_there(of_vectors, vectors)]


def _most(rows: Tensor) -> Tensor:
    """Of finite ones, for what is a sum over all rows."""
    return rows.nan_to_num(0.0, 0.0).amax() if rows.numel() else rows.new_zeros(())


def _there(found: list[Any], tensors: Tensors) -> list[Any]:
    """Without those of tensors that are not given."""
    pairs = zip(found, tensors, strict=True)
    return [one for one, tensor in pairs if tensor is not None]


def _added(terms: Any, dtype: torch.dtype) -> Any:
    """For the sum with a residual: its terms, and the gradient through it."""

    def of(tensors: Tensors, dys: Any, outs: Any) -> list[Truth]:
        x, residual, *vectors = tensors
        total = x + residual
        y, dx, *others = terms((total, *vectors), dys, outs)
        if len(dys) > 1:
            dx = replace(dx, terms=dx.terms + dys[1].double().abs())
        exact = Truth(
            *[total.double()] * 2, x.double().abs() + residual.double().abs(), dx.accumulator
        )
        return [y, exact, dx, dx, *others]

    return of


def _flat(value: Tensor | None, dims: int) -> Tensor | None:
    """A tensor that has fewer is for the op to refuse."""
    return value if value is None or not 1 < dims <= value.dim() else value.flatten(-dims)


def rms_norm(
    sample: str, x: Tensor, shape: Any, weight: Any = None, eps: float | None = None, *, way: str
) -> Call:
    x, weight = _flat(x, len(shape)), _flat(weight, len(shape))  # type: ignore[assignment]
    own = torch.finfo(accumulator_of(x.dtype)).eps if eps is None else eps

    def torchs(x: Tensor, weight: Tensor | None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], weight, own)

    terms = partial(_norm_terms, "rms_norm", (eps, "once"))
    if way == "plain":
        return _call(
            sample,
            lambda x, w: gm.rms_norm(x, w, eps),
            torchs,
            (x, weight),
            "x weight",
            ops=("rms_norm", "rms_norm_backward"),
            terms=terms,
            grads=(0, 1),
            reach=partial(_norm_reach, "rms_norm", False),
            scaled=True,
        )
    residual = x.flip(0) * 0.75
    if way == "add":
        return _call(
            sample,
            lambda x, r, w: gm.add_rms_norm(x, r, w, eps),
            _of_sum(torchs, x.dtype),
            (x, residual, weight),
            "x residual weight",
            ops=("add_rms_norm", "rms_norm_backward"),
            terms=_added(terms, x.dtype),
            grads=(0, 1, 2),
            reach=partial(_norm_reach, "rms_norm", True),
            scaled=True,
        )

    def in_place(x: Tensor, residual: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
        gm.fused_add_rms_norm_(x, residual, weight, own)
        return x, residual

    def of_whole_sum(x: Tensor, residual: Tensor, weight: Tensor | None) -> list[Tensor]:
        total = x + residual
        return [torchs(total, weight), total]

    def written_terms(tensors: Tensors, dys: Any, outs: Any) -> list[Truth]:
        return truth_of("fused_add_rms_norm_", (*tensors, own))

    return _call(
        sample,
        in_place,
        of_whole_sum,
        (x, residual, weight),
        "x residual weight",
        ops=("fused_add_rms_norm_",),
        terms=written_terms,
        grads=(),
        reach=lambda *args: _norm_reach("rms_norm", True, *args)[:2],
        scaled=True,
        written=(0, 1),
    )


def _of_sum(torchs: Any, dtype: torch.dtype) -> Any:
    """Of x and residual in fp64; the sum is rounded to its dtype before it is normalised."""

    def of(x: Tensor, residual: Tensor, *vectors: Any) -> list[Tensor]:
        exact = x + residual
        total = exact + (exact.detach().to(dtype).to(exact.dtype) - exact.detach()).nan_to_num(
            0.0, 0.0, 0.0
        )
        return [torchs(total, *vectors), total]

    return of


def layer_norm(
    sample: str,
    x: Tensor,
    shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *,
    way: str,
) -> Call:
    dims = len(shape)
    x, weight, bias = (_flat(one, dims) for one in (x, weight, bias))  # type: ignore[assignment]

    def torchs(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)

    terms = partial(_norm_terms, "layer_norm", (eps,))
    if way == "plain":
        return _call(
            sample,
            lambda x, w, b: gm.layer_norm(x, w, b, eps),
            torchs,
            (x, weight, bias),
            "x weight bias",
            ops=("layer_norm", "layer_norm_backward"),
            terms=terms,
            grads=(0, 1, 2),
            reach=partial(_norm_reach, "layer_norm", False),
            scaled=True,
        )
    return _call(
        sample,
        lambda x, r, w, b: gm.add_layer_norm(x, r, w, b, eps),
        _of_sum(torchs, x.dtype),
        (x, x.flip(0) * 0.75, weight, bias),
        "x residual weight bias",
        ops=("add_layer_norm", "layer_norm_backward"),
        terms=_added(terms, x.dtype),
        grads=(0, 1, 2, 3),
        reach=partial(_norm_reach, "layer_norm", True),
        scaled=True,
    )


# --- softmax and log-softmax, scaled, masked and causal


def softmax(
    sample: str,
    x: Tensor,
    dim: int,
    *,
    log: bool,
    scale: float = 1.0,
    mask: Tensor | None = None,
    causal: str | None = None,
    **others: Any,
) -> Call:
    dtype = x.dtype
    function, name = (gm.log_softmax, "log_softmax") if log else (gm.softmax, "softmax")
    torch_function = torch.log_softmax if log else torch.softmax

    def ours(x: Tensor, mask: Tensor | None) -> Tensor:
        return function(x, dim, scale=scale, mask=mask, causal=causal, **others)

    def torchs(x: Tensor, mask: Tensor | None) -> Tensor:
        """As documented of a row in which no element takes part: zeros, of logarithms -inf."""
        read, seen = _seen(x, None, causal), _seen(x, mask, causal)
        with torch.no_grad():
            value = torch.where(seen, x * scale, NONE)
            nobody = (value == NONE).all(dim, keepdim=True) if x.shape[dim] else ~seen
            y = torch_function(torch.where(nobody, 0.0, value), dim)
            y = y.masked_fill(nobody, NONE if log else 0.0)
            # Nor takes part what has a logarithm beyond the dtype.
            y = torch.where(y.to(dtype) == NONE, NONE, y)
        return _FromResult.apply(x, y, read, dim, scale, log)

    def terms(tensors: Tensors, dys: Any, outs: Any) -> list[Truth]:
        x, mask = tensors
        rows = x.movedim(dim, -1)
        hiding = _seen(x, mask, causal).movedim(dim, -1)
        forward = truth_of(name, (rows, 0, scale, hiding))[0]
        read = _seen(x, None, causal)
        y, dy = (one.movedim(dim, -1) for one in (outs[0], dys[0].masked_fill(~read, 0.0)))
        # The gradient is made from the result, which is off by its own error and was rounded.
        # Below the smallest normal number roundings are as large as there.
        rounded = y.abs().clamp(min=torch.finfo(x.dtype).tiny) * unit(x.dtype)
        off = forward.terms * unit(forward.accumulator) + rounded
        off = off.masked_fill((y == NONE) | (y == 0.0), 0.0)
        p = y.masked_fill(y == NONE, -torch.inf).exp() if log else y
        off = p * off if log else off
        size = abs(scale) * _softmax_slope(dy.double().abs(), p, off, log)
        backward = truth_of(f"{name}_backward", (dy, y, 0, scale))[0]
        size = backward.terms + size / unit(forward.accumulator)
        own = replace(backward, terms=size, accumulator=forward.accumulator)
        return [_moved(one, dim) for one in (forward, own)]

    def reach(tensors: Tensors, dys: Any, outs: Any) -> list[Tensor]:
        read = _seen(tensors[0], None, causal)
        row = _softmax_reach(dys[0].masked_fill(~read, 0.0), outs[0], dim, log)
        return [row.new_zeros(()), row * max(1.0, abs(scale))]

    return _call(
        sample,
        ours,
        torchs,
        (x, mask),
        "x mask",
        ops=(name, f"{name}_backward"),
        terms=terms,
        reach=reach,
    )


class _FromResult(torch.autograd.Function):
    """Torch's own gradient of a softmax, as documented: made from the result alone. Beyond a causal
    limit nothing is read, and a logarithm of -inf takes no part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, read: Tensor, *options: Any) -> Tensor:
        ctx.save_for_backward(y, read)
        ctx.options = options
        return y.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        y, read = ctx.saved_tensors
        dim, scale, log = ctx.options
        none = ~read | (y == NONE) if log else ~read
        dy, y = dy.masked_fill(none, 0.0), y.masked_fill(none, NONE if log else 0.0)
        back = torch._log_softmax_backward_data if log else torch._softmax_backward_data
        dx = scale * back(dy, y, dim, y.dtype)
        return dx.masked_fill(none, 0.0), *[None] * 5


class _Handed(torch.autograd.Function):
    """A gradient that is made for a loss of one, and multiplied with what comes back."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, loss: Tensor, gradient: Tensor) -> Tensor:
        ctx.save_for_backward(gradient)
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return gradient * (dloss if dloss.dim() == 0 else dloss.unsqueeze(-1)), None, None


def _softmax_slope(dy: Tensor, p: Tensor, off: Tensor, log: bool) -> Tensor:
    """How far the gradient moves where probabilities are off by so much; dy without its sign."""
    if log:
        return off * dy.sum(-1, keepdim=True)
    both = [(dy * one).sum(-1, keepdim=True) for one in (p, off)]
    return off * (dy + both[0]) + p * both[1]


def _softmax_reach(dy: Tensor, y: Tensor, dim: int, log: bool = False) -> Tensor:
    """Of y * (dy - sum(y * dy)), or dy - exp(y) * sum(dy): the sum, and what it is taken from."""
    dy, y = dy.double(), y.double()
    if not y.numel():
        return y.new_zeros(())
    parts = dy if log else y * dy
    total = parts.sum(dim, keepdim=True)
    difference = dy - (y.exp() * total if log else total)
    return torch.maximum(
        parts.abs().sum(dim, keepdim=True), difference.abs().amax(dim, keepdim=True)
    )


def _seen(x: Tensor, mask: Tensor | None, causal: str | None) -> Tensor:
    seen = torch.ones(x.shape, dtype=torch.bool, device=x.device)
    if causal is not None:
        queries, keys = x.shape[-2:]
        seen = seen.tril(keys - queries if causal == "bottom_right" else 0)
    return seen if mask is None else seen & mask


def _moved(truth: Truth, dim: int) -> Truth:
    low, high, terms = (one.movedim(-1, dim) for one in (truth.low, truth.high, truth.terms))
    return Truth(low, high, terms, truth.accumulator)


def softmax_backward(sample: str, dy: Tensor, y: Tensor, dim: int) -> Call:
    """The op itself, which works on the last dim: from y alone, whatever it is."""

    def torchs(dy: Tensor, y: Tensor) -> Tensor:
        return torch._softmax_backward_data(dy, y, dim, y.dtype)

    def ours(dy: Tensor, y: Tensor) -> Tensor:
        back = OPS["softmax_backward"]
        rows = [one.movedim(dim, -1) for one in (dy, y)]
        result: Tensor = back.call(tuple(rows), (*rows, 0, 1.0))
        return result.movedim(-1, dim)

    def terms(tensors: Tensors, dys: Any, outs: Any) -> list[Truth]:
        dy, y = (one.movedim(dim, -1) for one in tensors)
        return [_moved(truth_of("softmax_backward", (dy, y, 0, 1.0))[0], dim)]

    return _call(
        sample,
        ours,
        torchs,
        (dy, y),
        "dy y",
        ops=("softmax_backward",),
        terms=terms,
        grads=(),
        sums=True,
        reach=lambda tensors, dys, outs: [_softmax_reach(*tensors, dim)],
    )


# --- cross entropy: classes in the last dim, where torch has them in the second


def cross_entropy(
    sample: str,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    way: str = "plain",
) -> Call:
    if logits.dim() > 2:
        logits = logits.movedim(1, -1)
    options: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }
    ways = {"plain": {}, "lse": {"return_lse": True}, "one pass": {"one_pass": True}}
    ways["in place"] = {"one_pass": True, "inplace": True}
    first = {"one pass": "cross_entropy_one_pass", "in place": "cross_entropy_one_pass_"}

    def ours(logits: Tensor, target: Tensor, weight: Tensor | None) -> Any:
        return gm.cross_entropy(logits, target, weight=weight, **options, **ways[way])

    def torchs(logits: Tensor, target: Tensor, weight: Tensor | None) -> Any:
        """As documented of rows that are ignored: they are nothing, whatever they hold."""
        ignored = (target == ignore_index).unsqueeze(-1)
        used = torch.where(ignored, 0.0, logits)
        classes = used if used.dim() < 3 else used.movedim(-1, 1)
        loss = F.cross_entropy(classes, target.long(), weight, **options)
        if way in first and logits.requires_grad:
            (gradient,) = torch.autograd.grad(loss.sum(), logits)
            return _Handed.apply(logits, loss.detach(), gradient)
        return [loss, _lse(logits)] if way == "lse" else loss

    def terms(tensors: Tensors, dys: Any, outs: Any) -> list[Truth]:
        logits, target, weight = tensors
        weight, factor = _sizes_of_weights(weight, target, ignore_index, reduction)
        return [_larger(one, factor) for one in sizes(logits, target, weight, dys)]

    def reach(tensors: Tensors, dys: Any, outs: Any) -> list[Tensor]:
        """The loss of a row, of which a mean or a sum is made."""
        logits, target, weight = tensors
        none = torch.zeros((), dtype=torch.float64)
        row = none
        if reduction != "none":
            classes = logits.double() if logits.dim() < 3 else logits.double().movedim(-1, 1)
            own = None if weight is None else weight.double()
            words = {**options, "reduction": "none"}
            row = _most(F.cross_entropy(classes, target.long(), own, **words).abs())
        return [row, *[none] * len(outs[1:]), none]

    def sizes(logits: Tensor, target: Tensor, weight: Any, dys: Any) -> list[Truth]:
        words = (ignore_index, label_smoothing, 0.0, None, reduction)
        if way in first:
            args = (logits, target, weight, *words, False)
            loss, *_, gradient = truth_of("cross_entropy_one_pass", args)
            # Made for a loss of one, and multiplied with its gradient where that comes.
            times = dys[0].double().abs()
            times = times if times.dim() == 0 else times.unsqueeze(-1)
            size = (gradient.terms + 2 * gradient.low.abs()) * times
            return [loss, replace(gradient, terms=size)]
        args = (logits, target, weight, *words, way == "lse")
        loss, lse, denominators, *kept = truth_of("cross_entropy", args)
        dlse = dys[1] if way == "lse" else None
        known = ((*kept, lse)[0].low, denominators.low, weight)
        args = (dys[0], dlse, logits, target, *known, *words, 0, 0)
        gradient = _entropy_gradient(args, lse)
        return [loss, lse, gradient] if way == "lse" else [loss, gradient]

    ops = (first[way], "scale_gradient_") if way in first else ("cross_entropy",)
    return _call(
        sample,
        ours,
        torchs,
        (logits, target, weight),
        "logits target weight",
        ops=(*ops, "cross_entropy_backward"),
        terms=terms,
        reach=reach,
        written=(0,) if way == "in place" else (),
        wide=True,
        edges=weight is None and way != "lse",
    )


def _sizes_of_weights(
    weight: Tensor | None, target: Tensor, ignore_index: int, reduction: str
) -> tuple[Tensor | None, float]:
    """Weights without their signs, and by how much a mean is larger whose weights cancel."""
    if weight is None or not bool((weight < 0).any()):
        return weight, 1.0
    used = target[(target != ignore_index)].long()
    own = weight.double()[used]
    factor = float(own.abs().sum() / own.sum().abs()) if reduction == "mean" else 1.0
    return weight.abs(), 1.0 + 2.0 * factor


def _larger(truth: Truth, factor: float) -> Truth:
    return truth if factor == 1.0 else replace(truth, terms=truth.terms * factor)


def _entropy_gradient(args: tuple[Any, ...], lse: Truth) -> Truth:
    """Made from lse as the forward pass has found it."""
    value, terms = exact.backward(*args, spread=lse.terms)
    return Truth(value, value, terms, lse.accumulator)


def _lse(logits: Tensor) -> Tensor:
    """As documented of rows with infinity, which are NaN as their loss is."""
    spoiled = torch.where((logits == torch.inf).any(-1), torch.nan, 1.0)
    return torch.logsumexp(logits, -1) * spoiled


class _LseOfIgnored(torch.autograd.Function):
    """As documented of a row that is ignored: without a gradient of lse it has none, whatever it
    holds."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        return _lse(rows)

    @staticmethod
    def backward(ctx: Any, dlse: Tensor) -> Tensor:
        (rows,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = rows.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(_lse(leaf), leaf, dlse)
        return gradient.masked_fill((dlse == 0.0).unsqueeze(-1), 0.0)


def logsumexp(
    sample: str, x: Tensor, dim: Any, keepdim: bool = False, *, mask: Tensor | None = None
) -> Call:
    """By cross entropy, which returns it: of targets that all are ignored. A mask is the caller's:
    logits that are left out are -inf."""
    (own,) = dim if isinstance(dim, tuple) else (dim,)

    def rows_of(x: Tensor, mask: Tensor | None) -> Tensor:
        return (x if mask is None else x.masked_fill(~mask, NONE)).movedim(own, -1)

    def ours(x: Tensor, mask: Tensor | None) -> Tensor:
        rows = rows_of(x, mask)
        target = torch.full(rows.shape[:-1], -100, device=x.device)
        lse = gm.cross_entropy(rows, target, reduction="sum", return_lse=True)[1]
        return lse.unsqueeze(own) if keepdim else lse

    def torchs(x: Tensor, mask: Tensor | None) -> Tensor:
        lse: Tensor = _LseOfIgnored.apply(rows_of(x, mask))
        return lse.unsqueeze(own) if keepdim else lse

    def terms(tensors: Tensors, dys: Any, outs: Any) -> list[Truth]:
        rows = rows_of(*tensors)
        target = torch.full(rows.shape[:-1], -100, device=rows.device)
        words = (-100, 0.0, 0.0, None, "sum")
        _, lse, _, *kept = truth_of("cross_entropy", (rows, target, None, *words, True))
        dlse = dys[0].squeeze(own) if keepdim else dys[0]
        known = ((*kept, lse)[0].low, rows.new_empty(0), None, *words, 0, 0)
        zero = torch.zeros((), dtype=torch.float64)
        args = (zero, dlse, rows, target, *known)
        gradient = _moved(_entropy_gradient(args, lse), own)
        if keepdim:
            low, high, size = (one.unsqueeze(own) for one in (lse.low, lse.high, lse.terms))
            lse = Truth(low, high, size, lse.accumulator)
        return [lse, gradient]

    return _call(
        sample,
        ours,
        torchs,
        (x, mask),
        "x mask",
        ops=("cross_entropy", "cross_entropy_backward"),
        terms=terms,
        wide=True,
    )


# --- products


CHAIN = 4.0  # its chain of additions rounds every partial sum


def _product_terms(sizes: Callable[..., list[Tensor]], dtype: torch.dtype) -> Any:
    """Sums of products: their sizes, of each result and of each gradient, which is summed in the
    dtype of the products that it is made of."""

    def of(tensors: Tensors, dys: Any, outs: Any) -> list[Truth]:
        found = sizes(
            [None if one is None else _size(one) for one in tensors], [_size(dy) for dy in dys]
        )
        many = max([CHAIN, *(_equal_terms(one) for one in (*tensors, *dys) if one is not None)])
        return [Truth(one, one, many * one, dtype) for one in found]

    return of


def _size(values: Tensor) -> Tensor:
    """Of NaN none: what it is part of is NaN."""
    return values.double().abs().nan_to_num(0.0)


def _equal_terms(values: Tensor) -> float:
    """Of equal products every partial sum may be rounded the same way: half of their number."""
    same = values.numel() > 0 and values.dim() > 0 and bool((values == values[..., :1]).all())
    return values.shape[-1] / 2 if same else 0.0


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
}


def linear(
    sample: str, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, way: str | None = None
) -> Call:
    def torchs(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        h = F.linear(x, weight, bias)
        return h if way is None else ACTIVATIONS[way](h)

    def sizes(tensors: Any, dys: Any) -> list[Tensor]:
        x, w, b = tensors
        h = x @ w.t() if b is None else x @ w.t() + b
        dh = dys[0]
        if way == "relu":
            # Its slope is another where what is next to zero is lost, or overflows.
            info = torch.finfo(torch.float32)
            lost = (h < 100 * info.tiny) | (h > info.max / 4)
            dh = torch.where(lost, torch.inf, dh)
        elif way is not None:
            # Its slope changes by one at most where its argument does by one.
            dh = dh * (1.2 + 2 * h)
        rows, flat = (one.reshape(x.shape[:-1].numel(), one.shape[-1]) for one in (dh, x))
        found = [h, dh @ w, rows.t() @ flat]
        return found if b is None else [*found, rows.sum(0)]

    ops = ("linear", "linear_with_pre", "matmul")
    return _call(
        sample,
        lambda x, w, b: gm.linear(x, w, b, way),
        torchs,
        (x, weight, bias),
        "x weight bias",
        ops=ops,
        terms=_product_terms(sizes, x.dtype),
        grads=(0, 1, 2),
        sums=True,
    )


def matmul(sample: str, a: Tensor, b: Tensor) -> Call:
    def sizes(tensors: Any, dys: Any) -> list[Tensor]:
        a, b = tensors
        (dc,) = dys
        return [a @ b, (dc @ b.mT).sum_to_size(a.shape), (a.mT @ dc).sum_to_size(b.shape)]

    return _call(
        sample,
        gm.matmul,
        torch.matmul,
        (a, b),
        "a b",
        ops=("matmul",),
        terms=_product_terms(sizes, a.dtype),
        grads=(0, 1),
        sums=True,
    )


def linear_cross_entropy(
    sample: str,
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight_of_classes: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    chunk_rows: int | None = None,
) -> Call:
    words: dict[str, Any] = {
        "ignore_index": ignore_index,
        "reduction": reduction,
        "label_smoothing": label_smoothing,
    }

    def ours(x: Tensor, weight: Tensor, target: Tensor, bias: Any, classes: Any) -> Tensor:
        more = {"bias": bias, "class_weight": classes, "chunk_rows": chunk_rows}
        return gm.linear_cross_entropy(x, weight, target, **more, **words)

    def torchs(x: Tensor, weight: Tensor, target: Tensor, bias: Any, classes: Any) -> Tensor:
        x = torch.where((target == ignore_index).unsqueeze(-1), 0.0, x)
        logits = F.linear(x, weight, bias)
        if logits.dim() > 2:
            logits = logits.movedim(-1, 1)
        return F.cross_entropy(logits, target.long(), classes, **words)

    def terms(tensors: Tensors, dys: Any, outs: Any) -> list[Truth]:
        many = max(CHAIN, *(_equal_terms(one) for one in tensors[:2]))
        with mock.patch.object(linear_entropy, "CHAIN", many):
            return truths(tensors, dys)

    def truths(tensors: Tensors, dys: Any) -> list[Truth]:
        rest = (ignore_index, label_smoothing, 0.0, None, reduction, None)
        loss, lse, denominators, _ = truth_of("linear_cross_entropy", (*tensors, *rest))
        # Logits next to a tie of their rounding leave a range for the lse of the forward pass.
        middle, spread = (lse.low + lse.high) / 2, (lse.high - lse.low) / 2
        middle = torch.where(spread.isfinite(), middle, lse.low)
        # Both parts of a logarithm are kept: it and one.
        stats = torch.stack((middle, torch.ones_like(middle)), -1)
        _, factor = _sizes_of_weights(tensors[4], tensors[2], ignore_index, reduction)
        known = (dys[0], None, stats, denominators.low)
        grads = (True, True, tensors[3] is not None)
        spread = spread.nan_to_num(0.0, 0.0)
        made = linear_entropy.backward(*tensors, *known, *rest, *grads, spread=spread)
        found = [loss, *_there(made, (*tensors[:2], tensors[3]))]
        if factor == 1.0:
            return found
        # Where shares of rows cancel their sizes do not: those of a sum of all of them.
        sizes = [torch.maximum(one.terms.abs(), one.low.abs().max()) for one in found]
        return [
            replace(one, terms=8 * factor * size) for one, size in zip(found, sizes, strict=True)
        ]

    def reach(tensors: Tensors, dys: Any, outs: Any) -> list[Tensor]:
        """Logits are sums of products; all rows are part of a mean and of the others' gradients."""
        x, weight, target, bias, _ = tensors
        logits = x.double().abs() @ weight.double().abs().t()
        logits = logits if bias is None else logits + bias.double().abs()
        row = logits.amax(-1).masked_fill(target == ignore_index, 0.0)
        loss = row if reduction == "none" else _most(row)
        rows = [row.unsqueeze(-1), _most(row), _most(row)]
        return [loss, *_there(rows, (*tensors[:2], bias))]

    return _call(
        sample,
        ours,
        torchs,
        (x, weight, target, linear_bias, weight_of_classes),
        "x weight target bias class_weight",
        ops=("linear_cross_entropy", "linear_cross_entropy_backward"),
        terms=terms,
        grads=(0, 1, 3),
        wide=True,
        sums=True,
        reach=reach,
    )


def topk_router(
    sample: str,
    logits: Tensor,
    k: int,
    dim: int = -1,
    largest: bool = True,
    ordered: bool = True,
) -> Call:
    """The largest k of a softmax, and where they are: without their being made to add up."""
    assert not logits.dim() or dim % logits.dim() == logits.dim() - 1
    assert largest
    assert ordered
    rows = logits.flatten(0, -2) if logits.dim() > 2 else logits
    shape = rows.shape

    def ours(rows: Tensor) -> list[Tensor]:
        return listed(gm.topk_router(rows, k, renormalize=False))

    def torchs(rows: Tensor) -> list[Tensor]:
        nobody = (rows == NONE).all(-1, keepdim=True)
        scores = torch.softmax(torch.where(nobody, 0.0, rows), -1)
        scores = torch.where(nobody, 0.0, scores)
        # Of equal ones the first; torch.topk takes any.
        ids = torch.sort(rows, dim=-1, descending=True, stable=True).indices[..., :k]
        return [scores.gather(-1, ids), ids]

    def terms(tensors: Tensors, dys: Any, outs: Any) -> list[Truth]:
        (rows,) = tensors
        weights, ids = truth_of(
            "topk_router", (rows, k, "softmax", False, None, 1, 1, 1.0, torch.int32)
        )
        dy = torch.zeros(shape, dtype=torch.float64).scatter(-1, outs[1], dys[0].double())
        p = torch.softmax(rows.double(), -1)
        size = p * (dy.abs() + (p * dy.abs()).sum(-1, keepdim=True)) * (4 + rows.double().abs())
        return [weights, ids, Truth(p, p, size, accumulator_of(rows.dtype))]

    def reach(tensors: Tensors, dys: Any, outs: Any) -> list[Tensor]:
        dy = torch.zeros(shape, dtype=torch.float64).scatter(-1, outs[1], dys[0].double())
        none = dy.new_zeros(())
        return [none, none, _softmax_reach(dy, torch.softmax(tensors[0].double(), -1), -1)]

    return _call(
        sample,
        ours,
        torchs,
        (rows,),
        "logits",
        ops=("topk_router", "topk_router_backward"),
        terms=terms,
        wide=True,
        reach=reach,
    )
