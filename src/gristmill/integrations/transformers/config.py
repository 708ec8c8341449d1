"""`Nvfp4Config`: what is passed to `from_pretrained` of transformers as `quantization_config`."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from transformers.utils.quantization_config import QuantizationConfigMixin

from gristmill.checkpoints import QuantizationConfig
from gristmill.checkpoints.writer import _quantization_config as modelopt_config
from gristmill.errors import DtypeError
from gristmill.formats.nvfp4.quantize import METHODS
from gristmill.integrations.transformers.register import (
    COMPRESSED_TENSORS,
    METHOD,
    MODELOPT,
    register,
)
from gristmill.ops import checks
from gristmill.ops.nvfp4_linear.semantics import ACTIVATIONS


class Nvfp4Config(QuantizationConfigMixin):  # type: ignore[misc]
    """NVFP4 weights on gristmill's layers, for `from_pretrained` of transformers.

    With a dense checkpoint, its linear layers and experts are quantised while it is loaded. With an
    NVFP4 checkpoint of ModelOpt or compressed-tensors, what it holds in NVFP4 is loaded as it is,
    and `modules`, `ignore` and `method` have no effect. `save_pretrained` writes it in ModelOpt's
    form.

    Args:
        modules: patterns for the names of modules to quantise (``"*.mlp.*"``); None for all but the
            output head, routers, and what the model wants in fp32.
        ignore: patterns for those to leave as they are.
        method: how scales are chosen, as in :func:`gristmill.nvfp4.quantize`.
        act: what activations may be rounded to in linear layers, as in
            :func:`gristmill.nvfp4.linear`.
    """

    def __init__(
        self,
        modules: str | Sequence[str] | None = None,
        ignore: str | Sequence[str] = (),
        method: str = "amax",
        act: str | None = None,
    ) -> None:
        checks.one_of("Nvfp4Config", "method", method, METHODS)
        if act is not None:
            checks.one_of("Nvfp4Config", "act", act, ACTIVATIONS)
        self.quant_method = METHOD
        self.modules = None if modules is None else _patterns("modules", modules)
        self.ignore = _patterns("ignore", ignore)
        self.method, self.act = method, act
        # What a checkpoint says of itself; None where it is dense.
        self.checkpoint: QuantizationConfig | None = None
        # Modules of the loaded model that are not in NVFP4, as they will be listed in its folder.
        self.left: tuple[str, ...] = ()
        register()

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> Any:
        """From the `quantization_config` of a checkpoint's config.json."""
        given = dict(config_dict)
        config = cls()
        if given.get("quant_method") == METHOD:
            compressed = "config_groups" in given and "quant_algo" not in given
            given["quant_method"] = COMPRESSED_TENSORS if compressed else MODELOPT
            if not compressed:
                given.setdefault("quant_algo", "NVFP4")
        config.checkpoint = QuantizationConfig.from_dict(given)
        config.left = config.checkpoint.ignore
        unused = config.update(**kwargs)
        return (config, unused) if return_unused_kwargs else config

    def with_choices_of(self, other: Nvfp4Config) -> Nvfp4Config:
        """This config of a checkpoint, with what a user may choose for it."""
        found = copy.copy(self)
        found.act = other.act
        return found

    def to_dict(self) -> dict[str, Any]:
        """As it stands in the config.json of a checkpoint that ModelOpt might have written."""
        return modelopt_config(False, list(self.left), None)

    def __iter__(self) -> Any:
        yield from self.to_dict().items()


def _patterns(name: str, given: str | Sequence[str]) -> tuple[str, ...]:
    found = (given,) if isinstance(given, str) else tuple(given)
    for one in found:
        if not isinstance(one, str):
            raise DtypeError(
                f"Nvfp4Config: {name} must hold patterns as str, got {type(one).__name__}"
            )
    return found
