"""Which problems a benchmark measures.

A suite is data: names of tasks, the op that each stands for, and shapes. A `Task` is one point of
it, and what one row per implementation is written for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gristmill.bench.experts.models import (
    KNOWN,
    ROUTINGS,
    SIZES,
    TINY,
    TINY_TOKENS,
    Model,
    model_of,
)
from gristmill.bench.layers import SETS as LAYER_SETS
from gristmill.bench.layers import Layer, products
from gristmill.bench.shapes import OF_TASKS, SETS, Shape, sets_of, shapes_of
from gristmill.errors import ArgumentError
from gristmill.names import meant

DTYPES = ("bfloat16", "float16", "float32")
# As DeepSeek-V3 has it, beside a bias.
GROUPED = {"scoring": "sigmoid", "groups": 8, "topk_groups": 4, "scale": 2.5}
# Elements of x, or multiplications of a product. On a CPU the large problems would take minutes and
# gigabytes to say nothing new: its times are there for ratios.
CPU_LIMIT = 32 * 1024 * 1024


@dataclass(frozen=True)
class Kind:
    """What a task's name stands for.

    `options`: arguments of the op that differ from those of its example. `outputs`: the positions
    of those that are compared, where the op gives more than its peers do. `product`: shapes are
    M x N x K of a product of matrices, which operations may bound as well as bytes. `fp64`: errors
    against fp64 are told beside times. `loose`: outputs may be rounded on the way, to this relative
    error of each of their rows and columns. `experts`: shapes are M x E x k x H x I of a mixture of
    experts, which are told as a model, M and a routing.
    """

    suite: str
    op: str
    options: Mapping[str, Any] = field(default_factory=dict)
    outputs: tuple[int, ...] | None = None
    product: bool = False
    fp64: bool = False
    loose: float | None = None
    experts: bool = False


def _causal(op: str) -> Kind:
    return Kind("softmax", op, {"causal": "top_left"})


def _cross_entropy(op: str, outputs: tuple[int, ...] | None, reduction: str = "none") -> Kind:
    return Kind("cross_entropy", op, {"reduction": reduction}, outputs)


def _linear(activation: str | None) -> Kind:
    return Kind("linear", "linear", {"activation": activation}, product=True)


def _nvfp4(**more: Any) -> Kind:
    return Kind("nvfp4_linear", "nvfp4_linear", product=True, fp64=True, **more)


def _experts(op: str) -> Kind:
    return Kind(op, op, product=True, fp64=True, experts=True)


# Result files name what is measured ("rms_norm_bwd"), the registry names ops ("rms_norm_backward").
KINDS: dict[str, Kind] = {
    "rms_norm": Kind("rms_norm", "rms_norm"),
    "add_rms_norm": Kind("rms_norm", "add_rms_norm"),
    "rms_norm_bwd": Kind("rms_norm", "rms_norm_backward"),
    "layer_norm": Kind("layer_norm", "layer_norm"),
    "add_layer_norm": Kind("layer_norm", "add_layer_norm"),
    "layer_norm_bwd": Kind("layer_norm", "layer_norm_backward"),
    "softmax": Kind("softmax", "softmax"),
    "softmax_bwd": Kind("softmax", "softmax_backward"),
    "softmax_causal": _causal("softmax"),
    "softmax_causal_bwd": _causal("softmax_backward"),
    "cross_entropy": _cross_entropy("cross_entropy", (0,)),
    "cross_entropy_bwd": _cross_entropy("cross_entropy_backward", None),
    "cross_entropy_fwd_bwd": _cross_entropy("cross_entropy_one_pass", (0, 2)),
    "cross_entropy_train": _cross_entropy("cross_entropy_one_pass", (0, 2), "mean"),
    "linear": _linear(None),
    "linear_relu": _linear("relu"),
    "linear_silu": _linear("silu"),
    "linear_gelu": _linear("gelu"),
    "nvfp4_linear": _nvfp4(),
    # Activations and weights rounded to E4M3 make a result that is off by 3.6% of its size.
    "nvfp4_linear_fp8": _nvfp4(options={"act": "fp8"}, loose=0.08),
    "nvfp4_moe": _experts("nvfp4_moe"),
    "moe": _experts("moe"),
    "topk_router": Kind("topk_router", "topk_router", outputs=(0,)),
    "topk_router_grouped": Kind("topk_router", "topk_router", GROUPED, (0,)),
}


@dataclass(frozen=True)
class Task:
    """One problem to measure: what `name` stands for, at a shape, in one dtype.

    `routing`: of mixtures of experts, how their tokens are spread over them.
    """

    name: str
    shape: Shape
    dtype: str
    routing: str | None = None

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    @property
    def op(self) -> str:
        """The name in the registry of ops."""
        return self.kind.op

    @property
    def model(self) -> Model | None:
        """Whose experts these are."""
        return model_of(self.shape) if self.kind.experts else None

    @property
    def sets(self) -> list[str]:
        """The named sets of shapes that it belongs to."""
        return sets_of(self.name, self.shape)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.kind.product else math.prod(self.shape[:-1])

    @property
    def columns(self) -> int:
        return self.shape[-2] if self.kind.product and len(self.shape) > 2 else self.shape[-1]

    @property
    def depth(self) -> int | None:
        """K of a product of matrices."""
        return self.shape[-1] if self.kind.product else None

    @property
    def sizes(self) -> dict[str, Any]:
        """The keys of a row of results that say which problem it is about."""
        model = self.model
        if model is None:
            depth = {} if self.depth is None else {"K": self.depth}
            return {"M": self.rows, "N": self.columns, **depth, "shape": written(self.shape)}
        experts = {"E": model.experts, "topk": model.topk, "H": model.hidden, "I": model.inner}
        told = {"model": model.name, "routing": self.routing, **experts, "M": self.rows}
        return {**told, "shape": written(self.shape)}

    def __str__(self) -> str:
        if self.model is not None:
            return f"{self.name} {self.model.name} M={self.rows} {self.routing} {self.dtype}"
        return f"{self.name} {written(self.shape)} {self.dtype}"


@dataclass(frozen=True)
class Suite:
    name: str
    summary: str


SUITES = {
    suite.name: suite
    for suite in (
        Suite("rms_norm", "kernel time of RMSNorm: forward, with residual, backward"),
        Suite("layer_norm", "kernel time of LayerNorm: forward, with residual, backward"),
        Suite("softmax", "kernel time of softmax, plain and causal: forward, backward"),
        Suite("cross_entropy", "kernel time of cross entropy: forward, backward, both in one"),
        Suite("linear", "kernel time of linear layers with their activation"),
        Suite("nvfp4_linear", "kernel time and error of linear layers over NVFP4 weights"),
        Suite("nvfp4_moe", "kernel time and error of mixtures of experts with NVFP4 weights"),
        Suite("moe", "kernel time and error of mixtures of experts with weights of 16 bits"),
        Suite("topk_router", "kernel time of the router of mixtures of experts"),
        Suite("host_cost", "host time of an eager call: without grad, with grad, backward"),
        Suite("cold_start", "seconds until all is ready: an empty cache, a warm one, a bundle"),
        Suite("regret", "how far the picked kernel is from the best there is"),
        Suite("choice", "host time of choosing: lookup, first choice, first-call tuning"),
        Suite(
            "end_to_end", "a transformer block: training and decoding, with and without gristmill"
        ),
        Suite("vllm", "ms per decode step in vLLM: bf16, NVFP4 by Marlin and by gristmill"),
        Suite("transformers", "Hugging Face models, patched or not: training, loss, generation"),
    )
}
KERNEL_SUITES = tuple(dict.fromkeys(kind.suite for kind in KINDS.values()))


def written(shape: Sequence[int]) -> str:
    """A shape as the command line and result files have it: 16x4096x4096."""
    return "x".join(map(str, shape))


def known(kind: str, name: str, names: Iterable[str]) -> str:
    """`name`, if it is one of `names`; else an error that lists them and guesses what was meant."""
    names = list(names)
    if name in names:
        return name
    raise ArgumentError(
        f"unknown {kind} {name!r}{meant(name, names)}: there are {', '.join(names)}"
    )


def layers_of(text: str) -> tuple[Layer, ...]:
    """The layer that is written as N x K, or those of the set of this name."""
    if not text[:1].isdigit():
        return LAYER_SETS[known("set of layers", text, LAYER_SETS)]
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise ArgumentError(
            f"{text!r}: a layer is N x K, as in 8192x8192, or {', '.join(LAYER_SETS)}"
        )
    return ((int(sizes[0]), int(sizes[1])),)


def tasks(
    device_type: str,
    *,
    suites: Sequence[str] = KERNEL_SUITES,
    quick: bool = False,
    names: Sequence[str] = (),
    sets: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
    dtypes: Sequence[str] = (),
    layers: Sequence[Layer] = (),
    rows: Sequence[int] = (),
    models: Sequence[str] = (),
    routings: Sequence[str] = (),
) -> tuple[list[Task], list[str]]:
    """The problems of suites of kernel time on a kind of device, and notes on what was left out.

    An empty filter means everything the suites have; shapes given by hand are always run. With
    `sets` only shapes of these are. With `layers` (N x K) or `rows` (M) only products of matrices
    are: at these, and at all the suite's sizes of the other. With `models` or `routings` only
    mixtures of experts are, of these.
    """
    there = [name for name, kind in KINDS.items() if kind.suite in suites]
    chosen = [known("op", name, there) for name in names] or there
    models = [known("model", name, KNOWN) for name in models]
    routings = [known("routing", name, ROUTINGS) for name in routings]
    if sets:
        by_hand = bool(shapes or layers or rows or models)
        chosen = _with_sets(chosen, sets, by_hand=by_hand, every=bool(names))
    if layers or rows or models or routings:
        if shapes and (models or (rows and routings)):
            raise ArgumentError("models and rows choose among a suite's; a shape by hand has both")
        chosen = _filtered(chosen, bool(layers), bool(models or routings), bool(shapes))
    dtypes = [known("dtype", dtype, DTYPES) for dtype in dtypes] or ["bfloat16"]
    found: list[Task] = []
    left_out: dict[str, None] = {}
    for dtype in dtypes:
        for name in chosen:
            usual = _usual(name, device_type, quick, sets)
            if KINDS[name].experts:
                mixtures = _mixtures(usual, shapes, models, rows)
                if shapes and not mixtures and all(KINDS[one].experts for one in chosen):
                    model_of(shapes[0])  # says what a shape is
                some = ROUTINGS[:1] if quick or shapes else ROUTINGS
                found += [
                    Task(name, shape, dtype, routing)
                    for shape in mixtures
                    for routing in routings or some
                ]
                continue
            for shape in shapes or _shapes(usual, layers, rows):
                if not shapes and device_type != "cuda" and math.prod(shape) > CPU_LIMIT:
                    left_out[written(shape)] = None
                else:
                    found.append(Task(name, shape, dtype))
    notes = []
    if left_out:
        large = ", ".join(left_out)
        notes.append(f"left out on {device_type} (name them with --shape to run): {large}")
    return found, notes


def _with_sets(
    chosen: Sequence[str], sets: Sequence[str], *, by_hand: bool, every: bool
) -> list[str]:
    """Of the tasks those that have one of the sets; `every`: each of them must."""
    for name in sets:
        known("set of shapes", name, SETS)
    if by_hand:
        raise ArgumentError("sets choose among a suite's shapes: leave out shapes, layers, models")
    kept = [name for name in chosen if set(OF_TASKS[name]) & set(sets)]
    lacking = [name for name in chosen if name not in kept]
    if lacking and (every or not kept):
        has = dict.fromkeys(one for name in lacking for one in OF_TASKS[name])
        raise ArgumentError(
            f"{', '.join(lacking)}: not measured over {', '.join(sets)}, but over {', '.join(has)}"
        )
    return kept


def _filtered(chosen: Sequence[str], layers: bool, experts: bool, shapes: bool) -> list[str]:
    """The tasks that have what is asked for: layers, tokens, or models with their routing."""
    if layers and experts:
        raise ArgumentError("layers are those of products of matrices, and models have none")
    kinds = {name: KINDS[name] for name in chosen if KINDS[name].product}
    if layers or experts:
        kinds = {name: kind for name, kind in kinds.items() if kind.experts == experts}
    if experts and not kinds:
        raise ArgumentError("models and routing are those of mixtures of experts: none is here")
    if (shapes and not experts) or not kinds:
        what = "a shape by hand has both" if shapes else "none of these tasks has them"
        raise ArgumentError(f"layers and rows are those of products of matrices, and {what}")
    return list(kinds)


def _usual(name: str, device_type: str, quick: bool, sets: Sequence[str]) -> tuple[Shape, ...]:
    """The shapes of a task on a kind of device; of experts on a CPU a tiny model stands for all."""
    if KINDS[name].experts and device_type != "cuda" and not quick:
        return tuple(TINY.shape(tokens) for tokens in TINY_TOKENS)
    look = "cuda" if device_type == "cuda" else "cpu"
    return shapes_of(name, sets=sets, quick=look if quick else None)


def _mixtures(
    usual: Sequence[Shape], shapes: Sequence[Shape], models: Sequence[str], rows: Sequence[int]
) -> list[Shape]:
    """Shapes of mixtures of experts, model by model, so that all of one share the weights.

    Of shapes by hand those that are some.
    """
    if shapes:
        return [model_of(shape).shape(shape[0]) for shape in shapes if len(shape) == SIZES]
    if not models and not rows:
        return list(usual)
    named = models or list(dict.fromkeys(model_of(shape).name for shape in usual))
    tokens = rows or list(dict.fromkeys(shape[0] for shape in usual))
    return [KNOWN[name].shape(count) for name in named for count in tokens]


def _shapes(
    usual: Sequence[Shape], layers: Sequence[Layer], rows: Sequence[int]
) -> Sequence[Shape]:
    if not layers and not rows:
        return usual
    tokens = rows or list(dict.fromkeys(shape[0] for shape in usual))
    return products(tokens, layers or list(dict.fromkeys((n, k) for _, n, k in usual)))
