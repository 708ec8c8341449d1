"""What tools/sanitize.py reads in the output of compute-sanitizer, and the command around it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sanitize_modules import H200, load

from gristmill.jit import Kernel, Program
from gristmill.jit.nvrtc import compile_program


@pytest.fixture(scope="module")
def tool() -> SimpleNamespace:
    return load()


@pytest.fixture(scope="module")
def rings(tool: SimpleNamespace) -> list[Any]:
    """The runs that launch kernels with rings."""
    return tool.command.ringed(tool.runs.every_run(H200, ["nvfp4_linear", "nvfp4_moe"]))


# ---- what compute-sanitizer says ----

TALE = """========= COMPUTE-SANITIZER
sanitize: run softmax/cuda_warp/3 (9, 24): softmax rows=9
sanitize: run nvfp4_packing/parts/2 Pack(...)
========= Invalid __global__ write of size 4 bytes
=========     at void pack<(int)16, (int)4>(PackParams)+0x90
=========     by thread (0,0,0) in block (0,0,0)
=========     Access at 0x7f1000000100 is out of bounds
=========     and is 1 bytes after the nearest allocation at 0x7f1000000000 of size 256 bytes
=========
========= Invalid __global__ read of size 2 bytes
=========     at tiles+0x340 in matmul.py:88
=========     by thread (3,0,0) in block (1,0,0)
=========
========= Uninitialized __global__ memory read of size 4 bytes
=========     at void at::native::reduce_kernel<(int)512>(T3)+0x640
=========
"""
WALKED = {"runs": 2, "wrong": [], "launched": {"pack": 1, "softmax_forward": 1}}


def _ended(tool: SimpleNamespace, text: str, summary: str) -> str:
    return f"{text}{tool.report.WALKED}{json.dumps(WALKED)}\n========= {summary}\n"


def test_reports_are_read(tool: SimpleNamespace) -> None:
    text = _ended(tool, TALE, "ERROR SUMMARY: 3 errors")
    found = tool.report.read("initcheck", text, 9, {"pack", "tiles"})
    assert [(one.kernel, one.run) for one in found.errors] == [
        ("pack", "nvfp4_packing/parts/2"),
        ("tiles", "nvfp4_packing/parts/2"),
    ]
    assert found.errors[0].title == "Invalid __global__ write of size 4 bytes"
    assert [one.kernel for one in found.others] == ["at::native::reduce_kernel"]
    assert (found.runs, found.launched["pack"], found.broken) == (2, 1, [])
    assert not found.clean
    lines = list(tool.report.details(found))
    assert lines[0].startswith("initcheck: pack: Invalid __global__ write")
    assert lines[-1] == "initcheck: not ours: 1 in at::native::reduce_kernel"


def test_an_older_form_is_read(tool: SimpleNamespace) -> None:
    text = "========= Invalid __shared__ read of size 4 bytes\n"
    text += "=========     at 0x140 in /k/norm.cu:12:void norm_forward<T>(ForwardParams)\n"
    (one,) = tool.report.findings(text)
    assert one.kernel == "norm_forward"


def test_races_are_read(tool: SimpleNamespace) -> None:
    text = (
        "========= Error: Race reported between Write access at void softmax_forward<T>(P)+0x70\n"
        "=========     and Read access at void softmax_forward<T>(P)+0xb0 [64 hazards]\n"
        "=========\n"
        "========= Warning: Race reported between Write access at norm_forward+0x70\n"
        "=========     and Write access at norm_forward+0xb0 [2 hazards]\n"
    )
    ended = _ended(tool, text, "RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)")
    found = tool.report.read("racecheck", ended, 9, {"softmax_forward", "norm_forward"})
    assert [one.kernel for one in found.errors] == ["softmax_forward", "norm_forward"]
    assert found.broken == []


# ---- which reports are accepted ----

# By function, file and text. With line numbers, reports name the functions that were inlined.
COPY = "bulk_copy(void *, const void *)", "machine.cuh", "cp.async.bulk.shared::cluster.global"
CODES = "void decode_piece<bf16>(unsigned int (&)[4][4])", "nvfp4.cuh", "decode_row<T>(upper,"
STORE = CODES[0], "nvfp4.cuh", "operands[0][2 * half] ="
LAMBDA = (
    "void nvfp4_wgmma<bf16, (int)64>(WgmmaParams)::[lambda(int) (instance 1)]::operator ()(int)",
    "nvfp4_wgmma.cu",
    "uint4 codes =",
)
MOE, WGMMA = "nvfp4_moe/cuda_wgmma/12", "nvfp4_linear/cuda_wgmma/3"


def _at(tool: SimpleNamespace, place: tuple[str, str, str]) -> str:
    """A place of a report: the last line of the statement with a text."""
    function, file, text = place
    lines = (tool.accepted.SOURCES / file).read_text().splitlines()
    (number,) = (i for i, line in enumerate(lines, 1) if text in line)
    while text in tool.accepted.statement_at(file, number + 1):
        number += 1
    return f"{function}+0x430 in /a/b/{file}:{number}"


def _race(*accesses: str) -> str:
    lines = [f"========= Error: Race reported between {accesses[0]}"]
    return "\n".join([*lines, *(f"=========     and {one} [31 hazards]" for one in accesses[1:])])


def _judged(
    tool: SimpleNamespace, text: str, name: str = "racecheck", run: str = MOE, **options: bool
) -> Any:
    begun = f"{tool.report.STARTED}{run} (1, 8): nvfp4\n{text}\n=========\n"
    ended = _ended(tool, begun, "RACECHECK SUMMARY: 1 hazard displayed")
    ended += "========= ERROR SUMMARY: 1 error\n"
    return tool.report.read(name, ended, 9, {"nvfp4_moe", "norm_forward"}, **options)


def test_the_known_reports_about_rings_are_accepted(tool: SimpleNamespace) -> None:
    write = f"Write access at {_at(tool, COPY)}"
    read = f"Read access at {_at(tool, CODES)}"
    direct = f"Read access at {_at(tool, LAMBDA)}"
    for accesses in ((write, read), (read, write), (write, read, read), (direct, write, write)):
        found = _judged(tool, _race(*accesses))
        assert found.clean
        assert len(found.accepted) == 1
        (line,) = tool.report.details(found)
        assert "accepted: 1 in nvfp4_moe/cuda_wgmma" in line
        assert "1 accepted" in tool.report.table([found])
    assert _judged(tool, _race(write, direct), run=WGMMA).accepted
    at, line = _at(tool, CODES).split("+0x430 in ")
    older = f"Read access at 0x430 in {line}:{at}"
    assert _judged(tool, _race(write, older)).accepted


def test_every_other_report_about_rings_is_an_error(tool: SimpleNamespace) -> None:
    copy, codes = _at(tool, COPY), _at(tool, CODES)
    write, read = f"Write access at {copy}", f"Read access at {codes}"
    store = f"Read access at {_at(tool, STORE)}"
    others = {
        "two copies": (write, write),
        "two reads": (read, read),
        "a write of what is read": (write, f"Write access at {codes}"),
        "a read of what is written": (f"Read access at {copy}", read),
        "another read": (write, store),
        "one known read and another": (write, read, store),
        "another write": (f"Write access at {_at(tool, (*COPY[:2], 'arrive.expect_tx'))}", read),
        "an atomic": (write, read, f"Atomic access at {codes}"),
        "no line": (write, read.partition(" in ")[0]),
        "another function": (write, read.replace("decode_piece", "norm_forward")),
        "a line beyond the end": (write, read.rpartition(":")[0] + ":99999"),
        "a file of another name": (write, read.replace("nvfp4.cuh", "nvfp5.cuh")),
    }
    for name, accesses in others.items():
        found = _judged(tool, _race(*accesses))
        assert not found.clean, name
        assert (len(found.errors), found.accepted, found.others) == (1, [], []), name
    assert not _judged(tool, _race(write, read), accepting=False).clean
    assert not _judged(tool, _race(write, read), run="nvfp4_moe/triton/12").clean
    assert not _judged(tool, _race(write, read), "memcheck").clean


@pytest.mark.parametrize("name", ["memcheck", "racecheck", "synccheck"])
def test_a_function_that_is_no_kernel_is_part_of_one_of_ours(
    tool: SimpleNamespace, name: str
) -> None:
    """These tools look at our kernels alone, and line numbers hide the name of the kernel."""
    text = "========= Invalid read\n=========     at swizzle(int *)+0x40 in machine.cuh:3"
    (one,) = _judged(tool, text, name).errors
    assert one.kernel == "swizzle"
    text += "\n=========     at norm_forward+0x40"
    (one,) = _judged(tool, text, name).errors
    assert one.kernel == "norm_forward"


def test_what_is_accepted_is_listed_here_as_well(tool: SimpleNamespace) -> None:
    """Whoever accepts more says so in two files."""
    (one,) = tool.accepted.ACCEPTED
    assert one.tool == "racecheck"
    assert one.variants == ("nvfp4_linear/cuda_wgmma", "nvfp4_moe/cuda_wgmma")
    assert [(place.kind, place.function, place.file, place.text) for place in one.places] == [
        ("Write", "bulk_copy", "machine.cuh", COPY[2]),
        ("Read", "decode_piece", "nvfp4.cuh", "decode_row<T>(upper, codes.x, codes.y)"),
        ("Read", "decode_piece", "nvfp4.cuh", "upper_scales[2] ="),
        ("Read", "nvfp4_wgmma", "nvfp4_wgmma.cu", LAMBDA[2]),
        ("Read", "nvfp4_wgmma", "nvfp4_wgmma.cu", "uint2 scales ="),
    ]


def test_what_is_accepted_is_one_statement_each_in_runs_of_rings(
    tool: SimpleNamespace, rings: list[Any]
) -> None:
    variants = {tool.accepted.variant_of(run.name) for run in rings}
    for one in tool.accepted.ACCEPTED:
        assert set(one.variants) == variants
        assert len(one.reason) > 80
        for place in one.places:
            text = (tool.accepted.SOURCES / place.file).read_text()
            assert text.count(place.text) == 1, place
    assert tool.accepted.statement_at("machine.cuh", 0) == ""
    assert tool.accepted.statement_at("no_such.cu", 3) == ""


@pytest.mark.parametrize("tool_name", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_a_clean_process_is_clean(tool: SimpleNamespace, tool_name: str) -> None:
    summary = {"racecheck": "RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)"}.get(
        tool_name, "ERROR SUMMARY: 0 errors"
    )
    text = _ended(tool, "========= COMPUTE-SANITIZER\n", summary)
    assert tool.report.read(tool_name, text, 0, {"pack"}).clean


@pytest.mark.parametrize(
    ("text", "code", "reason"),
    [
        ("========= COMPUTE-SANITIZER\n", 0, "no summary"),
        ("========= ERROR SUMMARY: 0 errors\n", 0, "did not come to their end"),
        ("", None, "took too long"),
        ("========= ERROR SUMMARY: 0 errors\n", 139, "exited with 139"),
        ("========= ERROR SUMMARY: 4 errors\n", 9, "counts 4 errors and shows 0"),
        ("========= ERROR SUMMARY: 0 errors\n", 9, "has found something and shows nothing"),
        ("========= 24 errors were skipped (error buffer overflow).\n", 9, "more to report"),
        ("========= Warning: Maximum number of hazards reached. A variable\n", 9, "more to report"),
    ],
)
def test_what_did_not_end_well_is_not_clean(
    tool: SimpleNamespace, text: str, code: int | None, reason: str
) -> None:
    found = tool.report.read("memcheck", text, code, {"pack"})
    assert not found.clean
    assert any(reason in one for one in found.broken)


def test_findings_in_kernels_of_others_alone_are_told_and_no_more(tool: SimpleNamespace) -> None:
    at = TALE.index("========= Uninitialized")
    text = _ended(tool, TALE[at:], "ERROR SUMMARY: 1 error")
    found = tool.report.read("initcheck", text, 9, {"pack"})
    assert found.clean
    assert "1 in kernels of others" in tool.report.table([found])


def test_a_finding_without_a_kernel_counts(tool: SimpleNamespace) -> None:
    text = _ended(tool, "========= Out of memory\n", "ERROR SUMMARY: 1 error")
    assert len(tool.report.read("memcheck", text, 9, {"pack"}).errors) == 1


@pytest.mark.parametrize(
    "line",
    [
        "Target application terminated before first instrumented API call",
        "Error: process didn't terminate successfully",
        "Error: No attachable process found. compute-sanitizer timed-out.",
    ],
)
def test_a_process_that_was_not_looked_at_is_not_clean(tool: SimpleNamespace, line: str) -> None:
    text = _ended(tool, f"========= {line}\n", "ERROR SUMMARY: 0 errors")
    found = tool.report.read("memcheck", text, 0, {"pack"})
    assert [one.title for one in found.errors] == [line]


def test_kernels_are_named_as_compilers_name_them(tool: SimpleNamespace) -> None:
    found = tool.report.arguments("racecheck", {"pack"}, {"tiles"}, ["--launch-count", "3"])
    assert "kernel_substring=_Z4packI" in found
    assert "kernel_substring=tiles" in found
    assert found[-2:] == ["--launch-count", "3"]
    every = tool.report.arguments("initcheck", {"pack"}, {"tiles"})
    assert "--kernel-name" not in every  # what torch has written would not be known
    assert "--report-api-errors" in tool.report.arguments("memcheck", (), ())


def test_names_in_filters_are_those_of_the_compiler(tool: SimpleNamespace) -> None:
    program = Program("nvfp4_pack.cu", ("pack<16,4>",))
    (name,) = compile_program(program, "sm_90a").lowered.values()
    assert name.startswith("_Z4packI")
    for kernel in tool.command.FAULTY:
        (name,) = compile_program(tool.command.canary_program(kernel), "sm_90a").lowered.values()
        assert name.startswith(f"_Z{len(kernel)}{kernel}I")


def test_canaries_tell_what_a_tool_sees(tool: SimpleNamespace) -> None:
    misjudged = tool.blind.misjudged
    assert set(tool.blind.CANARIES) == set(tool.report.TOOLS)
    good = {"canary_racecheck", "canary_ring_broken"}
    assert not list(misjudged("racecheck", good))
    assert not list(misjudged("racecheck", {*good, "canary_ring_lane"}))
    (one,) = misjudged("racecheck", {*good, "canary_ring_every"})
    assert "canary_ring_every, which has no fault" in one
    (one,) = misjudged("racecheck", good - {"canary_ring_broken"})
    assert "does not see the fault of canary_ring_broken" in one


# ---- the command, with a sanitizer of the test ----


def test_a_command_that_takes_too_long_is_ended_with_its_children(
    tool: SimpleNamespace, tmp_path: Path
) -> None:
    alive = tmp_path / "alive"
    command = ["sh", "-c", f"echo began; (sleep 3; touch {alive}) & wait"]
    begin = time.monotonic()
    assert tool.command.captured(command, 0.5) == ("began\n", None)
    assert time.monotonic() - begin < 2.5
    time.sleep(max(0.0, begin + 3.5 - time.monotonic()))
    assert not alive.exists()
    assert tool.command.captured(["sh", "-c", "echo out; echo err >&2; exit 9"], 60) == (
        "out\nerr\n",
        9,
    )


SANITIZER = """#!{python}
import json, sys
words = sys.argv[sys.argv.index("--tool") + 1 :]
tool, blind = words[0], {blind!r}
assert "--error-exitcode" in words
if "--canary" in words:
    if tool == blind:
        print("========= ERROR SUMMARY: 0 errors")
        sys.exit(0)
    for one in (tool, "ring_broken"):
        print("========= Error: a fault")
        print(f"=========     at void canary_{{one}}<(int)7>(CanaryParams)+0x90")
    launched = {{}}
else:
    names = json.load(open(words[words.index("--walk") + 1]))
    launched = {launched!r}
print("{walked}" + json.dumps({{"runs": 1, "wrong": [], "launched": launched}}))
count = 2 * ("--canary" in words)
print("========= " + ("RACECHECK SUMMARY: %d hazards" if tool == "racecheck" else
                      "ERROR SUMMARY: %d errors") % count)
sys.exit(9 if count else 0)
"""


@pytest.mark.parametrize(
    ("launched", "blind", "code", "words"),
    [
        ({"pack": 1, "unpack": 2}, "", 0, "racecheck"),
        ({"pack": 1}, "", 1, "unpack was never launched"),
        ({"pack": 1, "unpack": 2}, "initcheck", 1, "does not see the fault of canary_initcheck"),
    ],
)
def test_the_command_adds_up(
    tool: SimpleNamespace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    launched: dict[str, int],
    blind: str,
    code: int,
    words: str,
) -> None:
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(
        SANITIZER.format(
            python=sys.executable, launched=launched, blind=blind, walked=tool.report.WALKED
        )
    )
    fake.chmod(0o755)
    options = argparse.Namespace(
        sanitizer=str(fake), jobs=2, limit=60, logs=tmp_path / "logs", options=""
    )
    some = tool.runs.every_run(H200, ["nvfp4_packing"])
    tools = ("racecheck", "initcheck")
    kernels = {"pack", "unpack"}
    assert tool.command.sanitized(tool.command.Driver(options), tools, some, kernels) == code
    out = capsys.readouterr().out
    assert words in out
    rows = out.splitlines()[-2:]
    assert [row.split()[:3] for row in rows] == [
        [name, "2", str(2 * sum(launched.values()))] for name in tools
    ]
    assert (tmp_path / "logs" / "racecheck-0.txt").is_file()


RACY = """#!{python}
import json, sys
words = sys.argv
lanes = "--every-lane" in words
told = {{"runs": 1, "wrong": [], "launched": {{"nvfp4_moe": 1}} if lanes in {launched!r} else {{}}}}
if "--canary" in words:
    for one in ("racecheck", "ring_broken"):
        print("========= Error: a fault")
        print(f"=========     at void canary_{{one}}<(int)7>(CanaryParams)+0x90")
    count = 2
else:
    names = json.load(open(words[words.index("--walk") + 1]))
    for name in names:
        print("fake: " + name)
    count = 1 if lanes in {racy!r} else 0
    if count:
        print({race!r})
print("{walked}" + json.dumps(told))
print("========= RACECHECK SUMMARY: %d hazards" % count)
sys.exit(9 if count else 0)
"""


BOTH = (False, True)


@pytest.mark.parametrize(
    ("racy", "launched", "code"),
    [((), BOTH, 0), ((False,), BOTH, 0), ((True,), BOTH, 1), ((), (False,), 1)],
)
def test_rings_run_again_with_every_lane_and_nothing_is_accepted_there(
    tool: SimpleNamespace,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    rings: list[Any],
    racy: tuple[bool, ...],
    launched: tuple[bool, ...],
    code: int,
) -> None:
    run = f"{tool.report.STARTED}{MOE}"
    race = _race(f"Write access at {_at(tool, COPY)}", f"Read access at {_at(tool, CODES)}")
    race = f"{run}\n{race}"
    fake = tmp_path / "compute-sanitizer"
    words = {"racy": racy, "race": race, "launched": launched, "walked": tool.report.WALKED}
    fake.write_text(RACY.format(python=sys.executable, **words))
    fake.chmod(0o755)
    logs = tmp_path / "logs"
    # One process where one report is counted, else several.
    jobs = 1 if racy else 2
    options = argparse.Namespace(sanitizer=str(fake), jobs=jobs, limit=60, logs=logs, options="")
    others = tool.runs.every_run(H200, ["nvfp4_packing"])[:2]
    driver = tool.command.Driver(options)
    ringed = [run for run in rings if run.op == "nvfp4_moe"][:3]
    some = [others[0], *ringed, others[1]]
    assert tool.command.sanitized(driver, ("racecheck",), some, {"nvfp4_moe"}) == code
    out = capsys.readouterr().out
    assert ("1 accepted" in out) == (racy == (False,))
    assert ("nvfp4_moe was never launched" in out) == (launched != BOTH)
    assert _walked(logs, "racecheck-?.txt") == [run.name for run in some]
    assert _walked(logs, "racecheck-?-every-lane.txt") == [run.name for run in ringed]


def _walked(logs: Path, pattern: str) -> list[str]:
    """The runs of the processes with these logs, as the sanitizer of the test writes them."""
    lines = [line for path in sorted(logs.glob(pattern)) for line in path.read_text().splitlines()]
    return [line.removeprefix("fake: ") for line in lines if line.startswith("fake: ")]


@pytest.mark.parametrize("every_lane", [False, True])
def test_a_process_arrives_with_every_lane_where_that_is_said(
    tool: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, every_lane: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    seen: list[bool] = []

    def start(place: str) -> None:
        text = Program("nvfp4_moe.cu", ("f<1>",)).texts()["nvfp4_moe.cu"]
        seen.append("barrier_init(empty + i, CONSUMERS);" in text)

    (first, *_) = tool.runs.every_run(H200, ["nvfp4_packing"])
    monkeypatch.setattr(tool.command, "device_here", lambda: H200)
    monkeypatch.setattr(tool.command, "chosen", lambda names, device: [replace(first, start=start)])
    names = tmp_path / "names.json"
    names.write_text("[]")
    words = ["--tool", "racecheck", "--walk", str(names), *["--every-lane"] * every_lane]
    assert tool.command.main(words) == 0
    assert seen == [every_lane]


def test_launches_are_counted_by_function(
    tool: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(Kernel, "prepare", lambda self, **_: lambda *v: started.append(v))
    kernel = Kernel.__new__(Kernel)
    kernel.name = "norm_forward<Tensor<bf16,2>,Absent>"
    launched: Counter[str] = Counter()
    with tool.command.counted(launched):
        start = kernel.prepare(grid=1)
    start(0, 1)
    start(0, 2)
    assert launched == {"norm_forward": 2}
    assert started == [(0, 1), (0, 2)]


def test_a_run_that_raises_does_not_end_the_others(
    tool: SimpleNamespace, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)

    def raises(place: str) -> str | None:
        raise RuntimeError("no such kernel")

    (first, *_) = tool.runs.every_run(H200, ["nvfp4_packing"])
    good = replace(first, start=lambda place: None)
    wrong = replace(first, start=lambda place: "output 0 is off by 3")
    assert tool.command.walk([good, good]) == 0
    assert tool.command.walk([replace(first, start=raises), wrong, good]) == 1
    told = json.loads(capsys.readouterr().out.splitlines()[-1].removeprefix(tool.report.WALKED))
    assert told["runs"] == 3
    assert len(told["wrong"]) == 2
    assert "no such kernel" in told["wrong"][0]
