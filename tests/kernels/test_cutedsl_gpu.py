"""The variant `cutedsl` of rms_norm on a GPU: its numbers, and what every kernel here promises."""

from __future__ import annotations

import itertools

import exact
import pytest
import torch

import gristmill
from gristmill.errors import VariantUnavailable
from gristmill.jit.cutedsl import why_missing
from gristmill.ops import launch
from gristmill.ops.registry import OPS
from gristmill.ops.rms_norm.cutedsl import CUTEDSL, CuteConfig, launcher
from gristmill.ops.rms_norm.semantics import CASTINGS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(why_missing() is not None, reason="needs the CuTe DSL"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0),
        reason="needs compute capability 9.0",
    ),
]

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
LENGTHS = (1, 7, 128, 1000, 4095, 4096, 5120, 16384, 32766, 32768)
DTYPES = (
    (BF16, BF16, None),
    (F16, F16, None),
    (F32, F32, None),
    (BF16, F32, None),
    (BF16, None, F32),
    (F32, BF16, BF16),
)
USUAL = (1e-6, 0.0, "once", None)
# The sum of squares of a row, its root and a product, in fp32.
ROUNDINGS = 24.0


def by_cutedsl(x: torch.Tensor, weight: torch.Tensor | None, *options: object) -> torch.Tensor:
    """Past autograd; the options are eps, weight_offset, casting and out_dtype, or the usual."""
    with gristmill.use("rms_norm", "cutedsl"):
        result: torch.Tensor = OPS["rms_norm"].run(x, weight, *(options or USUAL))
    return result


def rows(*shape: int, dtype: torch.dtype = BF16, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def check(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    y: torch.Tensor,
    what: str,
    *,
    eps: float = 1e-6,
    offset: float = 0.0,
    casting: str = "once",
) -> None:
    """Every element is what the exact value may round to."""
    normalised = product = F32
    if casting == "llama":
        normalised = x.dtype
        product = x.dtype if weight is None else torch.promote_types(x.dtype, weight.dtype)
    allowed = exact.forward(
        x, weight, eps, offset, normalised=normalised, product=product, roundings=ROUNDINGS
    )
    allowed.check(y, what)


@pytest.mark.parametrize("columns", LENGTHS)
def test_lengths_and_dtypes(columns: int) -> None:
    every = columns in (7, 128, 4096, 32768)
    for dtype, weight_dtype, out in DTYPES if every else DTYPES[:3:2]:
        x = rows(33, columns, dtype=dtype)
        weight = None if weight_dtype is None else rows(columns, dtype=weight_dtype, seed=1)
        y = by_cutedsl(x, weight, 1e-6, 0.0, "once", out)
        assert y.dtype == (out or dtype)
        check(x, weight, y, f"{columns} {dtype} {weight_dtype} {out}")


@pytest.mark.parametrize("columns", [520, 4096])
def test_every_candidate(columns: int) -> None:
    op = OPS["rms_norm"]
    x, weight = rows(70, columns), rows(columns, seed=1)
    args = (x, weight, *USUAL)
    problem = op.problem(*args)
    configs = CUTEDSL.configs(problem)
    assert len(configs) >= 3
    for config in configs:
        check(x, weight, CUTEDSL.bind(problem, config)(*args), str(config))


@pytest.mark.parametrize("casting", CASTINGS)
def test_castings_and_offsets(casting: str) -> None:
    for (dtype, weight_dtype, out), offset in itertools.product(DTYPES, (0.0, 1.0)):
        x = rows(19, 520, dtype=dtype)
        weight = None if weight_dtype is None else rows(520, dtype=weight_dtype, seed=1)
        y = by_cutedsl(x, weight, 1e-5, offset, casting, out)
        what = f"{dtype} {weight_dtype} {out} {offset}"
        check(x, weight, y, what, eps=1e-5, offset=offset, casting=casting)


def test_where_rows_lie() -> None:
    weight = rows(520, seed=1)
    whole = rows(40, 1040)
    lying = {
        "sliced": whole[:, :520],
        "sliced and shifted": whole[:, 520:],
        "odd stride": rows(40, 521)[:, :520],
        "unaligned": rows(40 * 520 + 1)[1:].view(40, 520),
        "every second": whole[::2, :520],
        "expanded": rows(1, 520).expand(40, 520),
        "nested": rows(5, 8, 520).transpose(0, 1),
        "columns first": rows(520, 40).t(),
        "one row": rows(520),
    }
    for name, x in lying.items():
        y = by_cutedsl(x, weight, 1e-6, 0.0, "once", None)
        assert y.shape == x.shape
        check(x, weight, y, name)
    unaligned = rows(521, seed=2)[1:]
    check(whole[:, :520], unaligned, by_cutedsl(whole[:, :520], unaligned), "weight unaligned")


def test_nothing_is_written_beyond_the_rows() -> None:
    """The tail of a block of several rows, and of a row's last vectors."""
    for count, columns in itertools.product((1, 3, 127, 129), (7, 128, 1000, 4095)):
        x, weight = rows(count, columns), rows(columns, seed=1)
        room = torch.full((count + 300, columns), 5.0, device="cuda", dtype=BF16)
        problem = OPS["rms_norm"].problem(x, weight, *USUAL)
        run = launcher(problem, CUTEDSL.config(problem))
        run(x, None, weight, None, room[:count], None, 1e-6, 0.0)
        check(x, weight, room[:count], f"{count}x{columns}")
        assert bool((room[count:] == 5.0).all())


def test_no_rows_and_values_that_are_no_numbers() -> None:
    empty = by_cutedsl(rows(0, 4096), rows(4096))
    assert empty.shape == (0, 4096)
    x = rows(4, 4096)
    x[1] = float("inf")
    x[2, 17] = float("nan")
    x[3] = 0.0
    y = by_cutedsl(x, None)
    check(x[:1], None, y[:1], "beside")
    assert bool(y[1:3].isnan().all())
    assert bool((y[3] == 0).all())


def test_bits_depend_on_nothing_else() -> None:
    """Neither on the run, nor on the other rows, nor on where a row lies among them."""
    for columns in (128, 1000, 4096, 16384):
        x, weight = rows(257, columns), rows(columns, seed=1)
        with gristmill.batch_invariant():
            whole = by_cutedsl(x, weight)
            assert torch.equal(whole, by_cutedsl(x, weight))
            for first, last in ((0, 1), (3, 4), (100, 200), (256, 257)):
                part = by_cutedsl(x[first:last].clone(), weight)
                assert torch.equal(whole[first:last], part), (columns, first)


def test_capture_and_replay() -> None:
    x, weight = rows(300, 4096), rows(4096, seed=1)
    by_cutedsl(x, weight)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = by_cutedsl(x, weight)
    for seed in (2, 3):
        x.copy_(rows(300, 4096, seed=seed))
        graph.replay()
        check(x, weight, y, f"replay {seed}")


def test_in_the_order_of_the_stream() -> None:
    """It may begin before the kernel before it has ended, and must not read before."""
    weight = rows(4096, seed=1)
    for _ in range(20):
        x = rows(4096, 4096)
        expected = by_cutedsl(x.clone(), weight)
        torch.cuda.synchronize()
        moving = torch.zeros_like(x)
        moving.copy_(x)
        y = by_cutedsl(moving, weight)
        moving.zero_()
        assert torch.equal(y, expected)


def test_the_gradient_goes_through() -> None:
    x, weight = rows(16, 1024).requires_grad_(), rows(1024, seed=1).requires_grad_()
    with gristmill.use("rms_norm", "cutedsl"):
        y = gristmill.rms_norm(x, weight)
    y.sum().backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_rows_that_are_too_long_are_refused_by_name() -> None:
    with pytest.raises(VariantUnavailable, match="too long for the registers of a block"):
        by_cutedsl(rows(2, 65536), None)


def test_the_kernel_as_the_driver_sees_it() -> None:
    problem = OPS["rms_norm"].problem(rows(8, 4096), rows(4096), *USUAL)
    (program,) = CUTEDSL.programs(problem, CuteConfig(256, 256, 2))
    kernel = launch.load(program, program.function, 0)
    assert kernel.local_bytes == 0
    assert kernel.occupancy(256) >= 6
