"""Calls of ops over M rows, of which each can be made alone: what batch invariance is tested with.

Every argument with rows has them in its first dim, so row i of a call is `call.part(args, [i])`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

import gristmill
from gristmill.ops.registry import OPS
from gristmill.select.chooser import Choice, ranked
from gristmill.select.device import Device as Machine
from gristmill.select.problem import Problem

Arguments = tuple[Any, ...]
Device = torch.device | str


@dataclass(frozen=True)
class RowCall:
    """`make(rows, columns, dtype, device)` gives the op's arguments, those at `rows` with rows.

    `results`: which results belong to rows; an op that works in place has its arguments for them.
    `multiple`: of the columns.
    """

    op: str
    rows: tuple[int, ...]
    results: tuple[int, ...]
    make: Callable[[int, int, torch.dtype, Device], Arguments]
    name: str = ""
    multiple: int = 1

    def __str__(self) -> str:
        return f"{self.op}-{self.name}".rstrip("-").replace(" ", "_")

    def part(self, args: Arguments, chosen: Sequence[int] | slice) -> Arguments:
        """The same call of some rows; a slice leaves them where they are, a list copies them."""
        index = chosen if isinstance(chosen, slice) else list(chosen)
        return tuple(arg[index] if at in self.rows else arg for at, arg in enumerate(args))

    def laid(self, args: Arguments, lay: Callable[[torch.Tensor], torch.Tensor]) -> Arguments:
        """The same call of rows that lie elsewhere."""
        return tuple(lay(arg) if at in self.rows else arg for at, arg in enumerate(args))

    def run(self, args: Arguments) -> list[torch.Tensor]:
        """What belongs to rows of a call's results, on arguments of its own."""
        own = tuple(copy_of(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)
        return self.of_rows(own, OPS[self.op].run(*own))

    def of_rows(self, args: Arguments, results: Any) -> list[torch.Tensor]:
        written = OPS[self.op].written
        if isinstance(results, torch.Tensor):
            results = (results,)
        found = [args[at] for at in written] + list(results or ())
        return [found[at] for at in self.results]


def chosen_for(call: RowCall, args: Arguments, machine: Machine) -> tuple[Choice, Problem]:
    """What the chooser takes for a call on some machine, in the modes that are in force."""
    op = OPS[call.op]
    problem = op.problem(*args, device=machine)
    return ranked(op.name, op.variants, problem)[0], problem


def launch_of(call: RowCall, args: Arguments, machine: Machine) -> tuple[str, Any, str]:
    """All that the bits of a row depend on: variant, config, and the kernel that does the rows."""
    with gristmill.batch_invariant():
        choice, problem = chosen_for(call, args, machine)
    programs = choice.variant.programs(problem, choice.config)
    return choice.variant.name, choice.config, programs[0].names[0]


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """With memory of its own, but the same strides and alignment."""
    whole = tensor.untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(whole, tensor.storage_offset(), tensor.size(), tensor.stride())


# --- where rows may lie


def aligned(x: torch.Tensor) -> torch.Tensor:
    return x.clone(memory_format=torch.contiguous_format)


def unaligned(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def far_apart(x: torch.Tensor) -> torch.Tensor:
    """Rows of a wider tensor, an odd number of elements apart."""
    *leading, last = x.shape
    return x.new_empty((*leading, last + 3))[..., 1 : last + 1].copy_(x)


def spread(x: torch.Tensor) -> torch.Tensor:
    """Columns that do not lie side by side."""
    return x.new_empty((*x.shape, 2))[..., 1].copy_(x)


def nested(x: torch.Tensor) -> torch.Tensor:
    """Two leading dims that lie the other way round; the number of rows must be even."""
    rows = x.reshape(2, x.shape[0] // 2, *x.shape[1:]).transpose(0, 1)
    return rows.contiguous().transpose(0, 1)


PLACES = (aligned, unaligned, far_apart, spread)


# --- the calls


def _rows(count: int, columns: int, dtype: torch.dtype, device: Device) -> torch.Tensor:
    """Drawn on the CPU: the same numbers on every device."""
    return torch.randn(count, columns).to(dtype).to(device)


def _example(name: str, **changes: Any) -> Callable[..., Arguments]:
    """The op's own example, with arguments by name changed, or made by `change(args)`."""

    def make(count: int, columns: int, dtype: torch.dtype, device: Device) -> Arguments:
        op = OPS[name]
        args = list(op.example((count, columns), dtype, device))
        names = [argument.name for argument in op.overload._schema.arguments]
        for key, value in changes.items():
            args[names.index(key)] = value(args) if callable(value) else value
        return tuple(args)

    return make


def _like(position: int) -> Callable[[list[Any]], torch.Tensor]:
    return lambda args: torch.randn_like(args[position])


def _numbers(position: int) -> Callable[[list[Any]], torch.Tensor]:
    """One of the accumulator's dtype for each row."""

    def make(args: list[Any]) -> torch.Tensor:
        x = args[position]
        own = torch.promote_types(x.dtype, torch.float32)
        return torch.randn(x.shape[:-1]).to(own).to(x.device)

    return make


def _mask(dtype: torch.dtype) -> Callable[[list[Any]], torch.Tensor]:
    def make(args: list[Any]) -> torch.Tensor:
        x = args[0]
        drawn = torch.rand(x.shape) < 0.8 if dtype == torch.bool else torch.randn(x.shape)
        return drawn.to(dtype).to(x.device)

    return make


def _classes(position: int, width: int = -1) -> Callable[[list[Any]], torch.Tensor]:
    """A weight for each class."""
    return lambda args: torch.rand(args[position].shape[width]).to(args[position].device) + 0.5


def _nothing(args: list[Any]) -> torch.Tensor:
    rows = next(arg for arg in args if isinstance(arg, torch.Tensor))
    own = torch.promote_types(rows.dtype, torch.float32)
    return torch.empty(0, dtype=own, device=rows.device)


def _norms() -> list[RowCall]:
    calls = []
    for norm, casting in (("rms_norm", {"casting": "llama"}), ("layer_norm", {})):
        add, fp8, back = f"add_{norm}", f"{norm}_fp8", f"{norm}_backward"
        calls += [
            RowCall(norm, (0,), (0,), _example(norm)),
            RowCall(
                norm, (0,), (0,), _example(norm, weight=None, out_dtype=torch.float32), "no weight"
            ),
            RowCall(add, (0, 1), (0, 1), _example(add, weight_offset=1.0, **casting)),
            RowCall(fp8, (0,), (0, 1), _example(fp8, amax=True)),
            RowCall(f"add_{fp8}", (0, 1), (0, 1, 2), _example(f"add_{fp8}")),
            RowCall(back, (0, 1), (0,), _example(back)),
            RowCall(back, (0, 1, 3), (0,), _example(back, dsum=_like(0)), "dsum"),
        ]
    fused = "fused_add_rms_norm_"
    return [*calls, RowCall(fused, (0, 1), (0, 1), _example(fused))]


def _softmaxes() -> list[RowCall]:
    calls = []
    for name in ("softmax", "log_softmax"):
        calls += [
            RowCall(name, (0,), (0,), _example(name, scale=0.3)),
            RowCall(name, (0, 3), (0,), _example(name, mask=_mask(torch.bool)), "bool mask"),
            RowCall(name, (0, 3), (0,), _example(name, mask=_mask(torch.float32)), "mask"),
            RowCall(f"{name}_backward", (0, 1), (0,), _example(f"{name}_backward")),
        ]
    return calls


def _entropies() -> list[RowCall]:
    calls = []
    options: dict[str, dict[str, Any]] = {
        "": {"reduction": "none"},
        "options": {
            "reduction": "none",
            "label_smoothing": 0.1,
            "z_loss": 1e-3,
            "softcap": 5.0,
            "weight": _classes(0),
            "return_lse": True,
        },
    }
    for word, values in options.items():
        for name, results in (
            ("cross_entropy", (0, 1)),
            ("cross_entropy_one_pass", (0, 1, 2)),
            ("cross_entropy_one_pass_", (0, 1, 2)),
        ):
            calls.append(RowCall(name, (0, 1), results, _example(name, **values), word))
    back, shard = "cross_entropy_backward", "cross_entropy_shard"
    own = {**options["options"], "weight": _classes(2)}
    del own["return_lse"]
    own |= {"dloss": _numbers(2), "dlse": _numbers(2), "denominators": _nothing}
    return [
        *calls,
        # A mean over a whole batch, whose denominators each row is given.
        RowCall(back, (2, 3, 4), (0,), _example(back), "mean"),
        RowCall(back, (0, 1, 2, 3, 4), (0,), _example(back, **own), "options"),
        RowCall(shard, (0, 1), (0,), _example(shard, sums=True)),
        RowCall("scale_gradient_", (0, 1), (0,), _example("scale_gradient_", factor=_numbers(0))),
    ]


def _products() -> list[RowCall]:
    whole, back = "linear_cross_entropy", "linear_cross_entropy_backward"
    return [
        RowCall("linear", (0,), (0,), _example("linear", activation="gelu")),
        RowCall("linear_with_pre", (0,), (0, 1), _example("linear_with_pre")),
        RowCall("matmul", (0,), (0,), _example("matmul")),
        RowCall(whole, (0, 2), (0, 1), _example(whole, reduction="none")),
        RowCall(back, (0, 2, 7), (0,), _example(back)),
        RowCall("nvfp4_linear", (0,), (0,), _example("nvfp4_linear"), multiple=32),
        RowCall(
            "nvfp4_linear_backward", (0,), (0,), _example("nvfp4_linear_backward"), multiple=32
        ),
        RowCall("moe", (0, 1, 2), (0,), _example("moe")),
        RowCall("moe_backward", (0, 1, 2, 3), (0, 1), _example("moe_backward")),
        RowCall("nvfp4_moe", (0, 1, 2), (0,), _example("nvfp4_moe"), multiple=32),
        RowCall(
            "nvfp4_moe_backward", (0, 1, 2, 3), (0, 1), _example("nvfp4_moe_backward"), multiple=32
        ),
    ]


def _routers() -> list[RowCall]:
    name, back = "topk_router", "topk_router_backward"
    biased = _example(name, scoring="sigmoid", bias=_classes(0), scale=2.5, ids_dtype=torch.int64)
    return [
        RowCall(name, (0,), (0, 1), _example(name)),
        RowCall(name, (0,), (0, 1), _example(name, renormalize=False), "as they are"),
        RowCall(name, (0,), (0, 1), biased, "bias"),
        RowCall(back, (0, 1, 2), (0,), _example(back)),
    ]


ROW_CALLS = (*_norms(), *_softmaxes(), *_entropies())
CALLS = (*ROW_CALLS, *_products(), *_routers())
