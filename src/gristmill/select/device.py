"""What the chooser knows about a GPU (or the CPU), without asking the driver twice.

A `Device` compares by what a choice may depend on, so two equal GPUs of one machine share their
tables, plans' reasons and explanations; the index only says where to launch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch

from gristmill.jit.program import arch_of

_MIB = 1 << 20
_KIB = 1 << 10


@dataclass(frozen=True)
class Device:
    """One accelerator as the chooser sees it.

    `index`, `bandwidth` (of memory, bytes/s) and `flops` (dense bf16 products with fp32 sums, per
    second) take no part in comparisons: the last two only draw the roof that `explain` shows, from
    the data sheet; 0 where they are not known.
    """

    kind: str
    name: str
    arch: str = ""
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    l2_bytes: int = 0
    shared_per_block: int = 0
    index: int = field(default=0, compare=False)
    bandwidth: float = field(default=0.0, compare=False)
    flops: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        if not self.arch:
            return self.name
        return f"{self.name} ({self.arch}, {self.multiprocessors} SMs)"


# What data sheets say of GPUs by words of their names: memory in GB/s, and dense bf16 products with
# fp32 sums in TFLOP/s. The first that fits counts, so a special card stands before its family.
_DATA_SHEETS: tuple[tuple[str, float, float], ...] = (
    ("A100-SXM4-80GB", 2039, 312),
    ("A100 80GB PCIe", 1935, 312),
    ("A100", 1555, 312),
    ("A30", 933, 165),
    ("A40", 696, 149.7),
    ("RTX A6000", 768, 154.8),
    ("RTX 3090", 936, 71),
    ("L40S", 864, 362),
    ("L40", 864, 181),
    ("L4", 300, 121),
    ("RTX 6000 Ada", 960, 364),
    ("RTX 4090", 1008, 165.2),
    ("H100 PCIe", 2039, 756),
    ("H100 NVL", 3938, 835),
    ("H100", 3350, 989),
    ("H200 NVL", 4800, 835),
    ("H200", 4800, 989),
    ("H20", 4000, 148),
    ("GB200", 8000, 2500),
    ("GB300", 8000, 2500),
    ("B200", 8000, 2250),
    ("B300", 8000, 2250),
    ("RTX PRO 6000 Blackwell Server", 1597, 503.8),
    ("RTX PRO 6000", 1792, 503.8),
    ("RTX 5090", 1792, 209.5),
)


def data_sheet(name: str) -> tuple[float, float]:
    """`bandwidth` and `flops` of the GPU of this name, as in `Device`; zeros if it is not known."""
    for words, gigabytes, teraflops in _DATA_SHEETS:
        # Whole words: an "L4" is in "L40S" too, and an "A40" in many a longer number.
        if re.search(rf"(?<![A-Za-z0-9]){re.escape(words)}(?![A-Za-z0-9])", name):
            return gigabytes * 1e9, teraflops * 1e12
    return 0.0, 0.0


def _known(name: str, arch: str, sms: int, l2_bytes: int, shared_per_block: int) -> Device:
    number = int("".join(letter for letter in arch if letter.isdigit()))
    capability, (bandwidth, flops) = divmod(number, 10), data_sheet(name)
    return Device(
        kind="cuda",
        name=name,
        arch=arch,
        capability=capability,
        multiprocessors=sms,
        l2_bytes=l2_bytes,
        shared_per_block=shared_per_block,
        bandwidth=bandwidth,
        flops=flops,
    )


# Devices that need not be present: `explain` and `warmup` can be asked about them anywhere.
# The numbers are the vendor's data sheet values of one common card of each architecture.
KNOWN: dict[str, Device] = {
    device.arch: device
    for device in (
        _known("NVIDIA A100-SXM4-80GB", "sm_80", 108, 40 * _MIB, 163 * _KIB),
        _known("NVIDIA L40S", "sm_89", 142, 96 * _MIB, 99 * _KIB),
        _known("NVIDIA H200", "sm_90a", 132, 60 * _MIB, 227 * _KIB),
        _known("NVIDIA B200", "sm_100a", 148, 126 * _MIB, 227 * _KIB),
        _known("NVIDIA B300", "sm_103a", 148, 126 * _MIB, 227 * _KIB),
        _known("NVIDIA RTX PRO 6000", "sm_120a", 188, 128 * _MIB, 99 * _KIB),
    )
}

_SEEN: dict[torch.device, Device] = {}


def device_of(device: torch.device | str) -> Device:
    """The `Device` behind a torch device; asks the driver once per device and process."""
    if not isinstance(device, torch.device):
        device = torch.device(device)
    found = _SEEN.get(device)
    if found is not None:
        return found
    if device == torch.device("cuda"):
        # The current device, which changes: never remembered under this name.
        return device_of(torch.device("cuda", torch.cuda.current_device()))
    found = _cuda_device(device.index) if device.type == "cuda" else _other_device(device)
    return _SEEN.setdefault(device, found)


def _cuda_device(index: int) -> Device:
    properties = torch.cuda.get_device_properties(index)
    if getattr(torch.version, "hip", None) is not None:
        # A ROCm build calls its devices "cuda"; no CUDA kernel runs there.
        return Device("hip", properties.name, index=index)
    capability = (properties.major, properties.minor)
    bandwidth, flops = data_sheet(properties.name)
    return Device(
        kind="cuda",
        name=properties.name,
        arch=arch_of(capability),
        capability=capability,
        multiprocessors=properties.multi_processor_count,
        l2_bytes=properties.L2_cache_size,
        # Not in torch's type stubs: what a block gets once the kernel has asked for it.
        shared_per_block=getattr(properties, "shared_memory_per_block_optin", 48 * _KIB),
        index=index,
        bandwidth=bandwidth or _bandwidth(properties),
        flops=flops,
    )


def _bandwidth(properties: Any) -> float:
    """That of memory by its clock (in kHz) and its width in bits, two transfers a clock."""
    clock = getattr(properties, "memory_clock_rate", 0)
    return 2e3 * float(clock) * getattr(properties, "memory_bus_width", 0) / 8


def _other_device(device: torch.device) -> Device:
    return Device(kind=device.type, name=device.type, index=device.index or 0)
