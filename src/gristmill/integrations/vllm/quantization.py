"""The quantization method `gristmill_nvfp4` of vLLM, and which checkpoints it takes.

It takes checkpoints that name it themselves, and those of ModelOpt and compressed-tensors when the
user asks for it, by `quantization="gristmill_nvfp4"` or by "nvfp4" in GRISTMILL_VLLM. What it has
no layers for (FP8, mixed precision, other formats) it leaves to vLLM.

The class is importable on its own: vLLM pickles it into processes where no plugin has run yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch

from gristmill.checkpoints import QuantizationConfig as CheckpointConfig
from gristmill.errors import CheckpointError
from gristmill.integrations.vllm import adapter
from gristmill.integrations.vllm.switch import is_switched_on, tell_once

try:
    from vllm.model_executor.layers.quantization import (
        QUANTIZATION_METHODS,
        register_quantization_config,
    )
    from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
except ImportError as error:
    raise adapter.declined(f"lacks what a quantization method needs ({error})") from error

NAME = "gristmill_nvfp4"
MIN_CAPABILITY = 80
# What ModelOpt leaves dense without saying so; vLLM's own method knows these, too.
_NEVER_QUANTISED = {
    "modelopt": ("mtp.fc", "vision_tower", "vision_model", "vit_large_projector"),
    "compressed-tensors": (),
}
# Models whose experts have no method here, by vLLM's reading of their config: known before a model
# is made, so that the switch leaves them alone.
_OTHER_EXPERTS = {
    "gpt_oss": "its experts have biases, and gate and up in alternate rows",
    "nemotron_h": "its experts have no gate",
}


def register_nvfp4_methods() -> None:
    """Make `gristmill_nvfp4` known to vLLM; again is no harm."""
    if NAME not in QUANTIZATION_METHODS:
        register_quantization_config(NAME)(GristmillNvfp4Config)


class GristmillNvfp4Config(QuantizationConfig):  # type: ignore[misc]
    """NVFP4 weights with 16-bit or fp32 activations.

    Checkpoints made for NVFP4 activations too are run with theirs in full.

    Args:
        checkpoint: what is quantised, and by whom.
        source: the dict in the model's config.json or hf_quant_config.json.
    """

    def __init__(self, checkpoint: CheckpointConfig, source: Mapping[str, Any]) -> None:
        super().__init__()
        self.checkpoint = checkpoint
        # Attention and compressed-tensors' KV-cache method look for these. ModelOpt's scheme goes
        # another way: vLLM reads it from the model's config.
        ours = checkpoint.producer == "compressed-tensors"
        self.kv_cache_scheme = source.get("kv_cache_scheme") if ours else None
        self.total_num_heads = source.get("total_num_heads")
        self.total_num_kv_heads = source.get("total_num_kv_heads")

    def get_name(self) -> str:
        return NAME

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        return MIN_CAPABILITY

    @staticmethod
    def get_config_filenames() -> list[str]:
        return ["hf_quant_config.json"]

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> GristmillNvfp4Config:
        return cls(_parsed(config), config)

    @classmethod
    def override_quantization_method(
        cls, hf_quant_cfg: dict[str, Any], user_quant: str | None, hf_config: Any = None
    ) -> str | None:
        asked = user_quant == NAME or (user_quant is None and is_switched_on("nvfp4"))
        if not asked or hf_quant_cfg.get("quant_method") == NAME:
            return None
        try:
            why_not = reason_to_leave(hf_quant_cfg, getattr(hf_config, "model_type", None))
        except Exception as error:  # vLLM would stop
            why_not = f"{type(error).__name__}: {error}"
        if why_not is None:
            return NAME
        tell_once(f"takeover {why_not}", f"vLLM NVFP4: left to vLLM: {why_not}")
        return None

    def apply_vllm_mapper(self, hf_to_vllm_mapper: Any) -> None:
        def mapped(names: tuple[str, ...]) -> tuple[str, ...]:
            result: list[str] = []
            for name in names:
                # The mapper knows names of modules: neither patterns nor names of classes.
                if "." not in name or name.startswith("re:"):
                    result.append(name)
                    continue
                # It has prefixes that end in a dot: "model.visual*" is no such name, what lies
                # below "model.visual" is.
                below = [f"{name[:-1]}.*"] if name.endswith("*") and name[-2] != "." else []
                for one in (name, *below):
                    result += hf_to_vllm_mapper.apply_list([one])
            return tuple(dict.fromkeys(result))

        checkpoint = self.checkpoint
        self.checkpoint = replace(
            checkpoint, ignore=mapped(checkpoint.ignore), targets=mapped(checkpoint.targets)
        )

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        from gristmill.integrations.vllm import compat
        from gristmill.integrations.vllm.linear_method import GristmillNvfp4LinearMethod
        from gristmill.integrations.vllm.moe_method import GristmillNvfp4MoeMethod

        producer = self.checkpoint.producer
        if isinstance(layer, compat.Attention):
            return compat.kv_cache_method(producer, self)
        if isinstance(layer, compat.MLAAttention):  # vLLM reads no scales for it but ModelOpt's
            return compat.kv_cache_method(producer, self) if producer == "modelopt" else None
        if isinstance(layer, compat.LinearBase):
            if self._is_ignored(prefix):
                return compat.UnquantizedLinearMethod()
            return GristmillNvfp4LinearMethod(producer, prefix)
        if isinstance(layer, compat.RoutedExperts):
            if self._are_experts_ignored(layer, prefix):
                return None  # vLLM then takes its own unquantised method
            return GristmillNvfp4MoeMethod(producer, prefix, layer.moe_config)
        return None  # embeddings and the head

    def _is_ignored(self, prefix: str, parts: Mapping[str, list[str]] | None = None) -> bool:
        if any(f".{name}." in f".{prefix}." for name in _NEVER_QUANTISED[self.checkpoint.producer]):
            return True
        return self.checkpoint.is_ignored(prefix, {**self.packed_modules_mapping, **(parts or {})})

    def _are_experts_ignored(self, layer: Any, prefix: str) -> bool:
        """Whether the layer is, or its first expert's matrices are, by the checkpoint's names."""
        last = prefix.rpartition(".")[2]
        names = (
            getattr(layer, f"ckpt_{which}_proj_name", f"{which}_proj")
            for which in ("gate", "up", "down")
        )
        return self._is_ignored(prefix, {last: [f"{last}.0.{name}" for name in names]})


def reason_to_leave(hf_quant_cfg: Mapping[str, Any], model_type: str | None) -> str | None:
    """Why a checkpoint is left to vLLM, or None if it is one of ours to take."""
    if model_type in _OTHER_EXPERTS:
        return f"{model_type}: {_OTHER_EXPERTS[model_type]}"
    try:
        _parsed(hf_quant_cfg)
        # What the layers need of vLLM. Half a second, and early for vLLM: not before it is asked.
        import_module("gristmill.integrations.vllm.compat")
        adapter.is_batch_invariant()  # so do they need to know that
    except (CheckpointError, adapter.Declined) as error:
        return str(error)
    return adapter.why_not_here(MIN_CAPABILITY)


def _parsed(config: Mapping[str, Any]) -> CheckpointConfig:
    """The config; one that names gristmill has the keys of either producer."""
    given = dict(config)
    if given.get("quant_method") == NAME:
        compressed = "config_groups" in given and "quant_algo" not in given
        given["quant_method"] = "compressed-tensors" if compressed else "modelopt"
        if not compressed:
            given.setdefault("quant_algo", "NVFP4")
    return CheckpointConfig.from_dict(given)
