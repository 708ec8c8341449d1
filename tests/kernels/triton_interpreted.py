"""Run the Triton variants on the CPU, in Triton's interpreter: the child of
test_triton_interpreted.py, which sets TRITON_INTERPRET=1.

Everything but the launch is what runs on a GPU: configs, programs, plans. A launch looks its values
up by the program's signature, as the driver does by the kernel's parameters.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.jit import TritonProgram
from gristmill.ops import launch
from gristmill.ops.linear.configs import MatmulConfig
from gristmill.ops.linear.problem import linear_problem, linear_with_pre_problem, matmul_problem
from gristmill.ops.linear.triton import PERSISTENT, SPLIT_K, TILES
from gristmill.select.device import KNOWN

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TYPES = {"bf16": BF16, "fp16": F16, "fp32": F32}
DEVICE = KNOWN["sm_90a"]
EPSILON = {dtype: torch.finfo(dtype).eps for dtype in (BF16, F16, F32)}


def _at(address: int, kind: str) -> torch.Tensor:
    """A tensor of one element whose memory is at `address`."""
    dtype = TYPES[kind[1:]]
    memory = (ctypes.c_char * dtype.itemsize).from_address(address)
    return torch.frombuffer(memory, dtype=dtype)


def _prepare(
    program: TritonProgram, device_index: int, *, grid: int, dependent: bool
) -> Callable[..., None]:
    function = program.imported()
    constants = dict(program.constants)
    assert constants.pop("DEPENDENT") is dependent
    assert constants.pop("EMULATED") is False

    def run(stream: int, *values: Any) -> None:
        *own, _scratch, _profile = values
        assert len(own) == len(program.signature)
        given = {}
        for (name, kind), value in zip(program.signature, own, strict=True):
            divisor = dict(program.divisible).get(name, 1)
            if divisor > 1:  # there are floats, too
                assert value % divisor == 0, f"{name} is {value}, which {divisor} does not divide"
            given[name] = _at(value, kind) if kind.startswith("*") else value
        function[(grid,)](**given, **constants, DEPENDENT=False, EMULATED=True)

    return run


launch.prepare_separate = _prepare
launch.current_stream = lambda index: 0
launch.empty = lambda count, dtype, index: torch.full((count,), 77, dtype=dtype)  # not zeros
launch.resident_programs = lambda program, index: 1
launch.scratch_bytes = lambda program, index: 384


@dataclass(frozen=True)
class Shape:
    """A product: sizes, dtype, options, and how the matrices lie."""

    rows: int
    columns: int
    depth: int
    dtype: torch.dtype = F16
    bias: bool = True
    activation: str | None = None
    pre: bool = False
    weight: str = "rows"  # or "columns": K or N contiguous, or "strided": neither
    step: int = 0  # elements between the rows of x beyond its columns


def _made(*size: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _arguments(shape: Shape) -> tuple[Any, ...]:
    x = _made(shape.rows, shape.depth + shape.step, dtype=shape.dtype, seed=1)[:, : shape.depth]
    weight = _made(shape.columns, shape.depth, dtype=shape.dtype, seed=2)
    if shape.weight == "columns":
        weight = weight.t().contiguous().t()
    elif shape.weight == "strided":
        weight = weight.repeat_interleave(2, dim=1)[:, ::2]
    bias = _made(shape.columns, dtype=shape.dtype, seed=3) if shape.bias else None
    return x, weight, bias, shape.activation


def _activated(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    functional = torch.nn.functional
    return {
        None: lambda: x,
        "relu": lambda: functional.relu(x),
        "silu": lambda: functional.silu(x),
        "gelu": lambda: functional.gelu(x),
        "gelu_tanh": lambda: functional.gelu(x, approximate="tanh"),
    }[activation]()


def _compare(got: torch.Tensor, wanted: torch.Tensor, terms: torch.Tensor, what: object) -> None:
    """Within one rounding of the result, and the fp32 sums' own error, of fp64.

    The interpreter multiplies by NumPy, whose fp32 sums of 64 terms are off by up to 6.6 roundings
    of the sum of absolute terms (2**-24): 8 are allowed.
    """
    assert torch.isfinite(got).all(), what
    allowed = 0.5001 * EPSILON[got.dtype] * wanted.abs() + 2.0**-21 * terms + 1e-7
    worst = ((got.double() - wanted).abs() / allowed).max().item()
    assert worst <= 1, f"{what}: {worst:.2f} times the allowed error"


def check_linear(variant: Any, config: MatmulConfig, shape: Shape) -> None:
    arguments = _arguments(shape)
    make = linear_with_pre_problem if shape.pre else linear_problem
    problem = make(DEVICE, *arguments)
    assert variant.unable(problem) is None, variant.unable(problem)
    result = variant.bind(problem, config)(*arguments)
    x, weight, bias, activation = arguments
    pre = x.double() @ weight.double().t()
    terms = x.double().abs() @ weight.double().abs().t()
    if bias is not None:
        pre, terms = pre + bias.double(), terms + bias.double().abs()
    what = f"{variant.name} {config} {shape}"
    if shape.pre:
        result, h = result
        _compare(h, pre, terms, f"pre of {what}")
    _compare(result, _activated(pre, activation), 1.2 * terms, what)


def check_matmul(variant: Any, config: MatmulConfig, a: torch.Tensor, b: torch.Tensor) -> None:
    problem = matmul_problem(DEVICE, a, b)
    assert variant.unable(problem) is None, variant.unable(problem)
    wanted = torch.matmul(a.double(), b.double())
    got = variant.bind(problem, config)(a, b)
    assert got.shape == wanted.shape
    what = f"{variant.name} {config} {tuple(a.shape)} {a.stride()} {tuple(b.shape)} {b.stride()}"
    _compare(got, wanted, torch.matmul(a.double().abs(), b.double().abs()), what)


SMALL = MatmulConfig(16, 32, 32, stages=3, warps=4, group=2)
EVEN = Shape(32, 64, 64)
RAGGED = Shape(19, 50, 43)


def tiles() -> None:
    for swap in (False, True):
        config = MatmulConfig(16, 32, 32, 3, 4, group=2, swap=swap)
        for shape in (
            EVEN,
            RAGGED,
            Shape(1, 32, 96, F32),
            Shape(19, 50, 43, F32, step=3, weight="strided"),
            Shape(5, 64, 40, BF16, step=8),
            Shape(40, 33, 70, BF16, bias=False, weight="columns"),
        ):
            check_linear(TILES, config, shape)


def activations() -> None:
    for activation in ("relu", "silu", "gelu", "gelu_tanh"):
        for pre in (False, True):
            shape = Shape(7, 40, 48, F32, activation=activation, pre=pre)
            check_linear(TILES, SMALL, shape)
            config = MatmulConfig(16, 32, 16, 3, 4, split_k=2)
            check_linear(SPLIT_K, config, Shape(7, 40, 48, BF16, activation=activation, pre=pre))


def split_k() -> None:
    for split, shape in (
        (2, EVEN),
        (4, RAGGED),
        (8, Shape(3, 40, 50, F32)),  # some shares are empty
        (2, Shape(5, 33, 100, BF16, weight="columns")),
    ):
        check_linear(SPLIT_K, MatmulConfig(16, 32, 16, 3, 4, split_k=split), shape)


def persistent() -> None:
    for parts, shape in (
        (1, Shape(40, 64, 64)),
        (2, Shape(37, 72, 40)),
        (4, Shape(37, 72, 48, BF16, activation="silu", pre=True)),
        (2, Shape(33, 64, 24, BF16, weight="columns", step=8)),
        (1, Shape(1, 64, 64, bias=False)),
    ):
        check_linear(PERSISTENT, MatmulConfig(16, 64, 32, 3, 4, group=2, parts=parts), shape)
    a, b = _made(50, 72, dtype=F16, seed=1), _made(72, 40, dtype=F16, seed=2)
    check_matmul(PERSISTENT, MatmulConfig(16, 32, 32, 3, 4), a, b)


def matmul() -> None:
    for dtype in (F32, BF16):
        a, b = _made(3, 20, 40, dtype=dtype, seed=1), _made(3, 40, 35, dtype=dtype, seed=2)
        one = _made(40, 35, dtype=dtype, seed=3)
        for variant, config in (
            (TILES, SMALL),
            (SPLIT_K, MatmulConfig(16, 32, 16, 3, 4, split_k=2)),
        ):
            check_matmul(variant, config, a, b)
            check_matmul(variant, config, a.mT.contiguous().mT, b)  # M contiguous
            check_matmul(variant, config, a, one)
            check_matmul(variant, config, a[:1], b.mT.contiguous().mT)  # one A for all B
            check_matmul(variant, config, a[0], b)
            # Batches of A that cannot be walked by one stride: a copy.
            check_matmul(variant, config, a.expand(2, 3, 20, 40)[:, :2], one)


def wide() -> None:
    """With offsets of 64 bits, as beyond 2**31 elements; the memory in between is never touched."""
    far = 2**31 // 8
    storage = torch.empty(9 * far + 64, dtype=F16)
    x = storage.as_strided((9, 64), (far, 1))
    x.copy_(_made(9, 64, dtype=F16, seed=1))
    weight = _made(40, 64, dtype=F16, seed=2)
    problem = linear_problem(DEVICE, x, weight, None, None)
    assert dict(TILES.programs(problem, SMALL)[0].constants)["WIDE"] is True
    for variant, config in ((TILES, SMALL), (SPLIT_K, MatmulConfig(16, 32, 16, 3, 4, split_k=2))):
        got = variant.bind(problem, config)(x, weight, None, None)
        dense = x.double().contiguous()
        wanted = dense @ weight.double().t()
        _compare(got, wanted, dense.abs() @ weight.double().abs().t(), f"{variant.name} wide")


def rows_alone() -> None:
    """The bits of a row do not depend on how many there are, nor on which they are."""
    x, weight = _made(37, 64, dtype=BF16, seed=1), _made(48, 64, dtype=BF16, seed=2)
    for variant, config in (
        (TILES, SMALL),
        (SPLIT_K, MatmulConfig(16, 32, 16, 3, 4, split_k=2)),
        (PERSISTENT, MatmulConfig(16, 32, 32, 3, 4)),
    ):

        def run(some: torch.Tensor, variant: Any = variant, config: Any = config) -> torch.Tensor:
            arguments = (some, weight, None, "silu")
            return variant.bind(linear_problem(DEVICE, *arguments), config)(*arguments)

        whole = run(x)
        for row in (0, 17, 36):
            assert torch.equal(run(x[row : row + 1])[0], whole[row]), variant.name
        assert torch.equal(run(x[5:30]), whole[5:30]), variant.name


def one_bit() -> None:
    """What all checks lean on: the neighbour of the right value is refused."""
    wanted = torch.tensor([1.0, -3.0, 100.0], dtype=torch.float64)
    for dtype in (BF16, F16):
        _compare(wanted.to(dtype), wanted, wanted.abs(), "the right one")
        for at in range(3):
            wrong = wanted.to(dtype)
            wrong.view(torch.int16)[at] += 1
            try:
                _compare(wrong, wanted, wanted.abs(), "its neighbour")
            except AssertionError:
                continue
            raise RuntimeError(f"{dtype}: a neighbour of {wanted[at]} passed")


if __name__ == "__main__":
    for name in sys.argv[1:]:
        begin = time.perf_counter()
        globals()[name]()
        sys.stdout.write(f"{name} {time.perf_counter() - begin:.1f} s\n")
