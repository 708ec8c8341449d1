"""What the numbers were made with: versions, the GPU, the revision of this code.

Also what `gristmill doctor` shows. Everything here is best effort: a version that cannot be found
is None, never an error.
"""

from __future__ import annotations

import datetime
import platform
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import gristmill
from gristmill.bench.peers import Peer
from gristmill.jit.optional import installed_version
from gristmill.select.device import device_of


def package_version(name: str) -> str | None:
    return installed_version(name) or None


def driver_version() -> str | None:
    """The NVIDIA driver's version as the kernel module tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"Kernel Module(?: for \S+)?\s+(\d+(?:\.\d+)+)", text)
    return found.group(1) if found else None


def revision() -> str | None:
    """The git revision of the source tree this package lies in, `+` appended if it was changed."""
    package = Path(__file__).resolve().parent.parent
    root = package.parent.parent
    if not (root / ".git").exists():  # installed, or another project's environment
        return None

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *words], capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+" if git("status", "-s", "src") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def processor() -> str:
    """The CPU's name, for results that were made on one."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found.group(1).strip() if found else platform.machine()


def device_name(device: torch.device) -> str:
    return device_of(device).name if device.type == "cuda" else f"CPU ({processor()})"


def describe(device: torch.device, peers: Iterable[Peer]) -> dict[str, Any]:
    """The part of a result file's meta that is known before anything is measured."""
    cuda = device.type == "cuda"
    return {
        "gpu": device_name(device),
        "device": device.type,
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": package_version("triton"),
        "cuda": torch.version.cuda,
        "driver": driver_version() if cuda else None,
        "gristmill": gristmill.__version__,
        "revision": revision(),
        "peers": {peer.name: peer.version() for peer in peers},
    }
