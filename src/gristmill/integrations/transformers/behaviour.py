"""Which norm a module computes, found by running a small copy of it on the CPU.

The copy has the module's class and attributes and weights of its own, so that nothing of the model
is read or touched but shapes and options: modules on GPUs, on the meta device and sharded ones are
recognised alike. What comes out is compared with gristmill's references: the statistics, the weight
and its offset, eps on inputs so small that it is all there is to see, then the order of roundings
and the dtype of the result for every pair of dtypes. Where they differ by more than roundings, the
module is none of ours; for pairs of dtypes in which they do, it runs as it did.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from itertools import permutations, product
from typing import Any

import torch

from gristmill.integrations.transformers.casting import AutocastRoutes, Routes, find_routes
from gristmill.integrations.transformers.probe import Probe, Unlike, near
from gristmill.ops.layer_norm import reference as layer
from gristmill.ops.rms_norm import reference as rms

_EPS_OF_DTYPES = [torch.finfo(dtype).eps for dtype in (torch.float32, torch.float64)]


@dataclass(frozen=True)
class Norm:
    """What a module computes, as arguments of `gristmill.rms_norm` or `gristmill.layer_norm`.

    `weight` and `bias` are names of the module's own tensors; `argument` is the name of its input;
    `dims` is over how many dims at the end it normalises. `routes` has, for the dtypes of x and
    weight (None: there is none), the casting and the dtype of the result; `autocast_routes` the
    same for what CUDA's autocast makes of it, by the dtype that this is to. Pairs that are not
    there run as before.
    """

    kind: str
    eps: float | None
    weight: str | None
    bias: str | None
    weight_offset: float
    dims: int
    argument: str
    routes: Routes
    autocast_routes: AutocastRoutes

    def __str__(self) -> str:
        options = [f"eps={self.eps}"]
        if self.weight_offset:
            options.append(f"weight_offset={self.weight_offset}")
        castings = {route.casting for route in self.routes.values()}
        if "llama" in castings:
            options.append("casting='llama'")
        return f"{self.kind}({', '.join(options)})"


def recognise(module: torch.nn.Module) -> Norm:
    """What this module computes; `Unlike`, with the reason, where it is no norm of ours."""
    argument = _one_argument(module)
    probe = Probe.of(module)
    for kind, offset, (weight, bias) in product(
        ("rms_norm", "layer_norm"), (0.0, 1.0), _roles(probe)
    ):
        if kind == "rms_norm" and bias is not None:
            continue
        if offset and weight is None:
            continue
        form = Form(kind, offset, weight, bias, probe.dims)
        if not _matches_without_eps(probe, form):
            continue
        eps = _find_eps(probe, form, module)
        _verify(probe, form, eps)
        routes, autocast_routes = find_routes(probe, form.reference, eps, offset=offset)
        return Norm(kind, eps, weight, bias, offset, probe.dims, argument, routes, autocast_routes)
    raise Unlike(f"its output is no RMSNorm or LayerNorm of its input over {probe.over}")


@dataclass(frozen=True)
class Form:
    """A norm but for eps, to be compared with a module."""

    kind: str
    offset: float
    weight: str | None
    bias: str | None
    dims: int

    def reference(
        self,
        x: torch.Tensor,
        tensors: dict[str, torch.Tensor],
        eps: float | None,
        casting: str = "once",
        out_dtype: torch.dtype | None = None,
        adds_first: bool = False,
    ) -> torch.Tensor:
        """What gristmill gives, by its reference: no kernel is chosen, nothing is forced."""
        weight = tensors[self.weight].flatten() if self.weight is not None else None
        offset = self.offset
        if adds_first and weight is not None:
            weight, offset = weight + offset, 0.0
        rows = x.flatten(-self.dims)
        if self.kind == "rms_norm":
            y = rms.rms_norm(rows, weight, eps, offset, casting, out_dtype)
        else:
            bias = tensors[self.bias].flatten() if self.bias is not None else None
            y = layer.layer_norm(rows, weight, bias, eps or 0.0, offset, out_dtype)
        return y.reshape(x.shape)


def _one_argument(module: torch.nn.Module) -> str:
    """The name of the input of `forward`; others may only be gathered in stars."""
    try:
        named = list(inspect.signature(type(module).forward).parameters.values())[1:]
    except (TypeError, ValueError):
        raise Unlike("its forward cannot be inspected") from None
    plain = [p for p in named if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if not plain:
        raise Unlike("its forward names no input")
    if len(plain) > 1:
        raise Unlike(f"its forward takes a second argument ({plain[1].name})")
    return plain[0].name


def _roles(probe: Probe) -> list[tuple[str | None, str | None]]:
    """Which tensor may be the weight and which the bias."""
    names = list(probe.tensors)
    if not names:
        return [(None, None)]
    if len(names) == 1:
        return [(names[0], None), (None, names[0])]
    if len(names) == 2:
        return [(one, other) for one, other in permutations(names)]
    raise Unlike(f"it has {len(names)} tensors: {', '.join(names)}")


def _matches_without_eps(probe: Probe, form: Form) -> bool:
    """Whether this is the form, judged on inputs so large that no eps is seen."""
    x = probe.input(torch.float32, scale=1e6, zero_row=False)
    tensors = probe.tensors_in(torch.float32)
    return near(probe.run(x, tensors), form.reference(x, tensors, 0.0), scale=_size(form, tensors))


def _find_eps(probe: Probe, form: Form, module: torch.nn.Module) -> float | None:
    """From inputs far below it: there y = x · weight / sqrt(eps). A bias would cover it: zeros."""
    x = probe.input(torch.float32, scale=1e-15, zero_row=False)
    tensors = probe.tensors_in(torch.float32)
    if form.bias is not None:
        tensors[form.bias] = torch.zeros_like(tensors[form.bias])
    y = probe.run(x, tensors).double()
    core = form.reference(x.double(), _double(tensors), 1.0)  # the norm times its own rms, near x
    usable = (core.abs() > core.abs().mean()) & (y != 0) & y.isfinite()
    if not bool(usable.any()):
        raise Unlike("eps is not found: tiny inputs give zeros or no numbers")
    found = float((core[usable] / y[usable]).square().median())
    # Without an eps the ratio is the mean of squares itself, 1e-30 here.
    found = 0.0 if found < 1e-25 else found
    candidates = [*_numbers(module), *_EPS_OF_DTYPES, float(f"{found:.2g}")]
    for candidate in candidates:
        if candidate == found or (found and abs(candidate - found) <= 1e-5 * found):
            none = candidate in _EPS_OF_DTYPES and candidate not in _numbers(module)
            return None if none and _has_none(module) and form.kind == "rms_norm" else candidate
    raise Unlike(f"eps is not found among its attributes: it behaves as {found:.8g}")


def _verify(probe: Probe, form: Form, eps: float | None) -> None:
    """The form and its eps on all sizes of numbers, ranks of input, modes, and in its gradient."""
    tensors = probe.tensors_in(torch.float32)
    size = _size(form, tensors)
    root = (eps or 1e-7) ** 0.5
    for scale in (1.0, root, 0.03 * root, 300.0):
        x = probe.input(torch.float32, scale=scale)
        if not near(probe.run(x, tensors), form.reference(x, tensors, eps), scale=size):
            raise Unlike(f"it treats eps otherwise than sqrt(mean + eps) with eps={eps}")
    for shape in probe.other_shapes():
        _verify_shape(probe, form, eps, shape)
    x = probe.input(torch.float32)
    if not near(probe.run(x, tensors, training=False), form.reference(x, tensors, eps), scale=size):
        raise Unlike("it computes something else in evaluation than in training")
    _verify_gradient(probe, form, eps)


def _verify_shape(probe: Probe, form: Form, eps: float | None, shape: tuple[int, ...]) -> None:
    """Where the module takes inputs of a shape, it must give the same; it need not take them."""
    tensors = probe.tensors_in(torch.float32)
    x = probe.input(torch.float32, shape=shape)
    try:
        y = probe.run(x, tensors)
    except Unlike:
        return
    try:
        ours = form.reference(x, tensors, eps)
    except RuntimeError:
        raise Unlike(f"it takes an input of {shape}, whose end is not {probe.over}") from None
    size = _size(form, tensors)
    if y.shape != ours.shape or not near(y, ours, scale=size):
        raise Unlike(f"of an input of {shape} it gives no norm over {probe.over}")


def _verify_gradient(probe: Probe, form: Form, eps: float | None) -> None:
    names = [name for name in (form.weight, form.bias) if name is not None]

    def gradients(run: Callable[[torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]) -> Any:
        tensors = {
            name: tensor.requires_grad_()
            for name, tensor in probe.tensors_in(torch.float32).items()
        }
        x = probe.input(torch.float32, zero_row=False).requires_grad_()
        y = run(x, tensors)
        towards = probe.input(torch.float32, seed=1, zero_row=False)
        return torch.autograd.grad(y, [x, *(tensors[name] for name in names)], towards)

    try:
        got = gradients(probe.run)
    except RuntimeError as error:
        raise Unlike(f"it has no gradient: {error}") from None
    wanted = gradients(lambda x, tensors: form.reference(x, tensors, eps))
    for one, other in zip(got, wanted, strict=True):
        if not near(one, other, scale=other.abs().max() + 1.0, roundings=256):
            raise Unlike("its gradient is not that of its formula")


def _size(form: Form, tensors: dict[str, torch.Tensor]) -> torch.Tensor | float:
    """How large the parts of each result are, against which roundings are measured."""
    size: torch.Tensor | float = 4.0
    if form.weight is not None:
        size = 4.0 * (tensors[form.weight].detach() + form.offset).abs()
    if form.bias is not None:
        size = size + tensors[form.bias].detach().abs()
    return size


def _numbers(module: torch.nn.Module) -> list[float]:
    """Numbers among the module's attributes that may be an eps."""
    return [
        float(value)
        for value in vars(module).values()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 1
    ]


def _has_none(module: torch.nn.Module) -> bool:
    return any(value is None for name, value in vars(module).items() if "eps" in name)


def _double(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}
