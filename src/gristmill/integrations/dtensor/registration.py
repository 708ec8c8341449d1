"""Tells DTensor the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._op_schema import RuntimeSchemaInfo
from torch.distributed.tensor.experimental import register_sharding

from gristmill.errors import ArgumentError
from gristmill.integrations.dtensor.rules import RULES, Rule
from gristmill.integrations.dtensor.vocabulary import Way
from gristmill.ops.op import NAMESPACE


def register() -> None:
    """Register the rule of every op."""
    for name, rule in RULES.items():
        _register(getattr(getattr(torch.ops, NAMESPACE), name).default, rule)


def _register(overload: Any, rule: Rule) -> None:
    arguments = overload._schema.arguments
    written = [one.name for one in arguments if one.alias_info and one.alias_info.is_write]

    def shardings(*args: Any, **kwargs: Any) -> Sequence[Way]:
        call = {
            argument.name: kwargs.get(argument.name, argument.default_value)
            for argument in arguments
        }
        # The dispatcher leaves out trailing arguments that equal their defaults.
        call.update(zip(call, args, strict=False))
        ways = rule(call).ways(call)
        if written:
            _refuse_moves(overload, call, written, ways)
        return ways

    register_sharding(overload)(shardings)
    # DTensor remembers what it has decided, by the placements of the tensors and by the other
    # arguments from `static_argnum` on, for which `register_sharding` takes the first int. Our
    # options before it, of other types, would not count: whether a gradient is wanted, a layout,
    # or which of two optional tensors was given. So all arguments count, from the first one on.
    info = RuntimeSchemaInfo(static_argnum=0)
    DTensor._op_dispatcher.sharding_propagator.op_to_schema_info[overload] = info


def _refuse_moves(
    overload: Any, call: Mapping[str, Any], written: Sequence[str], ways: Sequence[Way]
) -> None:
    """What is written to has to lie as a way has it: a copy that was moved would be lost."""
    names = list(call)
    held = [tuple(call[name].placements) for name in written]
    allowed = {tuple(inputs[names.index(name)] for name in written) for _, inputs in ways}
    if all(one in allowed for one in zip(*held, strict=True)):
        return
    op = overload._schema.name.split("::")[1]
    shown = ", ".join(f"{name} {list(one)}" for name, one in zip(written, held, strict=True))
    raise ArgumentError(
        f"{op}: works in place, so that what it writes to cannot be moved between ranks; all of it "
        f"must be sharded alike, along dims of rows, or replicated; got {shown}"
    )
