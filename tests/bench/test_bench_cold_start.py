"""The suite `cold_start`, and what keeps a start short."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import gristmill
from gristmill.bench.cold_start import child as cold_start_child
from gristmill.bench.cold_start import suite as cold_start
from gristmill.bench.cold_start.models import FORMS, LLAMA, Serving, Sizes, Training
from gristmill.bench.cold_start.report import table
from gristmill.bench.fresh import in_fresh_process
from gristmill.bench.report import markdown, notes
from gristmill.bench.results import Results
from gristmill.errors import ArgumentError, GristmillError
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.select.chooser import ranked
from gristmill.select.device import KNOWN
from gristmill.warmup import default_shapes

CPU = torch.device("cpu")
TINY = Sizes(64, 96, 128, 320, decode=(1, 3), prefill=(40,))


def answer(**changes: Any) -> dict[str, Any]:
    """What a child says of a model."""
    parts = {"torch_import_s": 2.0, "import_s": 0.1, "context_s": 0.5, "cublas_s": 0.25}
    parts |= {"torch_step_s": 1.0, "prepare_s": 0.02, "warmup_s": 0.4}
    parts |= {
        "first_step_s": 0.05,
        "second_step_s": 0.03,
        "step_compiles": 0,
        "compiles": 0,
        "failures": 0,
    }
    return {**parts, **changes}


class Child:
    """In the place of a fresh process: remembers how it was started, and says what it is told."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers) or [answer()]
        self.seen: list[tuple[tuple[str, ...], dict[str, str]]] = []
        self.empty: list[bool] = []

    def __call__(
        self, module: str, words: Any, environment: dict[str, str], what: str
    ) -> dict[str, Any]:
        folder = Path(environment["GRISTMILL_CACHE_DIR"])
        self.seen.append((tuple(words), dict(environment)))
        self.empty.append(not any(folder.iterdir()))
        if environment["GRISTMILL_JIT"] == "on":
            kernels = folder / "kernels"
            kernels.mkdir(exist_ok=True)
            (kernels / "norm-sm_90a-0123.tag.kernel").write_bytes(b"a kernel")
        else:
            assert Path(environment["GRISTMILL_CACHE_LAYERS"]).is_file()
        return self.answers[(len(self.seen) - 1) % len(self.answers)]


@pytest.fixture
def one_model(monkeypatch: pytest.MonkeyPatch) -> cold_start.Start:
    model = cold_start.starts(torch.device("cuda"))[-1]
    monkeypatch.setattr(cold_start, "starts", lambda device, names=(): [model])
    monkeypatch.setattr(cold_start, "_write_bytecode", lambda: None)
    return model


def rows_of(child: Child, monkeypatch: pytest.MonkeyPatch, repeats: int = 1) -> list[Any]:
    monkeypatch.setattr(cold_start, "in_fresh_process", child)
    results, steps = Results({}), []
    cold_start.run(torch.device("cuda"), results, steps.append, repeats=repeats)
    assert len(steps) == len(results.rows) == cold_start.steps(torch.device("cuda"))
    return results.rows


def test_each_cache_is_what_its_name_says(
    one_model: cold_start.Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child()
    rows = rows_of(child, monkeypatch, repeats=2)
    assert [row["cache"] for row in rows] == ["empty", "warm", "bundle"]
    assert [row["goal_s"] for row in rows] == [3.0, 0.3, 0.3]
    folders = [environment["GRISTMILL_CACHE_DIR"] for _, environment in child.seen]
    # Two empty folders, twice the first of these, two other empty ones beside the bundle.
    assert child.empty == [True, True, False, False, True, True]
    assert len(set(folders)) == 4
    assert folders[2] == folders[3] == folders[0]
    jit = [environment["GRISTMILL_JIT"] for _, environment in child.seen]
    assert jit == ["on"] * 4 + ["off"] * 2
    layers = [environment["GRISTMILL_CACHE_LAYERS"] for _, environment in child.seen]
    assert layers[:4] == [""] * 4
    assert layers[4] == layers[5] != ""
    assert {words for words, _ in child.seen} == {one_model.words}


def test_what_is_torchs_is_not_ours(
    one_model: cold_start.Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = Child(answer(warmup_s=0.4), answer(warmup_s=0.1), answer(warmup_s=0.9))
    row = rows_of(child, monkeypatch, repeats=3)[0]
    assert row["error"] is None
    assert row["torch_s"] == 3.75
    # Import, weights, warm-up, and what the first step takes longer than the second.
    assert row["beyond_s"] == pytest.approx(0.1 + 0.02 + 0.4 + 0.02)
    assert row["least_s"] == pytest.approx(0.24)
    assert row["most_s"] == pytest.approx(1.04)
    assert (row["warmup_s"], row["repeats"]) == (0.4, 3)


@pytest.mark.parametrize(
    ("changes", "caches", "words"),
    [
        ({"compiles": 2}, ["warm", "bundle"], "2 programs were compiled"),
        ({"failures": 1}, ["empty", "warm", "bundle"], "could not make 1 programs"),
        ({"step_compiles": 3}, ["empty", "warm", "bundle"], "after the warm-up compiled 3"),
    ],
)
def test_a_compile_that_must_not_be_is_an_error(
    changes: dict[str, int],
    caches: list[str],
    words: str,
    one_model: cold_start.Start,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = rows_of(Child(answer(), answer(**changes), answer()), monkeypatch, repeats=3)
    wrong = {row["cache"]: row["error"] for row in rows if row["error"]}
    assert list(wrong) == caches
    assert all(words in reason for reason in wrong.values())
    results = Results({}, rows)
    assert any(words in line for line in notes(results))


def test_a_child_that_fails_is_a_row(
    one_model: cold_start.Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*args: Any) -> Any:
        raise GristmillError("out of memory")

    rows = rows_of(fails, monkeypatch)  # type: ignore[arg-type]
    assert [row["error"] for row in rows[:1]] == ["out of memory"]
    found = table(rows)
    assert found is not None
    assert found[1][1][0][6] == "failed"


def test_a_gpu_has_calls_and_whole_models() -> None:
    found = cold_start.starts(torch.device("cuda"))
    assert [start.words[0] for start in found] == ["import"] + ["call"] * 5 + ["model"] * 2
    assert {start.words[1] for start in found if start.words[0] == "call"} <= set(OPS)
    assert [start.words[0] for start in cold_start.starts(CPU)] == ["import"] + ["kernels"] * 2


def test_the_model_is_llama_3_8b() -> None:
    assert LLAMA.weights == ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    assert LLAMA.vocabulary == 128256
    assert LLAMA.tokens == (1, 16, 64, 1024, 4096)
    assert (16, 28672, 4096) in FORMS["serving"].needs(LLAMA)["nvfp4_linear"]
    assert (64, 128256, 4096) in FORMS["serving"].needs(LLAMA)["linear"]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[Any, ...]]]:
    """Every call of an op from now on: its name and its arguments."""
    seen = []
    run = Op.run

    def watched(op: Op, *args: Any) -> Any:
        seen.append((op.name, args))
        return run(op, *args)

    def call(op: Op, tensors: Any, args: Any) -> Any:
        # As the op does it, but for the plan that it may remember.
        needs_grad = any(one is not None and one.requires_grad for one in tensors)
        if needs_grad:
            return op._function.apply(*args)
        return op.run(*args)

    for op in OPS.values():
        if op.gradient is not None:  # made with the `run` of before
            forward = staticmethod(lambda ctx, *args, op=op: _forward(op, ctx, args))
            monkeypatch.setattr(op._function, "forward", forward)
    monkeypatch.setattr(Op, "run", watched)
    monkeypatch.setattr(Op, "call", call)
    return seen


def _forward(op: Op, ctx: Any, args: tuple[Any, ...]) -> Any:
    outputs = op.run(*args)
    assert op.gradient is not None
    ctx.overrides = None
    op.gradient.save(ctx, args, outputs)
    return outputs


def programs_of(name: str, args: tuple[Any, ...]) -> set[Any]:
    """What a call would run on Hopper."""
    op = OPS[name]
    problem = op.problem(*args, device=KNOWN["sm_90a"])
    choice = ranked(name, op.variants, problem)[0]
    return set(choice.variant.programs(problem, choice.config))


@pytest.mark.parametrize("kind", [Serving, Training])
def test_a_step_runs_what_was_warmed_up(
    kind: type[Serving] | type[Training], calls: list[tuple[str, tuple[Any, ...]]]
) -> None:
    model = kind(TINY, CPU)
    model.run_torch()
    model.prepare()
    assert not calls
    outputs = model.run()
    assert all(torch.isfinite(output).all() for output in outputs)
    needs = kind.needs(TINY)
    assert {name for name, _ in calls} == set(needs)
    for name, shapes in needs.items():
        examples = [OPS[name].example(shape, torch.bfloat16, "meta") for shape in shapes]
        warmed = {one for example in examples for one in programs_of(name, example)}
        met = {one for called, args in calls if called == name for one in programs_of(name, args)}
        # Weights have another layout here than on Hopper: of these only shapes are compared.
        if name == "nvfp4_linear":
            warmed = {(*example[0].shape, *example[3].shape) for example in examples}
            met = {(*args[0].shape, *args[3].shape) for called, args in calls if called == name}
        assert met == warmed


def test_a_child_times_a_whole_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warmed = [SimpleNamespace(how=how) for how in ("compiled", "cached", "compiled", "failed")]
    monkeypatch.setattr(cold_start_child, "LLAMA", TINY)
    monkeypatch.setattr(gristmill, "warmup", lambda needs, device: warmed)
    cold_start_child.main(["model", "serving", "cpu"], {"torch_import_s": 1.0, "import_s": 0.1})
    found = json.loads(capsys.readouterr().out)
    parts = {*cold_start.PARTS, *cold_start.TORCH_PARTS} - {"first_call_s"}
    assert all(found[name] > 0 for name in parts)
    assert found["second_step_s"] > 0
    assert (found["programs"], found["failures"], found["step_compiles"]) == (4, 1, 0)
    assert found["compiles"] >= 2


def test_a_child_times_a_call_here(capsys: pytest.CaptureFixture[str]) -> None:
    imports = {"torch_import_s": 1.0, "import_s": 0.1}
    cold_start_child.main(["call", "nvfp4_linear", "3x48x64", "bfloat16", "cpu"], imports)
    found = json.loads(capsys.readouterr().out)
    assert found["import_s"] == 0.1
    assert 0 < found["first_call_s"] < 60
    assert found["prepare_s"] > 0
    assert found["compiles"] >= 0


def test_what_went_wrong_in_a_child_is_told() -> None:
    words = ["call", "no_op", "1x64", "bfloat16", "cpu"]
    with pytest.raises(
        GristmillError, match=r"^a call failed in a fresh process: KeyError: 'no_op'"
    ):
        in_fresh_process("gristmill.bench.cold_start.child", words, {}, "a call")


def test_the_table_and_the_picture(
    one_model: cold_start.Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = rows_of(Child(), monkeypatch)
    results = Results({"gpu": "NVIDIA H200", "device": "cuda"}, rows)
    text = markdown(results)
    line = next(line for line in text.splitlines() if "| bundle |" in line)
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[0] == "llama3_8b_training M=1024,4096"
    assert cells[2:8] == ["0.100", "0.020", "0.400", "0.050", "0.540", "0.540 to 0.540"]
    assert cells[8:] == ["0.3", "3.750", "0"]


def test_a_run_that_goes_on_starts_what_is_not_there(
    one_model: cold_start.Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a start, as one cache is made of the one before; nothing if all is there."""
    rows, cuda = rows_of(Child(), monkeypatch), torch.device("cuda")
    child = Child()
    monkeypatch.setattr(cold_start, "in_fresh_process", child)
    results = Results({}, list(rows))
    cold_start.run(cuda, results, lambda text: None, repeats=1)
    assert child.seen == []
    results = Results({}, rows[:1])
    cold_start.run(cuda, results, lambda text: None, repeats=1)
    assert [row["cache"] for row in results.rows] == ["empty", "warm", "bundle"]
    assert len(child.seen) == 3


def test_one_start_alone() -> None:
    cuda = torch.device("cuda")
    assert [start.name for start in cold_start.starts(cuda, ["import"])] == ["import"]
    assert cold_start.steps(cuda, ["llama3_8b_serving"]) == 3
    with pytest.raises(ArgumentError, match=r"unknown op 'imports' \(did you mean import"):
        cold_start.starts(cuda, ["imports"])


def test_results_of_the_suite_before_can_be_read() -> None:
    old = {"op": "rms_norm", "M": 256, "N": 4096, "impl": "gristmill", "cache": "warm"}
    old |= {"first_call_s": 0.031, "import_s": 0.2, "compiles": 0, "variant": "cuda_block"}
    found = table([old])
    assert found is not None
    assert found[1][1] == [
        ["rms_norm 256x4096", "warm", "0.200", "", "", "0.031", "", "", "", "", "0"]
    ]


QUICK = """
import sys, torch, gristmill
from gristmill.ops.registry import OPS
from gristmill.select.device import KNOWN
from gristmill.warmup import default_shapes
names = ("rms_norm", "softmax", "cross_entropy", "linear")
early = {f"gristmill.ops.{name}.cases" for name in names}
assert not early & set(sys.modules), "cases are imported by gristmill itself"
for op in OPS.values():
    for arch in ("sm_90a", "sm_100a", "sm_80"):
        op.problem(
            *op.example_for(KNOWN[arch], default_shapes(op.name)[0], torch.bfloat16),
            device=KNOWN[arch],
        )
slow = {"sympy", "torch._dynamo", "torch._inductor", "triton", "filelock"} & set(sys.modules)
assert not slow, f"imported: {sorted(slow)}"
"""


def test_a_warm_up_imports_nothing_that_is_slow() -> None:
    """Sympy takes 0.2 s and Dynamo 0.7: more than the whole start from a warm cache may."""
    done = subprocess.run([sys.executable, "-c", QUICK], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr.splitlines()[-1]


@pytest.mark.parametrize("name", list(OPS))
def test_examples_without_memory_are_like_those_with(name: str) -> None:
    op = OPS[name]
    shape = {2: (6, 64), 3: (6, 48, 64)}[len(default_shapes(name)[0])]
    for arch in ("sm_90a", "sm_100a", "sm_80"):
        real = op.example_for(KNOWN[arch], shape, torch.bfloat16, "cpu")
        meta = op.example_for(KNOWN[arch], shape, torch.bfloat16)
        for left, right in zip(real, meta, strict=True):
            if isinstance(left, torch.Tensor):
                assert right.is_meta
                assert (left.shape, left.dtype) == (right.shape, right.dtype)
                assert left.stride() == right.stride()
            else:
                assert left == right


@pytest.mark.long
def test_without_a_gpu_kernels_are_compiled_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    training = [start for start in cold_start.starts(CPU) if "training" in start.name]
    monkeypatch.setattr(cold_start, "starts", lambda device, names=(): training)
    results = Results({})
    cold_start.run(CPU, results, lambda text: None, repeats=1)
    assert [row["cache"] for row in results.rows] == ["empty", "warm", "bundle"]
    assert [row["error"] for row in results.rows] == [None] * 3
    assert [row["compiles"] > 0 for row in results.rows] == [True, False, False]
    assert all(row["target"] == "sm_90a" for row in results.rows)
    assert results.meta["notes"] == [cold_start.NO_GPU]
    assert results.rows[0]["warmup_s"] > results.rows[1]["warmup_s"] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("form", list(FORMS))
def test_a_step_after_a_warm_up_compiles_nothing(form: str) -> None:
    device = torch.device("cuda")
    model = FORMS[form](LLAMA, device)
    model.prepare()
    gristmill.warmup(FORMS[form].needs(LLAMA), device=device)
    before = gristmill.counters()["compiles"]
    outputs = model.run()
    assert all(torch.isfinite(output).all() for output in outputs)
    assert gristmill.counters()["compiles"] == before
