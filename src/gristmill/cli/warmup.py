"""`gristmill warmup`."""

from __future__ import annotations

from collections.abc import Sequence

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from gristmill.cli.common import console, parse_shape, torch_dtype
from gristmill.warmup import DTYPES, Warmed, warmup


def run(ops: Sequence[str], shapes: Sequence[str], dtypes: Sequence[str], arch: str | None) -> None:
    out = console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=out, transient=True, disable=not out.is_terminal) as bar:
        task = bar.add_task("compiling", total=None)

        def show(warmed: Warmed, number: int, total: int) -> None:
            kernels = ", ".join(name.split("<")[0] for name in warmed.kernels)
            what = f"{warmed.op} {warmed.variant} ({kernels}) for {warmed.arch}"
            out.print(f"{warmed.seconds:7.3f} s  {warmed.how:8s}  {what}", markup=False)
            bar.update(task, completed=number, total=total)

        done = warmup(
            ops or None,
            shapes=[parse_shape(shape) for shape in shapes] or None,
            dtypes=[torch_dtype(dtype) for dtype in dtypes] or DTYPES,
            arch=arch,
            progress=show,
        )
    compiled = [one for one in done if one.how == "compiled"]
    seconds = sum(one.seconds for one in done)
    out.print(
        f"{len(compiled)} programs compiled, {len(done) - len(compiled)} already in the cache, "
        f"{seconds:.1f} s"
    )
