"""The quantizer that `from_pretrained` and `save_pretrained` of transformers call."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import WeightRenaming
from transformers.quantizers.base import HfQuantizer

from gristmill.checkpoints import QuantizationConfig
from gristmill.checkpoints.checks import printable
from gristmill.checkpoints.files import tensor_names
from gristmill.checkpoints.names import MODELOPT
from gristmill.errors import ArgumentError, CheckpointError
from gristmill.integrations.transformers import adapters
from gristmill.integrations.transformers.config import Nvfp4Config
from gristmill.integrations.transformers.experts import Layout, are_experts, layout_of
from gristmill.integrations.transformers.linears import is_linear, reason_to_leave_linear
from gristmill.integrations.transformers.loading import (
    UNUSED,
    LoadNvfp4,
    QuantizeOnLoad,
    Targets,
    marked,
)
from gristmill.integrations.transformers.nvfp4 import candidates
from gristmill.integrations.transformers.saving import keep_names, left_dense, state_dict_of

_BYTES = 0.5 + 1 / 16  # of an element, with its share of a block's scale
# What other formats have beside a weight, or in its place; NVFP4 has a global scale as well.
_OTHER_PARTS = (MODELOPT.scales, "weight_scale_inv", "weight_packed", "qweight")


class Nvfp4HfQuantizer(HfQuantizer):  # type: ignore[misc]
    """Loads dense and NVFP4 checkpoints onto gristmill's layers, and saves ModelOpt's."""

    requires_calibration = False
    quantization_config: Nvfp4Config

    def __init__(self, quantization_config: Nvfp4Config, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self._targets: Targets | None = None
        self._files: dict[str, Path] | None = None  # of the checkpoint's tensors, by name
        self._dtypes: dict[str, torch.dtype] = {}

    def validate_environment(self, *args: Any, **kwargs: Any) -> None:
        places = kwargs.get("device_map")
        if isinstance(places, dict) and "disk" in {str(place) for place in places.values()}:
            raise ArgumentError(
                "from_pretrained: device_map puts modules on disk, from where NVFP4 layers cannot "
                "run; use devices and 'cpu'"
            )

    # Before the weights.

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        files = kwargs.get("checkpoint_files")
        self._files = _files_of(files)
        self._model = model
        if self._files is not None and marked(self._files):
            # Also where the config says nothing: ModelOpt may have said it in a file of its own.
            self.pre_quantized = True
        if self.quantization_config.checkpoint is None and files:
            self.quantization_config.checkpoint = _told_beside(files)
        if not self.pre_quantized:
            _refuse_other_formats(self._files or {}, lambda owner: True)
            self._targets = Targets(model, self._chosen(model))
            return
        patterns = model._keys_to_ignore_on_load_unexpected or set()
        model._keys_to_ignore_on_load_unexpected = {*patterns, *UNUSED}
        self._dtypes = {name: weight.dtype for name, weight in model.named_parameters()}

    def _chosen(self, model: Any) -> dict[str, Layout | None]:
        """What of a dense checkpoint is to be quantised."""
        config = self.quantization_config
        found, _ = candidates(model, config.modules or True, meta=True)
        return {
            one.name: one.layout
            for one in found
            if not any(_speaks_for(pattern, one.name) for pattern in config.ignore)
        }

    def update_weight_conversions(self, weight_conversions: list[Any], model: Any = None) -> Any:
        """transformers before 5.20 or so gives no model."""
        if not self.pre_quantized:
            return weight_conversions
        model = self._model if model is None else model
        renamings = [one for one in weight_conversions if isinstance(one, WeightRenaming)]
        modules = self._stored(model, renamings)
        self._targets = Targets(model, modules, self._files)
        return [LoadNvfp4(self._targets, self.quantization_config), *weight_conversions]

    def _stored(self, model: Any, renamings: list[Any]) -> dict[str, Layout | None]:
        """The modules that a checkpoint has in NVFP4: by its tensors, else by its config."""
        described = Targets(model, dict.fromkeys(dict(model.named_modules())))
        if self._files is None:
            checkpoint = self.quantization_config.checkpoint
            names = {
                name
                for name, module in model.named_modules()
                if (is_linear(module) or are_experts(module))
                and module is not model.get_output_embeddings()
                and not (checkpoint is not None and checkpoint.is_ignored(name))
            }
        else:
            trial = copy.deepcopy(renamings)  # they note that they were used

            def named(owner: str) -> str | None:
                for one in trial:
                    owner = one.rename_source_key(f"{owner}.weight")[0].removesuffix(".weight")
                if (found := described.named(owner)) is not None:
                    return found
                experts = described.named(_without_expert(owner))
                # In a list of layers it is of a layer that the model has not, such as one for MTP.
                if experts is None or isinstance(model.get_submodule(experts), torch.nn.ModuleList):
                    return None
                return experts

            _refuse_other_formats(self._files, lambda owner: named(owner) is not None)
            names = {name for owner in marked(self._files) if (name := named(owner)) is not None}
        return {name: self._loadable(model.get_submodule(name), name) for name in sorted(names)}

    def _loadable(self, module: torch.nn.Module, name: str) -> Layout | None:
        found: Layout | str | None
        if is_linear(module):
            found = reason_to_leave_linear(module, meta=True)
        elif are_experts(module):
            found = layout_of(module, meta=True)
        else:
            found = f"it is a {type(module).__name__}"
        if isinstance(found, str):
            raise CheckpointError(
                f"from_pretrained: {name} is in NVFP4 in the checkpoint, and cannot be here: "
                f"{found}"
            )
        return found

    # While they come.

    def param_needs_quantization(self, model: Any, param_name: str, **kwargs: Any) -> bool:
        name, _, parameter = param_name.rpartition(".")
        if self._targets is None or name not in self._targets.modules:
            return False
        return self._targets.modules[name] is not None or parameter == "weight"

    def param_element_size(self, model: Any, param_name: str, param: torch.Tensor) -> float:
        if param.dim() > 1 and self.param_needs_quantization(model, param_name):
            return _BYTES
        return float(param.element_size())

    def get_quantize_ops(self) -> Any:
        if self._targets is None:
            raise ArgumentError("Nvfp4HfQuantizer: there is no model to quantise")
        return QuantizeOnLoad(self._targets, self.quantization_config)

    def get_new_dtype(self, converter: Any, param: Any, dtype: torch.dtype | None) -> Any:
        """Codes and scales have the dtypes of the checkpoint."""
        if isinstance(converter, LoadNvfp4):
            return None
        return super().get_new_dtype(converter, param, dtype)

    # After them.

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if not hasattr(HfQuantizer, "get_new_dtype"):
            self._give_dtypes(model)
        conversions = getattr(model, "_weight_conversions", None) or ()
        model._weight_conversions = [one for one in conversions if not isinstance(one, LoadNvfp4)]
        self._targets = None
        del self._model
        self.quantization_config.left = left_dense(model)
        adapters.prepare()
        return model

    def _give_dtypes(self, model: Any) -> None:
        """Older versions leave what they rename in the dtype of the checkpoint."""
        plan = model._get_dtype_plan(model.dtype) if hasattr(model, "_get_dtype_plan") else {}
        # The plan comes from the model's class, not from the checkpoint.
        patterns = [re.compile(one.replace("*", ".*")) for one in plan]
        for name, weight in model.named_parameters():
            wanted = self._dtypes.get(name, weight.dtype)
            in_plan = any(one.search(name) for one in patterns)
            if weight.dtype != wanted and weight.is_floating_point() and not in_plan:
                weight.data = weight.data.to(wanted)

    # Saving and training.

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, torch.Tensor], Any]:
        keep_names(model)
        self.quantization_config.left = left_dense(model)
        return state_dict_of(model), {}

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        """Adapters beside the layers are, and all that is not in NVFP4."""
        return True

    @property
    def is_compileable(self) -> bool:
        return True


def attach(model: torch.nn.Module) -> None:
    """Let a model of transformers, quantised after it was loaded, be saved as one that was loaded
    so. It is not marked `is_quantized`: its norms and head may go on to train."""
    if not isinstance(model, PreTrainedModel) or getattr(model, "hf_quantizer", None) is not None:
        return
    _give_own_config(model)
    config = Nvfp4Config()
    config.left = left_dense(model)
    model.hf_quantizer = Nvfp4HfQuantizer(config, pre_quantized=False)
    model.config.quantization_config = config
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            # Attention asks linear layers for a dtype otherwise, and there may be none.
            module.config._is_quantized = True


def _give_own_config(model: torch.nn.Module) -> None:
    """Others may have been made of the same config, to whom what it is told now does not apply."""
    copies: dict[int, Any] = {}
    copy.deepcopy(model.config, copies)
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, PreTrainedConfig) and id(value) in copies:
                vars(module)[name] = copies[id(value)]


def _files_of(files: Any) -> dict[str, Path] | None:
    """Of the tensors in a checkpoint's files; None where they tell it only when they are loaded."""
    if not files or not all(str(one).endswith(".safetensors") for one in files):
        return None
    found = {}
    for file in map(Path, map(str, files)):
        for name in tensor_names(file):
            # To transformers, which sorts the names, each part of digits is a number.
            if any(part.isdigit() and not part.isdecimal() for part in name.split(".")):
                raise CheckpointError(
                    f"{file}: {printable(name)} has a part of digits, not a number"
                )
            found[name] = file
    return found


def _told_beside(files: Any) -> QuantizationConfig | None:
    """What ModelOpt's own file says of a checkpoint, where it lies beside the weights."""
    return QuantizationConfig.read(Path(str(files[0])).parent)


def _refuse_other_formats(files: dict[str, Path], concerns: Callable[[str], bool]) -> None:
    """Check that no weight is quantised in another format than NVFP4, if `concerns(its module)`.

    transformers would load the values of such a weight without its scales.
    """
    ours = marked(files)
    for name, file in files.items():
        owner, _, part = name.rpartition(".")
        if part in _OTHER_PARTS and owner not in ours and concerns(owner):
            raise CheckpointError(
                f"{file}: {printable(name)} is of a quantised weight, but not of one in NVFP4; "
                f"Nvfp4Config takes dense and NVFP4 weights"
            )


def _speaks_for(pattern: str, name: str) -> bool:
    """A pattern, or the name of a module or of one above it."""
    return fnmatchcase(name, pattern) or f".{pattern.strip('.')}." in f".{name}."


def _without_expert(owner: str) -> str:
    """``"a.experts.3.up_proj"`` -> ``"a.experts"``."""
    head, _, number = owner.rpartition(".")[0].rpartition(".")
    return head if number.isdecimal() else owner
