"""Norms into FP8: what is returned, how it is rounded, and what a user may not ask for."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conformance_graphs import Recorder, ours
from conformance_helpers import (
    DEVICES,
    FP8_NAMES,
    FP8_OPS,
    copied,
    run_by,
    same_bits,
    supporting,
)
from conformance_truth import truth_of

import gristmill
from gristmill.errors import ArgumentError, DtypeError, GristmillError, NoGradientError
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS

FP8 = torch.float8_e4m3fn
FUNCTIONS = {name: getattr(gristmill, name.removesuffix("_fp8")) for name in FP8_NAMES}
OF_FUNCTIONS = [pytest.param(name, id=name.removesuffix("_fp8")) for name in FP8_NAMES]
SMALLEST_SCALE = 2.0**-126


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def row_arguments(name: str) -> list[str]:
    """The names of the op's tensors but for its scale."""
    arguments = OPS[name].overload._schema.arguments
    tensors = [one.name for one in arguments if "Tensor" in str(one.type)]
    return [tensor for tensor in tensors if tensor != "scale"]


def rows(
    name: str, shape: tuple[int, ...] = (5, 96), dtype: torch.dtype = torch.bfloat16, **other: Any
) -> list[torch.Tensor]:
    """x, residual, weight, bias: those that the function takes, in its order."""
    return [
        torch.randn(shape if tensor in ("x", "residual") else shape[-1:], **other).to(dtype)
        for tensor in row_arguments(name)
    ]


def arguments(name: str, tensors: list[Any], scale: torch.Tensor | None, amax: bool) -> Any:
    """The op's positional arguments: `tensors`, the options, and the options of its example."""
    example = OPS[name].example((1, 1), torch.float32, "cpu")
    return (*tensors, scale, *example[len(tensors) + 1 : -1], amax)


# --- what a call gives


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("amax", [False, True], ids=["", "amax"])
@pytest.mark.parametrize("given", [False, True], ids=["per row", "given"])
@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_the_function_returns_what_was_asked_for_in_order(
    name: str, given: bool, amax: bool, device: str
) -> None:
    tensors = [tensor.to(device) for tensor in rows(name, (2, 3, 96))]
    scale = torch.full((1,), 0.02, device=device) if given else None
    found = FUNCTIONS[name](*tensors, out_dtype=FP8, scale=scale, return_amax=amax)
    y, *others = [found] if isinstance(found, torch.Tensor) else found
    by_op = list(OPS[name].overload(*arguments(name, tensors, scale, amax)))
    assert same_bits(y, by_op.pop(0))
    if "residual" in row_arguments(name):
        total = others.pop(0)
        assert same_bits(total, tensors[0] + tensors[1])
        assert same_bits(total, by_op.pop(0))
    if not given:
        row_scale = others.pop(0)
        assert row_scale.shape == (2, 3, 1)
        assert same_bits(row_scale, by_op[0])
    if amax:
        largest = others.pop(0)
        assert (largest.shape, largest.dtype) == ((), torch.float32)
        assert same_bits(largest, by_op[1])
    assert others == []


@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_the_result_times_the_scale_is_the_norm(name: str) -> None:
    """Within half a unit in the last place of E4M3, whose smallest step is 2^-9."""
    tensors = rows(name, (33, 260), torch.float32)
    plain = FUNCTIONS[name](*tensors)
    plain = plain if isinstance(plain, torch.Tensor) else plain[0]
    for scale in (None, torch.tensor(0.03)):
        found = FUNCTIONS[name](*tensors, out_dtype=FP8, scale=scale, return_amax=True)
        y, factor = found[0].float(), found[-2] if scale is None else scale
        assert (y * factor - plain).abs().le(plain.abs() / 16 * 1.001 + factor * 2.0**-10).all()
        assert torch.isclose(found[-1], plain.abs().max(), rtol=1e-6)
        if scale is None:
            assert torch.equal(y.abs().amax(-1), torch.full((33,), 448.0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(3, 0), (0,), (0, 8), (2, 0, 5), (4, 0, 0)], ids=str)
@pytest.mark.parametrize("op", FP8_OPS)
def test_nothing_to_do_is_done(op: Op, shape: tuple[int, ...], device: str) -> None:
    """A row of no columns has the smallest scale, and of no values the largest is 0."""
    for scale, amax in itertools.product((None, torch.tensor(0.5, device=device)), (False, True)):
        tensors = [tensor.to(device) for tensor in rows(op.name, shape)]
        args = arguments(op.name, tensors, scale, amax)
        for variant in supporting(op, args):
            results = run_by(op, variant.name, args)
            for result, want in zip(results, op.outputs(*args), strict=True):
                assert (result.shape, result.dtype) == (want.shape, want.dtype), variant.name
            assert results[-2].eq(SMALLEST_SCALE).all(), variant.name
            assert results[-1].eq(0.0).all(), variant.name


# --- how it is rounded


def ties() -> torch.Tensor:
    """Every E4M3 number, what lies halfway between two, and the fp32 numbers next to those."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    points = torch.cat([codes, (codes[:-1] + codes[1:]) / 2, torch.tensor([456.0, 464.0, 480.0])])
    points = torch.cat([points, points.nextafter(torch.tensor(0.0)), points * (1 + 2.0**-23)])
    beyond = torch.tensor([500.0, 1e9, 3e38, 2.0**-10, 2.0**-10 * 1.0001, 1e-20, 2.0**-126])
    points = torch.cat([points, beyond])
    return torch.cat([points, -points])


def nearest(values: torch.Tensor) -> torch.Tensor:
    """E4M3 by search over all its numbers: the nearest, of two the one with an even code."""
    codes = torch.arange(0x7F, dtype=torch.uint8)
    numbers = codes.view(FP8).double()
    sizes = values.double().abs().clamp(max=1e3)  # so that distances are exact
    distances = (sizes.unsqueeze(-1) - numbers).abs()
    tied = (distances == distances.amin(-1, keepdim=True)).long()
    first, second = tied.argmax(-1), codes.numel() - 1 - tied.flip(-1).argmax(-1)
    return numbers[torch.where(first % 2 == 0, first, second)] * values.double().sign()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["rms_norm_fp8", "add_rms_norm_fp8"])
def test_every_tie_goes_to_the_even_one_and_large_values_saturate(name: str, device: str) -> None:
    """Rows of ones with eps 0 have the norm 1, so that z is the weight itself, bit for bit."""
    op, weight = OPS[name], ties()
    expected = nearest(weight)
    x = torch.ones(3, len(weight))
    tensors = [x, weight] if name == "rms_norm_fp8" else [x / 2, x / 2, weight]
    tensors = [tensor.to(device) for tensor in tensors]
    args = (*tensors, torch.ones((), device=device), 0.0, 0.0, "once", True)
    for variant in supporting(op, args):
        results = run_by(op, variant.name, args)
        y = results[0].cpu()
        assert torch.equal(y.double(), expected.expand(3, -1)), variant.name
        # What becomes zero keeps its sign; a zero of its own is a sum with the offset 0.
        signs = weight.signbit() & (weight != 0)
        assert torch.equal(y.float().signbit(), signs.expand(3, -1)), variant.name
        assert float(results[-1]) == float(weight.abs().max())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("largest", [1.0, 3.0, 448.0, 1e30, 1e-30, 1e-40, 0.0])
def test_the_scale_of_a_row_comes_from_its_largest_value(largest: float, device: str) -> None:
    op = OPS["rms_norm_fp8"]
    weight = torch.linspace(-largest, largest / 2, 77, device=device)
    args = (torch.ones(2, 77, device=device), weight, None, 0.0, 0.0, "once", True)
    scale = max(torch.tensor(largest) / 448, torch.tensor(SMALLEST_SCALE))
    for variant in supporting(op, args):
        y, row_scale, amax = run_by(op, variant.name, args)
        torch.testing.assert_close(row_scale.cpu(), scale.expand(2, 1), rtol=2.0**-22, atol=0.0)
        assert float(amax) == float(weight.abs().max())
        expected = (weight / scale.to(device)).clamp(-448, 448)
        off = (y.float() - expected).abs()
        assert bool((off <= expected.abs() / 16 * 1.001 + 2.0**-10).all()), variant.name


# --- NaN and infinity


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    "shape", [(7, 64), (7, 1000), (9, 4096), (5, 16384), (3, 131072)], ids=lambda s: f"{s[-1]}"
)
@pytest.mark.parametrize("given", [False, True], ids=["per row", "given"])
@pytest.mark.parametrize("op", FP8_OPS)
def test_nan_stays_in_its_row_and_reaches_amax(
    op: Op, given: bool, shape: tuple[int, int], value: float, device: str
) -> None:
    scale = torch.tensor(0.01, device=device) if given else None
    tensors = [tensor.to(device) for tensor in rows(op.name, shape)]
    args = arguments(op.name, tensors, scale, True)
    spoiled = copied(args)
    spoiled[0][1, shape[-1] // 3] = value
    healthy = [row for row in range(shape[0]) if row != 1]
    for variant in supporting(op, args):
        clean, dirty = (run_by(op, variant.name, one) for one in (args, spoiled))
        for one, other in zip(clean[:-1], dirty[:-1], strict=True):
            if one.numel():
                assert same_bits(one[healthy], other[healthy]), variant.name
        nans = dirty[0][1].isnan()
        if value != value or not given or "layer" in op.name:
            assert nans.all(), variant.name  # an infinity is a NaN times zero, in its own place
        else:
            assert nans.sum() == 1, variant.name
        assert given or dirty[-2][1].isnan().all(), variant.name
        assert not clean[-1].isnan()
        assert dirty[-1].isnan(), variant.name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("op", FP8_OPS)
def test_a_row_does_not_depend_on_its_neighbours(op: Op, device: str) -> None:
    for shape in [(7, 64), (9, 4096), (3, 131072)]:
        args = op.example(shape, torch.bfloat16, device)
        turned = tuple(
            arg.roll(1, 0) if isinstance(arg, torch.Tensor) and arg.dim() > 1 else arg
            for arg in args
        )
        for variant in supporting(op, args):
            results, others = (run_by(op, variant.name, one) for one in (args, turned))
            for result, moved in zip(results, others, strict=True):
                if result.dim() > 1:
                    assert same_bits(result[:-1], moved[1:]), variant.name


# --- gradients


@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_a_gradient_is_refused_at_once_by_a_message_that_helps(name: str) -> None:
    for position in range(len(row_arguments(name))):
        tensors = rows(name)
        tensors[position].requires_grad_()
        words = rf"^{name.removesuffix('_fp8')}: .*no gradient.*torch\.no_grad\(\).*out_dtype"
        with pytest.raises(NoGradientError, match=words):
            FUNCTIONS[name](*tensors, out_dtype=FP8)
        with pytest.raises(NoGradientError, match=rf"^{name}: .*no gradient"):
            OPS[name].overload(*tensors)
        with torch.no_grad():
            FUNCTIONS[name](*tensors, out_dtype=FP8)
            OPS[name].overload(*tensors)
        with torch.inference_mode():
            FUNCTIONS[name](*tensors, out_dtype=FP8)
        FUNCTIONS[name](*(tensor.detach() for tensor in tensors), out_dtype=FP8)


def test_a_scale_that_requires_a_gradient_is_refused_too() -> None:
    scale = torch.ones((), requires_grad=True)
    with pytest.raises(NoGradientError, match="no gradient"):
        gristmill.rms_norm(torch.randn(3, 8), out_dtype=FP8, scale=scale)


# --- wrong arguments

WRONG: list[tuple[dict[str, Any], type[GristmillError], str]] = [
    ({"scale": torch.ones(())}, ArgumentError, "{0}: scale goes with out_dtype=.*got .* None"),
    ({"return_amax": True}, ArgumentError, "{0}: return_amax goes with out_dtype=.*got .* None"),
    (
        {"return_amax": True, "out_dtype": torch.float32},
        ArgumentError,
        r"{0}: return_amax goes with out_dtype=torch\.float8_e4m3fn, got out_dtype float32",
    ),
    *(
        ({"out_dtype": dtype}, DtypeError, f"{{0}}: out_dtype .*float8_e4m3fn, got {word}")
        for dtype, word in (
            (torch.float8_e5m2, "float8_e5m2"),
            (torch.float8_e4m3fnuz, "float8_e4m3fnuz"),
            (torch.float8_e5m2fnuz, "float8_e5m2fnuz"),
            (torch.int8, "int8"),
            ("float8_e4m3fn", "str"),
        )
    ),
    *(
        ({"out_dtype": FP8, "scale": scale}, error, f"{{0}}_fp8: scale {words}")
        for scale, error, words in (
            (0.5, DtypeError, r"must be a torch\.Tensor, got float"),
            ("1", DtypeError, r"must be a torch\.Tensor, got str"),
            (torch.ones((), dtype=torch.float64), DtypeError, ".*float32, got float64"),
            (torch.ones((), dtype=torch.bfloat16), DtypeError, ".*float32, got bfloat16"),
            (torch.ones((), dtype=torch.int32), DtypeError, ".*float32, got int32"),
            (torch.ones(5), ArgumentError, r"must have one element.*got shape \(5,\).*per row"),
            (torch.ones(5, 1), ArgumentError, r"must have one element.*got shape \(5, 1\)"),
            (torch.ones(0), ArgumentError, r"must have one element.*got shape \(0,\)"),
            (torch.ones(1).to_sparse(), ArgumentError, "must be a dense tensor.*sparse"),
            (torch.ones((), device="meta"), ArgumentError, "is on meta, x on cpu"),
        )
    ),
    *(
        ({"out_dtype": FP8, "return_amax": flag}, DtypeError, "{0}: return_amax .*got " + word)
        for flag, word in ((1, "int"), (None, "NoneType"), ("yes", "str"))
    ),
    ({"out_dtype": FP8, "eps": -1.0}, ArgumentError, "{0}_fp8: eps must be .*at least 0, got -1"),
    ({"out_dtype": FP8, "weight_offset": None}, DtypeError, "{0}_fp8: weight_offset .*a number"),
]


@pytest.mark.parametrize("number", range(len(WRONG)))
@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_wrong_arguments(name: str, number: int) -> None:
    options, error, words = WRONG[number]
    tensors = rows(name)
    function = name.removesuffix("_fp8")
    before = gristmill.counters()
    with pytest.raises(error, match="^" + words.format(function)):
        FUNCTIONS[name](*tensors, **options)
    assert gristmill.counters() == before


@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_wrong_tensors(name: str) -> None:
    for position, argument in enumerate(row_arguments(name)):
        for wrong in (torch.ones(4, 7), torch.ones(5, 96, dtype=torch.int32), [1.0], None):
            if wrong is None and argument in ("weight", "bias"):
                continue
            if argument == "x" and isinstance(wrong, torch.Tensor) and wrong.is_floating_point():
                continue  # then it is the others that are wrong
            tensors: list[Any] = list(rows(name))
            tensors[position] = wrong
            with pytest.raises(GristmillError, match=f"^{name}: {argument} must"):
                FUNCTIONS[name](*tensors, out_dtype=FP8)


# --- compilers, transforms, autocast


@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_one_call_is_one_node_with_any_number_of_rows(name: str) -> None:
    recorder = Recorder()

    @torch.compile(backend=recorder, fullgraph=True, dynamic=True)
    def function(*tensors: torch.Tensor) -> Any:
        found = FUNCTIONS[name](*tensors, out_dtype=FP8, return_amax=True)
        return found[0].float() * found[-2], found[-1] + 1

    for count in (5, 9, 17):
        tensors = rows(name, (count, 96))
        y, amax = function(*tensors)
        expected = FUNCTIONS[name](*tensors, out_dtype=FP8, return_amax=True)
        assert same_bits(y, expected[0].float() * expected[-2])
        assert same_bits(amax, expected[-1] + 1)
    assert ours(recorder.forward) == [f"gristmill.{name}"]


@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_inlined_it_is_traced_as_its_formula(name: str) -> None:
    tensors = rows(name, (6, 96), torch.float32)
    expected = FUNCTIONS[name](*tensors, out_dtype=FP8, return_amax=True)
    recorder = Recorder()
    with gristmill.inline(name):

        @torch.compile(backend=recorder, fullgraph=True)
        def function(*tensors: torch.Tensor) -> Any:
            return FUNCTIONS[name](*tensors, out_dtype=FP8, return_amax=True)

        found = function(*tensors)
        with pytest.raises(Exception, match="scale must have one element"):
            torch.compile(FUNCTIONS[name], backend="eager", fullgraph=True)(
                *tensors, out_dtype=FP8, scale=torch.ones(2)
            )
    assert ours(recorder.forward) == []
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_vmap_gives_each_slice_what_it_would_get_alone(name: str) -> None:
    shared = len(row_arguments(name)) - sum(one in ("x", "residual") for one in row_arguments(name))
    batches = rows(name, (3, 4, 96), torch.float32)
    dims = tuple(0 if tensor.dim() > 1 else None for tensor in batches)
    assert dims.count(None) == shared

    def call(*tensors: torch.Tensor) -> Any:
        return FUNCTIONS[name](*tensors, out_dtype=FP8, return_amax=True)

    found = torch.vmap(call, in_dims=dims)(*batches)
    for index in range(3):
        alone = call(*(one[index] if one.dim() > 1 else one for one in batches))
        for one, other in zip(found, alone, strict=True):
            assert same_bits(one[index].contiguous(), other)
    assert found[-1].shape == (3,)


@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_autocast_leaves_the_dtype_that_was_asked_for(name: str) -> None:
    tensors = rows(name)
    expected = FUNCTIONS[name](*tensors, out_dtype=FP8)
    with torch.autocast("cpu", torch.bfloat16):
        found = FUNCTIONS[name](*tensors, out_dtype=FP8)
    for one, other in zip(found, expected, strict=True):
        assert same_bits(one, other)


@pytest.mark.parametrize("name", OF_FUNCTIONS)
def test_explain_takes_the_functions_own_arguments(name: str) -> None:
    tensors = rows(name)
    function: Callable[..., Any] = FUNCTIONS[name]
    for op in (function, name.removesuffix("_fp8")):
        found = gristmill.explain(op, *tensors, out_dtype=FP8, scale=torch.ones(1))
        assert found.as_dict()["op"] == name
        assert dict(found.as_dict()["dtypes"])["out"] == "float8_e4m3fn"
        assert gristmill.explain(op, *tensors).as_dict()["op"] == name.removesuffix("_fp8")
    by_op = gristmill.explain(name, *tensors, torch.ones(1))
    assert by_op.as_dict()["op"] == name


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("op", FP8_OPS)
def test_amax_is_found_anew_at_every_replay(op: Op) -> None:
    first, second = (
        arguments(op.name, [one.cuda() * size for one in rows(op.name, (300, 8192))], None, True)
        for size in (8.0, 1.0)
    )
    for variant in supporting(op, first):
        static = copied(first)
        run_by(op, variant.name, static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run_by(op, variant.name, static)
        for values in (first, second):
            for arg, value in zip(static, values, strict=True):
                if isinstance(arg, torch.Tensor):
                    arg.copy_(value)
            graph.replay()
            expected = run_by(op, variant.name, values)
            for result, want in zip(captured, expected, strict=True):
                assert same_bits(result, want), variant.name


@pytest.mark.gpu
def test_scales_are_those_that_torchs_fp8_matmul_takes() -> None:
    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("torch multiplies by scales per row from sm_90 on")
    x = torch.randn(64, 256, device="cuda").bfloat16()
    weight = torch.randn(128, 256, device="cuda")
    y, scale = gristmill.rms_norm(x, out_dtype=FP8)
    weight_scale = weight.abs().amax(-1, keepdim=True) / 448
    packed = (weight / weight_scale).to(FP8)
    product = torch._scaled_mm(
        y, packed.t(), scale_a=scale, scale_b=weight_scale.t(), out_dtype=torch.bfloat16
    )
    expected = (y.float() * scale) @ (packed.float() * weight_scale).t()
    torch.testing.assert_close(product.float(), expected, rtol=2e-2, atol=2e-2)


def test_the_truth_notices_one_wrong_code() -> None:
    for name in FP8_NAMES:
        args = OPS[name].example((4, 256), torch.bfloat16, "cpu")
        truth, *_ = truth_of(name, args)
        y = OPS[name].reference(*args)[0]
        assert truth.roundings(y) == 0.0
        for step in (1, -1):
            wrong = y.clone()
            codes = wrong.view(torch.uint8)
            codes[2, 17] = codes[2, 17] + step
            assert truth.roundings(wrong) == float("inf")
