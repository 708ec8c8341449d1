"""`gristmill explain`."""

from __future__ import annotations

import typer

from gristmill.cli.common import parse_shape, torch_device, torch_dtype, write_json
from gristmill.errors import ArgumentError
from gristmill.ops.registry import OPS
from gristmill.select.device import device_of
from gristmill.select.explain import explain_problem
from gristmill.warmup import target_device


def run(name: str, shape: str, dtype: str, arch: str | None, *, as_json: bool) -> None:
    if name not in OPS:
        raise ArgumentError(f"unknown op {name!r}: there are {', '.join(OPS)}")
    op = OPS[name]
    device = device_of(torch_device(None)) if arch is None else target_device(arch)
    # Meta tensors: the choice depends on shapes and dtypes only, and costs no memory.
    args = op.example(parse_shape(shape), torch_dtype(dtype), "meta")
    found = explain_problem(op.name, op.variants, op.problem(*args, device=device))
    if as_json:
        write_json(found.as_dict())
    else:
        typer.echo(str(found))
