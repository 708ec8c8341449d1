"""NVFP4 weights: as a checkpoint has them, and as the kernels of a GPU want them.

A weight ``(N, K)``, or a stack of them ``(E, N, K)``, is

.. math:: w_{nk} = e_{nk} \\cdot s_{n, k / 16} \\cdot g_n

with E2M1 values e, an E4M3 scale s for every 16 of them along K, and an fp32 scale g for the matrix
or for each of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.formats.nvfp4 import e2m1, fragments, packing, structure, tiles

BLOCK = 16  # elements along K that share a scale
E4M3 = torch.float8_e4m3fn
LARGEST_SCALE = 448.0  # of E4M3
ROWS = "rows"
TILES = "tiles"
FRAGMENTS = "fragments"
PAIRS = "pairs"  # fragments of rows of gate and up, side by side
LAYOUTS = (ROWS, TILES, FRAGMENTS, PAIRS)
IN_PIECES = (FRAGMENTS, PAIRS)  # of 64 rows by 64 columns, padded
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of weights in the open

_PIECE = 1 << 24  # bytes of codes that are decoded at a time
_transforms = torch._C._functorch.peek_interpreter_stack


@dataclass(frozen=True, eq=False)
class NVFP4Tensor(structure.ByBytes):
    """A weight in the layout of checkpoints.

    Attributes:
        codes: uint8 ``(..., N, K / 2)``, two E2M1 values a byte, even columns in the low half.
        scales: float8_e4m3fn ``(..., N, K / 16)``, never negative, never NaN.
        global_scale: fp32 multiplier, one per matrix (shape ``(...)``) or per row (``(..., N)``).

    A pytree: maps over its three tensors reach through it.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    global_scale: torch.Tensor

    def __post_init__(self) -> None:
        _check_tensor("NVFP4Tensor", "codes", self.codes, torch.uint8)
        _check_tensor("NVFP4Tensor", "scales", self.scales, E4M3)
        _check_tensor("NVFP4Tensor", "global_scale", self.global_scale, torch.float32)
        codes = tuple(self.codes.shape)
        if len(codes) < 2 or codes[-1] % (BLOCK // 2):
            raise ArgumentError(
                f"NVFP4Tensor: codes must have shape (..., N, K / 2) with K a multiple of {BLOCK}, "
                f"got {codes}"
            )
        wanted = (*codes[:-1], codes[-1] * 2 // BLOCK)
        if tuple(self.scales.shape) != wanted:
            raise ArgumentError(
                f"NVFP4Tensor: scales must have shape {wanted}, one for every {BLOCK} of K beside "
                f"codes {codes}, got {tuple(self.scales.shape)}"
            )
        if tuple(self.global_scale.shape) not in (codes[:-2], codes[:-1]):
            raise ArgumentError(
                f"NVFP4Tensor: global_scale must have shape {codes[:-2]}, one per matrix, or "
                f"{codes[:-1]}, one per row, got {tuple(self.global_scale.shape)}"
            )
        devices = {tensor.device for tensor in structure.parts(self)}
        if len(devices) > 1:
            names = ", ".join(sorted(map(str, devices)))
            raise ArgumentError(f"NVFP4Tensor: its tensors must be on one device, got {names}")

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight, ``(..., N, K)``."""
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in structure.parts(self))

    @property
    def row_scale(self) -> torch.Tensor:
        """The global scale of each row, ``(..., N)``; a view."""
        per_row = self.global_scale.dim() == self.codes.dim() - 1
        scale = self.global_scale if per_row else self.global_scale.unsqueeze(-1)
        return scale.expand(self.codes.shape[:-1])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> NVFP4Tensor:
        parts = structure.parts(self)
        return NVFP4Tensor(*(part.to(device, non_blocking=non_blocking) for part in parts))

    def rows(self, start: int, stop: int) -> NVFP4Tensor:
        """Rows ``start:stop`` of every matrix; views."""
        return NVFP4Tensor(
            self.codes[..., start:stop, :],
            self.scales[..., start:stop, :],
            self.row_scale[..., start:stop],
        )

    def prepare(
        self, arch: str | None = None, *, in_place: bool = False, pairs: bool = False
    ) -> PackedNVFP4:
        """The weight as the kernels of a GPU want it.

        What keeps its layout is shared, not copied. What changes it is written anew, or with
        `in_place` over the bytes of this weight, so that there are never two of it: on a GPU not
        more than 16 MiB (for ``"pairs"`` one matrix, if that is more) are taken beside them for a
        while. Afterwards this NVFP4Tensor, and whoever else holds its tensors, must not be used.

        Bytes can take the place of others if there are as many: rows and columns must be multiples
        of 64 for the layouts ``"fragments"`` and ``"pairs"`` (of 128 and 64 for ``"tiles"``), and
        the tensors contiguous and aligned to 16 bytes. Where they are not, and where torch traces,
        `in_place` allocates like the default, and this weight stays as it is.

        Args:
            arch: an architecture such as ``"sm_90a"``; None means the device the weight lies on.
            in_place: whether this weight may be overwritten.
            pairs: the weight is the gate before up of :func:`gristmill.nvfp4.moe`, w13: where the
                layout would be ``"fragments"`` it becomes ``"pairs"``, in which rows of both halves
                lie side by side. N must be a multiple of 16.
        """
        if pairs:
            fragments.check_pairs("prepare", self.codes.shape[-2])
        arch = arch_of(self.device) if arch is None else arch
        layout = layout_of(arch, self.codes.dim() > 2, pairs=pairs)
        if in_place:
            self._check_writable()
        row_scale = self.row_scale.contiguous()
        if layout in IN_PIECES:
            codes, scales = packing.pack(self.codes, self.scales, in_place=in_place, pairs=pairs)
            return PackedNVFP4(codes, scales, row_scale, layout, self.shape[-1])
        scales = self.scales
        if layout == TILES:
            scales = packing.to_tiles(scales, in_place=in_place)
        return PackedNVFP4(self.codes, scales, row_scale, layout)

    def _check_writable(self) -> None:
        for name in ("codes", "scales"):
            if getattr(self, name).requires_grad:
                raise ArgumentError(
                    f"prepare: in_place=True would overwrite {name}, which requires a gradient; "
                    f"NVFP4 weights have none, so make it of {name}.detach()"
                )


@dataclass(frozen=True, eq=False)
class PackedNVFP4(structure.ByBytes):
    """A weight in the layout of some GPU's kernels; made by :meth:`NVFP4Tensor.prepare`.

    Attributes:
        codes: uint8 ``(..., N, K / 2)``; in layouts ``"fragments"`` and ``"pairs"`` the values in
            the order of the tensor cores of Ampere, Ada and Hopper:
            ``(..., ceil(N / 64), ceil(K / 64), 2048)``.
        scales: E4M3: ``(..., N, K / 16)`` in layout ``"rows"``; in ``"tiles"`` in the order of
            Blackwell's tensor cores, padded to 128 rows and 4 columns; in ``"fragments"`` and
            ``"pairs"`` uint8 ``(..., ceil(N / 64), ceil(K / 64), 256)``, in a code of their own.
        row_scale: fp32 ``(..., N)``, the global scale of each row, in the checkpoint's order.
        layout: ``"rows"``, ``"tiles"``, ``"fragments"``, or ``"pairs"``: fragments in which eight
            rows of the first half of N and the same eight of the second lie side by side.
        columns: K; only fragments and pairs, which are padded, need to be told.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    row_scale: torch.Tensor
    layout: str
    columns: int | None = None

    def __post_init__(self) -> None:
        if self.layout in IN_PIECES:
            self._check_pieces()

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight, ``(..., N, K)``."""
        if self.layout in IN_PIECES:
            return torch.Size((*self.row_scale.shape, self._told_columns()))
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in structure.parts(self))

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> PackedNVFP4:
        """On another device, in the same layout."""
        codes, scales, row_scale = (
            part.to(device, non_blocking=non_blocking) for part in structure.parts(self)
        )
        return PackedNVFP4(codes, scales, row_scale, self.layout, self.columns)

    def unpack(self) -> NVFP4Tensor:
        """Back in the layout of checkpoints; what has it already is shared, not copied.

        Codes beside a scale of zero may come back as 0.
        """
        return NVFP4Tensor(*_in_rows("unpack", self), self.row_scale)

    def _told_columns(self) -> int:
        if not isinstance(self.columns, (int, torch.SymInt)):
            raise ArgumentError(
                f"PackedNVFP4: columns must be K in layout {self.layout!r}, whose tensors do not "
                f"tell it, got {self.columns!r}"
            )
        return self.columns

    def _check_pieces(self) -> None:
        _check_tensor("PackedNVFP4", "codes", self.codes, torch.uint8)
        _check_tensor("PackedNVFP4", "scales", self.scales, torch.uint8)
        _check_tensor("PackedNVFP4", "row_scale", self.row_scale, torch.float32)
        parts = (self.codes, self.scales, self.row_scale)
        fragments.check_shapes("PackedNVFP4", *parts, self._told_columns(), self.layout)
        if self.layout == PAIRS:
            fragments.check_pairs("PackedNVFP4", self.row_scale.shape[-1])

    @staticmethod
    def _has_fp8_scales(state: dict[str, Any]) -> bool:
        return state["layout"] not in IN_PIECES


def layout_of(arch: str, stacked: bool = False, *, pairs: bool = False) -> str:
    """The layout that the kernels of an architecture read; `stacked`: of a stack of weights.

    Blackwell's tensor cores take block scales in tiles. Those of Ampere, Ada and Hopper take 16-bit
    values, and weights that lie ready for that, with `pairs` in that order; but stacks are read in
    row order before Hopper.
    """
    if not isinstance(arch, str):
        raise DtypeError(
            f"prepare: arch must be None or a str such as 'sm_90a', got {type(arch).__name__}"
        )
    number = arch.removeprefix("sm_").rstrip("af")
    if arch != "cpu" and not number.isdigit():
        raise ArgumentError(f"prepare: {arch!r} is no architecture; write one such as 'sm_90a'")
    if arch == "cpu" or int(number) < 80:
        return ROWS
    if int(number) >= 100:
        return TILES
    if stacked and int(number) < 90:
        return ROWS
    return PAIRS if pairs else FRAGMENTS


def arch_of(device: torch.device) -> str:
    # A ROCm build calls its devices "cuda", and what it says of them is no CUDA architecture.
    if device.type != "cuda" or torch.version.hip is not None:
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def scales_in_rows(scales: torch.Tensor, rows: int, columns: int, layout: str) -> torch.Tensor:
    """Block scales of a weight of `rows` x `columns` in row order, if they lie in no pieces."""
    return tiles.unswizzle(scales, rows, columns // BLOCK) if layout == TILES else scales


def in_rows(
    codes: torch.Tensor, scales: torch.Tensor, rows: int, columns: int, layout: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and block scales of a weight of `rows` x `columns` in row order."""
    if layout in IN_PIECES:
        return packing.unpack(codes, scales, rows, columns, pairs=layout == PAIRS)
    return codes, scales_in_rows(scales, rows, columns, layout)


def decode_blocks(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The product of elements and block scales, without the global scale; exact in every dtype.

    It has at most six significant bits and lies within 2**-10 and 2688, so bf16 and fp16 hold it.
    """
    blocks: torch.Tensor = e2m1.decode_packed(codes, dtype).unflatten(-1, (scales.shape[-1], BLOCK))
    return blocks.mul_(scales.to(dtype).unsqueeze(-1)).flatten(-2)


def dequantize(q: NVFP4Tensor | PackedNVFP4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    r"""The values of a weight.

    .. math:: w_{nk} = e_{nk} \cdot s_{n, k / 16} \cdot g_n

    The product of e and s is exact; times g it is rounded to fp32 (fp64 for fp64), then to `dtype`.

    Returns:
        ``(..., N, K)`` of `dtype`.
    """
    if not isinstance(q, (NVFP4Tensor, PackedNVFP4)):
        raise DtypeError(
            f"dequantize: q must be an NVFP4Tensor or a PackedNVFP4, got {type(q).__name__}"
        )
    if dtype not in DTYPES:
        raise DtypeError(f"dequantize: dtype must be fp32, bf16, fp16 or fp64, got {dtype}")
    if isinstance(q, PackedNVFP4):
        q = NVFP4Tensor(*_in_rows("dequantize", q), q.row_scale)  # says what does not fit together
    return _values(q.codes, q.scales, q.row_scale, dtype)


def _values(
    codes: torch.Tensor, scales: torch.Tensor, row_scale: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """All values; those of a large weight piece by piece, for the sake of what is made on the way.

    That is an index of 32 bits for each byte, and the values in fp32.
    """
    is_large = codes.numel() > _PIECE and codes.dim() > 1
    if not is_large or torch.compiler.is_compiling() or _transforms() is not None:
        exact = torch.float64 if dtype == torch.float64 else torch.float32
        return decode_blocks(codes, scales, exact).mul_(row_scale.unsqueeze(-1)).to(dtype)
    values = torch.empty((*codes.shape[:-1], codes.shape[-1] * 2), dtype=dtype, device=codes.device)
    step = _PIECE * len(codes) // codes.numel()
    for first in range(0, len(codes), max(step, 1)):
        part = slice(first, first + step) if step else first
        values[part] = _values(codes[part], scales[part], row_scale[part], dtype)
    return values


def _in_rows(op: str, q: PackedNVFP4) -> tuple[torch.Tensor, torch.Tensor]:
    if q.layout not in LAYOUTS:
        names = ", ".join(map(repr, LAYOUTS[:-1]))
        raise ArgumentError(
            f"{op}: the layout of a PackedNVFP4 must be {names} or {LAYOUTS[-1]!r}, "
            f"got {q.layout!r}"
        )
    return in_rows(q.codes, q.scales, q.shape[-2], q.shape[-1], q.layout)


def _check_tensor(op: str, name: str, value: Any, dtype: torch.dtype) -> None:
    if not isinstance(value, torch.Tensor) or value.dtype != dtype:
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise DtypeError(f"{op}: {name} must be a tensor of {dtype}, got {got}")


structure.register(NVFP4Tensor)
structure.register(PackedNVFP4, constants=("layout", "columns"))
