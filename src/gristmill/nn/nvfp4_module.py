"""What modules with NVFP4 weights share: buffers that keep their dtypes, and their loading."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from gristmill.errors import ArgumentError
from gristmill.formats.nvfp4.tensor import BLOCK, NVFP4Tensor

if TYPE_CHECKING:
    from typing_extensions import Self

# By which integers the floating-point buffers are hidden from a change of dtype.
_AS_INTEGERS = {torch.float8_e4m3fn: torch.uint8, torch.float32: torch.int32}


class NVFP4Module(torch.nn.Module):
    """Holds weights as buffers ``weight``, ``weight_scale`` and ``weight_scale_2``, after a prefix.

    These are ModelOpt's names for codes, block scales and global scales; the last is kept for every
    row. They are frozen, and `.to(torch.bfloat16)` and its like leave them as they are.
    """

    def _hold_zeros(
        self, prefix: str, shape: tuple[int, ...], device: torch.device | str | None
    ) -> None:
        """Buffers for a weight of `shape` that is still to be loaded."""
        *stack, rows, columns = shape
        if columns % BLOCK:
            raise ArgumentError(
                f"{type(self).__name__}: the columns of a weight must be a multiple of {BLOCK}, "
                f"got {columns} in {shape}"
            )
        lines = (*stack, rows)
        codes = torch.zeros((*lines, columns // 2), dtype=torch.uint8, device=device)
        scales = torch.zeros((*lines, columns // BLOCK), dtype=torch.uint8, device=device)
        row_scale = torch.zeros(lines, dtype=torch.float32, device=device)
        self._hold(prefix, NVFP4Tensor(codes, scales.view(torch.float8_e4m3fn), row_scale))

    def _hold(self, prefix: str, weight: NVFP4Tensor) -> None:
        self.register_buffer(f"{prefix}weight", weight.codes)
        self.register_buffer(f"{prefix}weight_scale", weight.scales)
        self.register_buffer(f"{prefix}weight_scale_2", weight.row_scale.contiguous())

    def _held(self, prefix: str) -> NVFP4Tensor:
        names = (f"{prefix}weight", f"{prefix}weight_scale", f"{prefix}weight_scale_2")
        return NVFP4Tensor(*(self.get_buffer(name) for name in names))

    def _block_scale_names(self) -> list[str]:
        return [name for name in self._buffers if name.endswith("weight_scale")]

    def _row_scale_names(self) -> list[str]:
        return [name for name in self._buffers if name.endswith("weight_scale_2")]

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Self:
        """Moves everything and converts what may be converted: scales are no numbers meanwhile."""
        names = self._block_scale_names() + self._row_scale_names()
        dtypes = {name: self.get_buffer(name).dtype for name in names}
        for name, dtype in dtypes.items():
            self._buffers[name] = self.get_buffer(name).view(_AS_INTEGERS[dtype])
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            for name, dtype in dtypes.items():
                self._buffers[name] = self.get_buffer(name).view(dtype)
        return self

    def __getstate__(self) -> dict[str, Any]:
        """For pickles, in which torch writes fp8 but does not read it: by bytes."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        state["_buffers"] = dict(self._buffers)
        for name in self._block_scale_names():
            state["_buffers"][name] = self.get_buffer(name).view(torch.uint8)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for name in self._block_scale_names():
            self._buffers[name] = self.get_buffer(name).view(torch.float8_e4m3fn)

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Also takes one global scale for all rows, block scales as bytes, and leaves the scales of
        activations out. Any other dtype is an error: torch would convert numbers that are codes.
        """
        for name in self._row_scale_names():
            found = state_dict.get(prefix + name)
            if isinstance(found, torch.Tensor):
                state_dict[prefix + name] = _for_every_row(found, self.get_buffer(name).shape)
        for name in self._block_scale_names():
            found = state_dict.get(prefix + name)
            if isinstance(found, torch.Tensor) and found.dtype == torch.uint8:
                state_dict[prefix + name] = found.view(torch.float8_e4m3fn)
        state_dict.pop(f"{prefix}input_scale", None)
        for name, held in self._buffers.items():
            found = state_dict.get(prefix + name)
            if held is None or "weight" not in name or not isinstance(found, torch.Tensor):
                continue
            if found.dtype != held.dtype:
                error_msgs.append(f"{prefix}{name} must have dtype {held.dtype}, got {found.dtype}")
                del state_dict[prefix + name]
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )


def _for_every_row(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """`scale` of one value per matrix as `shape`; anything else is torch's to judge."""
    matrices = shape[:-1]
    if scale.shape == shape or scale.numel() != matrices.numel():
        return scale
    return scale.reshape(*matrices, 1).expand(shape).contiguous()
