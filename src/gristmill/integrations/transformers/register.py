"""Makes `from_pretrained` of transformers know NVFP4 checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gristmill.locks import RLock

METHOD = "gristmill_nvfp4"
MODELOPT = "modelopt"
COMPRESSED_TENSORS = "compressed-tensors"

_lock = RLock()
_state = {"registered": False, "compressed_tensors": False}


def register(*, compressed_tensors: bool = False) -> None:
    """Let transformers load NVFP4 checkpoints onto gristmill's layers; again is no harm.

    After that, ``AutoModelForCausalLM.from_pretrained(folder)`` takes checkpoints of ModelOpt, for
    which transformers has nothing of its own. Imports transformers. Passing an `Nvfp4Config` as
    ``quantization_config`` does without.

    Args:
        compressed_tensors: take the NVFP4 checkpoints of compressed-tensors, too, for which
            transformers has a quantizer, that needs another package. Without it, they are taken
            where an `Nvfp4Config` is passed.
    """
    with _lock:
        _state["compressed_tensors"] |= compressed_tensors
        if _state["registered"]:
            return
        from transformers.quantizers import auto

        from gristmill.integrations.transformers.config import Nvfp4Config
        from gristmill.integrations.transformers.quantizer import Nvfp4HfQuantizer

        for name in (METHOD, MODELOPT):
            if name not in auto.AUTO_QUANTIZER_MAPPING:
                auto.register_quantization_config(name)(Nvfp4Config)
                auto.register_quantizer(name)(Nvfp4HfQuantizer)
        _wrap_merge(auto.AutoHfQuantizer, Nvfp4Config)
        _state["registered"] = True


def _wrap_merge(kind: Any, config_class: Any) -> None:
    """Where a checkpoint's config meets the user's, transformers goes by the checkpoint's method
    alone; here the user's choice decides for those that gristmill reads."""
    usual = kind.merge_quantization_configs

    def merge(cls: Any, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        asked = isinstance(quantization_config_from_args, config_class)
        if isinstance(quantization_config, config_class):
            found = quantization_config
        elif isinstance(quantization_config, Mapping) and _is_ours(quantization_config, asked):
            found = config_class.from_dict(dict(quantization_config))
        else:
            return usual(quantization_config, quantization_config_from_args)
        if asked:
            found = found.with_choices_of(quantization_config_from_args)
        elif quantization_config_from_args is not None:
            return usual(found, quantization_config_from_args)  # another class: its error
        return found

    kind.merge_quantization_configs = classmethod(merge)


def _is_ours(config: Mapping[str, Any], asked: bool) -> bool:
    method = config.get("quant_method")
    if method == COMPRESSED_TENSORS:
        return asked or (_state["compressed_tensors"] and _is_nvfp4(config))
    return method in (METHOD, MODELOPT)


def _is_nvfp4(config: Mapping[str, Any]) -> bool:
    from gristmill.checkpoints import QuantizationConfig
    from gristmill.errors import CheckpointError

    try:
        QuantizationConfig.from_dict(config)
    except CheckpointError:
        return False
    return True
