"""Inputs for tests, benchmarks and the doctor, ordinary and nasty, and what a call must cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gristmill.errors import ArgumentError
from gristmill.ops.examples import normal, padded, unaligned
from gristmill.ops.op import Arguments, Case, Cost
from gristmill.ops.topk_router import reference
from gristmill.ops.topk_router.semantics import BackwardCall, Call, accumulator

_BF16, _FP16, _FP32, _FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
_OPERATIONS = 4  # for each logit: a power, a sum, two comparisons


def forward_cost(*args: Any) -> Cost:
    """Logits and bias are read, weights and ids written."""
    call = Call(*args)
    chosen = call.logits.shape[0] * call.topk
    each = accumulator(call.logits.dtype).itemsize + call.ids.itemsize
    bias = 0 if call.bias is None else call.bias.numel() * call.bias.element_size()
    read = call.logits.numel() * call.logits.element_size() + bias
    return Cost(read + chosen * each, _OPERATIONS * call.logits.numel())


def backward_cost(*args: Any) -> Cost:
    """All logits are read for a softmax as it is, the chosen ones otherwise; all are written."""
    call = BackwardCall(*args)
    size, chosen = call.logits.element_size(), call.topk_ids.numel()
    each = call.dweights.element_size() + call.topk_ids.element_size()
    everyone = call.scoring == "softmax" and not call.renormalize
    read = (call.logits.numel() if everyone else chosen) * size + chosen * each
    return Cost(read + call.logits.numel() * size, _OPERATIONS * call.logits.numel())


def sizes_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """M, E and k of an example: ``(M, E)``, of which a token takes eight, or all of them."""
    if len(shape) == 2:
        shape = (*shape, max(1, min(8, shape[1])))
    if len(shape) != 3 or not 1 <= shape[2] <= shape[1]:
        raise ArgumentError(
            f"topk_router: an example is (M, experts) or (M, experts, topk) with topk from 1 to "
            f"experts, got {shape}"
        )
    rows, experts, topk = shape
    return rows, experts, topk


def forward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    rows, experts, topk = sizes_of(shape)
    logits = normal((rows, experts), dtype, device)
    return logits, topk, "softmax", True, None, 1, 1, 1.0, torch.int32


def backward_example(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str
) -> Arguments:
    rows, experts, topk = sizes_of(shape)
    logits = normal((rows, experts), dtype, device)
    dweights = normal((rows, topk), accumulator(dtype), device)
    if logits.is_meta:
        ids = torch.empty((rows, topk), dtype=torch.int32, device=device)
    else:
        ids = logits.topk(topk, -1).indices.int()
    return dweights, logits, ids, "softmax", True, 1.0


Lay = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Spread:
    """How one case differs from an ordinary one."""

    rows: int = 19
    experts: int = 128
    topk: int = 8
    logits: torch.dtype = _FP32
    scoring: str = "softmax"
    renormalize: bool = True
    bias: torch.dtype | None = None
    groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0
    ids: torch.dtype = torch.int32
    lay: Lay | None = None
    bias_lay: Lay | None = None
    fill: Lay | None = None
    dweights: torch.dtype | None = None
    dweights_lay: Lay | None = None


def deepseek(scoring: str = "sigmoid", **changes: Any) -> Spread:
    """As DeepSeek-V3 has it: 8 of 256 experts, in 4 of 8 groups."""
    shape: dict[str, Any] = {"experts": 256, "groups": 8, "topk_groups": 4, "scale": 2.5}
    return Spread(scoring=scoring, **{**shape, "bias": _FP32, **changes})


def _spreads() -> dict[str, Spread]:
    """For both directions."""
    spreads = {
        f"{rows} rows, {topk} of {experts}": Spread(rows, experts, topk, _BF16)
        for rows, experts, topk in (
            (1, 128, 8),
            (1, 1, 1),
            (5, 2, 1),
            (7, 8, 2),
            (33, 32, 4),
            (3, 60, 4),
            (9, 64, 6),
            (4, 97, 8),
            (130, 128, 8),
            (6, 160, 6),
            (5, 384, 8),
            (3, 512, 10),
            (3, 513, 22),
            (2, 1024, 32),
            (2, 2048, 16),
            (2, 2500, 8),
            (3, 100, 40),
            (4, 16, 16),
            (0, 64, 8),
        )
    }
    for dtype in (_FP32, _FP16, _BF16, _FP64):
        word = str(dtype).removeprefix("torch.")
        for scoring in ("softmax", "sigmoid"):
            for renormalize in (True, False):
                words = f"{word} {scoring}{'' if renormalize else ', as they are'}"
                spreads[words] = Spread(logits=dtype, scoring=scoring, renormalize=renormalize)
    return spreads | {
        "scaled": Spread(scale=2.5),
        "scaled by less than nothing": Spread(scale=-0.5, renormalize=False),
        "scaled by nothing": Spread(scale=0.0),
        "long ids": Spread(ids=torch.int64),
        "large logits": Spread(fill=lambda x: x * 30),
        "huge logits": Spread(fill=lambda x: x * 1e37),
        "far logits, sigmoid": Spread(fill=lambda x: x * 8 - 30, scoring="sigmoid"),
        "far logits, sigmoid, as they are": Spread(
            fill=lambda x: x * 8 - 30, scoring="sigmoid", renormalize=False
        ),
        "large offset": Spread(fill=lambda x: x + 1e4),
        "all the same": Spread(fill=torch.zeros_like),
        "ties": Spread(fill=lambda x: x.round()),
        "ties, sigmoid": Spread(fill=lambda x: x.round(), scoring="sigmoid"),
        "zeros of both signs": Spread(fill=lambda x: torch.where(x > 0, 0.0, -0.0)),
        "few above -inf": Spread(fill=_few),
        "few above -inf, as they are": Spread(fill=_few, renormalize=False),
        "few above -inf, sigmoid": Spread(fill=_few, scoring="sigmoid"),
        "nobody": Spread(fill=_nobody),
        "nobody, as they are": Spread(fill=_nobody, renormalize=False),
        "nobody, sigmoid": Spread(fill=_nobody, scoring="sigmoid"),
        "row slices": Spread(lay=lambda x: padded(x, 8)),
        "row slices, narrow": Spread(lay=lambda x: padded(x, 3)),
        "unaligned": Spread(lay=unaligned, logits=_BF16),
        "columns strided": Spread(lay=lambda x: x.t().contiguous().t()),
        "columns strided, as they are": Spread(
            lay=lambda x: x.t().contiguous().t(), renormalize=False, logits=_BF16
        ),
        "expanded rows": Spread(lay=lambda x: x[:1].expand(x.shape)),
        "expanded columns": Spread(lay=lambda x: x[:, :1].expand(x.shape)),
    }


def _choices() -> dict[str, Spread]:
    """Groups and biases, which the gradient does not see."""
    spreads = {
        "deepseek v3": deepseek(),
        "deepseek v3, one row": deepseek(rows=1),
        "deepseek v2": deepseek("softmax", experts=160, topk=6, topk_groups=3, bias=None),
        "deepseek v2, as they are": deepseek(
            "softmax", experts=160, topk=6, topk_groups=3, bias=None, renormalize=False, scale=16.0
        ),
        "kimi k2": deepseek(experts=384, groups=1, topk_groups=1, scale=2.827),
        "bias, softmax": Spread(bias=_FP32),
        "bias, softmax, as they are": Spread(bias=_FP32, renormalize=False, logits=_BF16),
        "bias, faint scores": Spread(
            bias=_FP32, fill=_one_far_above, bias_lay=lambda b: 10.0 * b, scale=2.5
        ),
        "bias, faint scores in groups": deepseek(
            "softmax", logits=_BF16, fill=_one_far_above, bias_lay=lambda b: 10.0 * b
        ),
        "bias strided": Spread(
            scoring="sigmoid", bias=_FP32, bias_lay=lambda b: b.repeat_interleave(2)[::2]
        ),
        "bias expanded": deepseek(bias_lay=lambda b: b[:1].expand(b.shape)),
        "bias, nobody": deepseek(fill=_nobody, rows=4),
        "all groups": deepseek(topk_groups=8),
        "groups of one": Spread(experts=16, groups=16, topk_groups=8),
        "groups of one, bias": deepseek(experts=32, groups=32, topk_groups=8),
        "groups of two": deepseek(experts=64, groups=32, topk_groups=5),
        "groups of seven": deepseek(experts=84, groups=12, topk_groups=2, topk=14),
        "groups of seven, sigmoid": deepseek(experts=84, groups=12, topk_groups=5, bias=None),
        "one of two groups, all of it": Spread(experts=64, groups=2, topk=32),
        "many groups": deepseek(experts=320, groups=40, topk_groups=10),
        "many groups, largest": Spread(experts=320, groups=80, topk_groups=10),
        "groups of 1024": Spread(rows=3, experts=2048, groups=2, logits=_BF16),
        "groups, ties": Spread(experts=64, groups=8, topk_groups=4, fill=lambda x: x.round() % 2),
        "groups, ties, bias": deepseek(fill=lambda x: (x > 3.0).float(), bias_lay=torch.zeros_like),
        "groups, all the same": deepseek(fill=torch.zeros_like, bias_lay=torch.zeros_like),
        "groups, few above -inf": Spread(experts=64, groups=8, topk_groups=2, fill=_few),
        "groups, nobody": Spread(experts=64, groups=8, topk_groups=4, fill=_nobody),
        "groups, columns strided": deepseek(lay=lambda x: x.t().contiguous().t()),
    }
    for logits in (_FP32, _BF16, _FP64):
        for bias in (_FP32, _BF16, _FP16, _FP64):
            one, other = (str(dtype).removeprefix("torch.") for dtype in (logits, bias))
            spreads[f"{one}, bias {other}"] = deepseek(logits=logits, bias=bias, rows=5)
    return spreads


def _gradients() -> dict[str, Spread]:
    return {
        "dweights bfloat16": Spread(dweights=_BF16),
        "dweights float16, as they are": Spread(dweights=_FP16, renormalize=False, logits=_BF16),
        "expanded dweights": Spread(dweights_lay=lambda d: d[:1, :1].expand(d.shape)),
        "dweights strided": Spread(dweights_lay=lambda d: d.t().contiguous().t()),
        "deepseek v3": deepseek(),
        "deepseek v2, as they are": deepseek(
            "softmax", experts=160, topk=6, topk_groups=3, bias=None, renormalize=False, scale=16.0
        ),
        "bias, softmax": Spread(bias=_FP32),
    }


def forward_cases() -> Iterator[Case]:
    for name, spread in {**_spreads(), **_choices()}.items():
        yield Case(name, partial(forward_arguments, spread))


def backward_cases() -> Iterator[Case]:
    for name, spread in {**_spreads(), **_gradients()}.items():
        yield Case(name, partial(backward_arguments, spread))


def forward_arguments(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((spread.rows, spread.experts), generator=generator) * 2
    logits = logits if spread.fill is None else spread.fill(logits)
    logits = logits.to(spread.logits).to(device)
    logits = logits if spread.lay is None else spread.lay(logits)
    bias = None
    if spread.bias is not None:
        bias = torch.rand(spread.experts, generator=generator).to(spread.bias).to(device)
        bias = bias if spread.bias_lay is None else spread.bias_lay(bias)
    return (
        logits,
        spread.topk,
        spread.scoring,
        spread.renormalize,
        bias,
        spread.groups,
        spread.topk_groups,
        spread.scale,
        spread.ids,
    )


def backward_arguments(spread: Spread, device: torch.device | str, seed: int) -> Arguments:
    args = forward_arguments(spread, "cpu", seed)
    logits, (_, ids) = args[0], reference.topk_router(*args)
    ids = ids.clone(memory_format=torch.contiguous_format)
    generator = torch.Generator().manual_seed(seed + 1)
    d = torch.randn(ids.shape, generator=generator)
    d = d.to(spread.dweights or accumulator(spread.logits)).to(device)
    d = d if spread.dweights_lay is None else spread.dweights_lay(d)
    # Laid out anew: a copy to another device keeps no strides but those of a dense tensor.
    logits = forward_arguments(spread, device, seed)[0] if device != "cpu" else logits
    return d, logits, ids.to(device), spread.scoring, spread.renormalize, spread.scale


def _few(x: torch.Tensor) -> torch.Tensor:
    """Fewer than are chosen, elsewhere in each row."""
    place = torch.arange(x.shape[1]) - torch.arange(len(x)).unsqueeze(-1) * 5
    return torch.where(place % x.shape[1] < 3, x, float("-inf"))


def _one_far_above(logits: torch.Tensor) -> torch.Tensor:
    """The scores of the others are too small for a float; a bias may choose them all the same."""
    return logits + 200.0 * (logits == logits.amax(-1, keepdim=True))


def _nobody(x: torch.Tensor) -> torch.Tensor:
    out = x.clone()
    out[::2] = float("-inf")
    return out
