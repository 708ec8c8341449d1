"""NVFP4 linear layers of vLLM in the layouts of GPUs, here on a CPU that passes for one."""

from __future__ import annotations

import copy
import gc
from typing import Any

import pytest
import torch
from test_vllm_nvfp4_linear import (
    HIDDEN,
    close,
    exact,
    inputs,
    matrix,
    qkv,
    qkv_layer,
    saved_and_loaded,
)
from vllm.config import LoadConfig, VllmConfig
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm_layers import PRODUCERS, load, quantization, rank, tensors_of

from gristmill.formats.nvfp4 import tensor as formats
from gristmill.integrations.vllm.weights import HELD
from gristmill.nvfp4 import NVFP4Tensor

LAYOUTS = {"sm_90a": "fragments", "sm_100a": "tiles"}


@pytest.fixture(autouse=True, params=LAYOUTS)
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    gc.collect()  # a runner of an earlier test would keep its name
    monkeypatch.setattr(
        formats, "arch_of", lambda device: request.param if device.type == "cpu" else "cpu"
    )
    return LAYOUTS[request.param]


def replicated(rows: int, columns: int) -> Any:
    return ReplicatedLinear(
        columns,
        rows,
        bias=False,
        quant_config=quantization("modelopt"),
        prefix="proj",
        params_dtype=torch.float32,
    )


@pytest.mark.parametrize("producer", PRODUCERS)
def test_a_layer_is_packed_in_the_memory_it_was_loaded_into(producer: str, layout: str) -> None:
    parts, x = qkv(), inputs()
    with rank():
        layer = qkv_layer(producer)
        codes = "weight" if producer == "modelopt" else "weight_packed"
        before = {name: getattr(layer, name).data_ptr() for name in (codes, "weight_scale")}
        load(layer, producer, parts)
        y, _ = layer(x)
    close(y, exact(list(parts.values()), x))
    held = getattr(layer, HELD).runner.weight
    assert held.layout == layout
    assert {name: getattr(layer, name).data_ptr() for name in before} == before
    # The layer's parameters are the runner's tensors: there are no others.
    assert held.codes is getattr(layer, codes)
    assert held.scales is layer.weight_scale
    assert held.row_scale is layer.weight_row_scale
    loaded = sum(part.codes.nbytes + part.scales.nbytes for part in parts.values())
    assert sum(p.nbytes for p in layer.parameters()) == loaded + held.row_scale.nbytes
    if layout == "fragments":
        assert layer.weight_scale.dtype == torch.uint8


@pytest.mark.parametrize(("rows", "columns"), [(40, 48), (64, 80), (96, 64)])
def test_odd_sizes_are_padded(rows: int, columns: int) -> None:
    weight, x = matrix(rows, columns, 0.1), inputs(columns)
    with rank():
        layer = replicated(rows, columns)
        load(layer, "modelopt", {None: weight})
        y, _ = layer(x)
    close(y, exact([weight], x))


def test_dummy_weights_run_and_real_ones_follow_in_place(layout: str) -> None:
    """Weights come in rows, and go into the packed tensors whose addresses captured graphs have."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    other = {
        name: NVFP4Tensor(w.codes ^ 0x11, w.scales, w.global_scale * 3) for name, w in qkv().items()
    }
    x = inputs()
    with rank(config=VllmConfig(load_config=LoadConfig(load_format="dummy"))):
        layer = qkv_layer()
        model = torch.nn.Sequential(layer)
        record_metadata_for_reloading(model)
        layer.quant_method.process_weights_after_loading(layer)
        assert bool(layer(x)[0].isfinite().all())
        addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
        held = getattr(layer, HELD)
        for parts in (qkv(), other):
            initialize_layerwise_reload(model)
            for shard, weight in parts.items():
                for name, tensor in tensors_of("modelopt", weight).items():
                    parameter = getattr(layer, name)
                    parameter.weight_loader(parameter, tensor, shard)
            finalize_layerwise_reload(model, None)
            assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses
            assert getattr(layer, HELD) is held
            assert held.runner.weight.layout == layout
            close(layer(x)[0], exact(list(parts.values()), x))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, saved_and_loaded])
def test_a_copy_has_its_own_weights_and_each_of_them_once(duplicate: Any, layout: str) -> None:
    weight, x = matrix(48, HIDDEN, 0.1), inputs()
    with rank():
        layer = torch.nn.Module()
        layer.logical_widths = [48]
        other = ReplicatedLinear(16, 16, bias=False, prefix="other", params_dtype=torch.float32)
        method = quantization("modelopt").get_quant_method(other, "proj")
        method.create_weights(layer, HIDDEN, [48], HIDDEN, 48, torch.float32)
        for name, tensor in tensors_of("modelopt", weight).items():
            getattr(layer, name).data.copy_(tensor)
        method.process_weights_after_loading(layer)
        twin = duplicate(layer)
        held = getattr(twin, HELD).runner.weight
        assert held.layout == layout
        assert held.codes is twin.weight
        assert held.scales is twin.weight_scale
        assert held.row_scale is twin.weight_row_scale
        twin.weight_row_scale.data.mul_(2)
        close(method.apply(twin, x), 2 * exact([weight], x))
        close(method.apply(layer, x), exact([weight], x))


def test_what_moves_the_layer_moves_its_runner(layout: str) -> None:
    """As `layer.to` and offloading do: by the data of parameters."""
    weight, x = matrix(64, HIDDEN, 0.1), inputs()
    with rank():
        layer = replicated(64, HIDDEN)
        load(layer, "modelopt", {None: weight})
        for parameter in layer.parameters():
            parameter.data = parameter.data.clone()
        y, _ = layer(x)
        assert getattr(layer, HELD).runner.weight.layout == layout
        close(y, exact([weight], x))
        layer.weight_row_scale.data = torch.zeros_like(layer.weight_row_scale)
        assert not layer(x)[0].any()
