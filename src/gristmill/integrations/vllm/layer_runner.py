"""What runs a layer of vLLM behind its opaque op: the layer's runner, in vLLM's mode."""

from __future__ import annotations

from typing import Any

import torch

from gristmill.integrations.vllm import warm
from gristmill.select.overrides import batch_invariant


class LayerRunner:
    """Calls `runner` after its kernels, and those of all other layers, have been made ready.

    Args:
        runner: an Nvfp4LinearRunner or Nvfp4MoeRunner.
        invariant: whether rows must not depend on the batch. The mode is entered at each call, as
            what calls is a compiled graph, in any thread; that costs about 3 us where no graph is
            captured (on a slow host, 2026-11-16).
    """

    def __init__(self, runner: Any, *, invariant: bool) -> None:
        self.runner = runner
        self.invariant = invariant

    def _run_impl(self, *tensors: torch.Tensor) -> torch.Tensor:
        if warm.WAITING:
            warm.settle(tensors[0])
        result: torch.Tensor
        if self.invariant:
            with batch_invariant():
                result = self.runner._run_impl(*tensors)
        else:
            result = self.runner._run_impl(*tensors)
        return result

    def __repr__(self) -> str:
        mode = "batch-invariant " if self.invariant else ""
        return f"{mode}{self.runner!r}"
