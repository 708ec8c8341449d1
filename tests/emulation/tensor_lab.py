"""Launches of the kernels in self_test_tensor.cu, and numbers for them."""

from __future__ import annotations

import shutil
import struct
from importlib import resources
from pathlib import Path

import torch

from emulation.harness import Emulator, Traffic, readable, writable
from gristmill.jit.program import Program

HEADERS = Path(str(resources.files("gristmill"))) / "kernels" / "cuda"
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}
TOKENS = (8, 16, 64, 96, 256)
KERNELS = (
    "turn_half",
    "hand_around",
    "copy_rows",
    "copy_block",
    "copy_constant",
    "copy_box",
    "read_next",
    "fill_aligned",
    *(f"multiply_pairs<{name},{high}>" for name in TYPES for high in ("false", "true")),
    "change_words",
    "load_rows<2>",
    "load_rows<4>",
    "store_turned<2>",
    "store_turned<4>",
    *(f"multiply_by_warp<{name}>" for name in TYPES),
    *(f"multiply_by_group<bf16,{tokens}>" for tokens in TOKENS),
    "multiply_by_group<f16,16>",
    *(f"multiply_by_columns<{most}>" for most in (16, 64, 192)),
)
PARAMS = struct.Struct("@128sQQQiiII")
NO_MAP = bytes(128)
ORDERS = (0, 1, 2, 3)


class Lab:
    """Launches of the kernels in self_test_tensor.cu."""

    def __init__(self, emulator: Emulator, folder: Path) -> None:
        self.emulator = emulator
        for header in HEADERS.glob("*.cuh"):
            shutil.copy(header, folder)
        shutil.copy(Path(__file__).with_name("self_test_tensor.cu"), folder)
        self.program = Program("self_test_tensor.cu", KERNELS, root=folder)
        emulator.prepare([self.program])

    def run(
        self,
        name: str,
        source: torch.Tensor,
        out: torch.Tensor,
        other: torch.Tensor | None = None,
        *,
        map_bytes: bytes = NO_MAP,
        column: int = 0,
        row: int = 0,
        value: int = 0,
        count: int = 0,
        grid: int = 1,
        block: int = 32,
        **launch: int,
    ) -> Traffic:
        second = other if other is not None else source
        pointers = (source.data_ptr(), second.data_ptr(), out.data_ptr())
        return self.emulator.launch(
            self.program,
            name,
            PARAMS.pack(map_bytes, *pointers, column, row, value, count),
            grid=grid,
            block=block,
            buffers=[readable(source), readable(second), writable(out)],
            **launch,
        )


def words(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 1 << 24, shape, generator=generator).int()


def whole(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Small whole numbers: sums of their products are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, shape, generator=generator).to(dtype)


def unset(*shape: int) -> torch.Tensor:
    """All ones: what shared memory starts as, and no number in any type here."""
    return torch.full(shape, -1, dtype=torch.int32)
