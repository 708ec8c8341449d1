"""`gristmill bench` and `gristmill bench compare`: options and help; the work is beside this."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from gristmill.cli.common import reported
from gristmill.cli.words import Device, Json, Shapes
from gristmill.errors import ArgumentError

_DEFAULT, _COMPARE = "run", "compare"
# What may stand beside --read: where to write what it shows.
_SHOWING = {"read", "json", "markdown", "plots", "output", "report", "check"}


class _Group(TyperGroup):
    """Its default command runs, under the group's own name, unless the first word is another's."""

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        if args[:1] == [_COMPARE]:
            return super().make_context(info_name, args, *more, **extra)
        return self.commands[_DEFAULT].make_context(info_name, args, *more, **extra)


bench_app = typer.Typer(
    cls=_Group,
    help="Measure gristmill against the peers that are installed; compare two such runs.",
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _listed(text: str | None) -> list[str]:
    """Words by commas."""
    return [] if text is None else [word.strip() for word in text.split(",")]


def _refuse_choices(context: typer.Context) -> None:
    """ArgumentError if the command line says what to measure, or how: --read has no use for it."""
    typed: list[str] = []
    for param in context.command.params:
        source = context.get_parameter_source(param.name or "")
        if param.name in _SHOWING or source is None or source.name != "COMMANDLINE":
            continue
        is_option = param.param_type_name == "option"
        typed += [max(param.opts, key=len)] if is_option else context.params[str(param.name)]
    if typed:
        raise ArgumentError(
            f"--read shows all that its files hold and measures nothing: leave out "
            f"{', '.join(typed)}, or --read"
        )


@bench_app.command(
    _DEFAULT,
    epilog="Examples: `gristmill bench --quick --report results`; "
    "`gristmill bench --all --jobs 16 --report results`, and when that was cut short the same "
    "with `--resume`; "
    "`gristmill bench rms_norm --sets quack,decode`; "
    "`gristmill bench --op rms_norm_bwd --shape 32768x4096 --peers quack --json out.json`; "
    "`gristmill bench nvfp4_linear --layers llama3_8b,8192x8192 --rows 1,16,64`; "
    "`gristmill bench nvfp4_moe --models deepseek-v3 --rows 1,32,1024 --routing uniform`; "
    "`gristmill bench vllm --models llama-8b --batches 1,16 --impls bf16,nvfp4_gristmill_norms`; "
    "`gristmill bench transformers --op training --impls eager,patched`; "
    "`gristmill bench host_cost cold_start`; "
    "`gristmill bench regret --op nvfp4_linear --seed 7 --grid --check`; "
    "`gristmill bench --read a.json --read b.json --report page`; "
    "`gristmill bench compare old.json new.json`",
)
@reported
def bench(
    context: typer.Context,
    suites: Annotated[
        list[str] | None,
        typer.Argument(
            help="Kernel time: rms_norm, layer_norm, softmax, cross_entropy, linear, nvfp4_linear, "
            "nvfp4_moe, moe, topk_router (by default these); host time of a call: host_cost; "
            "seconds until all is ready: cold_start; how good choices are: regret; what choosing "
            "costs: choice; a transformer block: end_to_end; whole models: vllm, transformers; or "
            "all.",
            show_default=False,
        ),
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All suites.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A few problems, fewer samples.")] = False,
    op: Annotated[
        list[str] | None,
        typer.Option(
            "--op",
            help="Only this of what the suites have: rms_norm, rms_norm_bwd, softmax_causal, "
            "cross_entropy_fwd_bwd, ...; of transformers training, loss, generation. May be "
            "repeated.",
        ),
    ] = None,
    sets: Annotated[
        str | None,
        typer.Option(
            help="Only problems of these sets of shapes: quack, hidden4096, deepseek_v3, decode, "
            "vocabularies, odd, scores, output_8b, gate_8b, weights, weights_prefill, experts, "
            "experts_small, router128, router256; by commas."
        ),
    ] = None,
    shape: Shapes = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(
            help="bfloat16, float16 or float32 (or bf16, fp16, fp32). May be repeated.",
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="Only products with these weights, at every M of the suite: NxK or one of few, "
            "llama3_8b, llama3_70b, qwen3_32b, deepseek_v3; by commas."
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(help="Only products, or experts, of so many rows, M: as in 1,16,64."),
    ] = None,
    models: Annotated[
        str | None,
        typer.Option(
            help="Only the experts of these models: qwen3-30b-a3b, qwen3-235b-a22b, deepseek-v3, "
            "gpt-oss-120b, tiny; of vllm llama-8b, qwen3-30b-a3b, tiny; by commas."
        ),
    ] = None,
    routing: Annotated[
        str | None,
        typer.Option(
            help="Only experts whose tokens are spread like this: uniform, or skewed (half of all "
            "slots with four experts); by commas."
        ),
    ] = None,
    batches: Annotated[
        str | None,
        typer.Option(help="Of vllm and end_to_end: how many sequences decode at once, as in 1,16."),
    ] = None,
    impls: Annotated[
        str | None,
        typer.Option(
            help="Of end_to_end, vllm and transformers: only these rows, such as "
            "bf16,nvfp4_marlin or eager,patched; by commas."
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="Only these: eager, inductor, quack, liger, flashinfer, cublas, torch, humming, "
            "vllm; by commas. Or none; by default all."
        ),
    ] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Samples per timing.")] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0, help="Of regret: the seed by which NVFP4 problems are drawn; by default 0."
        ),
    ] = None,
    sizes: Annotated[
        int | None,
        typer.Option(
            min=1, max=200, help="Of regret: row counts drawn for each weight; by default 8."
        ),
    ] = None,
    weights: Annotated[
        int | None,
        typer.Option(
            min=0, max=1000, help="Of regret: weights drawn beside the named ones; by default 8."
        ),
    ] = None,
    grid: Annotated[
        bool,
        typer.Option(
            "--grid",
            help="Of regret: measure each weight at a fixed grid of row counts as well: 1, 2, 4, 8 "
            "to 512 by 8, 768, 1024, 2048, 4096.",
        ),
    ] = False,
    all_launches: Annotated[
        bool,
        typer.Option(
            "--all-launches",
            help="Of regret: compare with every launch that a variant enumerates.",
        ),
    ] = False,
    check: Annotated[
        bool,
        typer.Option(
            "--check", help="Exit code 1 if a goal of regret is not met, or nothing was judged."
        ),
    ] = False,
    device: Device = None,
    jobs: Annotated[
        int,
        typer.Option(
            min=0,
            help="First compile what peers run, in so many processes; first calls are then not "
            "told. 0: each at its first call.",
        ),
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the file of rows of a run that was cut short: what it has is not "
            "measured again, but for problems that lack a peer which is asked for now: these are, "
            "as a whole. Peers that they had must then be asked for, too.",
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the rows to this file.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the tables to this page.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Write SVGs into this folder.")] = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Write all of these into this folder: results.json, results.md, SVGs."),
    ] = None,
    report: Annotated[
        Path | None,
        typer.Option(help="The same, and the whole report as one page: index.html."),
    ] = None,
    read: Annotated[
        list[Path] | None,
        typer.Option(
            help="Measure nothing: show this file of an earlier run, on any machine. Several, of "
            "runs on the same GPU, are shown as one: all rows of a problem are those of the last "
            "file that has gristmill's. What to measure cannot be said beside it."
        ),
    ] = None,
) -> None:
    """Measure gristmill against the peers that are installed, all in one run.

    Peers take part when they can be imported. Every implementation is checked before it is timed;
    the roof is a copy of as many bytes. Exit code 1 if gristmill's own result was wrong.

    `gristmill bench compare OLD NEW` compares two files of rows: see `gristmill bench compare -h`.
    """
    from gristmill.bench.suites import KERNEL_SUITES
    from gristmill.cli.bench import run
    from gristmill.cli.bench_plan import ALL, Options

    if read:
        _refuse_choices(context)
    folder = report or output
    run(
        Options(
            suites=[ALL] if every else suites or list(KERNEL_SUITES),
            quick=quick,
            ops=op or [],
            sets=_listed(sets),
            shapes=shape or [],
            dtypes=dtype or [],
            layers=_listed(layers),
            rows=_listed(rows),
            models=_listed(models),
            routings=_listed(routing),
            batches=_listed(batches),
            implementations=_listed(impls),
            peers=None if peers is None else _listed(peers),
            samples=samples,
            seed=seed,
            sizes=sizes,
            weights=weights,
            grid=grid,
            all_launches=all_launches,
            check=check,
            device=device,
            json=json or (folder and folder / "results.json"),
            markdown=markdown or (folder and folder / "results.md"),
            plots=plots or folder,
            report=report,
            read=read or [],
            resume=resume,
            jobs=jobs,
            command=shlex.join(["gristmill", *sys.argv[1:]]),
        )
    )


@bench_app.command(
    _COMPARE,
    epilog="Exit code 1 if something became slower. "
    "Example: `gristmill bench compare main.json change.json --threshold 5%`",
)
@reported
def compare(
    old: Annotated[Path, typer.Argument(help="The rows to compare with: results.json of a run.")],
    new: Annotated[Path, typer.Argument(help="Those of a later one, on the same kind of GPU.")],
    threshold: Annotated[
        str, typer.Option(help="How much slower is too much, beyond noise: 3% or 0.03.")
    ] = "3%",
    across: Annotated[
        bool,
        typer.Option("--across", help="Compare also what different GPUs or versions have given."),
    ] = False,
    every: Annotated[
        bool, typer.Option("--rows", help="Show all rows, not only those that have changed.")
    ] = False,
    json: Json = False,
) -> None:
    """Say what became slower or faster from one run to another, noise taken into account."""
    from gristmill.cli.bench_compare import run

    run(old, new, threshold=threshold, across=across, every=every, as_json=json)
