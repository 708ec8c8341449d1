"""Linear layers of vLLM that are loaded more than once: in place, after dummies, anew."""

from __future__ import annotations

import gc

import pytest
import torch
from test_vllm_nvfp4_linear import close, exact, inputs, qkv, qkv_layer
from vllm.config import LoadConfig, VllmConfig
from vllm_layers import load, rank, tensors_of

from gristmill.errors import CheckpointError
from gristmill.integrations.vllm.weights import HELD, HeldRunner
from gristmill.nvfp4 import NVFP4Tensor


@pytest.fixture(autouse=True)
def _no_leftovers() -> None:
    """A runner of an earlier test would keep its name."""
    gc.collect()


def test_weights_are_reloaded_in_place() -> None:
    """As vLLM's reload does it: CUDA graphs keep their addresses, compiled graphs their ids."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    other = {
        name: NVFP4Tensor(w.codes ^ 0x11, w.scales, w.global_scale * 3) for name, w in qkv().items()
    }
    with rank():
        layer = qkv_layer()
        model = torch.nn.Sequential(layer)
        record_metadata_for_reloading(model)
        load(layer, "modelopt", qkv())
        addresses = {name: p.data_ptr() for name, p in layer.named_parameters()}
        held = getattr(layer, HELD)
        initialize_layerwise_reload(model)
        for shard, weight in other.items():
            for name, tensor in tensors_of("modelopt", weight).items():
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, shard)
        finalize_layerwise_reload(model, None)
        assert {name: p.data_ptr() for name, p in layer.named_parameters()} == addresses
        assert getattr(layer, HELD) is held
        x = inputs()
        close(layer(x)[0], exact(list(other.values()), x))


@pytest.mark.parametrize("missing", ["weight", "weight_scale", "weight_scale_2"])
def test_what_a_reload_does_not_bring_is_named(missing: str) -> None:
    """vLLM gives the layer new memory for each reload; whatever was there before is in it."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    with rank():
        layer = qkv_layer()
        model = torch.nn.Sequential(layer)
        record_metadata_for_reloading(model)
        load(layer, "modelopt", qkv())
        initialize_layerwise_reload(model)
        for shard, weight in qkv().items():
            for name, tensor in tensors_of("modelopt", weight).items():
                if name != missing or shard != "k":
                    parameter = getattr(layer, name)
                    parameter.weight_loader(parameter, tensor, shard)
        with pytest.raises(CheckpointError, match=rf"qkv_proj\.{missing}: "):
            finalize_layerwise_reload(model, None)


def test_real_weights_after_dummy_ones() -> None:
    """As a trainer starts an engine: nothing to load at first, weights of its own later."""
    from vllm.model_executor.model_loader.reload import (
        finalize_layerwise_reload,
        initialize_layerwise_reload,
        record_metadata_for_reloading,
    )

    with rank(config=VllmConfig(load_config=LoadConfig(load_format="dummy"))):
        layer = qkv_layer()
        model = torch.nn.Sequential(layer)
        record_metadata_for_reloading(model)
        layer.quant_method.process_weights_after_loading(layer)
        initialize_layerwise_reload(model)
        for shard, weight in qkv().items():
            for name, tensor in tensors_of("modelopt", weight).items():
                parameter = getattr(layer, name)
                parameter.weight_loader(parameter, tensor, shard)
        finalize_layerwise_reload(model, None)
        x = inputs()
        close(layer(x)[0], exact(list(qkv().values()), x))


def test_a_runner_that_does_not_fit_any_more_leaves_its_id_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with rank():
        layer = qkv_layer()
        load(layer, "modelopt", qkv())
        old = getattr(layer, HELD).runner_id
        fresh = qkv_layer()
        for name in ("weight", "weight_scale", "weight_scale_2"):
            layer.register_parameter(name, getattr(fresh, name))
        monkeypatch.setattr(HeldRunner, "fits", lambda self, weights: False)
        load(layer, "modelopt", qkv())
        assert getattr(layer, HELD).runner_id == old
        x = inputs()
        close(layer(x)[0], exact(list(qkv().values()), x))
