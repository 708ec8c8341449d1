"""Walking over ops, variants and cases, and calling one of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_truth import Truth, results_of

import gristmill
from gristmill.ops.op import Case, Op
from gristmill.ops.registry import OPS
from gristmill.select.problem import Problem
from gristmill.select.tables import tables_for
from gristmill.select.variant import Variant

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]
CASES = [
    pytest.param(op, case, id=f"{op.name}-{case.name}".replace(" ", "_"))
    for op in OPS.values()
    for case in op.cases()
]
ALL_OPS = [pytest.param(op, id=op.name) for op in OPS.values()]
# Norms into FP8, whose results are of several kinds.
FP8_NAMES = [name for name in OPS if name.endswith("_fp8")]
# Those that work on rows of any length and have kernels of ours.
ROW_NAMES = [
    name for name in OPS if "rms_norm" in name or "layer_norm" in name if name not in FP8_NAMES
]
ROW_OPS = [pytest.param(OPS[name], id=name) for name in ROW_NAMES]
FP8_OPS = [pytest.param(OPS[name], id=name) for name in FP8_NAMES]
NORM_OPS = [*ROW_OPS, *FP8_OPS]
SOFTMAX_NAMES = [name for name in OPS if "softmax" in name]
SOFTMAX_OPS = [pytest.param(OPS[name], id=name) for name in SOFTMAX_NAMES]
KERNEL_OPS = [*NORM_OPS, *SOFTMAX_OPS]

# Rows of logits, or of their gradient.
ENTROPY_NAMES = [
    name for name in OPS if name.startswith("cross_entropy") or name == "scale_gradient_"
]
# Products of matrices.
PRODUCT_NAMES = ("linear", "linear_with_pre", "matmul")


def rows_of(op: Op, args: tuple[Any, ...]) -> torch.Tensor:
    """The argument whose rows the op works on."""
    rows: torch.Tensor = args[2] if op.name == "cross_entropy_backward" else args[0]
    return rows


def composed(
    op: Op, variant: str, args: tuple[Any, ...], device: str | None = None
) -> bool | torch.dtype:
    """Whether, and to which dtype, a variant rounds what it puts its result together from.

    torch's backward kernels of norms know no dsum: it is added to what that kernel has rounded.
    torch's layer_norm rounds the mean of a row.
    cuBLAS may add up the parts of a split sum in 16 bits, as torch lets it.
    torch's grouped mm gives bf16, and with scales of their own the rows of a weight do not stay
    exact in 16 bits; on a CPU both are fp32.
    """
    where = device or args[0].device.type
    if op.name.startswith("linear_cross_entropy") and where == "cuda":
        return args[0].dtype if args[0].dtype.itemsize == 2 else False
    if op.name in PRODUCT_NAMES and variant.startswith("library"):
        # torch rounds to its dtype before the activation, too.
        narrow = where == "cuda" and args[0].dtype.itemsize == 2
        return args[0].dtype if narrow else False
    if variant not in ("library", "dequantized", "grouped_mm"):
        return False
    if op.name == "nvfp4_linear_backward" or "moe" in op.name:
        dtype: torch.dtype = args[0].dtype
        return dtype if where == "cuda" else False
    if "layer_norm" in op.name:
        dsum = op.name == "layer_norm_backward" and args[3] is not None
        return True if dsum else torch.promote_types(args[0].dtype, torch.float32)
    return op.name == "rms_norm_backward"


def supporting(op: Op, args: tuple[Any, ...]) -> list[Variant]:
    """The variants that run this call on this machine."""
    problem = op.problem(*args)
    return [variant for variant in op.variants if variant.supports(problem) is None]


def run_by(op: Op, variant: str, args: tuple[Any, ...]) -> Any:
    """The call by one variant, whatever would be chosen."""
    with gristmill.use(op.name, variant):
        return op.run(*args)


def allowed(op: Op, args: tuple[Any, ...], truths: list[Truth], factor: float = 2.0) -> list[float]:
    """The roundings that each result may be off by: `factor` times those of the reference.

    The reference in working precision, on the same device, and at least one rounding.
    """
    own = copied(args)
    results = results_of(op.name, own, run_by(op, "reference", own))
    pairs = zip(truths, results, strict=True)
    return [factor * max(1.0, truth.roundings(result)) for truth, result in pairs]


def written(op: Op) -> list[int]:
    """Positions of the arguments that the op overwrites, by its schema."""
    arguments = op.overload._schema.arguments
    return [
        position
        for position, argument in enumerate(arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments with memory of their own, but the same strides and alignment."""
    return tuple(_copy(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_neg():
        return torch._neg_view(_copy(torch._neg_view(tensor)))
    whole = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    copy.set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())
    return copy


def memory(tensor: torch.Tensor) -> torch.Tensor:
    """Every byte of the storage under a tensor, what lies between its rows too."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Equal in every bit, NaNs too."""
    return (
        one.shape == other.shape
        and one.dtype == other.dtype
        and torch.equal(_bits(one), _bits(other))
    )


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return tensor.resolve_neg().contiguous().view(integers[tensor.element_size()])


def tuned_launches(problem: Problem) -> int:
    """How many launches tables name for problems of this kind: at most one for each row."""
    family = problem.family()
    tables = [source.table for source in tables_for(problem.device)]
    return sum(row.family == family for table in tables for row in table.rows.values())


def case_of(op: Op, name: str) -> Case:
    return next(case for case in op.cases() if case.name == name)
