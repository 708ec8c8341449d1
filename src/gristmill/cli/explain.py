"""`gristmill explain`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import typer

from gristmill.cli.common import (
    parse_options,
    parse_shape,
    torch_device,
    torch_dtype,
    write_json,
)
from gristmill.explain import explain_call
from gristmill.ops.registry import known_op
from gristmill.select.device import device_of
from gristmill.select.overrides import batch_invariant as batch_invariant_rows
from gristmill.select.overrides import is_batch_invariant
from gristmill.warmup import target_device


def run(
    name: str,
    shape: str,
    dtype: str,
    options: Sequence[str],
    arch: str | None,
    *,
    deterministic: bool,
    batch_invariant: bool,
    as_json: bool,
) -> None:
    op = known_op(name)
    device = device_of(torch_device(None)) if arch is None else target_device(arch)
    # Meta tensors: the choice depends on shapes and dtypes only, and costs no memory.
    sizes, kind = parse_shape(shape), torch_dtype(dtype)
    args = op.example_with(parse_options(options), sizes, kind, "meta", device)
    op.check(*args)
    # Inside: how a call is seen depends on the mode, too.
    with batch_invariant_rows(batch_invariant or is_batch_invariant()):
        problem = op.problem(*args, device=device)
        problem = replace(problem, deterministic=deterministic or problem.deterministic)
        found = explain_call(op, args, problem)
    if as_json:
        write_json(found.as_dict())
    else:
        typer.echo(str(found))
