"""nvfp4_wgmma.cu on the CPU: every way to cut a problem, against fp64; exact where sums are."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulation.harness import EmulationError, emulator_for
from exact import Range
from nvfp4_wgmma_cases import (
    BF16,
    EVERY,
    F16,
    F32,
    KERNELS,
    ORDERS,
    SPLITS,
    Kernel,
    Lab,
    fitting,
    problem_of,
)

over_kernels = pytest.mark.parametrize("kernel", EVERY, ids=str)

# Tokens, rows, columns: tails of all three, one of each, less than a piece.
SIZES = ((1, 16, 16), (5, 64, 64), (21, 208, 336), (70, 272, 1040))


@pytest.fixture(scope="module")
def lab(pytestconfig: pytest.Config) -> Lab:
    emulator = emulator_for(pytestconfig)
    emulator.prepare([kernel.program for kernel in EVERY])
    return Lab(emulator)


@over_kernels
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_exact_sums_come_out_exactly(lab: Lab, kernel: Kernel, size: tuple[int, int, int]) -> None:
    problem = problem_of(*fitting(kernel, size), kernel.x, whole=True)
    expected = problem.exact.float().to(kernel.out)
    assert torch.equal(problem.exact.float().double(), problem.exact)
    for order in ORDERS:
        y, _ = lab.run(kernel, problem, order=order)
        assert torch.equal(y, expected)


@over_kernels
def test_against_fp64(lab: Lab, kernel: Kernel) -> None:
    size = fitting(kernel, (kernel.tokens + 3, 64 * kernel.row_groups + 80, 592))
    problem = problem_of(*size, kernel.x, bias=F32, seed=1)
    y, _ = lab.run(kernel, problem)
    Range(problem.exact - problem.slack, problem.exact + problem.slack).check(y, str(kernel))


@pytest.mark.parametrize("clusters", [1, 2, 5])
@pytest.mark.parametrize("kernel", KERNELS[:9:2], ids=str)
def test_few_blocks_do_all_tiles_in_turn(lab: Lab, kernel: Kernel, clusters: int) -> None:
    """Rings go on from one tile to the next; tiles without a full ring, and many of them."""
    size = 3 * kernel.tokens - 2, 64 * kernel.row_groups * 2 + 16, 144
    problem = problem_of(*size, kernel.x, whole=True, bias=BF16)
    expected = problem.exact.float().to(kernel.out)
    for group, order in ((1, 0), (2, 1), (8, 2)):
        y, _ = lab.run(kernel, problem, clusters=clusters, group=group, order=order)
        assert torch.equal(y, expected)


@pytest.mark.parametrize("bias", [None, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("kernel", [KERNELS[0], KERNELS[3], KERNELS[4], SPLITS[1]], ids=str)
def test_every_bias(lab: Lab, kernel: Kernel, bias: torch.dtype | None) -> None:
    problem = problem_of(*fitting(kernel, (9, 80, 400)), kernel.x, bias=bias, seed=2)
    y, _ = lab.run(kernel, problem)
    Range(problem.exact - problem.slack, problem.exact + problem.slack).check(y, str(kernel))


@over_kernels
def test_a_tokens_result_does_not_depend_on_the_others(lab: Lab, kernel: Kernel) -> None:
    """Nor on the order of threads and blocks: bit by bit."""
    problem = problem_of(*fitting(kernel, (kernel.tokens + 5, 80, 464)), kernel.x, seed=3)
    together, _ = lab.run(kernel, problem)
    for order in ORDERS:
        assert torch.equal(together, lab.run(kernel, problem, order=order)[0])
    for token in (0, kernel.tokens - 1, kernel.tokens + 2):
        alone, _ = lab.run(kernel, replace(problem, x=problem.x[token : token + 1]))
        assert torch.equal(alone[0], together[token])


@over_kernels
def test_nothing_is_read_twice(lab: Lab, kernel: Kernel) -> None:
    """The weight once for every token tile, activations once for every tile of rows.

    Slots of the ring are filled up: with zeros, which come from nowhere, and with scales.
    """
    tokens, rows, columns = fitting(kernel, (kernel.tokens + 1, 300, 592))
    problem = problem_of(tokens, rows, columns, kernel.x, seed=4)
    _, traffic = lab.run(kernel, problem)
    chunks, slabs = -(-columns // 64), -(-rows // 64)
    share = -(-chunks // kernel.split)
    parts = [min(share, chunks - part * share) for part in range(kernel.split)]
    filled = sum(-(-part // kernel.depth) * kernel.depth for part in parts)
    units = 2 * -(-slabs // kernel.row_groups)
    weight = units * kernel.row_groups * (chunks * 2048 + filled * 256)
    activations = units * filled * kernel.tokens * 128
    assert traffic.bulk == weight + activations
    assert traffic.stored == tokens * rows * kernel.out.itemsize


@pytest.mark.parametrize("kernel", [KERNELS[2], KERNELS[4], SPLITS[0]], ids=str)
def test_all_shared_memory_is_needed(lab: Lab, kernel: Kernel) -> None:
    """Else the other tests would not see a kernel that needs more than the host gives."""
    problem = problem_of(*fitting(kernel, (9, 80, 400)), kernel.x)
    with pytest.raises(EmulationError, match="shared memory"):
        lab.run(kernel, problem, short=16)
