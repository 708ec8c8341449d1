"""LoRA adapters of PEFT beside NVFP4 layers.

PEFT finds the layer for an adapter by the class of the module it is for, and has no table to which
others could be added once for all configs. So the one function of it that decides is wrapped: for
an `NVFP4Linear` it gives PEFT's own linear layer with adapters, whose forward adds the adapter's
output to that of whatever layer it is around. PEFT is never imported for this: where it is not
there yet, its module is completed when somebody imports it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from gristmill.errors import ArgumentError
from gristmill.locks import Lock
from gristmill.log import logger
from gristmill.nn import NVFP4Linear

_MODULE = "peft.tuners.lora.model"
_ALL_LINEAR = "all-linear"
_INCLUDE = "_maybe_include_all_linear_layers"
# Starts that do not read the weight; PEFT would take codes for it.
_INITS = (True, False, "gaussian", "eva")
_lock = Lock()
_prepared = False


def prepare() -> None:
    """Let PEFT put LoRA adapters on NVFP4 layers, now or when it is imported; again is no harm."""
    global _prepared
    with _lock:
        if _prepared:
            return
        _prepared = True
        module = sys.modules.get(_MODULE)
        if module is None:
            sys.meta_path.insert(0, _Finder())
            return
    _complete(module)


class _Finder(MetaPathFinder):
    """Finds PEFT's module as usual, with a loader that completes it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _MODULE:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, usual: Loader) -> None:
        self._usual = usual

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._usual.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._usual.exec_module(module)
        _complete(module)

    def __getattr__(self, name: str) -> Any:  # get_source and the like
        return getattr(self._usual, name)


def _complete(module: ModuleType) -> None:
    try:
        kind = module.LoraModel
        usual = kind._create_new_module
    except AttributeError as problem:
        logger.warning("PEFT has no LoRA for NVFP4 layers: it lacks what is needed (%s)", problem)
        return

    def create(lora_config: Any, adapter_name: str, target: Any, **kwargs: Any) -> Any:
        base = target.get_base_layer() if hasattr(target, "get_base_layer") else target
        given = lora_config._custom_modules
        if not isinstance(base, NVFP4Linear) or any(isinstance(base, one) for one in given or ()):
            return usual(lora_config, adapter_name, target, **kwargs)
        # By PEFT's own way for layers it does not know: it calls the class as its version does.
        lora_config._custom_modules = {**(given or {}), NVFP4Linear: _layer_class()}
        try:
            return usual(lora_config, adapter_name, target, **kwargs)
        finally:
            lora_config._custom_modules = given

    kind._create_new_module = staticmethod(create)
    _complete_all_linear()


def _complete_all_linear() -> None:
    """Let the word "all-linear" speak for NVFP4 layers, too."""
    utils = sys.modules.get("peft.tuners.tuners_utils")
    usual = getattr(utils, _INCLUDE, None)
    if usual is None:
        return

    def include(peft_config: Any, model: Any) -> Any:
        asked = getattr(peft_config, "target_modules", None)
        peft_config = usual(peft_config, model)
        if isinstance(asked, str) and asked.lower() == _ALL_LINEAR:
            ours = {name for name, one in model.named_modules() if isinstance(one, NVFP4Linear)}
            head = getattr(model, "get_output_embeddings", lambda: None)()
            ours -= {name for name in ours if model.get_submodule(name) is head}
            # Those in layers that have an adapter already go by the name of that.
            ours = {name for name in ours if not name.endswith(".base_layer")}
            peft_config.target_modules = {*peft_config.target_modules, *ours}
        return peft_config

    # Also where it was imported by name: PEFT's module for the experts of mixtures does, and is
    # loaded with the first model that gets adapters, which may have been before this.
    for name, module in list(sys.modules.items()):
        if name.startswith("peft.") and getattr(module, "__dict__", {}).get(_INCLUDE) is usual:
            setattr(module, _INCLUDE, include)


_made: Any = None


def _layer_class() -> Any:
    """PEFT's linear layer with adapters, around NVFP4Linear; made on first use."""
    global _made
    if _made is not None:
        return _made
    from peft.tuners.lora.layer import Linear

    class LoraNVFP4Linear(Linear):  # type: ignore[misc]
        """LoRA adapters beside an :class:`gristmill.nn.NVFP4Linear`; only they train."""

        def _get_in_out_features(self, module: Any) -> tuple[int, int]:
            return module.in_features, module.out_features

        def update_layer(self, adapter_name: str, *args: Any, **kwargs: Any) -> Any:
            config = kwargs.get("config")
            for name, right in (("init_lora_weights", _INITS), ("use_dora", (False, None))):
                value = kwargs.get(name, getattr(config, name, right[0]))
                if value not in right:
                    words = ", ".join(map(repr, right[:2]))
                    raise ArgumentError(
                        f"LoraConfig: {name}={value!r} reads the weight, which for an NVFP4 layer "
                        f"is in 4 bits; use {words}"
                    )
            return super().update_layer(adapter_name, *args, **kwargs)

        def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
            raise ArgumentError(
                "merge: an adapter cannot be merged into an NVFP4 weight, which would be rounded "
                "to 4 bits again; keep it beside, or merge it into the dense model"
            )

        def unmerge(self) -> None:
            raise ArgumentError("unmerge: nothing was merged, NVFP4 weights take no adapters")

    LoraNVFP4Linear.__module__, LoraNVFP4Linear.__qualname__ = __name__, "LoraNVFP4Linear"
    _made = LoraNVFP4Linear
    return _made


def __getattr__(name: str) -> Any:
    if name == "LoraNVFP4Linear":  # for pickles
        return _layer_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
