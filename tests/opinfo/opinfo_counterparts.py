"""Which OpInfos of torch's have a counterpart here, how their samples become calls of it, and which
samples it does not take on purpose. OpInfos without one are listed with the reason.

`torch.testing._internal` is not a public interface of torch: what this needs of it is asked for
here, and nowhere else.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import opinfo_families as families
import pytest
import torch
from opinfo_call import Call, words

try:
    # Needs expecttest and, in part, numpy; takes two seconds.
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo.core import SampleInput
except ImportError as error:
    reason = f"torch's OpInfos cannot be imported: {type(error).__name__}: {error}"
    pytest.skip(reason, allow_module_level=True)

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
Sample = Any  # torch's SampleInput
Maker = Callable[[str, Sample], Call]
Numbers = Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Apart:
    """Samples that our function raises an error for, or has no argument for, and why.

    `error`: what our error says after the op's name: the wrong argument first. `lacks`: our
    function and the argument that it does not have, so that there is no call to make.
    """

    reason: str
    holds: Callable[[Sample], bool]
    error: str = ""
    lacks: tuple[str, str] | None = None


@dataclass(frozen=True, eq=False)
class Counterpart:
    """`ways`: calls of ours that each sample becomes. `more`: samples that OpInfo has not, longer
    ones and empty ones. `refused`: what our error says of an error input of torch's, by what torch
    says of it. `accepted`: error inputs that are none here, and why. `since`: the first torch that
    has the OpInfo."""

    name: str
    ways: dict[str, Maker]
    variant: str = ""
    apart: tuple[Apart, ...] = ()
    more: Callable[[Numbers], Iterator[Sample]] | None = None
    refused: dict[str, str] = field(default_factory=dict)
    accepted: dict[str, str] = field(default_factory=dict)
    since: tuple[int, int] = (2, 11)

    def __str__(self) -> str:
        return "-".join(filter(None, (self.name, self.variant)))

    @property
    def info(self) -> Any:
        return INFOS.get((self.name, self.variant))

    @cache  # noqa: B019 - the counterparts stay
    def samples(self, dtype: torch.dtype) -> list[Sample]:
        """Torch's own, then `more`; the same numbers every time."""
        torch.manual_seed(1234)
        found = []
        if dtype in self.info.dtypes:
            found = list(self.info.reference_inputs("cpu", dtype, requires_grad=False))
        if self.more is not None:
            found += self.more(partial(_numbers, dtype))
        return found

    def calls(self, dtype: torch.dtype, only: str | None = None) -> Iterator[Call]:
        """Of all samples that ours takes, in all ways or one."""
        for sample in self.samples(dtype):
            if not any(one.holds(sample) for one in self.apart):
                for way, make in self.ways.items():
                    if only in (None, way):
                        yield make(f"{way}({words(sample)})", sample)


INFOS = {(one.name, one.variant_test_name): one for one in op_db}


def _numbers(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(shape).to(dtype)


def _classes(count: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, count, shape)


def _made(function: Callable[..., Call], **fixed: Any) -> Maker:
    """A sample's input, args and kwargs, as they are."""
    accepts = inspect.signature(function).parameters

    def make(text: str, sample: Sample) -> Call:
        kwargs = {**fixed, **sample.kwargs}
        assert all(name in accepts or "others" in accepts for name in kwargs), text
        return function(text, sample.input, *sample.args, **kwargs)

    return make


def _tensor(sample: Sample, at: int) -> Any:
    """The argument at a position after the input, if it is a tensor."""
    value = sample.args[at] if at < len(sample.args) else None
    return value if isinstance(value, torch.Tensor) else None


# --- reasons

SCALAR = Apart(
    "a row has at least one dim",
    lambda sample: not sample.input.dim(),
    error="(x|logits) must have at least one dim",
)
NEGATIVE = Apart(
    "eps is at least 0: less gives NaN for small rows",
    lambda sample: any(isinstance(one, float) and one < 0 for one in _values(sample)),
    error="eps must be finite in fp32 and at least 0",
)
PROBABILITIES = Apart(
    "a target is a class, not a probability of each",
    lambda sample: _tensor(sample, -1) is not None and sample.args[-1].is_floating_point(),
    error="target must hold class indices",
)
VECTOR = Apart(
    "a matmul takes matrices: a vector is unsqueezed by the caller",
    lambda sample: min(sample.input.dim(), sample.args[0].dim()) < 2,
    error="[ab] must have at least two dims",
)
VECTOR_WEIGHT = Apart(
    "the weight of a linear layer is a matrix: a vector is unsqueezed by the caller",
    lambda sample: sample.args[0].dim() < 2,
    error="weight must have shape",
)
STACKED_CLASSES = Apart(
    "the weight of a linear layer is a matrix",
    lambda sample: sample.args[0].dim() > 2,
    error="weight must have shape",
)
FULL_BIAS = Apart(
    "a bias has one number for each column, and is not broadcast",
    lambda sample: sample.input.shape != sample.args[1].shape[1:],
    error="bias must have shape",
)
SCALED = Apart(
    "the factors of addmm: there is no argument for them",
    lambda sample: "alpha" in sample.kwargs,
    lacks=("linear", "alpha"),
)
SEVERAL_DIMS = Apart(
    "rows lie along one dim, which is the last",
    lambda sample: _several(sample.args[0] if sample.args else sample.kwargs.get("dim")),
    lacks=("cross_entropy", "dim"),
)
NOT_LAST = Apart(
    "a router takes the largest of the last dim",
    lambda sample: (
        sample.input.dim() > 0
        and len(sample.args) > 1
        and sample.args[1] % sample.input.dim() != sample.input.dim() - 1
    ),
    lacks=("topk_router", "dim"),
)
NO_ROWS = Apart(
    "a router has rows of experts",
    lambda sample: not sample.input.dim(),
    error="logits must have shape",
)


def _other_dtype(function: str) -> Apart:
    return Apart(
        "there is no argument for a dtype; the result has x's",
        lambda sample: "dtype" in sample.kwargs,
        lacks=(function, "dtype"),
    )


def _several(dim: Any) -> bool:
    return dim is None or (isinstance(dim, tuple) and len(dim) != 1)


FLATTENED = "there is no argument for normalized_shape: rows lie along the last dim"
LEADING = "x has any number of leading dims"


def _values(sample: Sample) -> list[Any]:
    return [*sample.args, *sample.kwargs.values()]


# --- more samples


def _norm_samples(vectors: int) -> Callable[[Numbers], Iterator[Sample]]:
    def more(numbers: Numbers) -> Iterator[Sample]:
        for shape in ((7, 64), (3, 2, 129), (2, 3, 4, 16), (5, 1), (2, 1000), (0, 8), (3, 0, 16)):
            own = [numbers(shape[-1]) for _ in range(vectors)]
            yield SampleInput(numbers(*shape), args=(shape[-1:], *own))
        yield SampleInput(numbers(6, 40), args=((40,),))

    return more


SOFTMAX_SHAPES = ((7, 64), (3, 5, 129), (2, 3, 4, 16), (2, 1000), (5, 1), (0, 8), (4, 0))


def _softmax_samples(numbers: Numbers) -> Iterator[Sample]:
    for shape in SOFTMAX_SHAPES:
        yield SampleInput(numbers(*shape) * 3, args=(-1,))
    yield SampleInput(numbers(6, 24, 5), args=(1,))


def _causal_samples(numbers: Numbers) -> Iterator[Sample]:
    for shape in ((8, 8), (2, 5, 9), (2, 9, 5), (3, 12, 64), (2, 2, 7, 40), (1, 33)):
        yield SampleInput(numbers(*shape), args=(-1,))


def _masked_samples(numbers: Numbers) -> Iterator[Sample]:
    for shape, sizes in (((7, 64), (64,)), ((3, 5, 129), (5, 129)), ((2, 3, 4, 16), (2, 1, 1, 16))):
        mask = torch.rand(sizes) < 0.6
        yield SampleInput(numbers(*shape), args=(-1,), kwargs={"mask": mask})


def _entropy_samples(numbers: Numbers) -> Iterator[Sample]:
    """Classes in the second dim, as torch has them."""
    for shape in ((9, 64), (4, 1000), (3, 129, 2), (5, 1), (0, 8)):
        target = _classes(shape[1], shape[0], *shape[2:])
        yield SampleInput(numbers(*shape) * 2, args=(target,))
        kwargs = {"ignore_index": 0, "reduction": "sum", "weight": numbers(shape[1]).abs() + 0.5}
        yield SampleInput(numbers(*shape) * 2, args=(target,), kwargs=kwargs)
    yield SampleInput(numbers(7, 64), args=(_classes(64, 7),), kwargs={"reduction": "none"})
    int32 = _classes(30, 6).to(torch.int32)
    yield SampleInput(numbers(6, 30), args=(int32,), kwargs={"reduction": "sum"})


def _sum_samples(numbers: Numbers) -> Iterator[Sample]:
    for shape in ((7, 64), (3, 5, 129), (2, 1000), (0, 8)):
        yield SampleInput(numbers(*shape) * 3, args=((-1,),))


def _linear_samples(numbers: Numbers) -> Iterator[Sample]:
    for lead, columns, depth in (((7,), 24, 64), ((2, 3), 33, 129), ((1,), 8, 300), ((4,), 5, 0)):
        yield SampleInput(
            numbers(*lead, depth), args=(numbers(columns, depth) * 0.2, numbers(columns))
        )
    yield SampleInput(numbers(7, 64), args=(numbers(64),))  # of torch's own since 2.15


def _addmm_samples(numbers: Numbers) -> Iterator[Sample]:
    """Torch's own all have factors."""
    for rows, depth, columns in ((7, 64, 24), (1, 300, 8), (5, 0, 10), (0, 8, 4)):
        args = (numbers(rows, depth), numbers(depth, columns) * 0.2)
        yield SampleInput(numbers(columns), args=args)
        for lead in ((rows,), (1,)):
            yield SampleInput(numbers(*lead, columns), args=args)


def _matmul_samples(numbers: Numbers) -> Iterator[Sample]:
    for first, second in (
        ((7, 64), (64, 24)),
        ((2, 3, 129), (129, 33)),
        ((3, 1, 8, 40), (2, 40, 9)),
    ):
        yield SampleInput(numbers(*first), args=(numbers(*second) * 0.2,))


def _linear_entropy_samples(numbers: Numbers) -> Iterator[Sample]:
    for lead, classes, depth in (((9,), 33, 64), ((2, 3), 130, 24), ((0,), 5, 8)):
        args = (numbers(classes, depth) * 0.3, _classes(classes, *lead))
        yield SampleInput(numbers(*lead, depth), args=args)


def _masked_sum_samples(numbers: Numbers) -> Iterator[Sample]:
    for shape, sizes in (((7, 64), (64,)), ((3, 5, 129), (5, 129)), ((2, 1000), (2, 1000))):
        mask = torch.rand(sizes) < 0.6
        yield SampleInput(numbers(*shape) * 3, kwargs={"dim": -1, "mask": mask})


def _router_samples(numbers: Numbers) -> Iterator[Sample]:
    for rows, experts, k in ((7, 64, 6), (5, 129, 8), (3, 8, 8), (0, 16, 2)):
        yield SampleInput(numbers(rows, experts), args=(k,))


# --- ways


def _with_mask(log: bool, scale: float = 1.0) -> Maker:
    return _made(families.softmax, log=log, scale=scale)


def _safe(text: str, sample: Sample) -> Call:
    return families.softmax(text, sample.input, sample.kwargs["dim"], log=False)


def _causal(log: bool, causal: str) -> Maker:
    return _made(families.softmax, log=log, causal=causal)


def _backward_of(text: str, sample: Sample) -> Call:
    y, dim, _ = sample.args
    return families.softmax_backward(text, sample.input, y, dim)


def _as_logits(**fixed: Any) -> Maker:
    """Whatever they are, nll_loss takes them for logarithms of probabilities."""
    return _made(families.cross_entropy, **fixed)


def _smoothed(text: str, sample: Sample) -> Call:
    kwargs = {**sample.kwargs, "label_smoothing": 0.1}
    return families.cross_entropy(text, sample.input, *sample.args, **kwargs)


def _of_linear(text: str, sample: Sample) -> Call:
    """A sample of linear, with a target for each row and with classes' weights."""
    weight, *bias = sample.args
    lead = sample.input.shape[:-1]
    target = (torch.arange(lead.numel()) % max(1, len(weight))).view(lead)
    more = {"linear_bias": bias[0]} if bias else {}
    return families.linear_cross_entropy(text, sample.input, weight, target, **more)


def _linear_entropy(text: str, sample: Sample) -> Call:
    kwargs = dict(sample.kwargs)
    options = kwargs.pop("options", None)
    # How torch splits its work is its own business; that ours is split shows in no number.
    kwargs["chunk_rows"] = getattr(options, "batch_chunk_size", None)
    if kwargs.get("ignore_index", 0) is None:
        del kwargs["ignore_index"]
    kwargs["weight_of_classes"] = kwargs.pop("weight", None)
    return families.linear_cross_entropy(text, sample.input, *sample.args, **kwargs)


def _added(text: str, sample: Sample) -> Call:
    """addmm(bias, x, weight.t())"""
    x, weight = sample.args
    return families.linear(text, x, weight.t(), sample.input)


def _reflected(text: str, sample: Sample) -> Call:
    return families.matmul(text, sample.args[0], sample.input)


ENTROPY_WAYS: dict[str, Maker] = {
    "cross_entropy": _made(families.cross_entropy),
    "return_lse": _made(families.cross_entropy, way="lse"),
    "one_pass": _made(families.cross_entropy, way="one pass"),
    "inplace": _made(families.cross_entropy, way="in place"),
    "label_smoothing": _smoothed,
}
MATMUL_WAYS: dict[str, Maker] = {"matmul": _made(families.matmul)}


def _softmaxes(log: bool) -> Iterator[Counterpart]:
    name = "log_softmax" if log else "softmax"
    plain = {name: _made(families.softmax, log=log)}
    yield Counterpart(name, plain, apart=(SCALAR,), more=_softmax_samples)
    causal = {f"{name} {one}": _causal(log, one) for one in ("top_left", "bottom_right")}
    last = Apart(
        "a causal limit is one of the last dim by the one before it",
        lambda sample: sample.input.dim() < 2 or sample.args[0] == 0,
        error="(causal limits the last dim|x must have at least one dim)",
    )
    yield Counterpart(name, causal, variant="", apart=(last,), more=_causal_samples)
    yield Counterpart(
        f"masked.{name}", {name: _with_mask(log)}, apart=(SCALAR,), more=_masked_samples
    )


COUNTERPARTS: tuple[Counterpart, ...] = (
    Counterpart(
        "nn.functional.rms_norm",
        {way: _made(families.rms_norm, way=way) for way in ("plain", "add", "in place")},
        apart=(NEGATIVE,),
        more=_norm_samples(1),
        refused={"Expected weight to be of same shape": "weight must have shape"},
        accepted={"to be at least 1-dimensional": FLATTENED, "Given normalized_shape": FLATTENED},
    ),
    Counterpart(
        "nn.functional.layer_norm",
        {way: _made(families.layer_norm, way=way) for way in ("plain", "add")},
        apart=(NEGATIVE,),
        more=_norm_samples(2),
    ),
    Counterpart(
        "native_layer_norm",
        {"layer_norm": _made(families.layer_norm, way="plain")},
        apart=(NEGATIVE,),
        refused={
            "Expected weight to be of same shape": "weight must have shape",
            "Expected bias to be of same shape": "bias must have shape",
        },
        accepted={"to be at least 1-dimensional": FLATTENED, "Given normalized_shape": FLATTENED},
    ),
    *_softmaxes(log=False),
    *_softmaxes(log=True),
    Counterpart(
        "nn.functional.softmin",
        {"softmax of -x": _made(families.softmax, log=False, scale=-1.0)},
        apart=(SCALAR,),
    ),
    Counterpart(
        "masked.softmin", {"softmax of -x": _with_mask(log=False, scale=-1.0)}, apart=(SCALAR,)
    ),
    Counterpart("torch.ops.aten._safe_softmax.default", {"softmax": _safe}),
    Counterpart("_softmax_backward_data", {"softmax_backward": _backward_of}),
    Counterpart(
        "nn.functional.cross_entropy",
        ENTROPY_WAYS,
        apart=(PROBABILITIES,),
        more=_entropy_samples,
    ),
    Counterpart("nn.functional.nll_loss", {"cross_entropy": _as_logits()}),
    Counterpart(
        "logsumexp",
        {"return_lse": _made(families.logsumexp)},
        apart=(SCALAR, SEVERAL_DIMS),
        more=_sum_samples,
    ),
    Counterpart(
        "masked.logsumexp",
        {"return_lse of masked logits": _made(families.logsumexp)},
        apart=(SCALAR, SEVERAL_DIMS),
        more=_masked_sum_samples,
    ),
    Counterpart(
        "nn.functional.linear",
        {
            "linear": _made(families.linear),
            **{one: _made(families.linear, way=one) for one in families.ACTIVATIONS},
            "linear_cross_entropy": _of_linear,
        },
        apart=(VECTOR_WEIGHT,),
        more=_linear_samples,
    ),
    Counterpart("addmm", {"linear": _added}, apart=(SCALED, FULL_BIAS), more=_addmm_samples),
    Counterpart("matmul", MATMUL_WAYS, apart=(VECTOR,), more=_matmul_samples),
    Counterpart("mm", MATMUL_WAYS),
    Counterpart("bmm", MATMUL_WAYS),
    Counterpart("__rmatmul__", {"matmul": _reflected}, apart=(VECTOR,)),
    *(
        Counterpart(
            "nn.functional.linear_cross_entropy",
            {"linear_cross_entropy": _linear_entropy},
            variant=variant,
            apart=(STACKED_CLASSES, PROBABILITIES),
            more=None if variant else _linear_entropy_samples,
            refused={
                "linear_weight with dimensionality at least 2": "weight must have shape",
                "expected equal input and linear_weight last dimensions": "weight must have shape",
                "K-dimensional loss": "weight must have shape",
                "expected linear_bias shape": "bias must have shape",
                "ignore_index cannot be specified": PROBABILITIES.error,
            },
            accepted={"expected input with dimensionality 1 or 2": LEADING},
            since=(2, 13),
        )
        for variant in ("", "chunked", "chunked_none")
    ),
    Counterpart(
        "topk",
        {"topk_router": _made(families.topk_router)},
        apart=(NOT_LAST, NO_ROWS),
        more=_router_samples,
    ),
)

# OpInfos all of whose samples differ on purpose: there is no call to judge.
ALL_APART: tuple[Counterpart, ...] = (
    *(
        Counterpart(name, {}, variant="with_dtype", apart=(_other_dtype(own),))
        for name, own in (
            ("softmax", "softmax"),
            ("log_softmax", "log_softmax"),
            ("nn.functional.softmin", "softmax"),
        )
    ),
    Counterpart("mv", MATMUL_WAYS, apart=(VECTOR,)),
)

# OpInfos of the same families that have no counterpart, by name and variant.
NO_ADDEND = "matmul adds nothing to its result, and linear a bias alone"
OF_PROBABILITIES = "it is a loss of numbers or probabilities, not of classes"
LEFT_OUT: dict[str, str] = {
    "addmm-decomposed": "the same samples as addmm's",
    "addbmm": NO_ADDEND,
    "addmv": NO_ADDEND,
    "baddbmm": NO_ADDEND,
    "bmm-triton_optimized": "the samples of bmm, of a kernel of Inductor's",
    "nn.functional.binary_cross_entropy": OF_PROBABILITIES,
    "nn.functional.binary_cross_entropy_with_logits": OF_PROBABILITIES,
    "nn.functional.gaussian_nll_loss": OF_PROBABILITIES,
    "nn.functional.poisson_nll_loss": OF_PROBABILITIES,
    "sparse.mm-reduce": "there are no sparse tensors",
    "sparse.sampled_addmm": "there are no sparse tensors",
    "torch._scaled_mm": "there is no FP8 GEMM",
    "torch._scaled_mm_v2": "there is no FP8 GEMM",
}
FAMILIES = re.compile(
    r"softmax|softmin|logsumexp|rms_norm|layer_norm|entropy|nll_loss|functional\.linear|matmul"
    r"|(^|\.|_|add|b)mm(_v2)?$|mv$|topk"
)


@cache
def version() -> tuple[int, int]:
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


def here() -> list[Counterpart]:
    """Those with calls whose OpInfo this torch has; all that it should have are there."""
    return [one for one in COUNTERPARTS if version() >= one.since]


def without_counterpart() -> set[str]:
    """The OpInfos of these families that are in neither table of counterparts."""
    known = {(one.name, one.variant) for one in (*COUNTERPARTS, *ALL_APART)}
    others = [key for key in INFOS if FAMILIES.search(key[0]) and key not in known]
    return {"-".join(filter(None, key)) for key in others}
