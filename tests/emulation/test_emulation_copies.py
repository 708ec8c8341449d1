"""Barriers and copies of tensor_cores.cuh in the emulation: right ones, and mistakes."""

from __future__ import annotations

import pytest
import torch

from emulation.harness import EmulationError, tensor_map, writable
from emulation.tensor_lab import NO_MAP, ORDERS, PARAMS, Lab, unset, whole, words

# ---- barriers ----


@pytest.mark.parametrize("order", ORDERS)
def test_named_barrier_waits_for_its_threads_alone(tensor_lab: Lab, order: int) -> None:
    source, out = words(2, 64), unset(2, 64)
    tensor_lab.run("turn_half", source, out, block=128, shared=256, order=order)
    assert torch.equal(out, source.flip(-1))


def test_without_a_named_barrier_some_order_shows_it(tensor_lab: Lab) -> None:
    wrong = 0
    for order in ORDERS:
        source, out = words(2, 64), unset(2, 64)
        tensor_lab.run("turn_half", source, out, value=1, block=128, shared=256, order=order)
        wrong += not torch.equal(out, source.flip(-1))
    assert wrong > 0


@pytest.mark.parametrize("order", ORDERS)
def test_arrivals(tensor_lab: Lab, order: int) -> None:
    source, out = words(5) % 1000, unset(32)
    tensor_lab.run("hand_around", source, out, count=5, shared=64, order=order)
    assert torch.equal(out, source.sum().int() * torch.arange(32, dtype=torch.int32))


# ---- copies ----


@pytest.mark.parametrize("order", ORDERS)
def test_copies_of_each_thread_and_zeros(tensor_lab: Lab, order: int) -> None:
    source, out = words(7, 64, 4), unset(7, 64, 4)
    shared = 3 * 64 * 16
    traffic = tensor_lab.run("copy_rows", source, out, row=50, count=7, block=64, shared=shared)
    expected = source.clone()
    expected[:, 50:] = 0
    assert torch.equal(out, expected)
    assert traffic.loaded == 7 * 50 * 16


def test_a_copy_that_is_not_waited_for_is_not_there(tensor_lab: Lab) -> None:
    source, out = words(7, 64, 4), unset(7, 64, 4)
    tensor_lab.run("copy_rows", source, out, value=1, row=64, count=7, block=64, shared=3 * 64 * 16)
    assert (out[:3] == -1).all()
    assert (out != source).all()  # later ones find what came late into a buffer that was full


@pytest.mark.parametrize("order", ORDERS)
def test_plain_copies_of_each_thread(tensor_lab: Lab, order: int) -> None:
    source, out = words(64, 4), unset(64, 4)
    tensor_lab.run("copy_block", source, out, block=64, shared=1024, order=order)
    assert torch.equal(out, source.flip(0))
    tensor_lab.run("copy_block", source, out, value=1, block=64, shared=1024, order=order)
    assert (out == -1).all()


def test_copies_of_other_threads_need_a_barrier(tensor_lab: Lab) -> None:
    missing = 0
    for order in ORDERS:
        source, out = words(64, 4), unset(64, 4)
        tensor_lab.run("copy_block", source, out, value=2, block=64, shared=1024, order=order)
        missing += (out == -1).any().item()
    assert missing > 0


def test_constants_may_come_before_the_previous_grid_is_done(tensor_lab: Lab) -> None:
    source, out = words(256), unset(256)
    tensor_lab.run("copy_constant", source, out, count=1024, shared=2048, dependent=True)
    assert torch.equal(out, source)


def test_what_kernels_write_is_no_constant(tensor_lab: Lab) -> None:
    out = unset(256)
    with pytest.raises(EmulationError, match="a buffer that kernels write"):
        tensor_lab.emulator.launch(
            tensor_lab.program,
            "copy_constant",
            PARAMS.pack(NO_MAP, out.data_ptr(), 0, out.data_ptr(), 0, 0, 0, 1024),
            grid=1,
            block=32,
            shared=2048,
            dependent=True,
            buffers=[writable(out)],
        )


def box_of(tensor: torch.Tensor, row: int, column: int, rows: int, columns: int) -> torch.Tensor:
    """A box with zeros outside of the tensor."""
    box = torch.zeros(rows, columns, dtype=tensor.dtype)
    for r in range(max(row, 0), min(row + rows, tensor.shape[0])):
        for c in range(max(column, 0), min(column + columns, tensor.shape[1])):
            box[r - row, c - column] = tensor[r, c]
    return box


def swizzled(box: torch.Tensor) -> torch.Tensor:
    """Rows of 128 bytes, whose units of 16 bytes change places by xor with the row modulo 8."""
    units = box.view(torch.uint8).view(box.shape[0], 8, 16)
    moved = torch.empty_like(units)
    for row in range(box.shape[0]):
        for unit in range(8):
            moved[row, unit ^ (row % 8)] = units[row, unit]
    return moved


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("row", "column"), [(0, 0), (3, 64), (17, 96), (-2, -5), (20, 128), (200, 0), (0, 1000)]
)
def test_boxes_in_swizzled_order_with_zeros_outside(
    tensor_lab: Lab, row: int, column: int, order: int
) -> None:
    matrix = whole(30, 160, dtype=torch.bfloat16)[:, :144]
    out = unset(16, 32)
    traffic = tensor_lab.run(
        "copy_box",
        matrix,
        out,
        map_bytes=tensor_map(matrix, 16, 64),
        row=row,
        column=column,
        count=2048,
        shared=1024 + 2048,
        order=order,
    )
    expected = swizzled(box_of(matrix, row, column, 16, 64))
    assert torch.equal(out.view(torch.uint8).view(16, 8, 16), expected)
    assert traffic.bulk == 2048


def test_boxes_as_they_are(tensor_lab: Lab) -> None:
    matrix = words(30, 40)
    out = unset(10, 8)
    box_map = tensor_map(matrix, 10, 8, swizzle=False)
    tensor_lab.run(
        "copy_box", matrix, out, map_bytes=box_map, row=25, column=36, count=320, shared=1024 + 384
    )
    assert torch.equal(out, box_of(matrix, 25, 36, 10, 8))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_loads_from_other_blocks(tensor_lab: Lab, cluster: int, order: int) -> None:
    source, out = words(cluster, 128), unset(cluster, 128)
    tensor_lab.run("read_next", source, out, grid=cluster, cluster=cluster, shared=512, order=order)
    assert torch.equal(out, source.roll(-1, 0))


def test_reading_a_block_that_has_not_written_gives_nan(tensor_lab: Lab) -> None:
    early = 0
    for order in ORDERS:
        source, out = words(2, 128), unset(2, 128)
        try:
            tensor_lab.run(
                "read_next", source, out, value=1, grid=2, cluster=2, shared=512, order=order
            )
        except EmulationError as error:
            assert "may not have started" in str(error)  # noqa: PT017
            early += 1
        else:
            early += (out == -1).any().item()
    assert early > 0


@pytest.mark.parametrize("bytes_", [32, 48, 1024, 1040, 5000])
def test_shared_memory_for_matrices_is_aligned(tensor_lab: Lab, bytes_: int) -> None:
    out = unset(1)
    tensor_lab.run("fill_aligned", words(1), out, shared=bytes_)
    assert out.item() == 0


def test_what_is_written_past_aligned_shared_memory_is_told(tensor_lab: Lab) -> None:
    with pytest.raises(EmulationError, match="written past the end of shared memory"):
        tensor_lab.run("fill_aligned", words(1), unset(1), value=1, shared=32)


BOX = {"map": 1, "count": 2048, "shared": 3072}


@pytest.mark.parametrize(
    ("name", "launch", "reason"),
    [
        ("turn_half", {"value": 2, "block": 128, "shared": 256}, "where others wait for"),
        ("turn_half", {"value": 3, "block": 128, "shared": 256}, "33 threads are not whole warps"),
        ("turn_half", {"value": 4, "block": 128, "shared": 256}, "16 names none of the barriers"),
        ("hand_around", {"value": 1, "count": 3, "shared": 64}, r"deadlock(.|\n)*barrier_wait"),
        ("hand_around", {"value": 2, "count": 3, "shared": 64}, "no initialised barrier"),
        ("copy_rows", {"value": 2, "row": 32, "count": 2, "shared": 1536}, "multiple of 16"),
        ("copy_rows", {"value": 3, "row": 32, "count": 9, "shared": 1536}, "out of bounds"),
        ("copy_rows", {"value": 4, "row": 32, "count": 2, "shared": 1536}, "leaves the shared"),
        (
            "copy_constant",
            {"value": 1, "count": 64, "shared": 2048, "dependent": 1},
            "bulk_copy be",
        ),
        ("copy_constant", {**BOX, "value": 2, "dependent": 1}, "tensor_copy before"),
        (
            "copy_constant",
            {"value": 3, "count": 64, "shared": 2048, "dependent": 1},
            "copy_async_or_zero before wait_for_previous_grid",
        ),
        ("copy_box", {**BOX, "value": 1}, "is in flight"),
        ("copy_box", {**BOX, "value": 2, "shared": 4096}, "not a multiple of 1024"),
        ("copy_box", {**BOX, "shared": 2048}, "leaves the shared memory"),
        ("copy_box", {**BOX, "map": 0}, "not made by tensor_map"),
        ("read_next", {"value": 2, "grid": 2, "cluster": 2, "shared": 512}, "rank 2 of a cluster"),
        ("read_next", {"value": 3, "shared": 1024}, "four aligned floats"),
        ("read_next", {"value": 4, "grid": 2, "cluster": 2, "shared": 512}, "which has ended"),
    ],
)
def test_mistakes_are_told(tensor_lab: Lab, name: str, launch: dict[str, int], reason: str) -> None:
    matrix = whole(64, 64, dtype=torch.bfloat16)
    source, other, out = matrix.view(torch.int32), torch.arange(2048).int() % 32, unset(8192)
    call = dict(launch)
    box_map = tensor_map(matrix, 16, 64) if call.pop("map", 0) else NO_MAP
    with pytest.raises(EmulationError, match=reason):
        tensor_lab.run(name, source, out, other, map_bytes=box_map, **call)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"offset": 4}, "multiples of 16"),
        ({"stride": 68}, "multiples of 16"),
        ({"box": (300, 64)}, "1 to 256 columns and rows"),
        ({"box": (16, 32)}, "swizzled box is 128 bytes"),
        ({"box": (16, 4), "swizzle": False}, "multiple of 16 bytes"),
    ],
)
def test_maps_that_no_driver_would_make(
    tensor_lab: Lab, change: dict[str, object], reason: str
) -> None:
    flat = whole(80 * 64, dtype=torch.bfloat16)
    stride = int(str(change.get("stride", 64)))
    matrix = flat.as_strided((64, 64), (stride, 1), int(str(change.get("offset", 0))))
    rows, columns = change.get("box", (16, 64))  # type: ignore[misc]
    box_map = tensor_map(matrix, rows, columns, swizzle=bool(change.get("swizzle", True)))
    with pytest.raises(EmulationError, match=reason):
        tensor_lab.run("copy_box", flat, unset(4096), map_bytes=box_map, count=2048, shared=65536)


def test_a_box_must_be_within_the_buffers(tensor_lab: Lab) -> None:
    longer = tensor_map(matrix := whole(65, 64, dtype=torch.bfloat16), 16, 64)
    with pytest.raises(EmulationError, match=r"tensor_copy of .* 128 bytes past the end of buffer"):
        tensor_lab.run(
            "copy_box", matrix[:64], unset(512), map_bytes=longer, row=56, count=2048, shared=3072
        )
