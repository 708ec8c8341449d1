"""A copy of a module on the CPU, with random weights of its own, to see what it computes."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

# What patching, hooks and kernels from a hub leave in a module; the copy has none of them.
NOT_COPIED = {"forward", "_old_forward", "_hf_hook"}
# Enough for a rounding that differs in one element of a hundred to be told from one in ten.
_ELEMENTS = 2048


class Unlike(Exception):  # noqa: N818 - reads as what it says
    """A module is no norm that gristmill can stand in for; the message says why."""


@dataclass(frozen=True)
class Probe:
    """A module's class, what its copies share, and the shapes of its own weights.

    `tensors` are its parameters and buffers, `missing` those that are None; `size` is the end
    of the shape of an input; `attributes` and `buffers` (single numbers) are what each copy holds
    besides.
    """

    kind: type[torch.nn.Module]
    attributes: dict[str, Any]
    buffers: dict[str, torch.Tensor]
    tensors: dict[str, torch.Size]
    missing: tuple[str, ...]
    size: tuple[int, ...]

    @classmethod
    def of(cls, module: torch.nn.Module) -> Probe:
        if isinstance(module, torch.jit.ScriptModule):
            raise Unlike("it is a script module")
        fresh = vars(torch.nn.Module())
        attributes = {
            name: value
            for name, value in vars(module).items()
            if name not in fresh and name not in NOT_COPIED
        }
        buffers = dict(module.named_buffers(recurse=False))
        tensors = {name: p.shape for name, p in module.named_parameters(recurse=False)}
        tensors |= {name: buffer.shape for name, buffer in buffers.items() if buffer.dim()}
        return cls(
            type(module),
            attributes | _constants(attributes),
            _constant_buffers(module, {n: b for n, b in buffers.items() if not b.dim()}),
            tensors,
            tuple(n for n, v in (module._parameters | module._buffers).items() if v is None),
            _size(module, tensors),
        )

    @property
    def dims(self) -> int:
        return len(self.size)

    @property
    def over(self) -> str:
        """Over what it would normalise, for messages."""
        return "the last dim" if self.dims == 1 else f"the last {self.dims} dims"

    def tensors_in(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Random weights, both signs, none near zero: what they do to a result can be read off."""
        generator = torch.Generator().manual_seed(7)
        made = {}
        for name, shape in self.tensors.items():
            # In fp32 whatever the default is, of which fp16 would not hold the inputs.
            values, signs = (
                torch.rand(shape, generator=generator, dtype=torch.float32) for _ in range(2)
            )
            values = values + 0.5
            made[name] = torch.where(signs < 0.25, -values, values).to(dtype)
        return made

    def input(
        self,
        dtype: torch.dtype,
        *,
        scale: float = 1.0,
        shape: tuple[int, ...] | None = None,
        seed: int = 0,
        zero_row: bool = True,
    ) -> torch.Tensor:
        """Random numbers with a mean that is not zero; the first row may be zeros."""
        generator = torch.Generator().manual_seed(seed)
        whole = shape or (2, self._rows(), *self.size)
        x = (torch.randn(whole, generator=generator, dtype=torch.float32) + 0.5) * scale
        if zero_row:
            x[(0,) * (x.dim() - self.dims)] = 0.0
        return x.to(dtype)

    def other_shapes(self) -> list[tuple[int, ...]]:
        """Fewer dims and more; and some whose channels lie elsewhere, which a norm refuses."""
        few = [n for n in (2, 3, 5, 7) if n not in self.size]
        one, two = few[:2]
        last = [(one, *self.size), (one, two, 1, *self.size)]
        return [*last, (one, *self.size, two), (one, *self.size, two, two)]

    def run(
        self, x: torch.Tensor, tensors: dict[str, torch.Tensor], *, training: bool = True
    ) -> torch.Tensor:
        """What the class's own forward gives, without hooks, of a copy with these weights."""
        given = [x, *tensors.values()]
        before = [tensor.detach().clone() for tensor in given]
        y = self.forward(x, tensors, training=training)
        if not all(map(torch.equal, before, given)):
            raise Unlike("it changes its input or its weights")
        return y

    def forward(
        self, x: torch.Tensor, tensors: dict[str, torch.Tensor], *, training: bool = True
    ) -> torch.Tensor:
        """As `run`, for tensors whose values cannot be looked at."""
        copy = self._copy(tensors, training)
        try:
            y = self.kind.forward(copy, x)
        except Exception as error:  # a module may fail in any way it likes
            first_line = (str(error).splitlines() or [""])[0]
            raise Unlike(
                f"its forward of a {x.dtype} input of {tuple(x.shape)} fails: "
                f"{type(error).__name__}: {first_line}"
            ) from None
        if not isinstance(y, torch.Tensor):
            raise Unlike(f"it returns no tensor but {type(y).__name__}")
        return y

    def _copy(self, tensors: dict[str, torch.Tensor], training: bool) -> torch.nn.Module:
        copy: torch.nn.Module = object.__new__(self.kind)
        vars(copy).update(vars(torch.nn.Module()))
        vars(copy).update(self.attributes, training=training)
        vars(copy)["_parameters"].update(dict.fromkeys(self.missing), **tensors)
        vars(copy)["_buffers"].update(self.buffers)
        return copy

    def _rows(self) -> int:
        columns = 1
        for n in self.size:
            columns *= n
        rows = max(3, _ELEMENTS // (2 * columns))
        return rows + 1 if rows in self.size else rows


@contextmanager
def undisturbed() -> Iterator[None]:
    """Neither do probes leave traces (random numbers), nor do modes in force change them."""
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device("cpu"))
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        yield


def near(
    got: torch.Tensor, wanted: torch.Tensor, *, scale: torch.Tensor | float, roundings: int = 16
) -> bool:
    """Whether two fp32 results differ by roundings of numbers as large as `scale`, and no more."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    difference = (got.detach().double() - wanted.detach().double()).abs()
    both_none = got.isnan() & wanted.isnan()
    return bool(((difference <= roundings * 2.0**-24 * scale) | both_none).all())


def same_roundings(got: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether two results of 16 bits are the same, but for elements where fp32 sums decide a tie.

    A difference of one rounding in fp32 moves one element in some thousands (fp16) to the next
    value, or, where a value is rounded and then multiplied, to the one after that. Rounding once
    more or less moves every fourth.
    """
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return False
    limits = torch.finfo(got.dtype)
    one, other = got.detach().double(), wanted.detach().double()
    differs = (one != other) & ~(one.isnan() & other.isnan())
    if int(differs.sum()) > 2 + 0.01 * differs.numel():
        return False
    allowed = 2 * limits.eps * other.abs() + 2 * limits.smallest_normal * limits.eps
    return bool((~differs | ((one - other).abs() <= allowed)).all())


def _size(module: torch.nn.Module, tensors: dict[str, torch.Size]) -> tuple[int, ...]:
    """The end of the shape of what the module normalises."""
    stated = getattr(module, "normalized_shape", None)
    stated = (stated,) if isinstance(stated, int) else tuple(stated or ())
    shapes = set(tensors.values())
    if not shapes:
        return stated or (64,)
    if len(shapes) > 1:
        sizes = ", ".join(f"{name} {tuple(shape)}" for name, shape in tensors.items())
        raise Unlike(f"its parameters differ in shape: {sizes}")
    shape = tuple(shapes.pop())
    if 0 in shape:
        raise Unlike("its weight has no elements here: patch a model before it is sharded")
    if len(shape) != 1 and shape != stated:
        raise Unlike(f"its weight has the shape {shape}")
    if shape[-1] == 1:
        raise Unlike("it has a single column")
    return shape


def _constants(attributes: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Plain tensors among attributes, on the CPU: single numbers only."""
    tensors = {name: v for name, v in attributes.items() if isinstance(v, torch.Tensor)}
    for name, tensor in tensors.items():
        if tensor.dim() or tensor.is_meta:
            raise Unlike(
                f"its {name} is a plain tensor, no parameter: patch a model before it is sharded"
            )
    return {name: tensor.detach().cpu() for name, tensor in tensors.items()}


def _constant_buffers(
    module: torch.nn.Module, numbers: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Single numbers that no state dict fills; others may change what comes out."""
    saved = module.state_dict().keys() if numbers else ()
    for name, buffer in numbers.items():
        if name in saved or buffer.is_meta:
            raise Unlike(f"it has a buffer of one number ({name})")
    return {name: buffer.detach().cpu() for name, buffer in numbers.items()}
