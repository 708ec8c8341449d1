"""Linear cross entropy holds a block of logits at a time, never all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import gristmill
from gristmill.ops.linear_cross_entropy import chunked, chunks, products
from gristmill.ops.linear_cross_entropy.chunks import Blocks
from gristmill.ops.linear_cross_entropy.problem import Sizes
from gristmill.ops.registry import OPS

MIB = 1 << 20
FORWARD, BACKWARD = OPS["linear_cross_entropy"], OPS["linear_cross_entropy_backward"]
# Rows, classes and columns of models in use, and some that are not.
SHAPES = [
    (8192, 32000, 4096),
    (8192, 50257, 768),
    (16384, 128256, 4096),
    (4096, 151936, 8192),
    (32768, 151936, 2048),
    (8192, 262144, 2304),
    (131072, 128256, 4096),
    (1 << 20, 32000, 1024),
    (4096, 1 << 20, 1024),
    (1, 128256, 4096),
    (100, 3, 5),
    (3, 2**31, 8),
]


class Memory(TorchDispatchMode):
    """The most that tensors made inside take at a time, and the size of the largest."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self.largest = 0
        self.products = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += "mm" in func.__name__
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self._live[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
                self.largest = max(self.largest, tensor.numel())
        self._live = {at: one for at, one in self._live.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def watched(op: Any, args: tuple[Any, ...]) -> tuple[Memory, Any]:
    op.run(*args)  # what is kept from the first call on is not of a call
    memory = Memory()
    with memory:
        results = op.run(*args)
    return memory, results


def backward_of(args: tuple[Any, ...], *needed: bool) -> tuple[Any, ...]:
    _, _, denominators, stats = FORWARD.run(*args)
    dloss = torch.ones((), dtype=stats.dtype, device=stats.device)
    return *args[:5], dloss, None, stats, denominators, *args[5:], *needed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("rows", "classes", "columns"), SHAPES)
def test_blocks_on_a_gpu_are_bounded_and_large(
    rows: int, classes: int, columns: int, dtype: torch.dtype
) -> None:
    sizes = Sizes(rows, classes, columns, dtype, None, "cuda")
    bound = max(256 * MIB, classes * columns * dtype.itemsize // 4)
    forward = chunks.forward_blocks(sizes)
    assert forward.classes == classes
    assert forward.rows * classes * dtype.itemsize <= bound or forward.rows == 1
    # Matmuls of fewer rows wait for the weight.
    if classes < 300_000:
        assert forward.rows >= min(rows, 256)
    for whole in (False, True):
        blocks = chunks.backward_blocks(sizes, whole_rows=whole)
        assert 1 <= blocks.rows <= rows
        assert 1 <= blocks.classes <= classes
        both = 2 * blocks.rows * blocks.classes * dtype.itemsize
        assert both <= bound or blocks.rows == 1
        assert blocks.classes == classes or not whole
        if not whole:
            assert blocks.classes >= min(classes, 1024)
            # One block of rows: nothing is summed up for dweight.
            assert blocks.rows == rows or rows * 1024 * 2 * dtype.itemsize > bound


@pytest.mark.parametrize("chunk_rows", [1, 7, 128, 5000])
@pytest.mark.parametrize(("rows", "classes", "columns"), SHAPES)
def test_blocks_as_asked_for(rows: int, classes: int, columns: int, chunk_rows: int) -> None:
    sizes = Sizes(rows, classes, columns, torch.bfloat16, chunk_rows, "cuda")
    expected = min(rows, chunk_rows)
    assert chunks.forward_blocks(sizes).rows in (expected, expected - expected % 128)
    for whole in (False, True):
        blocks = chunks.backward_blocks(sizes, whole_rows=whole)
        assert blocks.rows * blocks.classes <= chunk_rows * classes


def test_the_blocks_cover_everything_once() -> None:
    for total, size in ((0, 3), (1, 1), (10, 3), (12, 4), (5, 100)):
        seen = [at for part in chunks.ranges(total, size) for at in range(total)[part]]
        assert seen == list(range(total))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [(0.0, 0.0, None), (0.1, 1e-3, 5.0)], ids=["plain", "all"])
@pytest.mark.parametrize(
    ("rows", "classes", "columns"), [(1000, 1500, 16), (150, 10000, 16), (10000, 150, 16)]
)
def test_peak_of_a_call(
    rows: int,
    classes: int,
    columns: int,
    options: tuple[Any, ...],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block with all that the plain formula makes of it is within the bound."""
    bound = MIB
    monkeypatch.setattr(chunks, "BLOCK_BYTES", bound)
    monkeypatch.setattr(products, "PIECE_BYTES", MIB // 16)
    example = FORWARD.example((rows, classes, columns), dtype, "cpu")
    args = (*example[:6], *options, "mean", None)
    assert args[1].nbytes // 4 < bound
    # Columns of numbers for all rows: losses, what is counted, and what reduces them.
    thin = rows * 24
    memory, results = watched(FORWARD, args)
    outputs = sum(result.nbytes for result in results)
    assert memory.peak <= outputs + bound + thin
    assert memory.largest < rows * classes / 4

    args = backward_of(args, True, True, False)
    memory, results = watched(BACKWARD, args)
    outputs = sum(result.nbytes for result in results)
    # The sums of dx and of dweight in fp32, for results of 16 bits.
    sums = 4 * columns * (rows + classes) if dtype == torch.bfloat16 else 0
    assert memory.peak <= outputs + bound + thin + sums
    assert memory.largest < rows * classes / 4


def test_peak_does_not_grow_with_the_rows() -> None:
    peaks = []
    for rows in (1000, 4000):
        args = FORWARD.example((rows, 5000, 8), torch.float32, "cpu")
        memory, _ = watched(FORWARD, (*args[:-1], 100))
        peaks.append(memory.peak - rows * 64)
        whole, _ = watched(FORWARD, (*args[:-1], rows))
        assert whole.peak > 5 * memory.peak
    assert peaks[1] <= peaks[0] * 1.01


def test_no_product_without_need() -> None:
    """One that makes the logits, and one for each gradient of a matrix."""
    args = FORWARD.example((64, 2048, 16), torch.float32, "cpu")
    for needed, wanted in (
        ((True, True, True), 3),
        ((True, False, False), 2),
        ((False, True, False), 2),
        ((False, False, True), 1),
    ):
        memory, _ = watched(BACKWARD, backward_of(args, *needed))
        assert memory.products == wanted, needed


def test_whole_columns_leave_no_sums_of_dweight() -> None:
    """Of two ways to cut the logits the one that sums up less: dx, for there are fewer rows."""
    rows, classes, columns = 64, 40_000, 16
    args = FORWARD.example((rows, classes, columns), torch.bfloat16, "cpu")
    args = (*args[:-1], 4)
    problem = BACKWARD.problem(*backward_of(args, True, True, False))
    found = chunked.backward_blocks(problem)
    assert found == Blocks(rows, 4 * classes // rows - (4 * classes // rows) % 128)
    memory, results = watched(BACKWARD, backward_of(args, True, True, False))
    outputs = sum(result.nbytes for result in results)
    # No fp32 tensor of the weight's size: 2.5 MB.
    assert memory.peak - outputs < classes * columns * 4 + 28 * 4 * classes
    assert memory.largest == classes * columns  # dweight itself, in bf16


def test_pieces_of_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """16-bit products on a CPU in pieces of one column: nothing is left out or taken twice."""
    torch.manual_seed(0)
    a, b = torch.randn(5, 7).bfloat16(), torch.randn(7, 11).bfloat16()
    bias = torch.randn(11).bfloat16()
    exact = a.double() @ b.double()
    for size in (1, 7 * 4 * 3, MIB):
        monkeypatch.setattr(products, "PIECE_BYTES", size)
        out = torch.empty(5, 11, dtype=torch.bfloat16)
        products.linear_into(out, a, b.t(), bias)
        torch.testing.assert_close(out.double(), exact + bias.double(), rtol=2**-8, atol=1e-6)
        total = torch.ones(5, 11)
        products.product_into(total, a, b, add=True)
        torch.testing.assert_close(total.double(), exact + 1, rtol=1e-6, atol=1e-6)
        products.product_into(total, a, b, add=False)
        torch.testing.assert_close(total.double(), exact, rtol=1e-6, atol=1e-6)


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("needed", [(True, True, False), (True, False, False)], ids=["all", "dx"])
def test_peak_on_a_gpu(needed: tuple[bool, ...]) -> None:
    rows, classes, columns = 16384, 128256, 2048
    args = FORWARD.example((rows, classes, columns), torch.bfloat16, "cuda")
    whole = rows * classes * 2
    bound = 256 * MIB
    for op in (FORWARD, BACKWARD):
        call = args if op is FORWARD else backward_of(args, *needed)
        op.run(*call)  # cuBLAS keeps a workspace
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        results = op.run(*call)
        torch.cuda.synchronize()
        taken = torch.cuda.max_memory_allocated() - before
        outputs = sum(result.nbytes for result in results)
        sums = 4 * rows * columns if op is BACKWARD else 0
        # cuBLAS takes its workspace anew for some calls: 32 MB.
        assert taken <= outputs + bound + sums + 48 * MIB, op.name
        assert taken < whole / 3
        del results


@pytest.mark.gpu
@pytest.mark.parametrize("classes", [128256, 50257])
def test_training_step_on_a_gpu(classes: int) -> None:
    """Loss and gradients beside those of all logits at once."""
    torch.manual_seed(0)
    rows, columns = 4096, 1024
    x, weight, target = FORWARD.example((rows, classes, columns), torch.bfloat16, "cuda")[:3]
    target[::7] = -100
    grads = []
    for whole in (False, True):
        own = [tensor.clone().requires_grad_() for tensor in (x, weight)]
        if whole:
            loss = torch.nn.functional.cross_entropy((own[0] @ own[1].t()).float(), target)
        else:
            loss = gristmill.linear_cross_entropy(*own, target)
        loss.backward()
        grads.append([loss.detach().float(), *(leaf.grad.float() for leaf in own)])
    for one, other in zip(*grads, strict=True):
        assert float((one - other).norm() / other.norm()) < 0.01


@pytest.mark.gpu
def test_captured() -> None:
    args = FORWARD.example((512, 5000, 256), torch.bfloat16, "cuda")
    args = (*args[:-1], 128)
    expected = FORWARD.run(*args)
    more = backward_of(args, True, True, False)
    gradients = BACKWARD.run(*more)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = (*FORWARD.run(*args), *BACKWARD.run(*more))
    for result in results:
        result.zero_()
    graph.replay()
    torch.cuda.synchronize()
    for result, want in zip(results, (*expected, *gradients), strict=True):
        torch.testing.assert_close(result, want)
