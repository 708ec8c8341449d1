"""The kernels that pack NVFP4 weights into fragments and unpack them, run on the CPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import EACH
from emulation.harness import Buffer, Emulator, Traffic, emulator_for
from test_compile_archs import (
    REGISTERS_PER_BLOCK,
    RESERVED_SHARED,
    compiler,  # noqa: F401 - a fixture
)

from gristmill.errors import (
    CompileError,
    CompilerUnavailable,
    DriverError,
    KernelNotCached,
)
from gristmill.formats.nvfp4 import NVFP4Tensor, fragments, packing
from gristmill.jit import Program, compile_program, resource_usage
from gristmill.log import forget_warnings
from gristmill.select.device import KNOWN

ORDERS = (0, 1, 7)
E4M3 = torch.float8_e4m3fn
NAMES = tuple(
    f"{function}<{codes},{scales}>"
    for function, codes, scales in itertools.product(("pack", "unpack"), (16, 8, 1), (4, 1))
)
# One piece and less, one block and more; columns in whole chunks, vectors, half vectors.
SHAPES = [(1, 16), (64, 64), (63, 48), (65, 512), (130, 528), (192, 1056), (3, 65, 80)]
# Of gate and up: the halves of a slab, a part of one, and halves that end within a slab.
PAIRS = [(16, 16), (64, 64), (48, 48), (80, 528), (192, 80), (3, 160, 80), (2, 2, 96, 64)]


class Device:
    """Stands where the GPU would: knows what may be read and written, and what was launched."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        self.order = 0
        self.names: list[str] = []
        self.traffic: list[Traffic] = []

    def launch(self, name: str, grid: int, device: torch.device, values: tuple[int, ...]) -> None:
        codes, scales, packed, packed_scales, *strides, rows, blocks, chunks, groups = values[:12]
        slabs, half = values[12:]
        assert groups == -(-chunks // packing.CHUNKS)
        assert slabs == -(-rows // fragments.ROWS)
        assert half in (0, rows / 2)
        pieces, rest = divmod(grid * chunks, groups)
        matrices = grid // (groups * slabs)
        assert (rest, matrices * slabs * groups) == (0, grid)
        stride, scales_stride, far, scales_far = strides
        packs = name.startswith("pack")
        last = (rows - 1) * stride + blocks * 8, (rows - 1) * scales_stride + blocks
        buffers = [
            Buffer(codes, (matrices - 1) * far + last[0], writable=not packs),
            Buffer(scales, (matrices - 1) * scales_far + last[1], writable=not packs),
            Buffer(packed, pieces * fragments.CODES, writable=packs),
            Buffer(packed_scales, pieces * fragments.SCALES, writable=packs),
        ]
        traffic = self.emulator.launch(
            Program(packing.SOURCE, (name,)),
            name,
            packing.PARAMS.pack(*values),
            grid=grid,
            block=packing.THREADS,
            shared=packing.SHARED,
            buffers=buffers,
            order=self.order,
        )
        self.names.append(name)
        self.traffic.append(traffic)


@pytest.fixture(scope="module")
def emulator(pytestconfig: pytest.Config) -> Emulator:
    found = emulator_for(pytestconfig)
    found.prepare([Program(packing.SOURCE, NAMES)])
    return found


@pytest.fixture
def device(emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> Device:
    found = Device(emulator)
    monkeypatch.setattr(packing, "on_gpu", lambda codes: True)
    monkeypatch.setattr(packing, "load", lambda name, device: name)
    monkeypatch.setattr(packing, "launch", found.launch)
    return found


def weight(*shape: int, largest: int = 127) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and the bytes of scales, of which a few are zero."""
    generator = torch.Generator().manual_seed(sum(shape))
    *lines, columns = shape
    codes = torch.randint(256, (*lines, columns // 2), generator=generator)
    scales = torch.randint(1, largest, (*lines, columns // 16), generator=generator)
    scales *= torch.rand(scales.shape, generator=generator) < 0.9
    return codes.to(torch.uint8), scales.to(torch.uint8)


def equal(found: tuple[torch.Tensor, ...], expected: tuple[torch.Tensor, ...]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in pairs)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ways(device: Device, shape: tuple[int, ...]) -> None:
    codes, scales = weight(*shape)
    expected = fragments.pack(codes, scales)
    back = fragments.unpack(*expected, *shape[-2:])
    for order in ORDERS:
        device.order = order
        packed = packing.pack(codes, scales.view(E4M3))
        assert equal(packed, expected)
        assert equal(packing.unpack(*packed, *shape[-2:]), back)
    kinds = {name.partition("<")[0] for name in device.names}
    assert kinds == {"pack", "unpack"}


@pytest.mark.parametrize("shape", PAIRS, ids=str)
def test_pairs_both_ways(device: Device, shape: tuple[int, ...]) -> None:
    codes, scales = weight(*shape)
    expected = fragments.pack(codes, scales, pairs=True)
    back = fragments.unpack(*expected, *shape[-2:], pairs=True)
    for order in ORDERS:
        device.order = order
        packed = packing.pack(codes, scales.view(E4M3), pairs=True)
        assert equal(packed, expected)
        assert equal(packing.unpack(*packed, *shape[-2:], pairs=True), back)
    assert len(device.names) == 2 * len(ORDERS)


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("first", "step"), [(0, 16), (8, 8), (3, 1)])
def test_a_part_of_a_stack_in_one_launch(
    device: Device, first: int, step: int, pairs: bool
) -> None:
    """Matrices at any distance from each other, and no more aligned than that allows."""
    codes, scales = weight(3, 80, 96)
    expected = fragments.pack(codes, scales, pairs=pairs)
    room = torch.full((3, 80 * 64 + 16 + step), 255, dtype=torch.uint8)
    apart = room.as_strided((3, 80, 48), (room.stride(0), 64, 1), first).copy_(codes)
    found = packing.pack(apart, scales.view(E4M3), pairs=pairs)
    assert device.names == [f"pack<{step},1>"]
    assert equal(found, expected)


def test_every_code_beside_every_scale(device: Device) -> None:
    """In every place of a piece: the codes move on by one from block to block of rows."""
    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    scales = every.repeat_interleave(4).view(256, 4)
    for shift in range(16):
        low = (torch.arange(32) + shift + torch.arange(256)[:, None]) % 16
        codes = (low | (low + 5) % 16 << 4).to(torch.uint8)
        packed = packing.pack(codes, scales.view(E4M3))
        assert equal(packed, fragments.pack(codes, scales))
        assert equal(packing.unpack(*packed, 256, 64), fragments.unpack(*packed, 256, 64))


def test_any_byte_is_unpacked_as_torch_does(device: Device) -> None:
    """Of scales that nobody packs, too."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(256, (2, 1, 2048), generator=generator).to(torch.uint8)
    scales = torch.arange(512).remainder(256).to(torch.uint8).view(2, 1, 256)
    assert equal(packing.unpack(codes, scales, 128, 64), fragments.unpack(codes, scales, 128, 64))


def strided(part: torch.Tensor, first: int, stride: int) -> torch.Tensor:
    room = torch.full((len(part), stride), 255, dtype=torch.uint8)
    return room[:, first : first + part.shape[1]].copy_(part)


@pytest.mark.parametrize(
    ("codes_at", "scales_at", "accesses"),
    [
        ((16, 160), (4, 40), "16,4"),
        ((16, 160), (3, 40), "16,1"),
        ((8, 160), (4, 40), "8,4"),
        ((16, 136), (4, 31), "8,1"),
        ((3, 160), (4, 40), "1,4"),
        ((16, 149), (0, 33), "1,1"),
    ],
)
def test_any_strides_without_a_copy(
    device: Device, codes_at: tuple[int, int], scales_at: tuple[int, int], accesses: str
) -> None:
    codes, scales = weight(70, 208)
    expected = fragments.pack(codes, scales)
    found = packing.pack(strided(codes, *codes_at), strided(scales, *scales_at).view(E4M3))
    assert device.names == [f"pack<{accesses}>"]
    assert equal(found, expected)


@pytest.mark.parametrize(("columns", "accesses"), [(64, "16,4"), (96, "16,1"), (80, "8,1")])
def test_accesses_are_as_wide_as_rows_allow(device: Device, columns: int, accesses: str) -> None:
    codes, scales = weight(64, columns)
    packing.unpack(*packing.pack(codes, scales.view(E4M3)), 64, columns)
    assert device.names == [f"pack<{accesses}>", f"unpack<{accesses}>"]


@pytest.mark.parametrize("accesses", ["16,4", "16,1", "8,4", "8,1", "1,4", "1,1"])
def test_unpack_into_rows_of_any_alignment(
    device: Device, accesses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Narrower accesses than the rows would allow give the same."""
    codes, scales = weight(70, 192 + 64)
    packed = fragments.pack(codes, scales)
    monkeypatch.setattr(packing, "kernel_name", lambda function, *rows: f"{function}<{accesses}>")
    found = packing.unpack(*packed, 70, 256)
    assert device.names == [f"unpack<{accesses}>"]
    assert equal(found, fragments.unpack(*packed, 70, 256))


def test_no_byte_moves_twice(device: Device) -> None:
    codes, scales = weight(128, 1088)
    packed = packing.pack(codes, scales.view(E4M3))
    packing.unpack(*packed, 128, 1088)
    rows, pieces = codes.nbytes + scales.nbytes, packed[0].nbytes + packed[1].nbytes
    pack, unpack = device.traffic
    assert (pack.loaded, pack.stored) == (rows, pieces)
    assert (unpack.loaded, unpack.stored) == (pieces, rows)


@pytest.mark.parametrize("scratch", [1, 10000])
def test_in_place(device: Device, scratch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SCRATCH", scratch)
    codes, scales = weight(320, 128)
    expected = fragments.pack(codes, scales)
    places = codes.data_ptr(), scales.data_ptr()
    found = packing.pack(codes, scales.view(E4M3), in_place=True)
    assert equal(found, expected)
    assert (found[0].data_ptr(), found[1].data_ptr()) == places
    assert device.names == ["pack<16,4>"] * (5 if scratch == 1 else 3)
    assert codes._version == 1


@pytest.mark.parametrize(("scratch", "launches"), [(1, 5), (40000, 3), (1 << 20, 1)])
def test_pairs_in_place(
    device: Device, scratch: int, launches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A matrix at a time at least: every slab has rows from both of its halves."""
    monkeypatch.setattr(packing, "SCRATCH", scratch)
    codes, scales = weight(5, 192, 128)
    expected = fragments.pack(codes, scales, pairs=True)
    places = codes.data_ptr(), scales.data_ptr()
    found = packing.pack(codes, scales.view(E4M3), in_place=True, pairs=True)
    assert equal(found, expected)
    assert (found[0].data_ptr(), found[1].data_ptr()) == places
    assert device.names == ["pack<16,4>"] * launches


ERRORS: list[Callable[[], Exception]] = [
    lambda: CompilerUnavailable("no compiler"),
    lambda: CompileError("no compiler"),
    lambda: DriverError("no driver"),
    lambda: KernelNotCached("not cached"),
]


@pytest.mark.parametrize("error", ERRORS, ids=lambda make: type(make()).__name__)
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("pairs", [False, True])
def test_without_a_kernel_torch_packs(
    error: Callable[[], Exception],
    in_place: bool,
    pairs: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def load(name: str, device: torch.device) -> Any:
        raise error()

    monkeypatch.setattr(packing, "on_gpu", lambda codes: True)
    monkeypatch.setattr(packing, "load", load)
    monkeypatch.setattr(packing, "SCRATCH", 1)
    forget_warnings()
    codes, scales = weight(2, 128, 64)
    expected = fragments.pack(codes, scales, pairs=pairs)
    q = NVFP4Tensor(codes, scales.view(E4M3), torch.ones(2))
    with caplog.at_level("WARNING", "gristmill"):
        packed = q.prepare("sm_90a", in_place=in_place, pairs=pairs)
        packed.unpack()
    assert equal((packed.codes, packed.scales), expected)
    (record,) = caplog.records
    assert str(error()) in record.getMessage()
    forget_warnings()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("arch", EACH)
def test_compiled_within_limits(arch: str) -> None:
    binary = compile_program(Program(packing.SOURCE, NAMES), arch, verbose=True)
    usage = resource_usage(binary)
    for name in NAMES:
        used = usage[binary.lowered[name]]
        assert used.spill_bytes == 0, name
        assert used.stack_bytes == 0, name
        assert used.shared_bytes <= RESERVED_SHARED, name
        # At least four blocks to a multiprocessor, for there are loads to wait for.
        assert used.registers * packing.THREADS <= REGISTERS_PER_BLOCK // 4, name
    assert KNOWN[arch].shared_per_block >= packing.SHARED
