"""`gristmill doctor`: what is here, and whether it works."""

from __future__ import annotations

import os
import platform
import time
from pathlib import Path
from typing import Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

import gristmill
from gristmill.bench.check import WrongResultError, check
from gristmill.bench.environment import (
    driver_version,
    package_version,
    processor,
    revision,
)
from gristmill.cli.common import FAILURE, console, torch_device, write_json
from gristmill.cli.doctor_cache import (
    default_folder,
    folder_line,
    folder_report,
    folder_warnings,
    layer_line,
    layer_problems,
    layer_reports,
)
from gristmill.errors import CompilerUnavailable, GristmillError
from gristmill.jit import cutedsl, triton
from gristmill.jit.nvrtc import compiler_version, include_dir
from gristmill.jit.optional import imported
from gristmill.ops.registry import OPS
from gristmill.select.copies import rotate
from gristmill.select.device import device_of
from gristmill.select.explain import explain_problem
from gristmill.settings import VARIABLES, settings, unknown_variables

Report = dict[str, Any]
# Typical of inference, and quick: on one core of a CPU the larger one takes 3.8 s, the smaller 0.4.
SHAPES, DTYPE = {"cuda": (256, 1024), "cpu": (64, 512)}, torch.bfloat16


def run(*, as_json: bool) -> None:
    report = examine()
    if as_json:
        write_json(report)
    else:
        _show(report, console())
    if report["broken"]:
        raise typer.Exit(FAILURE)


def examine() -> Report:
    """Everything as plain data; `broken` lists what should work and does not."""
    settings()  # a mistake in the environment is the first thing to be told
    device = torch_device(None)
    compiler = _compiler()
    ops = [_op(name, device) for name in OPS]
    broken = [
        f"{op['op']}: the self-check failed: {op['check']['error']}"
        for op in ops
        if not op["check"]["passed"]
    ]
    if device.type == "cuda" and compiler["error"]:
        broken.append(f"kernels cannot be compiled for this GPU: {compiler['error']}")
    kept, layers = folder_report(), layer_reports()
    warnings = [*unknown_variables(), *_unusable_compilers(), *folder_warnings(kept)]
    # Where nothing may be compiled, a kernel that no layer has is an error of the call.
    (warnings if settings().jit else broken).extend(layer_problems(layers))
    return {
        "gristmill": {
            "version": gristmill.__version__,
            "revision": revision(),
            "folder": str(Path(__file__).resolve().parent.parent),
        },
        "python": platform.python_version(),
        "torch": {"version": torch.__version__, "cuda": torch.version.cuda},
        "device": _device(device),
        "compiler": compiler,
        "cache": kept,
        "layers": layers,
        "settings": _settings(),
        "ops": ops,
        "warnings": warnings,
        "broken": broken,
    }


def _device(device: torch.device) -> Report:
    found = device_of(device)
    if device.type != "cuda":
        return {"kind": found.kind, "name": processor(), "count": 0, "driver": driver_version()}
    return {
        "kind": found.kind,
        "name": found.name,
        "count": torch.cuda.device_count(),
        "arch": found.arch,
        "multiprocessors": found.multiprocessors,
        "l2_mib": round(found.l2_bytes / 2**20),
        "memory_gib": round(torch.cuda.get_device_properties(device).total_memory / 2**30),
        "driver": driver_version(),
    }


def _compiler() -> Report:
    report: Report = {
        "version": None,
        "library": None,
        "headers": None,
        "cuda_bindings": package_version("cuda-bindings"),
        "triton": package_version("triton"),
        "cutedsl": package_version(cutedsl.DISTRIBUTION),
        "error": None,
    }
    try:
        report["version"] = compiler_version()
    except CompilerUnavailable as error:
        report["error"] = str(error)
        return report
    report["library"] = _nvrtc_path()
    headers = include_dir()
    report["headers"] = None if headers is None else str(headers)
    return report


def _unusable_compilers() -> list[str]:
    """Why optional compilers that are installed cannot be used."""
    found = []
    for compiler in (triton, cutedsl):
        try:
            if compiler.installed_version():
                compiler.compiler_version()
        except CompilerUnavailable as error:
            found.append(str(error))
    return found


def _nvrtc_path() -> str | None:
    try:
        return str(imported("cuda.pathfinder").load_nvidia_dynamic_lib("nvrtc").abs_path)
    except Exception:  # only for show: whatever the helper says, the answer is "not known"
        return None


def _settings() -> list[Report]:
    now = settings()
    values = {
        "GRISTMILL_CACHE_DIR": "" if now.cache_dir is None else str(now.cache_dir),
        "GRISTMILL_CACHE_LAYERS": os.pathsep.join(map(str, now.cache_layers)),
        "GRISTMILL_JIT": "on" if now.jit else "off",
        "GRISTMILL_USE": ",".join(f"{op}:{variant}" for op, variant in now.use.items()),
        "GRISTMILL_TABLE": now.table,
        "GRISTMILL_TUNE": now.tune,
        "GRISTMILL_RECORD": "" if now.record is None else str(now.record),
        "GRISTMILL_BATCH_INVARIANT": str(int(now.batch_invariant)),
        "GRISTMILL_LOG": now.log,
        "GRISTMILL_NVTX": str(int(now.nvtx)),
        "GRISTMILL_VLLM": ",".join(sorted(now.vllm)),
        "GRISTMILL_DEBUG": "1" if now.debug else "0",
    }
    defaults = {variable.name: variable.default for variable in VARIABLES}
    defaults["GRISTMILL_CACHE_DIR"] = default_folder()
    return [
        {
            "name": variable.name,
            "value": value,
            "origin": "default" if value == defaults[variable.name] else "environment",
            "values": variable.values,
            "help": variable.help,
        }
        for variable in VARIABLES
        for value in (values[variable.name],)
    ]


def _op(name: str, device: torch.device) -> Report:
    op = OPS[name]
    shape = SHAPES[device.type]
    report: Report = {"op": name, "summary": op.summary, "shape": list(shape), "dtype": "bfloat16"}
    # Before explaining: a variant that cannot be built is known as such only once it was tried.
    report["check"] = self_check(name, device)
    here = device_of(device)
    args = op.example_for(here, shape, DTYPE)
    found = explain_problem(name, op.variants, op.problem(*args, device=here))
    report.update(chosen=found.chosen, source=found.source, reason=found.reason)
    report["variants"] = [row.as_dict() for row in found.rows]
    return report


def self_check(name: str, device: torch.device) -> Report:
    """Run the op once and hold its outputs, and whatever it wrote to, against the reference."""
    op = OPS[name]
    start = time.perf_counter()
    try:
        args = op.example(SHAPES[device.type], DTYPE, device)
        (expected_args,) = rotate(args, 1)
        outputs = _tensors(op.run(*args)) + _tensors(args)
        expected = _tensors(op.reference(*expected_args)) + _tensors(expected_args)
        error = check(outputs, expected)
    except (GristmillError, WrongResultError, RuntimeError) as problem:
        return {"passed": False, "error": f"{type(problem).__name__}: {problem}", "seconds": None}
    return {"passed": True, "error": error, "seconds": round(time.perf_counter() - start, 4)}


def _tensors(values: Any) -> list[torch.Tensor]:
    if values is None:
        return []
    values = [values] if isinstance(values, torch.Tensor) else values
    return [value for value in values if isinstance(value, torch.Tensor)]


def _show(report: Report, out: Console) -> None:
    own, compiler, kept = report["gristmill"], report["compiler"], report["cache"]
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    at = f" at {own['revision']}" if own["revision"] else ""
    table.add_row("gristmill", f"{own['version']}{at}, {own['folder']}")
    torch_cuda = f"CUDA {report['torch']['cuda']}" if report["torch"]["cuda"] else "no CUDA"
    table.add_row(
        "torch", f"{report['torch']['version']} ({torch_cuda}), Python {report['python']}"
    )
    table.add_row("device", _device_line(report["device"]))
    table.add_row("compiler", _compiler_line(compiler))
    table.add_row("", _extra_compilers_line(compiler))
    table.add_row("cache", folder_line(kept))
    for layer in report["layers"]:
        table.add_row("layer", layer_line(layer))
    for setting in report["settings"]:
        shown = f"{setting['value'] or '(empty)'}  ({setting['origin']})"
        table.add_row(setting["name"], shown)
    out.print(table)
    out.print()
    out.print(_ops_table(report["ops"]))
    for warning in report["warnings"]:
        out.print(Text(f"warning: {warning}", style="yellow"))
    for problem in report["broken"]:
        out.print(Text(f"broken: {problem}", style="red"))
    if not report["broken"]:
        out.print(Text("Everything that should work here does.", style="green"))


def _device_line(device: Report) -> str:
    if device["kind"] == "cpu":
        return f"no GPU; CPU: {device['name']}"
    return (
        f"{device['count']} x {device['name']} ({device['arch']}, {device['multiprocessors']} SMs, "
        f"{device['l2_mib']} MiB L2, {device['memory_gib']} GiB), driver {device['driver']}"
    )


def _compiler_line(compiler: Report) -> str:
    bindings = f"cuda-bindings {compiler['cuda_bindings'] or 'not found'}"
    if compiler["version"] is None:
        return f"{compiler['error']} ({bindings})"
    return (
        f"{compiler['version']} ({compiler['library'] or 'path unknown'}), {bindings}, "
        f"headers {compiler['headers'] or 'not found'}"
    )


def _extra_compilers_line(compiler: Report) -> str:
    """Compilers that some variants need, and nothing else."""
    names = {"triton": "Triton", "cutedsl": "CuTe DSL"}
    return ", ".join(f"{name} {compiler[key] or 'not found'}" for key, name in names.items())


def _ops_table(ops: list[Report]) -> Table:
    shape = "x".join(map(str, ops[0]["shape"]))
    table = Table(
        title=f"ops at {shape} bfloat16", title_justify="left", title_style="bold", show_lines=True
    )
    table.add_column("op", no_wrap=True)
    table.add_column("runs", no_wrap=True)
    table.add_column("self-check", no_wrap=True)
    table.add_column("the others", overflow="fold")
    for op in ops:
        passed = op["check"]["passed"]
        others = "\n".join(
            f"{row['variant']}: {row['status']}" + (f", {row['reason']}" if row["reason"] else "")
            for row in op["variants"]
            if row["variant"] != op["chosen"]
        )
        table.add_row(
            op["op"],
            op["chosen"] or "nothing",
            Text("passed" if passed else "failed", style="green" if passed else "red"),
            Text(others),
        )
    return table
