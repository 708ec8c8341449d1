"""The commands, their options and their help; the work is in the modules beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gristmill.cli.bench_app import bench_app
from gristmill.cli.common import DTYPE_HELP, SHAPE_HELP, reported
from gristmill.cli.words import Device, Dtypes, Json, Shapes

app = typer.Typer(
    name="gristmill",
    help="GPU kernels for PyTorch, compiled on first use, the right one picked for each shape.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
cache_app = typer.Typer(
    help="Look at, ship, check or empty the cache of compiled kernels.", no_args_is_help=True
)
app.add_typer(cache_app, name="cache")
app.add_typer(bench_app, name="bench")

Sets = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        help="NAME=VALUE: another value for an argument of the op than its example has, such as "
        "activation=silu or causal=top_left. May be repeated.",
    ),
]
Arch = Annotated[
    str | None,
    typer.Option("--arch", help="Ask about another GPU, here or not: sm_80, sm_90a, sm_100a, ..."),
]


def _version(wanted: bool) -> None:
    if wanted:
        from gristmill import __version__

        typer.echo(f"gristmill {__version__}")
        raise typer.Exit


@app.callback()
def top(
    _: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    pass


@app.command(
    epilog="Exit code 1 if something that should work does not. "
    "Example: `gristmill doctor --json > report.json`"
)
@reported
def doctor(json: Json = False) -> None:
    """Say what is here and whether it works: GPU, compiler, cache, settings, every op."""
    from gristmill.cli.doctor import run

    run(as_json=json)


@app.command(epilog="Example: `gristmill explain rms_norm --shape 4096x8192 --arch sm_100a`")
@reported
def explain(
    op: Annotated[str, typer.Argument(help="The op, such as rms_norm.")],
    shape: Annotated[str, typer.Option("--shape", help=SHAPE_HELP)] = "4096x8192",
    dtype: Annotated[str, typer.Option("--dtype", help=DTYPE_HELP)] = "bfloat16",
    options: Sets = None,
    arch: Arch = None,
    deterministic: Annotated[
        bool,
        typer.Option(
            "--deterministic", help="As under torch's use_deterministic_algorithms(True)."
        ),
    ] = False,
    batch_invariant: Annotated[
        bool, typer.Option("--batch-invariant", help="As under gristmill.batch_invariant().")
    ] = False,
    json: Json = False,
) -> None:
    """Say which variant of an op would run for a shape, and why not the others.

    With times where a tuned table has them, the roof, what decided and how to change it.
    """
    from gristmill.cli.explain import run

    run(
        op,
        shape,
        dtype,
        options or [],
        arch,
        deterministic=deterministic,
        batch_invariant=batch_invariant,
        as_json=json,
    )


@app.command(
    epilog="Examples: `gristmill warmup` for the GPU here; "
    "`gristmill warmup rms_norm --shape 1x4096 --arch sm_90a` in an image build without one; "
    "`gristmill warmup --all --arch sm_90a --bundle all.bundle` for machines without a compiler; "
    "`gristmill warmup --recorded run.jsonl --arch sm_90a --bundle my.bundle` for one program. "
    "Exit code 1 if something did not compile."
)
@reported
def warmup(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to warm up; by default all.")] = None,
    shape: Shapes = None,
    dtype: Dtypes = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch",
            help="Compile for this architecture, here or not: sm_80, sm_90a, sm_100a, ... "
            "May be repeated.",
        ),
    ] = None,
    every: Annotated[
        bool,
        typer.Option(
            "--all", help="Every kernel of the ops for these dtypes, not those of shapes."
        ),
    ] = False,
    recorded: Annotated[
        Path | None,
        typer.Option(help="What the calls in this file run, written by GRISTMILL_RECORD."),
    ] = None,
    program: Annotated[
        list[str] | None,
        typer.Option(
            "--program",
            help="One program, as the message of KernelNotCached names it. May be repeated.",
        ),
    ] = None,
    bundle: Annotated[
        Path | None,
        typer.Option(help="Also write it all into this file, for GRISTMILL_CACHE_LAYERS."),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes to compile in; by default by the cores.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only list what would be compiled.")
    ] = False,
    json: Json = False,
) -> None:
    """Compile kernels into the cache ahead of the first call, and into a bundle."""
    from gristmill.cli.warmup import Options, run

    run(
        Options(
            ops=ops or [],
            shapes=shape or [],
            dtypes=dtype or [],
            archs=arch or [],
            every=every,
            recorded=recorded,
            programs=program or [],
            bundle=bundle,
            workers=workers,
            dry_run=dry_run,
            json=json,
        )
    )


@app.command(
    epilog="Examples: `gristmill tune rms_norm --shape 4096x8192`; "
    "`GRISTMILL_RECORD=run.jsonl python serve.py`, then `gristmill tune --recorded run.jsonl`. "
    "Exit code 1 if nothing could be tuned."
)
@reported
def tune(
    ops: Annotated[list[str] | None, typer.Argument(help="Ops to tune; by default all.")] = None,
    shape: Shapes = None,
    dtype: Dtypes = None,
    recorded: Annotated[
        Path | None,
        typer.Option(help="Tune the problems in this file, written by GRISTMILL_RECORD."),
    ] = None,
    options: Sets = None,
    rows: Annotated[
        str | None,
        typer.Option(
            "--rows",
            "--hints",
            help="Numbers of rows to measure at, as in 1,16,64, in the place of those of --shape.",
        ),
    ] = None,
    capture_sizes: Annotated[
        str | None,
        typer.Option(
            help="In the place of --rows: the batches that a server captures CUDA graphs for, vllm "
            "or numbers as in 1,2,4,8. Between the first and the last only those are measured "
            "that are needed to find where the choice changes."
        ),
    ] = None,
    split: Annotated[
        bool,
        typer.Option(
            help="Also measure where the heuristics change their choice, and between two numbers "
            "of rows with different winners; without, only what is named."
        ),
    ] = True,
    probes: Annotated[
        int,
        typer.Option(
            min=1,
            help="Row ops and others that do not tile the rows: how many sizes to tell apart "
            "between two neighbouring hints.",
        ),
    ] = 1,
    again: Annotated[
        bool, typer.Option("--again", help="Also measure what a row covers already.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Time only the usual launch of each variant.")
    ] = False,
    table: Annotated[
        Path | None, typer.Option(help="Keep the rows in this file, not in the user's table.")
    ] = None,
    device: Device = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Processes to compile in; by default by the cores.")
    ] = None,
    json: Json = False,
) -> None:
    """Time the variants of ops ahead of time and keep the winners in a table.

    Says how many problems there are and about how long they take, then compiles all kernels, then
    measures. An interrupted run goes on where it was: what a row covers is passed over.
    """
    from gristmill.cli.tune import Options, run

    run(
        Options(
            ops=ops or [],
            shapes=shape or [],
            dtypes=dtype or [],
            recorded=recorded,
            rows=rows,
            capture_sizes=capture_sizes,
            options=options or [],
            split=split,
            probes=probes,
            again=again,
            quick=quick,
            table=table,
            device=device,
            workers=workers,
            json=json,
        )
    )


@app.command(epilog="Example: `gristmill tables rms_norm --stale`")
@reported
def tables(
    ops: Annotated[list[str] | None, typer.Argument(help="Only rows of these ops.")] = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Only rows that are passed over, with the reason.")
    ] = False,
    table: Annotated[
        Path | None, typer.Option(help="Show this file, not the tables in force here.")
    ] = None,
    device: Device = None,
    json: Json = False,
) -> None:
    """List the tuned rows that choices are made from: what was measured, when, who was second."""
    from gristmill.cli.tables import run

    run(ops or [], table, device, stale=stale, as_json=json)


@cache_app.command("ls")
@reported
def cache_ls(json: Json = False) -> None:
    """List the compiled kernels in the cache folder, and what its layers are."""
    from gristmill.cli.cache import ls

    ls(as_json=json)


@cache_app.command("clear")
@reported
def cache_clear(
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask first.")] = False,
) -> None:
    """Delete every compiled kernel from the cache folder. Layers stay as they are."""
    from gristmill.cli.cache import clear

    clear(ask=not yes)


@cache_app.command(
    "export",
    epilog="Example: `gristmill cache export kernels.bundle --arch sm_90a`, then on another "
    "machine `export GRISTMILL_CACHE_LAYERS=/opt/kernels.bundle`",
)
@reported
def cache_export(
    file: Annotated[Path, typer.Argument(help="The bundle to write.")],
    arch: Annotated[
        list[str] | None,
        typer.Option("--arch", help="Only kernels for this architecture. May be repeated."),
    ] = None,
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--source",
            help="Only kernels of this source, as in norm.cu or nvfp4*. May be repeated.",
        ),
    ] = None,
    tables: Annotated[bool, typer.Option(help="Put tuned tables into it, too.")] = True,
) -> None:
    """Write the kernels of the cache folder, and its tuned tables, into one file: a bundle.

    It is a zip with a manifest of hashes. Kernels depend on the architecture, not on the machine.
    """
    from gristmill.cli.cache import export

    export(file, arch or [], source or [], tables=tables)


@cache_app.command(
    "import",
    epilog="Without --sha256 the file must belong to you or root, in a folder that nobody else "
    "can write to. A layer (GRISTMILL_CACHE_LAYERS) needs no import. "
    "Example: `gristmill cache import kernels.bundle`",
)
@reported
def cache_import(
    file: Annotated[Path, typer.Argument(help="The bundle to read.")],
    sha256: Annotated[
        str | None, typer.Option(help="Take it only if this is the hash of the whole file.")
    ] = None,
) -> None:
    """Copy the kernels and tables of a bundle into the cache folder, each checked by its hash.

    All or nothing: a bundle with one damaged file is refused. A table that is there already stays.
    """
    from gristmill.cli.cache import import_

    import_(file, sha256)


@cache_app.command("verify", epilog="Exit code 1 if anything is damaged or may not be trusted.")
@reported
def cache_verify(
    path: Annotated[
        Path | None,
        typer.Argument(help="A bundle or a cache folder; by default the cache and its layers."),
    ] = None,
) -> None:
    """Check every kernel against its hash and its name, and who could have written it.

    What is damaged is never loaded anyway; this says so before it is needed.
    """
    from gristmill.cli.cache import verify

    verify(path)
