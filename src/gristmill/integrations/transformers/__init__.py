"""gristmill in Hugging Face models: `patch` and `unpatch`, and a quantizer for NVFP4 checkpoints.

Importing this package imports nothing of transformers. `patch` itself needs none of it, either: its
norms and linears may stand in any `torch.nn.Module`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from gristmill.integrations.transformers.patch import patch, unpatch
from gristmill.integrations.transformers.register import register
from gristmill.integrations.transformers.report import Left, PatchReport, Replaced

if TYPE_CHECKING:
    from gristmill.integrations.transformers.config import Nvfp4Config
    from gristmill.integrations.transformers.nvfp4 import quantize_modules

__all__ = [
    "Left",
    "Nvfp4Config",
    "PatchReport",
    "Replaced",
    "patch",
    "quantize_modules",
    "register",
    "unpatch",
]

# Where these are: imported when they are asked for, the first with transformers.
_LATER = {"Nvfp4Config": "config", "quantize_modules": "nvfp4"}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LATER[name]}"), name)
