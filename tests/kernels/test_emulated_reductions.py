"""What a team agrees on (reductions.cuh), in every scope, against fp64; and the FP8 conversion."""

from __future__ import annotations

import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import pytest
import torch
from emulation.harness import Emulator, emulator_for, readable, writable

from gristmill.jit import Program

HEADERS = Path(str(resources.files("gristmill"))) / "kernels" / "cuda"
PARAMS = struct.Struct("<QQQQI4xII")
UNIT = 2.0**-24
COLUMNS = 1000


@dataclass(frozen=True)
class Shape:
    """A team: its scope, the lanes of a warp in it, its blocks and their threads."""

    scope: str
    lanes: int = 32
    blocks: int = 1
    threads: int = 32

    def some_of(self, row: torch.Tensor) -> torch.Tensor:
        """No more columns than a few lanes are given: 16 each."""
        return row[: 16 * self.lanes] if self.lanes < 32 else row

    @property
    def shared(self) -> int:
        slots = {"WARP": 0, "CLUSTER": 16 * 32}.get(self.scope, 32)
        return 128 + 2 * 6 * 4 * slots


SHAPES = (
    *(Shape("WARP", lanes) for lanes in (1, 4, 32)),
    *(Shape("BLOCK", threads=threads) for threads in (32, 96, 1024)),
    *(Shape("CLUSTER", blocks=blocks, threads=64) for blocks in (2, 7, 16)),
    *(Shape("GRID", blocks=blocks, threads=96) for blocks in (2, 5)),
)
over_shapes = pytest.mark.parametrize("shape", SHAPES, ids=str)


class Lab:
    def __init__(self, emulator: Emulator, folder: Path) -> None:
        self.emulator, self.folder = emulator, folder
        for header in HEADERS.glob("*.cuh"):
            shutil.copy(header, folder)
        shutil.copy(Path(__file__).with_name("reductions_test.cu"), folder)
        kinds = ("moments<false,{}>", "moments<true,{}>", "softmax_sum<{}>", "largest<{}>")
        teams = sorted({f"{shape.scope},{shape.lanes}" for shape in SHAPES})
        names = tuple(kind.format(team) for kind in kinds for team in teams)
        self.program = Program("reductions_test.cu", names, root=folder)
        emulator.prepare([self.program])

    def run(self, kernel: str, shape: Shape, values: torch.Tensor, order: int = 0) -> torch.Tensor:
        """The floats that the team agreed on; every thread must have got the same bits."""
        columns = values.shape[-1]
        out = torch.zeros(shape.blocks * shape.threads, 6)
        meeting = torch.zeros(1 + 2 * shape.blocks * 6, dtype=torch.int32)
        share = -(-columns // shape.blocks)
        params = PARAMS.pack(
            values.data_ptr(),
            out.data_ptr(),
            meeting.data_ptr(),
            meeting.data_ptr() + 4,
            shape.blocks,
            columns,
            share,
        )
        self.emulator.launch(
            self.program,
            kernel.format(f"{shape.scope},{shape.lanes}"),
            params,
            grid=shape.blocks,
            block=shape.threads,
            shared=shape.shared,
            cluster=shape.blocks if shape.scope == "CLUSTER" else 1,
            cooperative=shape.scope == "GRID",
            buffers=[readable(values), writable(out), writable(meeting)],
            order=order,
        )
        bits = out.view(torch.int32)
        assert torch.equal(bits, bits[:1].expand_as(bits)), "threads disagree"
        return out[0]


@pytest.fixture(scope="module")
def lab(pytestconfig: pytest.Config, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(emulator_for(pytestconfig), tmp_path_factory.mktemp("reductions"))


def normal(seed: int = 0, columns: int = COLUMNS) -> torch.Tensor:
    return torch.randn(columns, generator=torch.Generator().manual_seed(seed))


# --- mean and variance

ROWS: dict[str, Callable[[], torch.Tensor]] = {
    "normal": normal,
    "mean 1e4": lambda: normal() + 1e4,
    "mean -3e6": lambda: normal() - 3e6,
    "a ramp": lambda: torch.arange(float(COLUMNS)) + normal() * 1e-3,
    "a ramp far away": lambda: torch.arange(float(COLUMNS)) + 1e6,
    "a step": lambda: normal() + 1e4 * (torch.arange(COLUMNS) > 300),
    "the first far away": lambda: normal().index_fill(0, torch.tensor([0]), 1e4),
    "one far away": lambda: normal().index_fill(0, torch.tensor([777]), -1e4),
    "constant": lambda: torch.full((COLUMNS,), 1234.5678),
    "small": lambda: normal() * 1e-15 + 1e-12,
    "large": lambda: normal() * 1e15 - 1e17,
    "few columns": lambda: normal(columns=5) + 100,
    "one column": lambda: normal(columns=1) * 1e6,
}


@over_shapes
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_moments(lab: Lab, row: Callable[[], torch.Tensor], shape: Shape) -> None:
    """Blocks, warps and lanes without a column are among them: of few columns most have none."""
    values = shape.some_of(row())
    count, center, offset, spread = lab.run("moments<false,{}>", shape, values)[:4].double()
    exact = values.double()
    distance = exact - exact.mean()
    columns = values.numel()
    assert count == columns
    # The mean is off by roundings of the distances from it, or of its own rest.
    scale = float(distance.abs().mean() + distance.square().mean().sqrt())
    mean_error = abs(float(center + offset - exact.mean()))
    assert mean_error <= 8 * UNIT * scale + 1e-30
    squares = float(distance.square().sum())
    assert abs(float(spread) - squares) <= 64 * UNIT * squares + 1e-37


@over_shapes
@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
def test_moments_and_products(lab: Lab, row: Callable[[], torch.Tensor], shape: Shape) -> None:
    values = shape.some_of(row())
    g = normal(1, values.numel()) + 0.5
    state = lab.run("moments<true,{}>", shape, torch.stack([values, g])).double()
    exact, weights = values.double(), g.double()
    distance = exact - exact.mean()
    total, product = state[4:]
    assert abs(float(total - weights.sum())) <= 8 * UNIT * float(weights.abs().sum())
    # What the mean is off by is in every term.
    terms = float((weights.abs() * (distance.abs() + distance.square().mean().sqrt())).sum())
    assert abs(float(product - (weights * distance).sum())) <= 16 * UNIT * terms + 1e-30


def test_the_moments_test_can_tell() -> None:
    """A variance of one pass, in fp32, on what the kernels get right."""
    values = ROWS["mean 1e4"]()
    one_pass = values.square().mean() - values.mean().square()
    squares = (values.double() - values.double().mean()).square().sum()
    assert abs(float(one_pass.double() * COLUMNS - squares)) > 1e4 * UNIT * float(squares)


@pytest.mark.parametrize("order", [1, 5])
@pytest.mark.parametrize("kernel", ["moments<true,{}>", "softmax_sum<{}>", "largest<{}>"])
@over_shapes
def test_the_order_of_threads_does_not_matter(
    lab: Lab, shape: Shape, kernel: str, order: int
) -> None:
    values = torch.stack([normal(), normal(1)])
    rows = values if "moments" in kernel else values[0]
    assert torch.equal(lab.run(kernel, shape, rows), lab.run(kernel, shape, rows, order))


# --- the sum of a softmax

INFINITY = float("inf")


def _only(*finite: int) -> torch.Tensor:
    row = torch.full((COLUMNS,), -INFINITY)
    row[list(finite)] = normal()[list(finite)]
    return row


EXPONENTS: dict[str, Callable[[], torch.Tensor]] = {
    "normal": lambda: normal() * 10,
    "large": lambda: normal() * 1000 + 1e4,
    "one that is finite": lambda: _only(617),
    "the first alone": lambda: _only(0),
    "the last alone": lambda: _only(COLUMNS - 1),
    "half of them": lambda: torch.where(torch.arange(COLUMNS) < 500, -INFINITY, normal()),
    "every other": lambda: torch.where(torch.arange(COLUMNS) % 2 == 0, -INFINITY, normal()),
    "few columns": lambda: normal(columns=3),
}


@over_shapes
@pytest.mark.parametrize("row", EXPONENTS.values(), ids=EXPONENTS.keys())
def test_sum_of_a_softmax(lab: Lab, row: Callable[[], torch.Tensor], shape: Shape) -> None:
    """Slices that are -infinity through and through leave no NaN behind."""
    exponents = row()
    largest, total = lab.run("softmax_sum<{}>", shape, exponents)[:2]
    assert largest == exponents.max()
    expected = torch.exp2(exponents.double() - exponents.max().double()).sum()
    assert abs(float(total - expected)) <= 32 * UNIT * float(expected)


@over_shapes
def test_sum_of_a_softmax_of_nobody(lab: Lab, shape: Shape) -> None:
    largest, total = lab.run("softmax_sum<{}>", shape, torch.full((COLUMNS,), -INFINITY))[:2]
    assert (float(largest), float(total)) == (-INFINITY, 0.0)


@over_shapes
@pytest.mark.parametrize("where", [0, 500, COLUMNS - 1])
def test_nan_is_in_the_sum(lab: Lab, where: int, shape: Shape) -> None:
    for others in (normal(), torch.full((COLUMNS,), -INFINITY)):
        others[where] = float("nan")
        assert lab.run("softmax_sum<{}>", shape, others)[1].isnan()


# --- the largest


@over_shapes
def test_largest(lab: Lab, shape: Shape) -> None:
    values = normal()
    assert lab.run("largest<{}>", shape, values)[0] == values.abs().max()
    assert lab.run("largest<{}>", shape, torch.full((COLUMNS,), -0.0))[0] == 0
    values[313] = -INFINITY
    assert lab.run("largest<{}>", shape, values)[0] == INFINITY
    for where in (0, 417, COLUMNS - 1):
        spoiled = values.clone()
        spoiled[where] = float("nan")
        assert lab.run("largest<{}>", shape, spoiled)[0].isnan()


# --- fp32 to E4M3 by integer arithmetic, for GPUs that have no instruction for it

CONVERSION = """
#include "emulation.h"
#define DEVICE inline
{function}
struct Params {{ const float* in; unsigned char* out; long long count; }};

__global__ void convert(const Params p) {{
    for (long long i = 2 * threadIdx.x; i < p.count; i += 2 * blockDim.x) {{
        unsigned bits[2];
        load_global<4>(bits, p.in + i);
        load_global<4>(bits + 1, p.in + i + 1);
        const unsigned pair = {name}(__uint_as_float(bits[0]), __uint_as_float(bits[1]));
        store_global<2>(p.out + i, &pair);
    }}
}}
"""


@pytest.mark.parametrize("whose", ["machine.cuh", "the emulation"])
def test_every_conversion_to_e4m3(pytestconfig: pytest.Config, tmp_path: Path, whose: str) -> None:
    """All codes, all ties and what lies beside them, and a dense sample of all floats."""
    text = (HEADERS / "machine.cuh").read_text()
    found = re.search(r"DEVICE unsigned pack_e4m3\(.*?\n}\n", text, re.DOTALL)
    assert found is not None
    assert "__CUDA_ARCH__ >= 890" in found[0]  # elsewhere the code that is tested here
    function, name = "", "pack_e4m3"
    if whose == "machine.cuh":
        function, name = found[0].replace("pack_e4m3", "from_machine"), "from_machine"
    (tmp_path / "convert.cu").write_text(CONVERSION.format(function=function, name=name))

    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = codes[codes.isfinite()].sort().values.double()
    ties = ((numbers[1:] + numbers[:-1]) / 2).float()
    edges = torch.tensor([448.0, 463.9, 464.0, 480.0, 1e9, 3.4e38, INFINITY, 2.0**-10, 2.0**-149])
    exact = torch.cat([numbers.float(), ties, edges, -edges])
    beside = [torch.nextafter(exact, torch.full_like(exact, way)) for way in (-1e9, 1e9)]
    step = torch.arange(-(2**31), 2**31, 4099, dtype=torch.int64).int().view(torch.float32)
    sizes = torch.arange(0x3A000000, 0x43F00000, 211, dtype=torch.int32).view(torch.float32)
    source = torch.cat([exact, *beside, step, sizes, -sizes, torch.tensor([float("nan")])])
    source = torch.cat([source, source[: source.numel() % 2]])

    out = torch.zeros(source.numel(), dtype=torch.uint8)
    emulator_for(pytestconfig).launch(
        Program("convert.cu", ("convert",), root=tmp_path),
        "convert",
        struct.pack("<QQq", source.data_ptr(), out.data_ptr(), source.numel()),
        grid=1,
        block=64,
        buffers=[readable(source), writable(out)],
    )
    expected = source.clamp(-448, 448).to(torch.float8_e4m3fn)
    result = out.view(torch.float8_e4m3fn)
    nan = source.isnan()
    assert torch.equal(result.float().isnan(), nan)
    assert torch.equal(out[~nan], expected.view(torch.uint8)[~nan])
