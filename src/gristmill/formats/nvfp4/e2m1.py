"""E2M1, the element of NVFP4: one sign bit, two exponent bits, one mantissa bit, two to a byte."""

from __future__ import annotations

import torch

# The magnitude of codes 0 to 7; bit 3 is the sign. There is no infinity and no NaN.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST = MAGNITUDES[-1]

# The places where rounding goes over to the next code: the middles between magnitudes. A value on a
# middle goes to the even code of the two, so every other middle belongs to the code above it.
_MIDDLES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def encode(values: torch.Tensor) -> torch.Tensor:
    """The nearest code of each value, as uint8; ties to even, beyond 6 to 6; the sign is kept.

    NaN has no code: it becomes a zero of either sign.
    """
    size = values.abs()
    codes = torch.zeros(values.shape, dtype=torch.uint8, device=values.device)
    for number, middle in enumerate(_MIDDLES):
        codes += size >= middle if number % 2 else size > middle
    return codes + torch.signbit(values).to(torch.uint8) * 8


def decode(codes: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The value of each code (its low four bits), exact in any float dtype."""
    exponent, mantissa = (codes >> 1) & 3, (codes & 1).to(dtype)
    # 0 and 0.5 have exponent 0; above, one and a half times that for the mantissa bit.
    power = (1 << exponent).to(dtype) / 2
    size = torch.where(exponent == 0, mantissa / 2, power + mantissa * power / 2)
    return torch.where((codes & 8) != 0, -size, size)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes ``(..., K)`` as bytes ``(..., K / 2)``: even columns in the low half."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """Bytes ``(..., K / 2)`` as codes ``(..., K)``, one to a byte."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_packed(packed: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The values ``(..., K)`` of bytes ``(..., K / 2)``.

    One lookup per byte: the table holds both values of a byte side by side as one integer.
    """
    pairs = _pairs(packed.device, dtype)
    # Not pairs[...]: that copies the index to 64 bits first, and takes four times as long on a CPU.
    values = pairs.index_select(0, packed.int().flatten()).view(dtype)
    return values.view(*packed.shape[:-1], packed.shape[-1] * 2)


_WHOLE = {2: torch.int32, 4: torch.int64, 8: torch.complex128}
_tables: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}


def _pairs(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """256 entries of two values each, viewed as one element; kept per device and dtype."""
    if not _can_keep(device):
        return _made(device, dtype)
    table = _tables.get((device, dtype))
    if table is None:
        with torch.inference_mode(False), torch.no_grad():
            # By way of the CPU: the copy is over before another stream can see the table.
            table = _tables[device, dtype] = _made(torch.device("cpu"), dtype).to(device)
    return table


def _made(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    every = torch.arange(256, dtype=torch.int16, device=device).to(torch.uint8)
    return decode(unpack(every[:, None]), dtype).view(_WHOLE[dtype.itemsize]).flatten()


def _can_keep(device: torch.device) -> bool:
    """Whether tensors are what they seem, and stay.

    Tracers, transforms and modes hand out tensors that end with them, and take none that was there
    before; a captured graph owns the memory of what it makes.
    """
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack():
        return False
    if torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if device.type == "meta":
        return False
    return device.type != "cuda" or not torch.cuda.is_current_stream_capturing()
