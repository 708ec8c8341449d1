"""The named sets of shapes that suites of kernel time run over, and which task has which of them.

All of it is data, in one place. A task's problems are those of its sets, each once; a row of
results says to which sets it belongs. Shapes are rows x columns, with more leading dimensions where
they matter; of products M x N x K; of mixtures of experts M x experts x topk x H x I.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gristmill.bench.experts.models import MODELS, TINY
from gristmill.bench.layers import FEW, products

Shape = tuple[int, ...]
# Of x; QuACK's suites end here, too, and offsets of 32 bits do.
MOST_ELEMENTS = 2**31


@dataclass(frozen=True)
class ShapeSet:
    """Shapes with something in common.

    `quick` and `quick_cpu` are those that a first look takes, on a GPU and on a CPU.
    """

    name: str
    summary: str
    shapes: tuple[Shape, ...]
    quick: tuple[Shape, ...] = ()
    quick_cpu: tuple[Shape, ...] = ()


def _grid(rows: Sequence[int], columns: Sequence[int]) -> tuple[Shape, ...]:
    """Rows by columns, as far as they are not too large."""
    pairs = ((row, column) for column in columns for row in rows)
    return tuple((row, column) for row, column in pairs if row * column <= MOST_ELEMENTS)


def _doubling(first: int, last: int) -> tuple[int, ...]:
    return tuple(first << step for step in range((last // first).bit_length()))


# Experts of two models: one whose weights fit a small GPU, and the largest.
_EXPERTS = ("qwen3-30b-a3b", "deepseek-v3")
_EXPERT_ROWS = (1, 16, 128, 1024)

SETS: dict[str, ShapeSet] = {
    one.name: one
    for one in (
        ShapeSet(
            "quack",
            "QuACK's own pairs of M and N, by which it shows its reductions",
            (*_grid((32768,), _doubling(256, 65536)), (16384, 131072), (8192, 262144)),
            quick=((32768, 4096),),
        ),
        ShapeSet(
            "hidden4096",
            "a hidden size of 4096 by batch x sequence, up to 2^31 elements",
            _grid(_doubling(8192, 524288), (4096,)),
        ),
        ShapeSet(
            "deepseek_v3",
            "prefill of models like DeepSeek-V3",
            _grid((4096, 16384, 65536), (6144, 7168, 8192)),
            quick=((4096, 7168),),
        ),
        ShapeSet(
            "decode",
            "a step of decoding, where launches and latency count",
            _grid((1, 16, 64, 256), (4096, 7168)),
            quick=((1, 4096), (256, 7168)),
            quick_cpu=((256, 4096),),
        ),
        ShapeSet(
            "vocabularies",
            "logits over vocabularies of Llama 2, GPT-2 (odd), Llama 3, DeepSeek-V3, Qwen 3, Phi-4 "
            "and Gemma 3 in training; then of few tokens",
            (
                *((8192, 32000), (4096, 50257), (8192, 128256), (4096, 129280), (4096, 151936)),
                *((4096, 200064), (4096, 262144), (16, 32000), (1, 128256), (256, 151936)),
            ),
            quick=((4096, 50257), (4096, 151936), (16, 32000)),
            quick_cpu=((16, 32000),),
        ),
        ShapeSet(
            "odd",
            "sizes that no kernel likes: odd rows, columns that are not a multiple of 8, primes",
            ((32768, 257), (8191, 4095), (997, 5003), (4096, 12290), (33, 65537), (1000, 3001)),
            quick=((8191, 4095),),
        ),
        ShapeSet(
            "scores",
            "scores of attention: heads x queries x keys",
            ((32, 512, 512), (16, 4096, 4096), (8, 16384, 16384)),
            quick=((16, 4096, 4096),),
            quick_cpu=((4, 512, 512),),
        ),
        ShapeSet(
            "output_8b",
            "the output layer of attention of a model of 8B parameters, from decoding to prefill",
            products((1, 16, 64, 512, 4096), ((4096, 4096),)),
            quick=((64, 4096, 4096), (4096, 4096, 4096)),
            quick_cpu=((16, 512, 512),),
        ),
        ShapeSet(
            "gate_8b",
            "the gate of its MLP",
            products((64, 512, 4096), ((14336, 4096),)),
            quick=((512, 14336, 4096),),
            quick_cpu=((16, 512, 512),),
        ),
        ShapeSet(
            "weights",
            "four weights of Llama 3, from small to large, from decoding to prefill",
            products((1, 16, 64, 256, 1024), FEW),
            quick=products((1, 16, 64, 256), ((8192, 8192),)),
            quick_cpu=((4, 256, 512),),
        ),
        ShapeSet(
            "weights_prefill",
            "the same at sizes where products in FP8 may be worth the rounding of their operands",
            products((1024, 4096), FEW),
            quick=((1024, 8192, 8192),),
            quick_cpu=((64, 256, 512),),
        ),
        ShapeSet(
            "experts",
            "the experts of a layer of Qwen3-30B-A3B and of DeepSeek-V3",
            tuple(MODELS[name].shape(rows) for name in _EXPERTS for rows in _EXPERT_ROWS),
            quick=tuple(MODELS[_EXPERTS[0]].shape(rows) for rows in (1, 128, 1024)),
            quick_cpu=(TINY.shape(16),),
        ),
        ShapeSet(
            "experts_small",
            "those of Qwen3-30B-A3B alone",
            tuple(MODELS[_EXPERTS[0]].shape(rows) for rows in _EXPERT_ROWS),
            quick=tuple(MODELS[_EXPERTS[0]].shape(rows) for rows in (1, 128, 1024)),
            quick_cpu=(TINY.shape(16),),
        ),
        ShapeSet(
            "router128",
            "tokens x 128 experts: decoding, a batch, prefill",
            _grid((1, 32, 256, 4096), (128,)),
        ),
        ShapeSet(
            "router256",
            "tokens x 256 experts",
            _grid((1, 32, 256, 4096), (256,)),
            quick=((32, 256), (4096, 256)),
            quick_cpu=((256, 256),),
        ),
    )
}

_ROWS = ("quack", "deepseek_v3", "decode", "odd")
_LOGITS = ("quack", "vocabularies", "odd")
# By the names of result files. Backward passes of a step of decoding do not exist, and are measured
# at these sizes all the same: they are where a launch too many shows.
OF_TASKS: dict[str, tuple[str, ...]] = {
    "rms_norm": (*_ROWS, "hidden4096"),
    "add_rms_norm": _ROWS,
    "rms_norm_bwd": _ROWS,
    "layer_norm": (*_ROWS, "hidden4096"),
    "add_layer_norm": ("deepseek_v3", "decode", "odd"),
    "layer_norm_bwd": _ROWS,
    "softmax": ("quack", "hidden4096", "decode", "vocabularies", "odd", "scores"),
    "softmax_bwd": ("quack", "decode", "odd", "scores"),
    "softmax_causal": ("scores",),
    "softmax_causal_bwd": ("scores",),
    "cross_entropy": _LOGITS,
    "cross_entropy_bwd": _LOGITS,
    "cross_entropy_fwd_bwd": _LOGITS,
    "cross_entropy_train": ("vocabularies",),
    "linear": ("output_8b", "gate_8b"),
    "linear_relu": ("gate_8b",),
    "linear_silu": ("output_8b", "gate_8b"),
    "linear_gelu": ("gate_8b",),
    "nvfp4_linear": ("weights",),
    "nvfp4_linear_fp8": ("weights_prefill",),
    "nvfp4_moe": ("experts",),
    "moe": ("experts_small",),
    "topk_router": ("router128", "router256"),
    "topk_router_grouped": ("router256",),
}


def shapes_of(
    task: str, *, sets: Sequence[str] = (), quick: str | None = None
) -> tuple[Shape, ...]:
    """The shapes of a task's sets, or of those of them that are named, each once.

    `quick`: only the few of a first look, on "cuda" or "cpu".
    """
    chosen = [SETS[name] for name in OF_TASKS[task] if not sets or name in sets]
    picked = {None: "shapes", "cuda": "quick", "cpu": "quick_cpu"}[quick]
    return tuple(dict.fromkeys(shape for one in chosen for shape in getattr(one, picked)))


def sets_of(task: str, shape: Shape) -> list[str]:
    """Those of a task's sets that have the shape; none for one that was given by hand."""
    return [
        name
        for name in OF_TASKS[task]
        if shape in (*SETS[name].shapes, *SETS[name].quick, *SETS[name].quick_cpu)
    ]
