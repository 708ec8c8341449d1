"""How tools/sanitize.py starts compute-sanitizer, and what it reads in its output."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import sanitize_accepted
from sanitize_accepted import Access, variant_of

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 9  # what compute-sanitizer exits with where it has found something
STARTED, WALKED = "sanitize: run ", "sanitize: walked "
# Reports that are printed; the others are only counted.
_PRINTED = 2000

_SUMMARY = re.compile(r"^=+ ERROR SUMMARY: (\d+) error", re.MULTILINE)
_RACES = re.compile(r"^=+ RACECHECK SUMMARY: (\d+) hazard", re.MULTILINE)
# `at void f<int>(Params)+0x90`, `at f+0x90 in a.py:7`, `at 0x90 in a.cu:7:void f<int>(Params)`.
_PLACE = re.compile(
    r"\bat (?:0x[0-9a-f]+ in )?(?:\S+:\d+:)?(?:void )?([A-Za-z_][\w:]*)(?=[<(+]|\s*$)"
)
# `Race reported between Write access at f+0x90 in /a/b.cuh:7`, `and Read access at f+0xb0 in b.cu:9
# [31 hazards]`, `Write access at 0x90 in b.cu:7:f(Params)`. Where lines are known, f is a function
# inlined into the kernel.
_ACCESS = re.compile(r"\b(\w+) access at \S.*?(?= and \w+ access at |$)")
_LINE = re.compile(r" in (?:\S*/)?([^\s/:]+):(\d+)(?=[:\s\[]|$)")
_NO_REPORT = re.compile(
    r"COMPUTE-SANITIZER|ERROR SUMMARY|RACECHECK SUMMARY|LEAK SUMMARY|\(Identical error|"
    r"Warning: .* not supported|error buffer overflow|Error buffer overflow|"
    r"Maximum number of hazards reached"
)


def arguments(
    tool: str, kernels: Iterable[str], functions: Iterable[str], options: Sequence[str] = ()
) -> list[str]:
    """The options of compute-sanitizer; `kernels` are templates, `functions` have plain names.

    initcheck has to see every write, also those of torch. The others look at our kernels alone:
    reports about those of torch are not ours to mend.
    """
    found = ["--tool", tool, "--error-exitcode", str(FOUND), "--show-backtrace", "no"]
    found += ["--print-limit", str(_PRINTED)]
    if tool == "memcheck":
        # The driver's bindings look for functions that a driver may not have. A run that fails
        # must not take those behind it with it.
        found += ["--report-api-errors", "no", "--destroy-on-device-error", "kernel"]
    if tool != "initcheck":
        for name in sorted(kernels):
            found += ["--kernel-name", f"kernel_substring=_Z{len(name)}{name}I"]  # as it is mangled
        for name in sorted(functions):
            found += ["--kernel-name", f"kernel_substring={name}"]
    return [*found, *options]


@dataclass(frozen=True)
class Finding:
    """A report: its first line, the kernel (None if no function is named) and the run it came in.

    Where line numbers are known the kernel may be missing, and a function inlined into it is named
    instead. `accesses`: those that are reported to race.
    """

    title: str
    kernel: str | None
    run: str
    accesses: tuple[Access, ...] = ()


@dataclass
class Outcome:
    """What became of one process under a tool."""

    tool: str
    runs: int = 0
    launched: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    errors: list[Finding] = field(default_factory=list)
    others: list[Finding] = field(default_factory=list)  # in kernels that are not ours
    accepted: list[Finding] = field(default_factory=list)  # as sanitize_accepted.py has it
    broken: list[str] = field(default_factory=list)  # why nothing, or not everything, is known
    seconds: float = 0.0

    @property
    def clean(self) -> bool:
        return not (self.wrong or self.errors or self.broken)


def read(
    tool: str, text: str, code: int | None, ours: Iterable[str], *, accepting: bool = True
) -> Outcome:
    """From the output of a process and its exit code; None: it was ended for taking too long.

    `accepting`: reports that are accepted are no errors.
    """
    outcome, known = Outcome(tool), set(ours)
    reports = list(findings(text, known))
    for one in reports:
        # The other tools look at our kernels alone: see `arguments`.
        if tool == "initcheck" and one.kernel is not None and one.kernel not in known:
            outcome.others.append(one)
        elif accepting and sanitize_accepted.reason(tool, one.run, one.accesses):
            outcome.accepted.append(one)
        else:
            outcome.errors.append(one)
    counts = (_RACES if tool == "racecheck" else _SUMMARY).findall(text)
    if not counts:
        outcome.broken.append("compute-sanitizer gave no summary")
    elif sum(map(int, counts)) > len(reports):
        outcome.broken.append(
            f"compute-sanitizer counts {sum(map(int, counts))} errors and shows {len(reports)}"
        )
    if "rror buffer overflow" in text or "Maximum number of hazards reached" in text:
        outcome.broken.append("compute-sanitizer had more to report than it could hold")
    walked = _walked(text)
    if walked is None:
        outcome.broken.append("the runs did not come to their end")
    else:
        outcome.runs, outcome.wrong = walked["runs"], walked["wrong"]
        outcome.launched = Counter(walked["launched"])
    if code is None:
        outcome.broken.append("it took too long")
    elif code == FOUND and not reports:
        outcome.broken.append("compute-sanitizer has found something and shows nothing")
    elif code not in (0, FOUND) and not outcome.wrong:
        outcome.broken.append(f"it exited with {code}")
    return outcome


def findings(text: str, kernels: Collection[str] = ()) -> Iterator[Finding]:
    """Every report of an output, whatever the tool; `kernels`: the names of ours."""
    run, report_run = "", ""
    report: list[str] = []
    for line in [*text.splitlines(), "========= ERROR SUMMARY"]:
        if line.startswith(STARTED):
            run = line.removeprefix(STARTED).split(" ")[0]
        if not line.startswith("========="):
            continue
        rest = line.removeprefix("=========")
        is_title = rest.startswith(" ") and not rest.startswith("  ") and rest.strip() != ""
        if is_title or not rest.strip():
            if report:
                kernel = _kernel(report, kernels)
                yield Finding(report[0], kernel, report_run, tuple(_accesses(report)))
            report = []
        if is_title and not _NO_REPORT.search(rest):
            report, report_run = [rest.strip()], run
        elif report and rest.strip():
            report.append(rest.strip())


def _kernel(report: list[str], kernels: Collection[str]) -> str | None:
    """The first kernel of ours that is named, or else the first function."""
    named = [found[1] for line in report for found in _PLACE.finditer(line)]
    return next((name for name in named if name in kernels), next(iter(named), None))


def _accesses(report: list[str]) -> Iterator[Access]:
    for line in report:
        for found in _ACCESS.finditer(line):
            name, place = _PLACE.search(found[0]), _LINE.search(found[0])
            function = name[1] if name else ""
            if place:
                yield Access(found[1], function, place[1], int(place[2]))
            else:
                yield Access(found[1], function)


def _walked(text: str) -> dict[str, Any] | None:
    lines = [line for line in text.splitlines() if line.startswith(WALKED)]
    return json.loads(lines[-1].removeprefix(WALKED)) if lines else None


def together(tool: str, outcomes: Iterable[Outcome]) -> Outcome:
    """Those of all processes under one tool."""
    total = Outcome(tool)
    for one in outcomes:
        total.runs += one.runs
        total.launched += one.launched
        for name in ("wrong", "errors", "others", "accepted", "broken"):
            getattr(total, name).extend(getattr(one, name))
    return total


def never(outcome: Outcome, kernels: Iterable[str]) -> list[str]:
    """The kernels that were not launched once."""
    return sorted(name for name in kernels if not outcome.launched[name])


def table(outcomes: Sequence[Outcome]) -> str:
    """One line for each tool."""
    lines = [f"{'tool':<10} {'runs':>6} {'launches':>9} {'errors':>7} {'wrong':>6} {'seconds':>8}"]
    for one in outcomes:
        lines.append(
            f"{one.tool:<10} {one.runs:>6} {one.launched.total():>9} {len(one.errors):>7} "
            f"{len(one.wrong):>6} {one.seconds:>8.0f}"
            + (f"  {len(one.accepted)} accepted" if one.accepted else "")
            + (f"  {len(one.others)} in kernels of others" if one.others else "")
            + ("" if not one.broken else "  incomplete")
        )
    return "\n".join(lines)


def kernel_table(outcomes: Sequence[Outcome], kernels: Iterable[str]) -> str:
    """How often each kernel was launched under each tool."""
    lines = [f"{'kernel':<30} " + " ".join(f"{one.tool:>10}" for one in outcomes)]
    for name in sorted(kernels):
        lines.append(f"{name:<30} " + " ".join(f"{one.launched[name]:>10}" for one in outcomes))
    return "\n".join(lines)


def details(outcome: Outcome) -> Iterator[str]:
    """What is wrong, each kind of finding once with the first run that it came in."""
    kinds: dict[tuple[str, str], list[Finding]] = {}
    for one in outcome.errors:
        kinds.setdefault((one.kernel or "no kernel is named", one.title), []).append(one)
    for (kernel, title), some in kinds.items():
        yield f"{outcome.tool}: {kernel}: {title} ({len(some)}, first in {some[0].run})"
    for name, count in Counter(variant_of(one.run) for one in outcome.accepted).items():
        yield f"{outcome.tool}: accepted: {count} in {name} (sanitize_accepted.py gives the reason)"
    for name, count in Counter(one.kernel for one in outcome.others).items():
        yield f"{outcome.tool}: not ours: {count} in {name}"
    for text in (*outcome.wrong, *outcome.broken):
        yield f"{outcome.tool}: {text}"
