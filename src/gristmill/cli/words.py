"""Options that several commands have, with their help."""

from __future__ import annotations

from typing import Annotated

import typer

from gristmill.cli.common import DTYPE_HELP, SHAPE_HELP

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
Shapes = Annotated[list[str] | None, typer.Option("--shape", help=SHAPE_HELP + " May be repeated.")]
Dtypes = Annotated[list[str] | None, typer.Option("--dtype", help=DTYPE_HELP + " May be repeated.")]
Device = Annotated[
    str | None, typer.Option("--device", help="cuda, cuda:1 or cpu; by default the GPU.")
]
