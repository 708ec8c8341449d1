"""Kernels that no variant of an op launches on every GPU, each beside the same in plain torch.

Weights are packed before any op sees them, and what is around products of NVFP4 by NVFP4 takes part
only on Blackwell, whose tensor cores do these. For tools/sanitize_runs.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.bench.check import WrongResultError, check
from gristmill.formats.nvfp4 import fragments, packing
from gristmill.formats.nvfp4.tensor import E4M3
from gristmill.jit import Program
from gristmill.ops.nvfp4_linear.finish import Finish, finish_program
from gristmill.ops.nvfp4_linear.quantizers import nvfp4_quantizer, nvfp4_tokens, quantizer_program
from gristmill.select.device import device_of

_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32


def moved(value: Any, place: str) -> Any:
    """A tensor in memory of its own at `place`: exactly its bytes, as it lies and is aligned.

    What lies between its elements goes with it, so that a read beyond the last one is out of bounds
    and no read before it is one of memory that nobody has written.
    """
    if not isinstance(value, torch.Tensor):
        return value
    if not value.numel():
        return value.to(place)
    before = value.data_ptr() % 16 // value.element_size()
    steps = zip(value.shape, value.stride(), strict=True)
    span = 1 + sum((size - 1) * step for size, step in steps)
    flat = torch.zeros(before + span, dtype=value.dtype)
    flat[before:] = torch.as_strided(value, (span,), (1,))
    return torch.as_strided(flat.to(place), value.shape, value.stride(), before)


class Part(ABC):
    """One launch: `outputs` at a place, on a GPU by our kernel, and `expected`, from torch."""

    exact = True

    @property
    @abstractmethod
    def program(self) -> Program:
        """What is launched on a GPU."""

    @abstractmethod
    def outputs(self, place: str) -> list[torch.Tensor]:
        """As the library makes them there."""

    @abstractmethod
    def expected(self) -> list[torch.Tensor]:
        """The same in other words, on the CPU."""

    def start(self, place: str) -> str | None:
        """What is wrong, or None."""
        got = [one.cpu() for one in self.outputs(place)]
        for index, (left, right) in enumerate(zip(got, self.expected(), strict=True)):
            if self.exact and not torch.equal(_bytes(left), _bytes(right)):
                return f"output {index} is not what torch makes"
            try:
                if not self.exact:
                    check(left, right)
            except WrongResultError as error:
                return str(error)
        return None


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Not all dtypes can be compared."""
    return tensor.contiguous().view(torch.uint8)


@dataclass(frozen=True)
class Pack(Part):
    """Weights into fragments; `gap` bytes before the first row, and behind each."""

    experts: int
    rows: int
    columns: int
    gap: int = 0
    pairs: bool = False

    @property
    def program(self) -> Program:
        return Program(packing.SOURCE, (packing.kernel_name("pack", *self.weight()),))

    def weight(self) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        found = []
        # All codes, and scales that are some.
        for columns, low, high in ((self.columns // 2, 0, 256), (self.columns // 16, 1, 0x7F)):
            shape, step = (self.experts, self.rows, columns), columns + self.gap
            memory = torch.zeros(self.gap + self.experts * self.rows * step, dtype=torch.uint8)
            part = torch.as_strided(memory, shape, (self.rows * step, step, 1), self.gap)
            found.append(part.copy_(torch.randint(low, high, shape, generator=generator)))
        codes, scales = found
        return codes, scales

    def outputs(self, place: str) -> list[torch.Tensor]:
        codes, scales = (moved(one, place) for one in self.weight())
        return [*packing.pack(codes, scales.view(E4M3), pairs=self.pairs)]

    def expected(self) -> list[torch.Tensor]:
        codes, scales = self.weight()
        return [*fragments.pack(codes, scales.view(E4M3), pairs=self.pairs)]


class Unpack(Pack):
    """And back, into rows that are dense."""

    @property
    def program(self) -> Program:
        codes, scales = (one.contiguous() for one in self.weight())
        return Program(packing.SOURCE, (packing.kernel_name("unpack", codes, scales),))

    def outputs(self, place: str) -> list[torch.Tensor]:
        codes, scales = (moved(one, place) for one in super().expected())
        return [*packing.unpack(codes, scales, self.rows, self.columns, pairs=self.pairs)]

    def expected(self) -> list[torch.Tensor]:
        codes, scales = super().expected()
        return [*fragments.unpack(codes, scales, self.rows, self.columns, pairs=self.pairs)]


@dataclass(frozen=True)
class Tokens(Part):
    """Activations into NVFP4."""

    rows: int
    columns: int
    dtype: torch.dtype

    @property
    def program(self) -> Program:
        return quantizer_program("nvfp4", self.dtype)

    def x(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return torch.randn((self.rows, self.columns), generator=generator).to(self.dtype)

    def outputs(self, place: str) -> list[torch.Tensor]:
        return [*nvfp4_quantizer(device_of(place), self.dtype, {self.rows})(moved(self.x(), place))]

    def expected(self) -> list[torch.Tensor]:
        return [*nvfp4_tokens(self.x())]


@dataclass(frozen=True)
class Finishing(Part):
    """From the sums of a product to results."""

    rows: int
    columns: int
    dtype: torch.dtype
    token: bool
    shift: bool
    exact = False

    @property
    def program(self) -> Program:
        return finish_program(self.dtype, token=self.token, shift=self.shift)

    def operands(self) -> tuple[Any, ...]:
        generator = torch.Generator().manual_seed(0)
        total = torch.randn((self.rows, self.columns), generator=generator)
        scale = torch.rand(self.columns, generator=generator) + 0.5
        token = torch.rand((self.rows, 1), generator=generator) + 0.5
        shift = torch.randn(self.columns, generator=generator)
        return total, scale, token if self.token else None, shift if self.shift else None

    def outputs(self, place: str) -> list[torch.Tensor]:
        total, scale, token, shift = (moved(one, place) for one in self.operands())
        finish = Finish(
            *(device_of(place), self.dtype, self.columns, [(self.rows, self.columns)]),
            token=self.token,
            shift=self.shift,
        )
        out = torch.empty((self.rows, self.columns), dtype=self.dtype, device=place)
        finish(total, scale, out, at=(0, 0), token=token, shift=shift)
        return [out]

    def expected(self) -> list[torch.Tensor]:
        total, scale, token, shift = self.operands()
        result = total * scale if token is None else total * token * scale
        return [(result if shift is None else result + shift).to(self.dtype)]


def _packing() -> Iterator[Part]:
    """By every width of accesses that rows allow, with slabs and chunks that are not full."""
    for sizes in (
        (1, 64, 64),
        (1, 130, 1056),
        (2, 48, 1088, 8),
        (1, 20, 1104, 8),
        (1, 70, 80, 3),
        (3, 80, 96, 0, True),
        (2, 144, 528, 1, True),
    ):
        yield Pack(*sizes)
        yield Unpack(*sizes)


def _tokens() -> Iterator[Part]:
    yield Tokens(5, 48, _BF16)
    yield Tokens(130, 1040, _FP16)
    yield Tokens(3, 8224, _FP32)


def _finishing() -> Iterator[Part]:
    yield Finishing(1, 8, _BF16, token=True, shift=True)
    yield Finishing(37, 200, _FP16, token=True, shift=False)
    yield Finishing(16, 1032, _FP32, token=False, shift=True)
    yield Finishing(50, 2056, _BF16, token=False, shift=False)


PARTS = {"nvfp4_packing": _packing, "nvfp4_tokens": _tokens, "nvfp4_finish": _finishing}
