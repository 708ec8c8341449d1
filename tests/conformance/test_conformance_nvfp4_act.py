"""What `act` permits: rounded activations, within stated errors, and never more than permitted."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES, run_by, same_bits, supporting
from conformance_truth import truth_of
from conformance_truth_nvfp4 import rounded_off, weight_of

import gristmill
from gristmill import nvfp4
from gristmill.formats.nvfp4.tensor import E4M3
from gristmill.ops.nvfp4_linear.cases import Spread, forward_example, random_weight
from gristmill.ops.registry import OPS
from gristmill.select import KNOWN

FP64 = torch.float64
LINEAR = OPS["nvfp4_linear"]
# The variants that round, with what permits it.
ROUNDING = {"scaled_mm_fp8": "fp8", "scaled_mm": "nvfp4"}
ACTS = ("fp8", "nvfp4")
# The stated errors of a result whose activations are normal numbers: the norm of what a row is off
# by, over its norm. E4M3 rounds a value to within half of 1 / 8 of its power of two, evenly, which
# is sqrt(1 / 12) / 8 of that power: 2.6% rms of the values, and as much of the weight's, of which
# some are exact: 2.1%. The two are independent. NVFP4 has steps of 1 / 2 up to 2, of 1 up to 4 and
# of 2 up to 6, of a sixth of the largest of 16: 9.5%.
STATED = {"fp8": 0.034, "nvfp4": 0.095}
# Of 512 columns and sums of 512 products: rows scatter about that by some percent, their mean less.
SCATTER, MEAN_SCATTER = 0.25, 0.03


def in_fp8(values: torch.Tensor, scale: torch.Tensor | float) -> torch.Tensor:
    return (values.float() / scale).clamp(-448, 448).to(E4M3).double() * scale


def rounded(x: torch.Tensor, act: str) -> torch.Tensor:
    """Activations as a kernel may round them: a scale for each row."""
    if act == "fp8":
        return in_fp8(x, x.float().abs().amax(-1, keepdim=True).clamp(min=2**-126) / 448)
    # Each row is a matrix of a stack, with a global scale of its own.
    packed = nvfp4.quantize(x.float().unsqueeze(-2))
    return nvfp4.dequantize(packed, FP64).squeeze(-2)


def by_hand(args: tuple[Any, ...]) -> torch.Tensor:
    """The product of what `act` permits to round, rounded, in fp64."""
    x, codes, scales, row_scale, _, layout, _, act = args
    weight = weight_of(codes, scales, row_scale, layout, x.shape[-1])
    if act == "fp8":
        factor = row_scale.double().unsqueeze(-1)
        weight = in_fp8((weight / factor).float(), 8.0) * factor
    return rounded(x, act) @ weight.t()


def call(x: torch.Tensor, act: str | None, rows: int = 40, layout: str = "rows") -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(7)
    shape = (rows, x.shape[-1])
    weight = random_weight(shape, "cpu", layout=layout, generator=generator, per_row=True)
    parts = (part.to(x.device) for part in weight[:3])
    return (x, *parts, None, layout, torch.float32, act)


def spread_out(kind: str) -> torch.Tensor:
    torch.manual_seed(3)
    x = torch.randn(9, 144)
    if kind == "outliers":
        x[:, ::37] *= 300
    elif kind == "tiny beside huge":
        x *= 10 ** (torch.rand(9, 144) * -6)
    elif kind == "ties":  # halfway between two numbers of E4M3, and of E2M1
        x = (1 + torch.randint(0, 8, (9, 144)) / 8 + 1 / 16) * 2.0 ** torch.randint(-8, 8, (9, 144))
        x[:, 0] = 448
    elif kind == "zeros":
        x[::2] = 0
        x[:, 32:64] = 0
    return x


@pytest.mark.parametrize("kind", ["normal", "outliers", "tiny beside huge", "ties", "zeros"])
@pytest.mark.parametrize("act", ACTS)
def test_rounding_stays_within_the_bound(act: str, kind: str) -> None:
    """Of every activation and every result; and the bound is no larger than it has to be."""
    x = spread_out(kind)
    off = (rounded(x, act) - x.double()).abs()
    bound = rounded_off(x, act)
    assert (off <= bound).all()
    if kind in ("ties", "tiny beside huge"):
        assert (off / bound.clamp(min=1e-300)).max() > 0.9
    args = call(x, act)
    (truth,) = truth_of("nvfp4_linear", args)
    result = by_hand(args)
    assert (result >= truth.low).all()
    assert (result <= truth.high).all()


def test_nothing_is_permitted_where_nothing_is_asked_for() -> None:
    """A rounding that `act` did not permit is an error by orders of magnitude."""
    x = spread_out("normal")
    for act in ACTS:
        result = by_hand(call(x, act)).float()
        (truth,) = truth_of("nvfp4_linear", call(x, None))
        assert truth.roundings(result) > 1000
        (truth,) = truth_of("nvfp4_linear", call(x, act))
        assert truth.roundings(result) <= 1


@pytest.mark.parametrize("act", ACTS)
def test_the_stated_error_is_that_of_the_rounding(act: str) -> None:
    args = call_of_normal_numbers("cpu", act)
    check_stated(act, errors_of_rows(args, by_hand(args)))


def check_stated(act: str, errors: torch.Tensor) -> None:
    """Of every row; and the mean is no less: what rounds nothing has no need of a permission."""
    found = errors / STATED[act] - 1
    assert found.max() < SCATTER
    assert abs(found.mean()) < MEAN_SCATTER


def call_of_normal_numbers(device: str, act: str, rows: int = 256) -> tuple[Any, ...]:
    """A weight quantised from normal numbers, too, in the layout of the device."""
    generator = torch.Generator().manual_seed(5)
    weight = nvfp4.quantize(torch.randn(512, 512, generator=generator)).to(device).prepare()
    x = torch.randn(rows, 512, generator=generator).to(torch.bfloat16).to(device)
    return (x, weight.codes, weight.scales, weight.row_scale, None, weight.layout, None, act)


def errors_of_rows(args: tuple[Any, ...], result: torch.Tensor) -> torch.Tensor:
    (truth,) = truth_of("nvfp4_linear", (*args[:-1], None))
    return (result.double() - truth.low).norm(dim=-1) / truth.low.norm(dim=-1)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ROUNDING)
def test_variants_that_round_keep_to_the_stated_error(name: str) -> None:
    act = ROUNDING[name]
    args = call_of_normal_numbers("cuda", act, 512)
    if name not in {variant.name for variant in supporting(LINEAR, args)}:
        pytest.skip(f"{name} does not run on this GPU")
    result = run_by(LINEAR, name, args)
    check_stated(act, errors_of_rows(args, result))
    want = by_hand(args)
    assert (result.double() - want).norm() < 0.01 * want.norm()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", ["rows", "tiles", "fragments"])
@pytest.mark.parametrize("act", ACTS)
def test_others_ignore_the_permission(act: str, layout: str, device: str) -> None:
    """Bit for bit, the reference and every variant that keeps activations as they are."""
    x = spread_out("outliers").to(torch.bfloat16).to(device)
    permitted, plain = call(x, act, 48, layout), call(x, None, 48, layout)
    names = {variant.name for variant in supporting(LINEAR, permitted)} - set(ROUNDING)
    assert names == {variant.name for variant in supporting(LINEAR, plain)}
    assert {"library", "reference"} <= names
    for name in names:
        assert same_bits(run_by(LINEAR, name, permitted), run_by(LINEAR, name, plain)), name


def test_nobody_rounds_without_permission() -> None:
    """On no GPU there is: which variants run is told by their reasons."""
    seen = set()
    for arch, device in KNOWN.items():
        for act in (None, *ACTS):
            *args, _ = forward_example((512, 512, 512), torch.bfloat16, "meta", arch)
            problem = LINEAR.problem(*args, act, device=device)
            assert problem.flags == (args[5], *([f"act_{act}"] if act else []))
            for variant in LINEAR.variants:
                if variant.name in ROUNDING and variant.supports(problem) is None:
                    assert act == ROUNDING[variant.name]
                    seen.add(variant.name)
    assert seen == set(ROUNDING)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("act", ACTS)
def test_gradients_know_nothing_of_it(act: str, device: str) -> None:
    made = []
    for asked in (None, act):
        *args, _ = call(spread_out("normal").to(device), asked, 48)
        args[0] = args[0].requires_grad_()
        LINEAR.call(tuple(args[:5]), (*args, asked)).sum().backward()
        made.append(args[0].grad)
    assert same_bits(*made)


def test_public_functions_pass_it_on() -> None:
    weight = nvfp4.quantize(torch.randn(32, 64))
    x = torch.randn(2, 64)
    for act in ACTS:
        found = gristmill.explain(nvfp4.linear, x, weight, act=act)
        assert found.problem.flags == (f"act_{act}",)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = nvfp4.linear(x, weight, act="fp8")
    assert same_bits(y, nvfp4.linear(x.bfloat16(), weight))


def test_there_are_cases_of_it() -> None:
    """The suites walk over cases: each permission is among them in every layout of a GPU."""
    made = [case.make("cpu", 0) for case in LINEAR.cases()]
    assert Spread().act is None
    for layout in ("tiles", "fragments"):
        assert {args[7] for args in made if args[5] == layout} == {None, *ACTS}
