"""What a test asks of vLLM's worker besides counts: `LLM(worker_extension_cls=...)`."""

from __future__ import annotations

from typing import Any

from vllm_counting import Counting

from gristmill.integrations.vllm.weights import HELD


class Nvfp4Worker(Counting):
    """Mixed into vLLM's worker class."""

    model_runner: Any

    def gristmill_kv_scales(self) -> list[tuple[float, float]]:
        """The scales of K and V in each layer of attention."""
        modules = self.model_runner.model.modules()
        layers = [module for module in modules if hasattr(module, "_k_scale")]
        return [(float(layer._k_scale), float(layer._v_scale)) for layer in layers]

    def gristmill_nbytes(self) -> int:
        """What the parameters take of the layers that run on a runner."""
        layers = [module for module in self.model_runner.model.modules() if hasattr(module, HELD)]
        return sum(part.nbytes for layer in layers for part in layer.parameters())
