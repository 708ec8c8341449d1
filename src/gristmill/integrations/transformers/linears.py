"""Linear layers of a model: which can be in NVFP4, and made so.

A layer counts as linear by its class: `torch.nn.Linear` itself, and transformers' `Conv1D`, whose
weight is the transpose of one. Subclasses have a forward of their own, of which nothing is known.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Hashable
from functools import lru_cache
from typing import Any, cast

import torch

from gristmill.formats.nvfp4 import NVFP4Tensor, quantize
from gristmill.formats.nvfp4.tensor import BLOCK
from gristmill.nn import NVFP4Linear

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_is_full_backward_hook",
)
_OTHER_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def is_linear(module: torch.nn.Module) -> bool:
    """Whether it is one by its class, or might be taken for one."""
    return isinstance(module, torch.nn.Linear) or is_transposed(module)


def is_transposed(module: torch.nn.Module) -> bool:
    """Whether it is transformers' Conv1D: ``y = x W + b``, W of shape (in, out)."""
    names = sys.modules.get("transformers.pytorch_utils")
    kind = getattr(names, "Conv1D", None)
    return kind is not None and isinstance(module, kind)


def shape_of(linear: torch.nn.Module) -> tuple[int, int]:
    """Rows and columns of the weight as NVFP4 holds it: out and in."""
    rows, columns = linear.get_parameter("weight").shape
    return (columns, rows) if is_transposed(linear) else (rows, columns)


def reason_to_leave_linear(linear: torch.nn.Module, *, meta: bool = False) -> str | None:
    """Why a linear layer cannot be in NVFP4; None if it can. `meta`: its weight may be on meta."""
    # First: what shards a weight may change the class of its module, too.
    reason = _reason_in_weights(linear, meta=meta)
    if reason is not None:
        return reason
    plain = torch.nn.Linear if isinstance(linear, torch.nn.Linear) else _conv1d()
    if type(linear) is not plain:
        return f"a subclass of {plain.__name__}, which may do something else"
    reason = reason_to_leave_module(linear, {"weight", "bias"}, meta=meta)
    if reason is not None:
        return reason
    weight = linear.get_parameter("weight")
    if weight.dim() != 2 or not weight.numel():
        return f"its weight is no matrix, its shape is {tuple(weight.shape)}"
    columns = shape_of(linear)[1]
    if columns % BLOCK:
        return f"its {columns} columns are not a multiple of {BLOCK}"
    return None


def reason_to_leave_module(module: torch.nn.Module, known: set[str], *, meta: bool) -> str | None:
    """What forbids to exchange a module, whatever it computes. `known`: its parameters."""
    reason = _reason_in_weights(module, meta=meta)
    if reason is not None:
        return reason
    if "forward" in module.__dict__:
        owner = "accelerate's hooks" if hasattr(module, "_hf_hook") else "another library"
        return f"its forward was exchanged by {owner}; quantise before that"
    if any(getattr(module, name, None) for name in _OTHER_HOOKS):
        return "it has hooks on its state dict"
    others = [name for name, _ in module.named_parameters() if name not in known]
    others += [name for name, _ in module.named_buffers()]
    if others:
        return f"it holds more than its weights: {', '.join(others)}"
    return None


def _reason_in_weights(module: torch.nn.Module, *, meta: bool) -> str | None:
    for name, weight in module.named_parameters():
        kind = type(weight.data)
        if kind is not torch.Tensor or type(weight) is not torch.nn.Parameter:
            kind = kind if kind is not torch.Tensor else type(weight)
            return f"its {name} is a {kind.__name__}, no plain tensor"
        if weight.device.type == "meta" and not meta:
            return f"its {name} is on the meta device: there are no values to quantise"
        if weight.dtype not in _DTYPES:
            return f"its {name} has dtype {str(weight.dtype).removeprefix('torch.')}"
    return None


def reason_in_parent(parent: torch.nn.Module, name: str) -> str | None:
    """Why a child cannot be exchanged, by what its parent does with it."""
    if name == "base_layer":
        return "an adapter wraps it; quantise first, then add adapters"
    if isinstance(parent, torch.nn.MultiheadAttention):
        return "torch's MultiheadAttention reads its weight"
    # A parent that reads the weight itself would find codes there.
    if not name.isdecimal() and re.search(
        rf"\bself\.{name}\.weight\b(?!\.device)", _source(cast(Hashable, type(parent)))
    ):
        return f"{type(parent).__name__} reads its weight directly"
    return None


def quantized_linear(
    linear: torch.nn.Module, weight: NVFP4Tensor | torch.Tensor, *, method: str, act: str | None
) -> NVFP4Linear:
    """A layer to stand in the place of `linear`, with its bias, over `weight`.

    A dense weight lies as the layer has it, and is quantised.
    """
    if isinstance(weight, torch.Tensor):
        dense = weight.detach()
        weight = quantize(dense.t() if is_transposed(linear) else dense, method=method)
    layer = NVFP4Linear._of(weight, None, act)
    layer.bias = linear._parameters.get("bias")
    return layer


def take_place(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Give `new` the mode and the hooks of `old`; their handles go on to work."""
    new.train(old.training)
    for name in _HOOKS:
        if name in old.__dict__:
            new.__dict__[name] = old.__dict__[name]


@lru_cache(maxsize=512)
def _source(kind: Any) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):
        return ""  # made at run time: nothing to read


def _conv1d() -> Any:
    return sys.modules["transformers.pytorch_utils"].Conv1D
