"""What the numbers were made with: the machine, versions, peers, methods, commands, runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gristmill.bench.page.html import Html, cell, command, element, join, row, table
from gristmill.bench.results import Results

_NAMES = {
    "driver": "Driver",
    "cuda": "CUDA",
    "torch": "torch",
    "triton": "Triton",
    "python": "Python",
    "date": "Date",
}


def gpu_of(results: Results) -> str:
    return str(results.meta.get("gpu") or "an unknown device")


def facts(results: Results) -> Html:
    """The machine and the versions, in short."""
    meta = results.meta
    told: dict[str, object] = {"Device" if meta.get("device") == "cpu" else "GPU": gpu_of(results)}
    told |= {name: meta[key] for key, name in _NAMES.items() if meta.get(key)}
    told["gristmill"] = " ".join(map(str, filter(None, _revision(meta))))
    is_cpu = meta.get("device") == "cpu"  # which has no roof worth the name
    if meta.get("copy_tb_per_s") and not is_cpu:
        told["Copy, a roof"] = f"{meta['copy_tb_per_s']:.2f} TB/s at the largest size"
    for dtype, rate in ({} if is_cpu else meta.get("mm_tflop_per_s", {})).items():
        told["Product, a roof"] = f"{rate:.0f} TFLOP/s, {dtype}"
    if len(meta.get("runs") or []) > 1:
        told["Runs"] = f"rows of {len(meta['runs'])} runs"
    pairs = [_pair(name, value) for name, value in told.items()]
    peers = ", ".join(f"{name} {version}" for name, version in meta.get("peers", {}).items())
    pairs.append(_pair("Peers", peers or "none", "wide"))
    missing = meta.get("missing_peers", {})
    if missing:
        absent = "; ".join(f"{name} ({reason})" for name, reason in missing.items())
        pairs.append(_pair("Took no part", absent, "wide"))
    return element("dl", *pairs, class_="facts")


def _pair(name: str, value: object, class_: str | None = None) -> Html:
    return element("div", element("dt", name), element("dd", value), class_=class_)


def _revision(meta: Mapping[str, Any]) -> tuple[Any, ...]:
    return meta.get("gristmill"), meta.get("revision")


def runs(results: Results) -> Html:
    """The commands that made the rows; of several runs, what each of them brought."""
    meta = results.meta
    found = meta.get("runs") or []
    if len(found) > 1:
        return _runs(found)
    made = [element("li", command(str(line))) for line in meta.get("commands") or []]
    return join([element("p", "Made by:"), element("ul", *made, class_="plain")] if made else [])


def _runs(found: Sequence[Mapping[str, Any]]) -> Html:
    header = ["run", "rows", "date", "revision", "torch", "peers", "suites", "command"]
    lines = []
    for index, run in enumerate(found):
        peers = ", ".join(f"{name} {version}" for name, version in run.get("peers", {}).items())
        words = (
            run.get("date", ""),
            run.get("revision") or run.get("gristmill", ""),
            run.get("torch", ""),
            peers,
            ", ".join(run.get("suites", [])),
        )
        cells = [
            cell(str(run.get("file", index + 1)), name="th scope=row"),
            cell(str(run.get("rows", ""))),
            *(cell(word, "l") for word in words),
            cell(join(map(command, run.get("commands") or []), " "), "l"),
        ]
        lines.append(row(cells))
    caption = f"Merged from {len(found)} runs; ratios are always of one run"
    return table(caption, header, lines, words=(0, 2, 3, 4, 5, 6, 7))


def methods(results: Results) -> Html:
    """How it was measured, in the words of the run."""
    meta = results.meta
    told = [element("p", f"Kernel time: {meta['method']}.")] if meta.get("method") else []
    told += [
        element("p", element("b", suite), f": {text}.")
        for suite, text in meta.get("methods", {}).items()
    ]
    if meta.get("jobs"):
        text = "What is run was compiled ahead, so that times of first calls are not told."
        told.append(element("p", text))
    rates = meta.get("copy_tb_per_s_by_mb", {})
    if rates and meta.get("device") != "cpu":
        lines = [
            row([cell(size, name="th scope=row"), cell(f"{rate:.2f}")])
            for size, rate in rates.items()
        ]
        told.append(
            element(
                "details",
                element("summary", "The roof at every size"),
                table("A copy that moves as many bytes", ["MB", "TB/s"], lines, class_="small"),
            )
        )
    return join(told)
