"""Choosing, remembering and explaining, for the real ops."""

from __future__ import annotations

import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from conformance_helpers import (
    ALL_OPS,
    CASES,
    DEVICES,
    ENTROPY_NAMES,
    FP8_NAMES,
    KERNEL_OPS,
    ROW_NAMES,
    SOFTMAX_NAMES,
    case_of,
    rows_of,
    same_bits,
    supporting,
    tuned_launches,
)
from conformance_truth import results_of, truth_of

import gristmill
from gristmill.errors import ArgumentError, VariantUnavailable
from gristmill.ops import op as op_module
from gristmill.ops.op import Case, Op
from gristmill.ops.plain import Reference
from gristmill.ops.registry import OPS
from gristmill.ops.rms_norm import semantics
from gristmill.ops.rms_norm.plain import Library
from gristmill.ops.rows import problem as rows_problem
from gristmill.ops.rows.config import ASYNC, ONE_ROW, TWICE, RowConfig
from gristmill.select import HINTS, KNOWN, ranked, resolve
from gristmill.settings import reload_settings

RMS_NORM = OPS["rms_norm"]


def chosen(op: Op, args: tuple[Any, ...]) -> str | None:
    return gristmill.explain(op.name, *args).chosen


# --- remembering


def test_a_plan_is_made_once_per_kind_of_call() -> None:
    x, weight = torch.randn(4, 32), torch.randn(32)
    before = gristmill.counters()["plans"]
    for _ in range(3):
        gristmill.rms_norm(x, weight)
        gristmill.rms_norm(x.clone(), weight.clone())
    assert gristmill.counters()["plans"] == before + 1
    assert len(RMS_NORM._plans) == 1
    gristmill.rms_norm(x.double(), weight.double())
    gristmill.rms_norm(x[:2], weight)
    gristmill.rms_norm(x, None)
    gristmill.rms_norm(x, weight, casting="llama")
    assert gristmill.counters()["plans"] == before + 5


def test_what_a_plan_depends_on_makes_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of each kind, and no two share a plan: strides and alignment too."""
    x = torch.randn(8, 32)
    wide, flat = torch.randn(8, 40)[:, :32], torch.randn(8 * 32 + 1)[1:].view(8, 32)
    calls: list[tuple[Any, ...]] = [
        (x,),
        (wide,),
        (flat,),
        (x.t().contiguous().t(),),
        (x.view(2, 4, 32),),
        (x.bfloat16(),),
        (x, None, 1e-5),
        (x, None, None),
    ]
    for count, args in enumerate(calls, start=1):
        gristmill.rms_norm(*args)
        gristmill.rms_norm(*args)
        assert len(RMS_NORM._plans) == count


def test_plans_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op_module, "PLANS_KEPT", 16)
    weight = torch.randn(8)
    for rows in range(1, 100):
        x = torch.randn(rows, 8)
        expected = torch.nn.functional.rms_norm(x, (8,), weight, 1e-6)
        torch.testing.assert_close(gristmill.rms_norm(x, weight), expected)
        assert len(RMS_NORM._plans) <= 16


def test_many_threads_with_many_shapes() -> None:
    """Plans are made, found, thrown away and used by all at once; every answer is right."""
    weights = {columns: torch.randn(columns) for columns in range(1, 24)}
    start = threading.Barrier(8)
    failures: list[str] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start.wait()
        for turn in range(300):
            columns = 1 + (turn * 7 + seed) % 23
            x = torch.randn((1 + (turn * 5 + seed) % 40, columns), generator=generator)
            name = ("library", "reference")[(turn + seed) % 2]
            with gristmill.use("rms_norm", name):
                y = gristmill.rms_norm(x, weights[columns])
            expected = torch.nn.functional.rms_norm(x, (columns,), weights[columns], 1e-6)
            if not torch.allclose(y, expected, rtol=1e-5, atol=1e-6):
                failures.append(f"{seed} {turn}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(op_module, "PLANS_KEPT", 64)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(work, range(8)))
    assert failures == []


@pytest.mark.parametrize("variant", [Library, Reference])
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_many_threads_make_the_first_call_of_a_plan(
    name: str, variant: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are held where the plan finds out what it promises; it must be found out whole, once."""
    op, threads = OPS[name], 8
    together = threading.Barrier(threads)

    def outputs(*args: Any) -> Any:
        together.wait(30)
        return op.outputs(*args)

    monkeypatch.setattr(semantics, "outputs_forward", outputs)
    monkeypatch.setattr(semantics, "outputs_add", outputs)
    args = case_of(op, "columns strided").make("cpu", 0)
    made = variant() if variant is Library else variant(op.reference, outputs)
    plan = made.bind(op.problem(*args), None)
    with ThreadPoolExecutor(threads) as pool:
        first = list(pool.map(lambda _: results_of(name, args, plan(*args)), range(threads)))
    for results in (*first, results_of(name, args, plan(*args))):
        for truth, result in zip(truth_of(name, args), results, strict=True):
            assert truth.roundings(result) <= 2.5
            assert result.stride() == torch.empty_like(args[0]).stride()


# --- forcing


@pytest.mark.parametrize("device", DEVICES)
def test_use_runs_the_variant_it_names_and_no_other(device: str) -> None:
    args = RMS_NORM.example((8, 256), torch.bfloat16, device)
    for variant in supporting(RMS_NORM, args):
        before = gristmill.counters()["choices"].get(f"rms_norm:{variant.name}", 0)
        RMS_NORM.forget_plans()
        with gristmill.use("rms_norm", variant.name):
            gristmill.rms_norm(*args[:3])
            assert chosen(RMS_NORM, args) == variant.name
        assert gristmill.counters()["choices"][f"rms_norm:{variant.name}"] == before + 1


def test_use_ends_with_its_block_and_finds_its_plans_again() -> None:
    args = RMS_NORM.example((8, 256), torch.bfloat16, "cpu")
    gristmill.rms_norm(*args[:3])
    for _ in range(3):
        with gristmill.use("rms_norm", "reference"):
            assert chosen(RMS_NORM, args) == "reference"
            gristmill.rms_norm(*args[:3])
        assert chosen(RMS_NORM, args) == "library"
    assert len(RMS_NORM._plans) == 2


def test_use_of_one_op_leaves_the_others() -> None:
    x, residual = torch.randn(3, 8), torch.randn(3, 8)
    with gristmill.use("rms_norm", "reference"):
        assert gristmill.explain("add_rms_norm", x, residual).chosen == "library"


def test_the_environment_forces_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRISTMILL_USE", "rms_norm:reference,add_rms_norm:reference")
    reload_settings()
    x = torch.randn(3, 8)
    before = gristmill.counters()["choices"].get("rms_norm:reference", 0)
    gristmill.rms_norm(x)
    assert gristmill.counters()["choices"]["rms_norm:reference"] == before + 1
    with gristmill.use("rms_norm", "library"):
        found = gristmill.explain("rms_norm", x)
    assert (found.chosen, found.source) == ("library", "forced")
    assert gristmill.explain("add_rms_norm", x, x).chosen == "reference"


def test_forced_and_impossible_says_so_each_time_and_keeps_nothing() -> None:
    x = torch.randn(3, 8).bfloat16()
    weight = torch.randn(8)
    for _ in range(2):
        with (
            gristmill.use("rms_norm", "library"),
            pytest.raises(VariantUnavailable, match=r"'library'.*one dtype for all tensors"),
        ):
            gristmill.rms_norm(x, weight)
    assert not RMS_NORM._plans
    # And without force, what can run does.
    assert gristmill.rms_norm(x, weight).dtype == torch.bfloat16


# --- explaining


def test_explain_takes_a_name_or_the_function() -> None:
    x, weight = torch.randn(4, 64), torch.randn(64)
    by_name = gristmill.explain("rms_norm", x, weight, eps=None)
    by_function = gristmill.explain(gristmill.rms_norm, x, weight=weight, eps=None)
    assert by_name == by_function
    with pytest.raises(
        ArgumentError,
        match=r"unknown op 'softmin' .did you mean softmax.*: there are rms_norm, add_rms_norm",
    ):
        gristmill.explain("softmin", x)


def test_explain_says_why_on_a_cpu() -> None:
    x, weight = torch.randn(4, 64).bfloat16(), torch.randn(64)
    text = str(gristmill.explain("rms_norm", x, weight))
    assert "rms_norm rows=4 N=64 x=bfloat16 weight=float32" in text
    assert "needs a CUDA device, not cpu" in text
    assert "one dtype for all tensors" in text
    assert "runs reference, by preference" in text


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "case"), CASES)
def test_explain_tells_the_truth(op: Op, case: Case, device: str) -> None:
    """What it says will run is what runs, for every case; and it is JSON."""
    args = case.make(device, 0)
    explanation = gristmill.explain(op.name, *args)
    found = json.loads(json.dumps(explanation.as_dict()))
    assert found["op"] == op.name
    # A product of stacks counts the rows of one batch.
    batch = found["dims"].pop("batch", 1) if op.name == "matmul" else 1
    rows = op.outputs(*args) if op.name == "matmul" else rows_of(op, args)
    assert found["rows"] * batch == math.prod(rows.shape[:-1])
    assert found["dims"] == _dims(op, args)
    assert [row["variant"] for row in found["variants"]] == [one.name for one in op.variants]
    statuses = [row["status"] for row in found["variants"]]
    assert statuses.count("chosen") == 1
    assert all(row["reason"] for row in found["variants"] if row["status"] == "unsupported")
    choice, _ = resolve(op.name, op.variants, op.problem(*args))
    assert (choice.variant.name, choice.source) == (found["chosen"], found["source"])


def _dims(op: Op, args: tuple[Any, ...]) -> dict[str, int]:
    """The dimensions that a kernel may be specialised on."""
    if op.name in (*ROW_NAMES, *FP8_NAMES, *SOFTMAX_NAMES, *ENTROPY_NAMES):
        return {"N": rows_of(op, args).shape[-1]}
    named = dict(zip([one.name for one in op.overload._schema.arguments], args, strict=True))
    if "linear_cross_entropy" in op.name:
        return dict(zip(("V", "K"), named["weight"].shape, strict=True))
    if op.name in ("linear", "linear_with_pre"):
        return dict(zip(("N", "K"), named["weight"].shape, strict=True))
    if op.name == "matmul":
        return dict(zip(("K", "N"), named["b"].shape[-2:], strict=True))
    if "nvfp4_linear" in op.name:
        return {"N": len(named["row_scale"]), "K": named.get("columns", args[0].shape[-1])}
    if op.name == "topk_router":
        groups = {"groups": named["groups"]} if named["topk_groups"] < named["groups"] else {}
        return {"E": args[0].shape[1], "k": named["topk"], **groups}
    if op.name == "topk_router_backward":
        return {"E": named["logits"].shape[1], "k": args[0].shape[1]}
    if op.name in ("moe", "moe_backward"):
        experts, hidden, inner = named["w2"].shape
        return {"E": experts, "k": named["topk_ids"].shape[1], "H": hidden, "I": inner}
    (experts, hidden), topk = named["w2_row_scale"].shape, named["topk_ids"].shape[1]
    return {"E": experts, "k": topk, "H": hidden, "I": named["w13_row_scale"].shape[1] // 2}


def test_counters_are_plain_numbers() -> None:
    gristmill.rms_norm(torch.randn(2, 4))
    found = json.loads(json.dumps(gristmill.counters()))
    assert found["plans"] == sum(found["choices"].values()) > 0
    assert {"compiles", "compile_seconds", "memory_hits", "disk_hits", "fallbacks"} <= set(found)


# --- the choices for GPUs, without one

ARCHITECTURES = [pytest.param(device, id=arch) for arch, device in KNOWN.items()]


@pytest.mark.parametrize("device", ARCHITECTURES)
@pytest.mark.parametrize("op", KERNEL_OPS)
def test_every_case_has_a_launchable_choice_on_every_gpu(op: Op, device: Any) -> None:
    empty = ((3, 0), (0,), (0, 8), (2, 0, 2, 0, 64))
    extra = [op.example(shape, torch.float32, "meta") for shape in empty]
    for args in [*(case.make("meta", 0) for case in op.cases()), *extra]:
        problem = op.problem(*args, device=device)
        choices = ranked(op.name, op.variants, problem)
        wide = any(dtype == "float64" for _, dtype in problem.dtypes)
        assert choices[0].variant.name.startswith("cuda_") != wide
        for choice in choices:
            if isinstance(choice.config, RowConfig):
                _check_launch(problem, choice, device)


def _check_launch(problem: Any, choice: Any, device: Any) -> None:
    config, variant, details = choice.config, choice.variant, problem.layout
    what = f"{problem.key(problem.rows)} {variant.name} {config}"
    assert 0 < config.threads <= 1024, what
    assert config.threads % 32 == 0, what
    if problem.rows == 0 or problem.dim("N") == 0:
        return
    share = config.lanes if variant.scope == "WARP" else config.threads * config.cluster
    if config.feed != TWICE:  # the row is kept whole, by somebody
        assert share * config.items >= details.layout.vectors, what
    assert variant.shared_bytes(details, config) <= device.shared_per_block, what
    if variant.scope == "CLUSTER":
        assert 2 <= config.cluster <= 16, what
    if variant.scope == "GRID":
        assert config.cluster <= device.multiprocessors, what
    if config.feed > 0:
        assert device.capability >= (9, 0), what
    if config.feed > 0 or config.feed == ASYNC:
        assert details.bulk(0, 1), what
    for program in variant.programs(problem, config):
        assert program.names


@pytest.mark.parametrize("multiprocessors", [14, 58, 142])
@pytest.mark.parametrize("op", KERNEL_OPS)
def test_no_variant_makes_way_for_one_that_cannot_run(op: Op, multiprocessors: int) -> None:
    """Too few SMs to share a long row: a block that reads it twice is still better than torch."""
    device = replace(KNOWN["sm_89"], multiprocessors=multiprocessors)
    first = {}
    for rows in (1, 64, 4096):
        for columns in (8192, 65536, 131072, 262143, 262144):
            args = op.example((rows, columns), torch.bfloat16, "meta")
            problem = op.problem(*args, device=device)
            able = [one.name for one in op.variants if one.supports(problem) is None]
            first[rows, columns] = ranked(op.name, op.variants, problem)[0].variant.name
            if any(name.startswith("cuda_") for name in able):
                assert first[rows, columns].startswith("cuda_"), (rows, columns)
    if op.name in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"):
        shared = "cuda_cooperative" if multiprocessors == 142 else "cuda_block"
        assert first[64, 262143] == shared


@pytest.mark.parametrize("device", ARCHITECTURES)
@pytest.mark.parametrize("op", KERNEL_OPS)
def test_rows_of_2_31_columns_are_refused_with_a_reason(op: Op, device: Any) -> None:
    """Kernels count columns in 32 bits, whatever the length in vectors."""
    for columns in (2**31, 2**31 + 1, 2**31 + 8, 2**33, 2**40 + 1):
        for dtype in (torch.bfloat16, torch.float32):
            problem = op.problem(*op.example((2, columns), dtype, "meta"), device=device)
            for variant in op.variants:
                if variant.name.startswith("cuda_"):
                    reason = variant.supports(problem)
                    assert reason is not None, f"{variant.name} {columns} {dtype}"
                    assert str(columns) in reason or "clusters" in reason
            assert not ranked(op.name, op.variants, problem)[0].variant.name.startswith("cuda_")
    if op.name in ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm"):
        longest = op.problem(*op.example((2, 2**31 - 8), torch.bfloat16, "meta"), device=device)
        assert ranked(op.name, op.variants, longest)[0].variant.name.startswith("cuda_")


@pytest.mark.parametrize("device", ARCHITECTURES)
@pytest.mark.parametrize(
    "name", [name for name in ROW_NAMES + SOFTMAX_NAMES if not name.endswith("_backward")]
)
def test_more_rows_than_teams_can_be_numbered_are_taken_in_turns(name: str, device: Any) -> None:
    op = OPS[name]
    warp, block = (
        next(one for one in op.variants if one.name == kind) for kind in ("cuda_warp", "cuda_block")
    )
    for columns in (1, 8, 128, 1024):
        for rows, looping in ((2**31 - 1, False), (2**31, True), (2**33, True)):
            args = op.example((rows, columns), torch.bfloat16, "meta")
            problem = op.problem(*args, device=device)
            assert warp.supports(problem) is None
            assert ranked(name, op.variants, problem)[0].variant is warp
            feed = warp.config(problem).feed
            assert (feed not in ONE_ROW) == looping, (rows, columns, feed)
            assert (block.supports(problem) is not None) == looping  # a block per row


# Every size of a batch for the GPU that has a table. For others a sample; all of them take long.
OTHERS = [arch for arch in KNOWN if arch != "sm_90a"]
GROWING = [
    pytest.param(KNOWN["sm_90a"], True, id="sm_90a"),
    *(pytest.param(KNOWN[arch], False, id=f"{arch} sample") for arch in OTHERS),
    *(pytest.param(KNOWN[arch], True, id=arch, marks=pytest.mark.long) for arch in OTHERS),
]


@pytest.mark.parametrize(("device", "every"), GROWING)
@pytest.mark.parametrize("op", KERNEL_OPS)
def test_growing_rows_need_few_kernels(op: Op, device: Any, every: bool) -> None:
    """M is a runtime argument: a server that meets every batch size compiles a handful.

    And where a table has rows, what these name.
    """
    few, many = range(1, 300), range(1000, 70000, 1001)
    if not every:
        few, many = few[::7], many[::3]
    for columns in (128, 1024, 4096, 8192, 16384, 65536):
        programs = set()
        for rows in (*few, *HINTS, *many):
            problem = op.problem(
                *op.example((rows, columns), torch.bfloat16, "meta"), device=device
            )
            choice = ranked(op.name, op.variants, problem)[0]
            programs.update(choice.variant.programs(problem, choice.config))
        most = 4 + tuned_launches(problem)
        assert 1 <= len(programs) <= most, (columns, [program.names for program in programs])


@pytest.mark.parametrize("op", ALL_OPS)
def test_an_old_gpu_gets_what_torch_has(op: Op) -> None:
    turing = replace(KNOWN["sm_80"], name="NVIDIA T4", arch="sm_75", capability=(7, 5))
    problem = op.problem(*op.example((4, 64), torch.float16, "meta"), device=turing)
    names = [choice.variant.name for choice in ranked(op.name, op.variants, problem)]
    ours = ("cuda_", "cutedsl", "triton_")
    plain = [one.name for one in op.variants if not one.name.startswith(ours)]
    if op.name == "linear":
        plain.remove("library_fused")  # no activation to fuse
    if "linear_cross_entropy" in op.name:
        plain.remove("library")  # torch's own gives its loss in fp16: too few bits
    if "nvfp4" in op.name or op.name == "moe":
        plain = ["library", "reference"]  # the others, whatever their names, have kernels of ours
    if op.name == "moe_backward":
        plain = ["reference"]  # no grouped mm for the gradients of weights
    assert names == plain


def test_forgetting_plans_changes_no_answer() -> None:
    x, weight = torch.randn(4, 32), torch.randn(32)
    one = gristmill.rms_norm(x, weight)
    RMS_NORM.forget_plans()
    assert not RMS_NORM._plans
    assert same_bits(gristmill.rms_norm(x, weight), one)


@pytest.mark.parametrize(
    "name", [name for name in ROW_NAMES if name not in ("rms_norm", "layer_norm")]
)
def test_a_plan_that_copies_one_tensor_aligns_the_other(name: str) -> None:
    """Accesses are as wide as those of what the plan takes, which is `packed` of each."""
    op = OPS[name]
    args = case_of(op, "unaligned beside strided columns").make("cpu", 0)
    details = op.problem(*args, device=KNOWN["sm_90a"]).layout
    assert details.copied
    assert args[0].data_ptr() % 4 == 2
    assert {view.access for view in details.layout.views if view is not None} == {16}
    for tensor in args[:2]:
        assert rows_problem.packed(tensor).is_contiguous()
        assert rows_problem.packed(tensor).data_ptr() % 16 == 0
        assert torch.equal(rows_problem.packed(tensor), tensor)
    dense = torch.randn(3, 64)
    assert rows_problem.packed(dense) is dense
