"""Every op, every variant that runs here, every case: right, laid out as promised, and tidy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conformance_helpers import (
    CASES,
    DEVICES,
    ROW_OPS,
    SOFTMAX_OPS,
    allowed,
    composed,
    copied,
    memory,
    run_by,
    same_bits,
    supporting,
    written,
)
from conformance_truth import TRUTHS, results_of, truth_of

from gristmill.ops.op import Case, Op
from gristmill.ops.registry import OPS

# The references may be off by this much and no more; variants are measured by what they really
# are off by.
REFERENCE_ROUNDINGS = 2.5


def test_every_op_has_a_truth_and_cases() -> None:
    assert set(TRUTHS) == set(OPS)
    for op in OPS.values():
        names = [case.name for case in op.cases()]
        assert len(names) == len(set(names)) > 20, op.name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_error_is_that_of_the_reference_in_working_precision(
    op: Op, case: Case, device: str
) -> None:
    args = case.make(device, 0)
    truths = truth_of(op.name, args)
    limits = allowed(op, args, truths, case.factor)
    wrong = []
    for variant in supporting(op, args):
        errors = _errors(op, variant.name, truths, args)
        for position, (error, limit) in enumerate(zip(errors, limits, strict=True)):
            bound = REFERENCE_ROUNDINGS if variant.name == "reference" else limit
            if not error <= bound:
                wrong.append(f"{variant.name} result {position}: {error:.2f} roundings > {bound}")
    assert not wrong


def _errors(op: Op, variant: str, truths: list[Any], args: tuple[Any, ...]) -> list[float]:
    own = copied(args)
    results = results_of(op.name, own, run_by(op, variant, own))
    return [
        truth.roundings(result, composed=composed(op, variant, args))
        for truth, result in zip(truths, results, strict=True)
    ]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_results_are_laid_out_as_promised_and_inputs_left_alone(
    op: Op, case: Case, device: str
) -> None:
    args = case.make(device, 1)
    tensors = [(at, arg) for at, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
    promised = op.outputs(*args)
    for variant in supporting(op, args):
        own = copied(args)
        returned = run_by(op, variant.name, own)
        for position, before in tensors:
            if position not in written(op):
                same = torch.equal(memory(before), memory(own[position]))
                assert same, f"{variant.name} wrote to argument {position}"
        if promised is None:
            assert returned is None
            continue
        results, wanted = _list(returned), _list(promised)
        assert len(results) == len(wanted)
        used = [tensor.untyped_storage().data_ptr() for _, tensor in tensors]
        for result, want in zip(results, wanted, strict=True):
            found = (result.shape, result.stride(), result.dtype, result.device)
            expected = (want.shape, want.stride(), want.dtype, want.device)
            assert found == expected, variant.name
            if result.numel():
                assert result.untyped_storage().data_ptr() not in used, variant.name
            used.append(result.untyped_storage().data_ptr())


def _list(value: Any) -> list[torch.Tensor]:
    return [value] if isinstance(value, torch.Tensor) else list(value)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "shape", [(0,), (0, 8), (3, 0), (2, 0, 5), (0, 3, 16), (4, 0, 0), (2, 0, 2, 0, 64)]
)
@pytest.mark.parametrize("op", [*ROW_OPS, *SOFTMAX_OPS])
def test_nothing_to_do_is_done(op: Op, shape: tuple[int, ...], device: str) -> None:
    args = op.example(shape, torch.bfloat16, device)
    for variant in supporting(op, args):
        returned = run_by(op, variant.name, args)
        promised = op.outputs(*args)
        if promised is None:
            assert returned is None
            continue
        for result, want in zip(_list(returned), _list(promised), strict=True):
            assert (result.shape, result.dtype) == (want.shape, want.dtype), variant.name
            # A weight gradient over no rows is the empty sum.
            assert not result.any(), variant.name


EMPTY_VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda flat: flat.view(2, 0, 2, 0, 64),
    "transposed": lambda flat: flat.view(3, 0, 64).transpose(0, 1),
    "permuted": lambda flat: flat.view(2, 0, 3, 0, 5, 64).permute(4, 1, 0, 3, 2, 5),
    "columns first": lambda flat: flat.view(64, 0).t(),
    "every second column": lambda flat: flat.view(4, 0, 128)[:, :, ::2],
    "expanded": lambda flat: flat.view(1, 0, 64).expand(7, 0, 64),
    "no columns": lambda flat: flat.view(0, 4, 3).permute(2, 1, 0),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("view", EMPTY_VIEWS.values(), ids=EMPTY_VIEWS.keys())
@pytest.mark.parametrize("op", [*ROW_OPS, *SOFTMAX_OPS])
def test_nothing_to_do_in_any_layout(
    op: Op, view: Callable[[torch.Tensor], torch.Tensor], device: str
) -> None:
    rows = view(torch.empty(0, device=device))
    if op.name == "fused_add_rms_norm_" and 0 in rows.stride():
        rows = torch.empty(rows.shape, device=device)  # what is overwritten cannot be expanded
    weight = torch.ones(rows.shape[-1], device=device)
    args = tuple(
        (rows.clone() if arg.dim() == 2 else weight) if isinstance(arg, torch.Tensor) else arg
        for arg in op.example((1, 1), torch.float32, device)
    )
    args = tuple(rows if at == 0 else arg for at, arg in enumerate(args))
    promised = op.outputs(*args)
    for variant in supporting(op, args):
        returned = run_by(op, variant.name, args)
        if promised is None:
            assert returned is None
            continue
        for result, want in zip(_list(returned), _list(promised), strict=True):
            assert (result.shape, result.stride()) == (want.shape, want.stride()), variant.name
            assert not result.any(), variant.name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["x fp32", "x bf16"])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_llama_casting_adds_the_offset_unrounded(
    name: str, dtype: torch.dtype, device: str
) -> None:
    """A narrow weight plus the offset needs more bits than the weight has."""
    op = OPS[name]
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(19, 520, generator=generator).to(device, dtype) for _ in range(2)]
    weight = torch.randn(520, generator=generator).to(device, torch.bfloat16)
    assert not torch.equal((weight + 1.0).double(), weight.double() + 1.0)
    args = (*rows[: 1 if name == "rms_norm" else 2], weight, 1e-6, 1.0, "llama", torch.float32)
    truths = truth_of(name, args)
    for variant in supporting(op, args):
        for truth, result in zip(
            truths, results_of(name, args, run_by(op, variant.name, args)), strict=True
        ):
            assert truth.roundings(result) <= 4.0, variant.name


# Shapes for each scope: lanes of a warp, a block, blocks fed by rings, clusters.
ROWS = [(7, 64), (7, 1000), (9, 4096), (5, 16384), (3, 131072)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("shape", ROWS, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("op", ROW_OPS)
def test_nan_and_inf_stay_in_their_row(
    op: Op, shape: tuple[int, ...], value: float, device: str
) -> None:
    args = op.example(shape, torch.bfloat16, device)
    x = 1 if op.name.endswith("_backward") else 0
    spoiled = copied(args)
    spoiled[x][1, shape[-1] // 3] = value
    healthy = [row for row in range(shape[0]) if row != 1]
    expected = copied(spoiled)
    expected_results = results_of(op.name, expected, run_by(op, "reference", expected))
    for variant in supporting(op, args):
        clean, dirty = copied(args), copied(spoiled)
        clean_results = results_of(op.name, clean, run_by(op, variant.name, clean))
        dirty_results = results_of(op.name, dirty, run_by(op, variant.name, dirty))
        for one, other, want in zip(clean_results, dirty_results, expected_results, strict=True):
            if one.dim() > 1:
                assert same_bits(one[healthy], other[healthy]), variant.name
                assert not other[1].isfinite().all(), variant.name
            assert torch.equal(other.isnan(), want.isnan()), variant.name
            assert torch.equal(other.isinf(), want.isinf()), variant.name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", ROWS, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("op", [*ROW_OPS, *SOFTMAX_OPS])
def test_a_row_does_not_depend_on_its_neighbours(
    op: Op, shape: tuple[int, ...], device: str
) -> None:
    """Within one variant and shape: the same row among others gives the same bits."""
    args = op.example(shape, torch.bfloat16, device)
    turned = tuple(
        arg.roll(1, 0) if isinstance(arg, torch.Tensor) and arg.dim() > 1 else arg for arg in args
    )
    for variant in supporting(op, args):
        one, other = copied(args), copied(turned)
        results = results_of(op.name, one, run_by(op, variant.name, one))
        others = results_of(op.name, other, run_by(op, variant.name, other))
        for result, moved in zip(results, others, strict=True):
            if result.dim() > 1:
                assert same_bits(result.roll(1, 0), moved), variant.name


VIEWS = {
    "slices": lambda wide: wide[:, :, :96],
    "narrow slices": lambda wide: wide[:, :, 1:96],
    "second of three": lambda wide: wide[:, 1:2, :],
    "transposed": lambda wide: wide.transpose(0, 1),
    "strided columns": lambda wide: wide[:, :, ::2],
    "every other row": lambda wide: wide[::2],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
def test_in_place_on_views_writes_the_view_and_nothing_else(
    view: Any, dtype: torch.dtype, device: str
) -> None:
    op = OPS["fused_add_rms_norm_"]
    generator = torch.Generator().manual_seed(0)
    wide_x, wide_residual = (
        torch.randn((6, 3, 128), generator=generator).to(device, dtype) for _ in range(2)
    )
    x, residual = view(wide_x), view(wide_residual)
    weight = torch.randn(x.shape[-1], generator=generator).to(device, dtype)
    truths = truth_of(op.name, (x, residual, weight, 1e-6))
    outside = torch.ones((6, 3, 128), dtype=torch.bool, device=device)
    view(outside).fill_(False)
    limits = allowed(op, (x, residual, weight, 1e-6), truths)
    for variant in supporting(op, (x, residual, weight, 1e-6)):
        bases = wide_x.clone(), wide_residual.clone()
        views = [view(base) for base in bases]
        assert run_by(op, variant.name, (*views, weight, 1e-6)) is None
        for truth, result, limit in zip(truths, views, limits, strict=True):
            assert truth.roundings(result) <= limit, variant.name
        for base, before in zip(bases, (wide_x, wide_residual), strict=True):
            assert same_bits(base[outside], before[outside]), variant.name


def test_the_truth_notices_a_small_error() -> None:
    op = OPS["rms_norm"]
    for dtype in (torch.bfloat16, torch.float32):
        args = op.example((4, 256), dtype, "cpu")
        (truth,) = truth_of(op.name, args)
        result = op.reference(*args)
        assert truth.roundings(result) <= 1.0 + (dtype == torch.float32)
        for step in (1 + 4 * torch.finfo(dtype).eps, 1 - 4 * torch.finfo(dtype).eps):
            wrong = result.clone()
            wrong[2, 17] = (wrong[2, 17].double() * step).to(dtype)
            assert truth.roundings(wrong) > 2.0
