"""A model's norms: found, exchanged for gristmill's ops, and given back."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import torch

from gristmill.integrations.transformers.behaviour import Norm, recognise
from gristmill.integrations.transformers.casting import Route
from gristmill.integrations.transformers.forwards import (
    exchange_forward,
    exchanged_forward,
    options_of,
    original_forward,
    own_forward,
    restore_forward,
)
from gristmill.integrations.transformers.probe import NOT_COPIED, Probe, Unlike, undisturbed
from gristmill.integrations.transformers.report import Left, PatchReport, Replaced
from gristmill.ops.layer_norm import layer_norm
from gristmill.ops.rms_norm import rms_norm


def patch_norms(model: torch.nn.Module) -> PatchReport:
    """Let every RMSNorm and LayerNorm of a model run on gristmill.

    Equal modules (class, options, shapes) are looked at once: what one computes, all do.
    """
    replaced: list[Replaced] = []
    left: list[Left] = []
    seen: dict[Hashable, Norm | Unlike] = {}
    for name, module in _candidates(model):
        kind = type(module).__name__
        present = options_of(module)
        if isinstance(present, Norm):
            left.append(Left(name, kind, f"runs {present} already"))
            continue
        try:
            norm = _look_at(module, seen)
        except Unlike as reason:
            if _is_named_norm(module) or _forgets_scale(module):
                left.append(Left(name, kind, str(reason)))
            continue
        exchange_forward(module, norm_forward, norm)
        replaced.append(Replaced(name, kind, str(norm)))
    return PatchReport(tuple(replaced), tuple(left))


def unpatch_norms(model: torch.nn.Module) -> PatchReport:
    """Give the model's norms back what they ran before."""
    replaced: list[Replaced] = []
    for name, module in model.named_modules():
        norm = options_of(module)
        if isinstance(norm, Norm) and restore_forward(module):
            replaced.append(Replaced(name, str(norm), type(module).__name__))
    return PatchReport(tuple(replaced))


def norm_forward(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    """The forward of an exchanged norm.

    What was not looked at when the module was recognised (other arguments, other dtypes, a bias of
    another dtype than the weight's) runs as it did before.
    """
    norm: Norm = options_of(module)
    if len(args) == 1 and not kwargs:
        x = args[0]
    elif not args and len(kwargs) == 1 and norm.argument in kwargs:
        x = kwargs[norm.argument]
    else:
        return original_forward(module)(*args, **kwargs)
    weight = getattr(module, norm.weight) if norm.weight is not None else None
    bias = getattr(module, norm.bias) if norm.bias is not None else None
    route = _route(norm, x, weight, bias)
    if route is None:
        return original_forward(module)(*args, **kwargs)
    if not _is_autocast(x):
        return _run(norm, route, x, weight, bias)
    # The route says already what autocast makes of it.
    with torch.autocast(x.device.type, enabled=False):
        return _run(norm, route, x, weight, bias)


def _route(norm: Norm, x: Any, weight: Any, bias: Any) -> Route | None:
    """How gristmill gives what the module would; None where it is not known to."""
    if not isinstance(x, torch.Tensor):
        return None
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        return None
    own = weight if weight is not None else bias
    routes = norm.routes
    if x.device.type != "cpu" and _is_autocast(x):
        routes = norm.autocast_routes.get(torch.get_autocast_dtype(x.device.type), {})
    return routes.get((x.dtype, None if own is None else own.dtype))


def _is_autocast(x: torch.Tensor) -> bool:
    """Whether autocast is on where x is; torch refuses to say it of the meta device."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def _run(norm: Norm, route: Route, x: torch.Tensor, weight: Any, bias: Any) -> torch.Tensor:
    offset = norm.weight_offset
    if route.adds_first:
        weight, offset = weight + offset, 0.0
    rows = x
    if norm.dims > 1:
        rows = x.flatten(-norm.dims)
        weight = None if weight is None else weight.flatten()
        bias = None if bias is None else bias.flatten()
    if norm.kind == "rms_norm":
        y = rms_norm(
            rows,
            weight,
            norm.eps,
            weight_offset=offset,
            casting=route.casting,
            out_dtype=route.out_dtype,
        )
    else:
        y = layer_norm(
            rows, weight, bias, norm.eps or 0.0, weight_offset=offset, out_dtype=route.out_dtype
        )
    return y if norm.dims == 1 else y.reshape(x.shape)


def _candidates(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module]]:
    """Modules without modules inside, with one or two small parameters or with an eps.

    Those that are called norms are candidates whatever they hold, so that the report names them.
    """
    for name, module in model.named_modules():
        if _is_named_norm(module):
            yield name, module
        elif not any(True for _ in module.children()):
            own = list(module.parameters(recurse=False))
            small = len(own) <= 2 and all(parameter.dim() == 1 for parameter in own)
            if small and (own or any("eps" in attribute for attribute in vars(module))):
                yield name, module


def _look_at(module: torch.nn.Module, seen: dict[Hashable, Norm | Unlike]) -> Norm:
    if any(True for _ in module.children()):
        raise Unlike("it has modules inside")
    if own_forward(module) is not None or exchanged_forward(module) is not None:
        raise Unlike("it has a forward of its own, which somebody gave this instance")
    key = _key(module)
    if key not in seen:
        seen[key] = _recognised(module)
    found = seen[key]
    if isinstance(found, Unlike):
        raise found
    own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    dtypes = {tensor.dtype for tensor in own if tensor.dim()}
    if len(dtypes) > 1:
        raise Unlike(f"its weight and its bias differ in dtype: {_listed(dtypes)}")
    if not _gives_all_of(found, dtypes):
        where = _listed(dtypes) or torch.float32
        raise Unlike(f"in {where} it rounds otherwise than gristmill's {found.kind}")
    return found


def _gives_all_of(norm: Norm, dtypes: set[torch.dtype]) -> bool:
    """Whether inputs of the weight's own dtype, or without a weight of fp32, have a route."""
    if not dtypes:
        return (torch.float32, None) in norm.routes
    return all((dtype, dtype) in norm.routes for dtype in dtypes)


def _recognised(module: torch.nn.Module) -> Norm | Unlike:
    try:
        with undisturbed():
            return recognise(module)
    except Unlike as reason:
        return reason


def _key(module: torch.nn.Module) -> Hashable:
    """Equal for modules that compute the same: class, attributes by value or identity, shapes."""
    fresh = vars(torch.nn.Module())
    attributes = tuple(
        (name, value if _is_plain(value) else id(value))
        for name, value in sorted(vars(module).items())
        if name not in fresh and name not in NOT_COPIED
    )
    own = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
    shapes = tuple((name, tensor.shape if tensor.dim() else id(tensor)) for name, tensor in own)
    return type(module), attributes, shapes


def _is_plain(value: Any) -> bool:
    """Whether a value is all there is to it: numbers, words, and tuples of them (shapes)."""
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return isinstance(value, (bool, int, float, str, type(None), torch.dtype))


def _is_named_norm(module: torch.nn.Module) -> bool:
    return "norm" in type(module).__name__.lower() and not _holds_others(module)


def _holds_others(module: torch.nn.Module) -> bool:
    """Whether parameters lie deeper than here: a block that happens to be called after its norm."""
    return any(True for child in module.children() for _ in child.parameters())


def _forgets_scale(module: torch.nn.Module) -> bool:
    """Whether it gives the same of an input twice as large, as norms do and little else does."""
    try:
        with undisturbed():
            probe = Probe.of(module)
            tensors = probe.tensors_in(torch.float32)
            x = probe.input(torch.float32, scale=64.0, zero_row=False)
            one, two = probe.run(x, tensors), probe.run(2 * x, tensors)
            same = torch.allclose(one, two, rtol=1e-3, atol=1e-3)
            return same and not torch.allclose(one, one[:1, :1].expand_as(one))
    except (Unlike, RuntimeError):
        return False


def _listed(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype) for dtype in dtypes))
