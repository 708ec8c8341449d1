"""Compile a model of two NVFP4 layers as vLLM does on a GPU, and say what it took from its cache.

`python vllm_compile_run.py first|second`: "second" compiles the second of two equal models. An LLM
on a CPU uses a simpler kind of compilation, which keeps nothing that another process could load.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from vllm.compilation.counter import compilation_counter
from vllm.compilation.decorators import support_torch_compile
from vllm.config import CompilationMode, VllmConfig
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm_counting import CALLS
from vllm_layers import load, quantization, rank

from gristmill.nvfp4 import quantize

WIDTH, LAYERS = 64, 2


@support_torch_compile(dynamic_arg_dims={"x": 0})
class Model(torch.nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            ReplicatedLinear(
                WIDTH,
                WIDTH,
                bias=False,
                quant_config=quantization("modelopt"),
                prefix=f"model.layers.{index}.proj",
                params_dtype=torch.float32,
            )
            for index in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + torch.relu(layer(x)[0])
        return x


def model_of(config: VllmConfig, seed: int) -> Any:
    model = Model(vllm_config=config)
    generator = torch.Generator().manual_seed(seed)
    for layer in model.layers:
        load(layer, "modelopt", {None: quantize(torch.randn(WIDTH, WIDTH, generator=generator))})
    return model


def compiled_config() -> VllmConfig:
    config = VllmConfig()
    config.compilation_config.mode = CompilationMode.VLLM_COMPILE
    config.compilation_config.backend = "inductor"
    config.compilation_config.compile_sizes = []
    return config


@torch.no_grad()
def main(which: str) -> dict[str, Any]:
    others = []
    if which == "second":
        with rank(config=compiled_config()) as config:
            others.append(model_of(config, seed=1))
    with rank(config=compiled_config()) as config:
        model = model_of(config, seed=0)
        x = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(2))
        with set_forward_context(None, config):
            results = [model(x), model(torch.cat([x, x]))]
        calls = CALLS["nvfp4_linear"]
        want = x
        for layer in model.layers:
            want = want + torch.relu(layer(want)[0])
    torch.testing.assert_close(results[0], want)
    torch.testing.assert_close(results[1], torch.cat([want, want]))
    del others
    return {
        "compiled": compilation_counter.num_inductor_compiles,
        "loaded": compilation_counter.num_aot_artifacts_loaded,
        "calls": calls,
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(sys.argv[1])) + "\n")
