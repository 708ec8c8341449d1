"""NVFP4 weights: as a checkpoint has them, and as the kernels of a GPU want them.

A weight ``(N, K)``, or a stack of them ``(E, N, K)``, is

.. math:: w_{nk} = e_{nk} \\cdot s_{n, k / 16} \\cdot g_n

with E2M1 values e, an E4M3 scale s for every 16 of them along K, and an fp32 scale g for the matrix
or for each of its rows.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

from gristmill.errors import ArgumentError, DtypeError
from gristmill.formats.nvfp4 import e2m1, tiles

BLOCK = 16  # elements along K that share a scale
E4M3 = torch.float8_e4m3fn
LARGEST_SCALE = 448.0  # of E4M3
ROWS = "rows"
TILES = "tiles"
LAYOUTS = (ROWS, TILES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # of weights in the open

_PIECE = 1 << 24  # bytes of codes that are decoded at a time
_transforms = torch._C._functorch.peek_interpreter_stack

T = TypeVar("T", bound="NVFP4Tensor | PackedNVFP4")


class _ByBytes:
    """For pickles, in which torch writes fp8 but does not read it: such parts go as bytes."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: _seen_as(part, E4M3, torch.uint8) for name, part in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = {**state, "scales": _seen_as(state["scales"], torch.uint8, E4M3)}
        for name, part in state.items():
            object.__setattr__(self, name, part)


@dataclass(frozen=True, eq=False)
class NVFP4Tensor(_ByBytes):
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
        devices = {tensor.device for tensor in _parts(self)}
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
        return sum(part.nbytes for part in _parts(self))

    @property
    def row_scale(self) -> torch.Tensor:
        """The global scale of each row, ``(..., N)``; a view."""
        per_row = self.global_scale.dim() == self.codes.dim() - 1
        scale = self.global_scale if per_row else self.global_scale.unsqueeze(-1)
        return scale.expand(self.codes.shape[:-1])

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> NVFP4Tensor:
        return NVFP4Tensor(*(part.to(device, non_blocking=non_blocking) for part in _parts(self)))

    def rows(self, start: int, stop: int) -> NVFP4Tensor:
        """Rows ``start:stop`` of every matrix; views."""
        return NVFP4Tensor(
            self.codes[..., start:stop, :],
            self.scales[..., start:stop, :],
            self.row_scale[..., start:stop],
        )

    def prepare(self, arch: str | None = None) -> PackedNVFP4:
        """The weight as the kernels of a GPU want it.

        `arch` is an architecture such as ``"sm_90a"``; None means the device the weight lies on.
        What keeps its layout is shared, not copied.
        """
        layout = layout_of(arch_of(self.device) if arch is None else arch)
        scales = tiles.swizzle(self.scales) if layout == TILES else self.scales
        return PackedNVFP4(self.codes, scales, self.row_scale.contiguous(), layout)


@dataclass(frozen=True, eq=False)
class PackedNVFP4(_ByBytes):
    """A weight in the layout of some GPU's kernels; made by :meth:`NVFP4Tensor.prepare`.

    Attributes:
        codes: uint8 ``(..., N, K / 2)``.
        scales: E4M3: ``(..., N, K / 16)`` in layout ``"rows"``; in ``"tiles"`` in the order of
            Blackwell's tensor cores, padded to 128 rows and 4 columns.
        row_scale: fp32 ``(..., N)``, the global scale of each row.
        layout: ``"rows"`` or ``"tiles"``.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    row_scale: torch.Tensor
    layout: str

    @property
    def shape(self) -> torch.Size:
        """The shape of the weight, ``(..., N, K)``."""
        return torch.Size((*self.codes.shape[:-1], self.codes.shape[-1] * 2))

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in _parts(self))

    def unpack(self) -> NVFP4Tensor:
        """Back in the layout of checkpoints."""
        return NVFP4Tensor(self.codes, _unpacked_scales("unpack", self), self.row_scale)


def layout_of(arch: str) -> str:
    """The layout that the kernels of an architecture read.

    Blackwell's tensor cores take block scales in tiles; before it they are read in row order.
    """
    if not isinstance(arch, str):
        raise DtypeError(
            f"prepare: arch must be None or a str such as 'sm_90a', got {type(arch).__name__}"
        )
    number = arch.removeprefix("sm_").rstrip("af")
    if arch != "cpu" and not number.isdigit():
        raise ArgumentError(f"prepare: {arch!r} is no architecture; write one such as 'sm_90a'")
    return TILES if arch != "cpu" and int(number) >= 100 else ROWS


def arch_of(device: torch.device) -> str:
    if device.type != "cuda":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def scales_in_rows(scales: torch.Tensor, rows: int, columns: int, layout: str) -> torch.Tensor:
    """Block scales of a weight of `rows` x `columns` in row order, whatever their layout."""
    return tiles.unswizzle(scales, rows, columns // BLOCK) if layout == TILES else scales


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
    scales = _unpacked_scales("dequantize", q) if isinstance(q, PackedNVFP4) else q.scales
    return _values(q.codes, scales, q.row_scale, dtype)


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


def _unpacked_scales(op: str, q: PackedNVFP4) -> torch.Tensor:
    if q.layout not in LAYOUTS:
        names = " or ".join(map(repr, LAYOUTS))
        raise ArgumentError(f"{op}: the layout of a PackedNVFP4 must be {names}, got {q.layout!r}")
    return scales_in_rows(q.scales, q.shape[-2], q.shape[-1], q.layout)


def _seen_as(part: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """A tensor of one dtype as another of the same size; anything else as it is."""
    is_old = isinstance(part, torch.Tensor) and part.dtype == old
    return part.view(new) if is_old else part


def _parts(value: NVFP4Tensor | PackedNVFP4) -> list[torch.Tensor]:
    parts = (getattr(value, field.name) for field in fields(value))
    return [part for part in parts if isinstance(part, torch.Tensor)]


def _check_tensor(op: str, name: str, value: Any, dtype: torch.dtype) -> None:
    if not isinstance(value, torch.Tensor) or value.dtype != dtype:
        got = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
        raise DtypeError(f"{op}: {name} must be a tensor of {dtype}, got {got}")


def _register(cls: type[T], constants: tuple[str, ...] = ()) -> None:
    names = [field.name for field in fields(cls) if field.name not in constants]

    def flatten(value: T) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(value, name) for name in names], tuple(
            getattr(value, name) for name in constants
        )

    def flatten_with_keys(value: T) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        leaves, context = flatten(value)
        return [
            (pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)
        ], context

    def unflatten(leaves: Any, context: tuple[Any, ...]) -> T:
        # Past the checks: a map over the leaves may put anything in their places.
        value = object.__new__(cls)
        for name, leaf in zip((*names, *constants), (*leaves, *context), strict=True):
            object.__setattr__(value, name, leaf)
        return value

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"gristmill.nvfp4.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=list,
        from_dumpable_context=tuple,
    )


_register(NVFP4Tensor)
_register(PackedNVFP4, constants=("layout",))
