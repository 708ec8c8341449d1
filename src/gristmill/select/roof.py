"""The roof: the least time a problem can take on a device, by the device's data sheet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from gristmill.select.device import Device, data_sheet


class Work(Protocol):
    """What a call cannot do without: bytes to and from memory, floating-point operations."""

    @property
    def bytes(self) -> int: ...

    @property
    def operations(self) -> int: ...


@dataclass(frozen=True)
class Roof:
    """`bytes` at `bandwidth` (bytes/s) and `operations` at `flops` (per second): the longer counts.

    `flops` are those of bf16 on tensor cores, the most there is: a roof for every other precision,
    if a high one. 0 where it is not known. `origin` says where the rates come from.
    """

    bytes: int
    operations: int
    bandwidth: float
    flops: float
    origin: str

    @property
    def memory_us(self) -> float:
        return self.bytes / self.bandwidth * 1e6

    @property
    def arithmetic_us(self) -> float:
        return self.operations / self.flops * 1e6 if self.flops else 0.0

    @property
    def us(self) -> float:
        return max(self.memory_us, self.arithmetic_us)

    def share(self, us: float) -> float:
        """The part of the roof's speed that a call of `us` microseconds reaches."""
        return self.us / us if us > 0 else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "us": self.us,
            "bytes": self.bytes,
            "operations": self.operations,
            "bandwidth": self.bandwidth,
            "flops": self.flops,
            "memory_us": self.memory_us,
            "arithmetic_us": self.arithmetic_us,
            "origin": self.origin,
        }

    def __str__(self) -> str:
        moved = f"{_scaled(self.bytes, 'B')} at {_scaled(self.bandwidth, 'B/s')}"
        if self.arithmetic_us <= self.memory_us:
            return f"{moved} = {_us(self.us)} ({self.origin})"
        done = f"{_scaled(self.operations, 'FLOP')} at {_scaled(self.flops, 'FLOP/s')}"
        return (
            f"{done} = {_us(self.us)} ({self.origin}, bf16 on tensor cores); "
            f"{moved} alone are {_us(self.memory_us)}"
        )


def roof_of(device: Device, work: Work | None) -> Roof | None:
    """The roof of `work` on `device`; None where either is not known."""
    if work is None or work.bytes <= 0 or not device.bandwidth:
        return None
    origin = "data sheet" if data_sheet(device.name)[0] else "by its memory clock"
    return Roof(work.bytes, work.operations, device.bandwidth, device.flops, origin)


def _us(us: float) -> str:
    return f"{us:.1f} us" if us >= 10 else f"{us:.2f} us"


def _scaled(value: float, unit: str) -> str:
    """Three digits and a prefix: 268435456, "B" -> "268 MB"."""
    for prefix in ("", "k", "M", "G", "T"):
        if value < 999.5:
            return f"{value:.3g} {prefix}{unit}"
        value /= 1000
    return f"{value:.3g} P{unit}"
