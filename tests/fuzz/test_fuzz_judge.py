"""The judge finds what is wrong, and the tool says so."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fuzz_judge
import pytest
import torch
from conformance_helpers import copied
from conformance_truth_core import Truth, unit, walk
from fuzz_again import FREE, OF_A_KIND
from fuzz_families import FAMILIES
from fuzz_judge import Ways, error_of, judged
from fuzz_layouts import laid_out
from fuzz_plan import Maker, Plan, plan
from fuzz_run import each_plan
from fuzz_values import Drawn, filled

ROOT = Path(__file__).parents[2]
INF, NAN = float("inf"), float("nan")
CALL = plan(
    "rms_norm",
    5,
    shape=(6, 40),
    x=Drawn("float32", special="nan", layout="padded", by=3),
    weight=None,
    eps=1e-6,
    offset=0.0,
    casting="once",
    out=None,
)


def truth(value: float, terms: float = 1.0) -> Truth:
    exact = torch.tensor([value], dtype=torch.float64)
    return Truth(exact, exact, torch.tensor([terms], dtype=torch.float64), torch.float32)


@pytest.mark.parametrize(
    ("wanted", "got", "right"),
    [
        (NAN, NAN, True),
        (NAN, 0.0, False),
        (NAN, INF, False),
        (INF, INF, True),
        (INF, -INF, False),
        (INF, NAN, False),
        (INF, 65504.0, False),
        (1.0, 1.001, True),
        (1.0, 1.1, False),
        (1.0, NAN, False),
        (1.0, INF, False),
        (1e5, INF, True),  # too large for fp16
        (-1e5, INF, False),
        (1e5, 3e4, False),
        (65519.0, 65504.0, True),
        (6e4, INF, False),
    ],
)
def test_specials_are_told_apart(wanted: float, got: float, right: bool) -> None:
    error = error_of(truth(wanted), torch.tensor([got], dtype=torch.float16), Ways())
    assert (error <= 4.0) == right


def test_ways_of_their_own() -> None:
    zero, nan = torch.zeros(1), torch.tensor([NAN])
    assert error_of(truth(INF), nan, Ways(alike=True)) == 0.0
    assert error_of(truth(INF), zero, Ways(alike=True)) == INF
    assert error_of(truth(1.0), nan, Ways(alike=True)) == INF
    for alike in (False, True):
        there = torch.tensor([alike])
        assert error_of(truth(INF), nan, Ways(alike=there)) == (0.0 if alike else INF)
        assert error_of(truth(INF), zero, Ways(alike=there)) == INF
    assert error_of(truth(1.0), nan, Ways(spoiled=True)) == 0.0
    assert error_of(truth(1.0), zero, Ways(spoiled=True)) > 100
    assert error_of(truth(NAN), zero, Ways(relu=True)) == 0.0
    assert error_of(truth(NAN), zero + 1, Ways(relu=True)) == INF
    large = truth(1e36, terms=1e36)  # of a sum of a thousand times that
    assert error_of(large, zero + INF, Ways()) > 100
    assert error_of(large, zero + INF, Ways(way=1e3)) == 0.0
    assert error_of(truth(1e20, terms=1e20), zero + INF, Ways(way=1e3)) > 100


def _off(x: torch.Tensor, y: torch.Tensor) -> None:
    y[1] *= 1.001


def _number(x: torch.Tensor, y: torch.Tensor) -> None:
    y.nan_to_num_(0.0)


def _leak(x: torch.Tensor, y: torch.Tensor) -> None:
    """Within all limits: the last bit of other rows, if there is a NaN anywhere."""
    if bool(y.isnan().any()):
        y.mul_(1 + 2**-23)


def _write(x: torch.Tensor, y: torch.Tensor) -> None:
    """Between the rows."""
    whole = x.as_strided((6, 43), (43, 1))
    whole[0, 41] = 1.0


def _die(x: torch.Tensor, y: torch.Tensor) -> None:
    raise RuntimeError("out of luck")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_off, "roundings"),
        (_number, "off by inf"),
        (_leak, "rows that change"),
        (_write, "argument 0 was written to"),
        (_die, "RuntimeError: out of luck"),
    ],
    ids=lambda one: one.__name__ if callable(one) else "",
)
def test_a_wrong_variant_is_found(
    spoil: Callable[..., None], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not judged(CALL, "cpu").mismatches
    right = fuzz_judge.run_by

    def wrong(op: Any, variant: str, args: tuple[Any, ...]) -> Any:
        y = right(op, variant, args)
        spoil(args[0], y)
        return y

    monkeypatch.setattr(fuzz_judge, "run_by", wrong)
    found = judged(CALL, "cpu").mismatches
    assert any(words in one for one in found), found


@pytest.mark.parametrize("op", list(FAMILIES))
def test_again_is_the_same_kernels_and_other_numbers(op: str) -> None:
    groups: list[list[Plan]] = []

    def body(call: Plan) -> None:
        if not groups or len(groups[-1]) == 3:
            groups.append([])
        groups[-1].append(call)

    each_plan(op, 30, 3, body, shrink=False, repeat=3)
    assert [len(group) for group in groups] == [3] * 10
    changed = set()
    for first, *others in groups:
        for other in others:
            assert other not in (first, *others[: others.index(other)])
            assert other.words.keys() == first.words.keys()
            for name, word in first.words.items():
                new = other.words[name]
                if isinstance(word, Drawn):
                    changed.add("scale" if new.scale != word.scale else "")
                    assert (new.dtype, new.layout, new.by) == (word.dtype, word.layout, word.by)
                elif name not in (*FREE, *OF_A_KIND, "mask"):
                    assert new == word
                else:
                    assert (new is None) == (word is None)
                    changed.add(name if new != word else "")
    assert changed - {""}


def test_a_shard_is_judged_as_a_whole() -> None:
    """A largest logit that is off by a rounding, and the sum told from there, is right."""
    largest = 2.0**26
    value = torch.tensor([[largest, 1.0, 0.0]], dtype=torch.float64)
    terms = torch.tensor([[largest, 1.0 + largest, 0.0]], dtype=torch.float64)
    args = (torch.zeros(1, 4), None, False)
    shard = fuzz_judge._of_largest(Truth(value, value, terms, torch.float32), args)

    def error(*numbers: float) -> float:
        told = fuzz_judge._about_largest(shard, torch.tensor([numbers]))
        return error_of(shard, told, Ways())

    off = 4.0
    assert error(largest, 1.0, 0.0) == 0.0
    assert error(largest - off, math.exp(off), 0.0) <= 1.0
    assert error(largest, 1.001, 0.0) > 100
    assert error(largest - off, 1.0, 0.0) > 100
    assert error(largest - off, math.exp(off) * 1.001, 0.0) > 100


@pytest.mark.parametrize("depth", [64, 500, 2000])
def test_sums_of_an_outlier_walk_as_far_as_they_are_allowed_to(depth: int) -> None:
    """One product after another in fp32: beyond any number of terms, within some of the walk."""
    generator = torch.Generator().manual_seed(depth)
    x = torch.randn(1, depth, generator=generator)
    x[0, 0] = 1e5
    w = torch.randn(depth, 4000, generator=generator)
    sums = torch.zeros(4000)
    for k in range(depth):
        sums = sums + x[0, k] * w[k]
    exact, terms = x.double() @ w.double(), x.double().abs() @ w.double().abs()
    off = (sums.double() - exact).abs() / unit(torch.float32)
    assert (off > (depth / 32) ** 0.5 * terms).any()
    far = walk(x, w)
    assert 2.0 < float((off / far).max()) < 6.0
    plain = x.clone()
    plain[0, 0] = 1.0
    terms = plain.double().abs() @ w.double().abs()
    assert (walk(plain, w) < terms).double().mean() > 0.95


def test_a_plan_is_python_that_makes_it() -> None:
    assert eval(repr(CALL), {"plan": plan, "Drawn": Drawn}) == CALL


@pytest.mark.parametrize(
    ("layout", "strides"),
    [
        ("negative", (12, 4, 1)),
        ("expanded", (0, 4, 1)),
        ("overlapping", (9, 3, 1)),
        ("permuted", (4, 8, 1)),
    ],
)
def test_layouts_and_copies_of_them(layout: str, strides: tuple[int, ...]) -> None:
    values = torch.randn(2, 3, 4)
    found = laid_out(values, layout, 3)
    assert (found.shape, found.stride()) == (values.shape, strides)
    assert found.is_neg() == (layout == "negative")
    if layout in ("negative", "permuted"):
        assert torch.equal(found, values)
    assert torch.equal(found[0], values[0]) or layout == "overlapping"
    (copy,) = copied((found,))
    assert (copy.stride(), copy.is_neg()) == (found.stride(), found.is_neg())
    assert bool(fuzz_judge._equal_bits(copy, found).all())
    assert not bool(fuzz_judge._equal_bits(copy, found.neg()).any())


def test_magnitudes_are_numbers_from_1e4_to_the_largest() -> None:
    for dtype, largest in (("float32", 3.4e38), ("bfloat16", 3.4e38), ("float16", 65504.0)):
        how = Drawn(dtype, special="magnitudes", where="rows", count=4)
        values = filled(how, (4, 500), torch.Generator().manual_seed(0), math.inf, ordinary=False)
        sizes = values.double().abs()
        assert 0.99e4 < sizes.min() < 2e4
        assert largest / 2 < sizes.max() <= largest * 1.01
        assert (sizes < (1e4 * largest) ** 0.5).double().mean().sub(0.5).abs() < 0.1


@pytest.mark.parametrize("causal", [None, "top_left", "bottom_right"])
def test_a_causal_call_has_specials_on_the_sides_that_are_asked_for(causal: str | None) -> None:
    for spoil in (None, "hidden", "visible", "both"):
        words = {"shape": (40, 60), "x": Drawn(), "keep": 1.0, "scale": 1.0, "mask": None}
        call = plan("softmax", 1, **words, causal=causal, spoil=spoil)
        x, *_ = FAMILIES["softmax"].make(Maker(call, "cpu"))
        hidden = torch.ones(40, 60).triu(21 if causal == "bottom_right" else 1) > 0
        special = ~x.isfinite()
        assert bool((special & hidden).any()) == (spoil in ("hidden", "both"))
        assert bool((special & ~hidden).any()) == (spoil in ("visible", "both"))
        x, *_ = FAMILIES["softmax"].make(Maker(call, "cpu", ordinary=True))
        assert bool(x.isfinite().all())


def _tool() -> Any:
    spec = importlib.util.spec_from_file_location("fuzz_tool", ROOT / "tools/fuzz.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    return tool


def test_a_case_that_went_wrong_is_in_the_folder_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tool = _tool()
    options = argparse.Namespace(
        cases=8, repeat=1, device="cpu", limit_seconds=9.0, out=tmp_path, json=tmp_path / "all.json"
    )
    run = tool.Run(["rms_norm"], options, seed=1, cache="")
    answer = {"op": "rms_norm", "first": True, "seconds": 1.0, "variants": ["reference"]}
    run._take({**answer, "plan": "plan('right')", "mismatches": []})
    for number in range(7):
        run._take({**answer, "plan": f"plan({number})", "mismatches": [f"off by {number}"]})
        lines = (tmp_path / "mismatches.jsonl").read_text().splitlines()
        assert json.loads(lines[-1]) == {
            "op": "rms_norm",
            "plan": f"plan({number})",
            "mismatches": [f"off by {number}"],
        }
        assert len(lines) == number + 1
    assert run.report() == 1
    shown = capsys.readouterr().out.splitlines()
    assert [f"    plan({number})," in shown for number in range(7)] == [True] * 5 + [False] * 2
    assert "and 2 more of rms_norm" in shown
    assert shown[-1].startswith("8 of 8 cases, of 8 plans, run 8 times on cpu, 7 mismatches")
    assert len(json.loads((tmp_path / "all.json").read_text())["failures"]) == 7


def test_a_call_that_runs_when_time_is_over_is_ended_and_no_mismatch(tmp_path: Path) -> None:
    options = argparse.Namespace(device="cpu", repeat=1)
    tool = _tool()
    tool.GRACE_SECONDS = 0.1
    worker = tool.Worker(options, str(tmp_path))
    start = time.monotonic()
    item = {"op": "rms_norm", "count": 500, "seed": 1, "until": time.time()}
    assert not worker.ask(item, lambda answer: None)
    assert worker.reason == ""
    worker.end(now=True)
    assert time.monotonic() - start < 20
    assert worker.process.returncode is not None


@pytest.mark.long
def test_the_tool_counts_and_fails(tmp_path: Path) -> None:
    def run(*options: str) -> tuple[int, str]:
        command = [sys.executable, str(ROOT / "tools/fuzz.py"), "--device", "cpu", "--jobs", "1"]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=300)
        return done.returncode, done.stdout + done.stderr

    file = tmp_path / "out.json"
    code, text = run("--cases", "6", "--seed", "1", "--ops", "scale_grad", "--json", str(file))
    assert code == 0, text
    found = json.loads(file.read_text())
    assert (found["cases"], found["runs"], found["mismatches"]) == (6, 6, 0)
    assert (found["plans"], found["repeat"]) == (6, 1)
    options = ("--cases", "10", "--repeat", "4", "--ops", "scale_grad", "--json", str(file))
    code, text = run(*options)
    assert code == 0, text
    found = json.loads(file.read_text())
    assert (found["cases"], found["plans"], found["repeat"]) == (10, 3, 4)
    assert "10 of 10 cases, of 3 plans" in text
    assert run("--cases", "6", "--ops", "scale_grad", "--limit-seconds", "0")[0] == 3
    assert run("--cases", "6", "--ops", "no such op")[0] == 2
