"""Every name of vLLM that the NVFP4 layers touch, in one place.

The classes here are what those derive from, so they are imported with this module; a vLLM without
one of them is declined, with a line that says which.
"""

from __future__ import annotations

import logging
from typing import Any

from gristmill.integrations.vllm.adapter import FUSED_ADD_RMS_NORM, RMS_NORM, declined
from gristmill.integrations.vllm.warm import Serving
from gristmill.log import log_once, logger

try:
    from vllm.config import get_current_vllm_config_or_none
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.fused_moe import (
        FusedMoEMethodBase,
        FusedMoeWeightScaleSupported,
        RoutedExperts,
    )
    from vllm.model_executor.layers.linear import (
        LinearBase,
        LinearMethodBase,
        UnquantizedLinearMethod,
        register_weight_loader_v2_supported_method,
    )
    from vllm.model_executor.parameter import ModelWeightParameter, PerTensorScaleParameter
except ImportError as error:
    raise declined(f"lacks a name that the NVFP4 layers need ({error})") from error

__all__ = [
    "Attention",
    "FusedMoEMethodBase",
    "FusedMoeWeightScaleSupported",
    "LinearBase",
    "LinearMethodBase",
    "MLAAttention",
    "ModelWeightParameter",
    "PerTensorScaleParameter",
    "RoutedExperts",
    "UnquantizedLinearMethod",
    "add_to_compile_hash",
    "has_dummy_weights",
    "kv_cache_method",
    "register_weight_loader_v2_supported_method",
    "serving",
]


def kv_cache_method(producer: str, config: Any) -> Any:
    """What vLLM itself uses for the scales of the KV cache in checkpoints of this producer."""
    if producer == "modelopt":
        from vllm.model_executor.layers.quantization.modelopt import ModelOptKVCacheMethod

        return ModelOptKVCacheMethod(config)
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsKVCacheMethod,
    )

    return CompressedTensorsKVCacheMethod(config)


def has_dummy_weights() -> bool:
    """Whether the model being made gets no weights from a checkpoint (`--load-format dummy`)."""
    config = get_current_vllm_config_or_none()
    return config is not None and str(config.load_config.load_format) == "dummy"


def add_to_compile_hash(name: str, value: str) -> bool:
    """Make vLLM's cache of compiled graphs depend on `value`, for the model being loaded.

    vLLM hashes its `additional_config`, a dict that is there for what it does not know itself.
    Returns whether the hash depends on `value` now.
    """
    config = get_current_vllm_config_or_none()
    if config is None or not isinstance(config.additional_config, dict):
        return False
    config.additional_config.setdefault("gristmill", {})[name] = value
    return True


def serving(provider: str) -> Serving:
    """What the calls to come will be, for the model being loaded; `provider` is that of our norms.

    It is for what is done ahead of time alone, so that a vLLM which has some of it under other
    names is no reason to decline anything.
    """
    config = get_current_vllm_config_or_none()
    if config is None:
        return Serving()
    try:
        return _serving(config, provider)
    except Exception as error:
        logger.debug("vLLM's config is read in another way", exc_info=True)
        told = f"vLLM: kernels are compiled for usual numbers of tokens: {error!r}"
        log_once(logging.INFO, "vllm serving", told)  # and not for each layer
        return Serving()


def _serving(config: Any, provider: str) -> Serving:
    parallel, model = config.parallel_config, config.model_config
    # Experts get the tokens of all data-parallel ranks.
    most = config.scheduler_config.max_num_batched_tokens * parallel.data_parallel_size
    captured = tuple(config.compilation_config.cudagraph_capture_sizes or ())
    order = config.kernel_config.ir_op_priority
    first = {(getattr(order, name) or [None])[0] for name in (RMS_NORM, FUSED_ADD_RMS_NORM)}
    hidden = heads = None
    if model is not None and provider in first:
        hidden = model.get_hidden_size()
        queries, keys = model.get_num_attention_heads(parallel), model.get_num_kv_heads(parallel)
        heads = (queries, keys, model.get_head_size())
    ranks = parallel.tensor_parallel_size * parallel.pipeline_parallel_size
    return Serving(captured, max(most, *captured, 1), hidden, heads, ranks)
