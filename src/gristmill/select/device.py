"""What the chooser knows about a GPU (or the CPU), without asking the driver twice.

A `Device` compares by what a choice may depend on, so two equal GPUs of one machine share their
tables, plans' reasons and explanations; the index only says where to launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from gristmill.jit.program import arch_of

_MIB = 1 << 20
_KIB = 1 << 10


@dataclass(frozen=True)
class Device:
    """One accelerator as the chooser sees it; `index` takes no part in comparisons."""

    kind: str
    name: str
    arch: str = ""
    capability: tuple[int, int] = (0, 0)
    multiprocessors: int = 0
    l2_bytes: int = 0
    shared_per_block: int = 0
    index: int = field(default=0, compare=False)

    def __str__(self) -> str:
        if not self.arch:
            return self.name
        return f"{self.name} ({self.arch}, {self.multiprocessors} SMs)"


# Devices that need not be present: `explain` and `warmup` can be asked about them anywhere.
# The numbers are the vendor's data sheet values of one common card of each architecture.
KNOWN: dict[str, Device] = {
    device.arch: device
    for device in (
        Device("cuda", "NVIDIA A100-SXM4-80GB", "sm_80", (8, 0), 108, 40 * _MIB, 163 * _KIB),
        Device("cuda", "NVIDIA L40S", "sm_89", (8, 9), 142, 96 * _MIB, 99 * _KIB),
        Device("cuda", "NVIDIA H200", "sm_90a", (9, 0), 132, 60 * _MIB, 227 * _KIB),
        Device("cuda", "NVIDIA B200", "sm_100a", (10, 0), 148, 126 * _MIB, 227 * _KIB),
        Device("cuda", "NVIDIA B300", "sm_103a", (10, 3), 148, 126 * _MIB, 227 * _KIB),
        Device("cuda", "NVIDIA RTX PRO 6000", "sm_120a", (12, 0), 188, 128 * _MIB, 99 * _KIB),
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
    )


def _other_device(device: torch.device) -> Device:
    return Device(kind=device.type, name=device.type, index=device.index or 0)
