"""NVFP4 experts of vLLM in the layouts of GPUs, here on a CPU that passes for one."""

from __future__ import annotations

import gc

import pytest
import torch
from test_vllm_nvfp4_moe import EXPERTS, ROWS, SIZES, Matrices, close, exact, routed, run
from vllm_layers import PRODUCERS, experts, load_experts, quantization, rank

from gristmill.formats.nvfp4 import tensor as formats
from gristmill.integrations.vllm.weights import HELD
from gristmill.nvfp4 import quantize

# Of w13 and w2.
LAYOUTS = {"sm_90a": ("pairs", "fragments"), "sm_100a": ("tiles", "tiles"), "sm_80": ("rows",) * 2}
HIDDEN, PADDED = SIZES["hidden"], SIZES["inner"]
WHOLE = 128  # an inner size in whole pieces of 64 rows and columns


@pytest.fixture(autouse=True, params=LAYOUTS)
def layouts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    gc.collect()  # a runner of an earlier test would keep its name
    monkeypatch.setattr(
        formats, "arch_of", lambda device: request.param if device.type == "cpu" else "cpu"
    )
    return LAYOUTS[request.param]


def matrices(inner: int = WHOLE, seed: int = 0) -> Matrices:
    generator = torch.Generator().manual_seed(seed)
    shapes = ((inner, HIDDEN, 0.2), (inner, HIDDEN, 0.02), (HIDDEN, inner, 0.1))
    gates, ups, downs = (
        [
            quantize(torch.randn(rows, columns, generator=generator) * size * (1 + expert))
            for expert in range(EXPERTS)
        ]
        for rows, columns, size in shapes
    )
    return gates, ups, downs


@pytest.mark.parametrize("producer", PRODUCERS)
def test_experts_are_packed_in_the_memory_they_were_loaded_into(
    producer: str, layouts: tuple[str, str]
) -> None:
    given, call = matrices(), routed()
    codes = "weight" if producer == "modelopt" else "weight_packed"
    with rank():
        layer = experts(quantization(producer), **{**SIZES, "inner": WHOLE})
        names = (f"w13_{codes}", "w13_weight_scale", f"w2_{codes}")
        before = {name: getattr(layer, name).data_ptr() for name in names}
        load_experts(layer, producer, *given)
        close(run(layer, *call), exact(given, *call))
    runner = getattr(layer, HELD).runner
    assert (runner.w13.layout, runner.w2.layout) == layouts
    assert {name: getattr(layer, name).data_ptr() for name in before} == before
    # The layer's parameters are the runner's tensors: there are no others.
    assert runner.w13.codes is getattr(layer, f"w13_{codes}")
    assert runner.w2.row_scale is layer.w2_weight_row_scale
    assert sum(p.nbytes for p in layer.parameters()) == runner.w13.nbytes + runner.w2.nbytes


def test_sizes_that_must_be_padded_on_two_ranks() -> None:
    given, call = matrices(PADDED), routed()
    total = torch.zeros(ROWS, HIDDEN)
    for index in range(2):
        with rank(index, of=2):
            layer = experts(quantization("modelopt"), tp=(index, 2), **SIZES)
            load_experts(layer, "modelopt", *given)
            total += run(layer, *call)
    close(total, exact(given, *call))


def test_weights_are_reloaded_in_place(layouts: tuple[str, str]) -> None:
    """Weights come in rows, and go into the packed tensors whose addresses captured graphs have."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    first, second, call = matrices(), matrices(seed=1), routed()
    with rank():
        layer = experts(quantization("modelopt"), **{**SIZES, "inner": WHOLE})
        model = torch.nn.Sequential(layer)
        record_metadata_for_reloading(model)
        load_experts(layer, "modelopt", *first)
        addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
        held = getattr(layer, HELD)
        initialize_layerwise_reload(model)
        load_experts(layer, "modelopt", *second, process=False)
        finalize_layerwise_reload(model, None)
        assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses
        assert getattr(layer, HELD) is held
        assert held.runner.w13.layout == layouts[0]
        close(run(layer, *call), exact(second, *call))
