"""What moe_machine.cuh offers in the emulation: right uses, and mistakes."""

from __future__ import annotations

import shutil
import struct
from contextlib import AbstractContextManager
from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch

from emulation.harness import EmulationError, Emulator, Traffic, readable, writable
from gristmill.jit.program import Program

HEADERS = Path(str(resources.files("gristmill"))) / "kernels" / "cuda"
WIDTHS = (1, 2, 4, 8, 16)
KERNELS = (
    *("match", "ask", "take_from", "take_up", "count", "vote_after_a_lane_left"),
    *("histogram", "draw", "add_elsewhere", "add_askew"),
    *(f"read_early<{width}>" for width in WIDTHS),
)
PARAMS = struct.Struct("@QQI")
ORDERS = (0, 1, 2, 3)


class Lab:
    """Launches of the kernels in self_test_moe.cu."""

    def __init__(self, emulator: Emulator, folder: Path) -> None:
        self.emulator = emulator
        for header in HEADERS.glob("*.cuh"):
            shutil.copy(header, folder)
        shutil.copy(Path(__file__).with_name("self_test_moe.cu"), folder)
        self.program = Program("self_test_moe.cu", KERNELS, root=folder)
        emulator.prepare([self.program])

    def run(
        self,
        name: str,
        source: torch.Tensor,
        out: torch.Tensor,
        *,
        value: int = 0,
        grid: int = 1,
        block: int = 32,
        shared: int = 0,
        dependent: bool = False,
        order: int = 0,
        fresh: bool = False,
    ) -> Traffic:
        return self.emulator.launch(
            self.program,
            name,
            PARAMS.pack(source.data_ptr(), out.data_ptr(), value),
            grid=grid,
            block=block,
            shared=shared,
            dependent=dependent,
            buffers=[replace(readable(source), fresh=fresh), writable(out)],
            order=order,
        )


@pytest.fixture(scope="module")
def lab(emulator: Emulator, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return Lab(emulator, tmp_path_factory.mktemp("votes"))


def _words(*shape: int, most: int = 1 << 24) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, most, shape, generator=generator).int()


def _unset(*shape: int) -> torch.Tensor:
    return torch.full(shape, -1, dtype=torch.int32)


def _mask(lanes: torch.Tensor) -> torch.Tensor:
    """Words of 32 booleans each, as int32."""
    words = (lanes.long() << torch.arange(32)).sum(-1)
    return (words - ((words >> 31) << 32)).int()


@pytest.mark.parametrize("order", ORDERS)
def test_lanes_that_bring_the_same(lab: Lab, order: int) -> None:
    source, out = _words(6, 32, most=5), _unset(6, 32)
    source[0], source[1] = 3, torch.arange(32)
    lab.run("match", source, out, grid=2, block=96, order=order)
    assert torch.equal(out, _mask(source[:, :, None] == source[:, None, :]))


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("value", [0, 4, 10])
def test_votes(lab: Lab, value: int, order: int) -> None:
    source, out = _words(4, 32, most=10), _unset(4, 32)
    lab.run("ask", source, out, value=value, block=128, order=order)
    assert torch.equal(out, _mask(source < value)[:, None].expand(4, 32))


@pytest.mark.parametrize("order", ORDERS)
def test_values_of_other_lanes(lab: Lab, order: int) -> None:
    source, out = _words(2, 32), _unset(2, 32)
    lab.run("take_from", source, out, value=5, block=64, order=order)
    assert torch.equal(out, source[:, (torch.arange(32) * 3 + 5) % 32])
    for distance in (1, 16, 31):
        lab.run("take_up", source, out, value=distance, block=64, order=order)
        lanes = torch.arange(32)
        assert torch.equal(out, source[:, torch.where(lanes < distance, lanes, lanes - distance)])


def test_counts_of_bits(lab: Lab) -> None:
    source, out = torch.arange(64, dtype=torch.int32), _unset(64)
    source[5] = -1
    lab.run("count", source, out, block=64)
    assert out.tolist() == [32 if i == 5 else i.bit_count() for i in range(64)]


@pytest.mark.parametrize("order", ORDERS)
def test_counting_in_shared_memory(lab: Lab, order: int) -> None:
    source, out = _words(256, most=9), _unset(9)
    lab.run("histogram", source, out, value=9, block=256, shared=36, order=order)
    assert torch.equal(out.long(), source.long().bincount(minlength=9))
    out = _unset(64)
    lab.run("draw", source, out, block=64, shared=4, order=order)
    assert (out == 7).all()


@pytest.mark.parametrize("width", WIDTHS)
def test_what_is_settled_may_be_read_early(lab: Lab, width: int) -> None:
    source, out = _words(64 * width // 4), _unset(64 * width // 4)
    traffic = lab.run(f"read_early<{width}>", source, out, block=64, dependent=True)
    assert torch.equal(out, source)
    assert traffic.loaded == 64 * width


def _told(message: str) -> AbstractContextManager[object]:
    return pytest.raises(EmulationError, match=message)


def test_mistakes(lab: Lab) -> None:
    source, out = _words(64), _unset(64)
    with _told("load_global before wait_for_previous_grid"):
        lab.run("read_early<4>", source, out, value=1, dependent=True)
    with _told("load_settled of 4 bytes at 0x[0-9a-f]+: the address is not a multiple of 4"):
        lab.run("read_early<4>", source, out, value=2, dependent=True)
    with _told("load_settled of 4 bytes at 0x[0-9a-f]+ is out of bounds"):
        lab.run("read_early<4>", source, out, grid=3, dependent=True)
    with _told("load_settled before wait_for_previous_grid.* the previous grid has written"):
        lab.run("read_early<4>", source, out, dependent=True, fresh=True)
    lab.run("read_early<4>", source, out, fresh=True)  # not while the previous grid runs
    with _told("shuffle_from: there is no lane"):
        lab.run("take_from", source, out, value=99)
    with _told("vote: a lane of the warp has returned"):
        lab.run("vote_after_a_lane_left", source, out)
    for name in ("add_elsewhere", "add_askew"):
        with _told("atomic_add_shared: the address is not that of a word in this block's shared"):
            lab.run(name, source, out, shared=64)
    with _told("atomic_add_shared"):
        lab.run("histogram", torch.full((32,), 9), out, value=9, shared=36)
