"""Linear layers and experts of a model in NVFP4, on request."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from gristmill.errors import ArgumentError, DtypeError
from gristmill.formats.nvfp4 import NVFP4Tensor
from gristmill.formats.nvfp4.quantize import METHODS
from gristmill.integrations.transformers import adapters
from gristmill.integrations.transformers.experts import (
    Layout,
    NVFP4Experts,
    are_experts,
    layout_of,
    parameters_of,
)
from gristmill.integrations.transformers.linears import (
    is_linear,
    quantized_linear,
    reason_in_parent,
    reason_to_leave_linear,
    take_place,
)
from gristmill.integrations.transformers.report import Left, PatchReport, Replaced
from gristmill.nn import NVFP4Linear, NVFP4MoE
from gristmill.nn.nvfp4_module import NVFP4Module
from gristmill.ops import checks
from gristmill.ops.nvfp4_linear.semantics import ACTIVATIONS

Which = bool | str | Iterable[str] | Callable[[str, torch.nn.Module], bool]

_WAS = "gristmill_was"  # on a module that stands in the place of another: its class


@dataclass(frozen=True)
class Candidate:
    """A module that could be in NVFP4: its names in the model, and experts' layout."""

    name: str
    module: torch.nn.Module
    layout: Layout | None = None


def quantize_modules(
    model: torch.nn.Module,
    which: Which,
    *,
    method: str = "amax",
    act: str | None = None,
) -> PatchReport:
    """Put linear layers and experts of a model into NVFP4, in place, one after the other.

    `torch.nn.Linear` and transformers' `Conv1D` become :class:`gristmill.nn.NVFP4Linear`, experts
    that are stacked become `NVFP4Experts`, a :class:`gristmill.nn.NVFP4MoE`. Each dense weight is
    freed before the next is quantised. Biases stay the same parameters, hooks and modes are kept.
    A quantised weight is frozen, and the way back is lost.

    Args:
        model: any module; it must itself be none of these layers.
        which: True for every layer but the output head, routers, and what the model wants in fp32;
            one or several patterns (as of files: ``"*.mlp.*"``) over the names of modules; or a
            function of name and module. Weights that are shared are left in any case.
        method: how scales are chosen, as in :func:`gristmill.nvfp4.quantize`.
        act: what activations may be rounded to in linear layers, as in
            :func:`gristmill.nvfp4.linear`.
    """
    if not isinstance(model, torch.nn.Module):
        raise DtypeError(
            f"quantize_modules: model must be a torch.nn.Module, got {type(model).__name__}"
        )
    checks.one_of("quantize_modules", "method", method, METHODS)
    if act is not None:
        checks.one_of("quantize_modules", "act", act, ACTIVATIONS)
    if which is False:
        return PatchReport()
    chosen, left = candidates(model, which)
    replaced, places = [], places_of(model)
    chosen.reverse()
    while chosen:  # taken out of the list, which would hold the dense weights
        replaced.append(_quantized(chosen.pop(), places, method, act))
    if replaced:
        adapters.prepare()
        _tell_transformers(model)
    return PatchReport(tuple(replaced), tuple(left))


def left_quantized(model: torch.nn.Module) -> tuple[Left, ...]:
    """What `quantize_modules` has replaced in a model, and why that stays."""
    return tuple(
        Left(
            name,
            type(module).__name__,
            f"quantised: the dense {getattr(module, _WAS)} is gone; load the model anew",
        )
        for name, module in model.named_modules()
        if isinstance(module, NVFP4Module) and hasattr(module, _WAS)
    )


def candidates(
    model: torch.nn.Module, which: Which, *, meta: bool = False
) -> tuple[list[Candidate], list[Left]]:
    """What `which` chooses and can be in NVFP4, and what cannot. `meta`: weights may be
    still to come."""
    wanted = _chooser(model, which)
    tied, in_fp32, adapted = _tied(model), kept_in_fp32(model), _adapted(model)
    chosen: list[Candidate] = []
    left: list[Left] = []
    layouts: dict[tuple[object, ...], Layout | str] = {}
    for name, module in model.named_modules():
        if name and isinstance(module, (NVFP4Linear, NVFP4MoE)):
            if wanted(name, module) is True:
                left.append(Left(name, type(module).__name__, "already in NVFP4"))
            continue
        if not name or not (is_linear(module) or are_experts(module)):
            continue
        asked = wanted(name, module)
        if asked is False:
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        reason = asked if isinstance(asked, str) else _reason(parent, name, module, tied, in_fp32)
        if reason is None and name.startswith(adapted):
            reason = "it is part of an adapter or of a copy that PEFT trains"
        layout: Layout | None = None
        if reason is None and is_linear(module):
            reason = reason_to_leave_linear(module, meta=meta)
        elif reason is None:
            key = _kind(module)
            if key not in layouts:
                layouts[key] = layout_of(module, meta=meta)
            found = layouts[key]
            reason = found if isinstance(found, str) else None
            layout = None if isinstance(found, str) else found
        if reason is None:
            chosen.append(Candidate(name, module, layout))
        else:
            left.append(Left(name, type(module).__name__, reason))
    return chosen, left


Places = dict[int, list[tuple[torch.nn.Module, str]]]


def places_of(model: torch.nn.Module) -> Places:
    """Where each module stands, by its id: parents, and its names in them.

    Looked up once for all: there are models with tens of thousands of experts.
    """
    places: Places = {}
    for parent in model.modules():
        for child, module in parent._modules.items():
            places.setdefault(id(module), []).append((parent, child))
    return places


def put_in_place(old: torch.nn.Module, new: torch.nn.Module, places: Places) -> None:
    """Exchange a module wherever it stands in the model."""
    take_place(old, new)
    for parent, child in places.pop(id(old)):
        parent._modules[child] = new


def _quantized(one: Candidate, places: Places, method: str, act: str | None) -> Replaced:
    old = one.module
    new: NVFP4Linear | NVFP4Experts
    if one.layout is None:
        new = quantized_linear(old, old.get_parameter("weight"), method=method, act=act)
        now = f"NVFP4Linear({new.extra_repr()})"
    else:
        parts: dict[str, NVFP4Tensor | torch.Tensor] = {
            name: one.layout.quantized(name, old.get_parameter(name), method)
            for name in parameters_of(old)
        }
        new = NVFP4Experts.of_parts(one.layout, parts)
        now = f"NVFP4Experts({new.extra_repr()})"
    new.__dict__[_WAS] = type(old).__name__
    put_in_place(old, new, places)
    return Replaced(one.name, type(old).__name__, now)


def _chooser(model: torch.nn.Module, which: Which) -> Callable[[str, torch.nn.Module], bool | str]:
    """True: chosen; False: not asked for; words: asked for with all others, and why it is left."""
    if which is True:
        return _Default(model)
    if callable(which):
        function = which

        def asked(name: str, module: torch.nn.Module) -> bool:
            return bool(function(name, module))

        return asked
    patterns: object = [which] if isinstance(which, str) else which
    if not isinstance(patterns, Iterable) or isinstance(patterns, bytes):
        raise DtypeError(
            f"quantize_modules: which must be True, patterns of names, or a function of name and "
            f"module, got {type(which).__name__}"
        )
    listed = list(patterns)
    for one in listed:
        if not isinstance(one, str):
            raise DtypeError(
                f"quantize_modules: which must hold patterns as str, got {type(one).__name__}"
            )
    _check_patterns(model, listed)
    return lambda name, module: any(fnmatchcase(name, one) for one in listed)


def _check_patterns(model: torch.nn.Module, patterns: list[str]) -> None:
    names = [
        name
        for name, module in model.named_modules()
        if is_linear(module) or are_experts(module) or isinstance(module, NVFP4Module)
    ]
    for one in patterns:
        if not any(fnmatchcase(name, one) for name in names):
            some = ", ".join(names[:3]) or "none"
            raise ArgumentError(
                f"quantize_modules: which: {one!r} matches no linear layer and no experts of this "
                f"model; there are {some}{', ...' if len(names) > 3 else ''}"
            )


class _Default:
    """Every layer, but those that are usually kept: heads, routers, what is to be in fp32."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.heads: list[torch.nn.Module] = []
        self.bodies: list[tuple[str, str]] = []  # where a model with a head is, and its base model
        for name, one in models_in(model):
            with suppress(AttributeError, NotImplementedError):
                self.heads.append(one.get_output_embeddings())  # type: ignore[operator]
            base = getattr(one, "base_model_prefix", "")
            if base and isinstance(base, str) and hasattr(one, base):
                outer = f"{name}." if name else ""
                self.bodies.append((outer, f"{outer}{base}."))

    def __call__(self, name: str, module: torch.nn.Module) -> bool | str:
        last = name.rpartition(".")[2]
        if any(module is head for head in self.heads):
            return "the output head"
        if any(name.startswith(outer) and not name.startswith(b) for outer, b in self.bodies):
            return "a head: outside of the base model"
        if is_linear(module) and (last == "gate" or last.endswith("_gate") or "router" in last):
            return "a router or gate, by its name"
        return True


def _reason(
    parent: torch.nn.Module,
    name: str,
    module: torch.nn.Module,
    tied: set[int],
    in_fp32: set[str],
) -> str | None:
    if any(id(weight) in tied for weight in module.parameters()):
        return "its weight is shared with another module (tied)"
    if any(one in name.split(".") for one in in_fp32):
        return "the model wants it in fp32"
    return reason_in_parent(parent, name.rpartition(".")[2])


def models_in(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """The models, as transformers has them, that a module is or is wrapped around; none in them.

    By their classes: wrappers (PEFT, torch.compile) pass on what they are asked for.
    """
    outer: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(one) for one in outer)
        if not inside and hasattr(type(module), "get_output_embeddings"):
            outer.append(f"{name}." if name else "")
            yield name, module


def kept_in_fp32(model: torch.nn.Module) -> set[str]:
    """Names of modules that transformers keeps in fp32, by the model's word."""
    found: set[str] = set()
    for _, one in models_in(model):
        for attribute in ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"):
            found |= set(getattr(one, attribute, None) or ())
    return found


def _adapted(model: torch.nn.Module) -> tuple[str, ...]:
    """Where PEFT's layers are, by the start of the names of what is in them."""
    marks = ("base_layer", "original_module")
    return tuple(
        f"{name}."
        for name, module in model.named_modules()
        if any(mark in module._modules for mark in marks)
    )


def _tied(model: torch.nn.Module) -> set[int]:
    """Parameters that stand in more than one module, by id; also those that will, once loaded."""
    seen: dict[int, set[int]] = {}
    for module in set(model.modules()):
        for weight in module._parameters.values():
            if weight is not None:
                seen.setdefault(id(weight), set()).add(id(module))
    tied = {weight for weight, owners in seen.items() if len(owners) > 1}
    to_be = getattr(model, "all_tied_weights_keys", None) or {}
    names = {*to_be, *to_be.values()} if isinstance(to_be, dict) else set()
    tied |= {id(one) for name, one in model.named_parameters() if name in names}
    return tied


def _kind(experts: torch.nn.Module) -> tuple[object, ...]:
    """What a trial of experts depends on: equal ones are tried once."""
    plain = (
        (name, value)
        for name, value in sorted(experts.__dict__.items())
        if type(value) in (bool, int, float, str)
    )
    shapes = (
        (name, None if one is None else (tuple(one.shape), one.dtype, one.device.type, type(one)))
        for name, one in experts._parameters.items()
    )
    children = (str(child) for child in experts.children())
    functions = (
        (name, value) for name, value in sorted(experts.__dict__.items()) if _is_function(value)
    )
    return type(experts), *plain, *shapes, *children, *functions


def _is_function(value: object) -> bool:
    """Whether it is a plain function, such as an activation."""
    return callable(value) and hasattr(value, "__code__")


def _tell_transformers(model: torch.nn.Module) -> None:
    """Let transformers know what the model holds, where it is one of its own: it saves by that."""
    if "transformers.modeling_utils" not in sys.modules:
        return
    from gristmill.integrations.transformers.quantizer import attach

    for _, one in models_in(model):
        if any(isinstance(module, NVFP4Module) for module in one.modules()):
            attach(one)
