"""Mixtures of experts: routings as they are named, calls that stay cold, liars that are caught."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gristmill.bench import charts, runner
from gristmill.bench.check import WrongResultError
from gristmill.bench.experts import inputs as expert_inputs
from gristmill.bench.experts.inputs import (
    Experts,
    calls_at,
    expert_bytes,
    experts_of,
    make_calls,
    make_experts,
)
from gristmill.bench.experts.models import KNOWN, MODELS, TINY, Model
from gristmill.bench.experts.report import lines
from gristmill.bench.experts.routing import distinct, draw, renamed
from gristmill.bench.experts.truth import Truth
from gristmill.bench.peers import PEERS, Function, Part, Peer, Sets
from gristmill.bench.report import markdown
from gristmill.bench.results import OURS, Results, by_problem
from gristmill.bench.runner import Runner
from gristmill.bench.suites import Task
from gristmill.formats.nvfp4 import dequantize
from gristmill.ops.registry import OPS

CPU = torch.device("cpu")
SMALL = Model("small", 8, 3, 64, 48)
OAI = Model("oai", 6, 2, 64, 32, bias=True, activation="swiglu_oai", limit=0.5)
TASK = Task("nvfp4_moe", TINY.shape(9), "bfloat16", "uniform")


def drawn(routing: str, calls: int, tokens: int, experts: int, topk: int) -> torch.Tensor:
    return draw(routing, calls, tokens, experts, topk, torch.Generator().manual_seed(3))


def run(given: list[Peer], tasks: list[Task]) -> Results:
    results = Results({"device": "cpu"})
    Runner(CPU, given, results, samples=2).run(tasks, lambda text: None)
    return results


# ----------------------------------------------------------------------------------------- routing


@pytest.mark.parametrize("routing", ["uniform", "skewed"])
@pytest.mark.parametrize(("experts", "topk"), [(128, 8), (16, 4), (5, 4), (4, 4), (3, 1), (1, 1)])
def test_every_token_takes_distinct_experts(routing: str, experts: int, topk: int) -> None:
    ids = drawn(routing, 3, 50, experts, topk)
    assert ids.shape == (3, 50, topk)
    assert 0 <= int(ids.min()) <= int(ids.max()) < experts
    ordered = ids.sort(-1).values
    assert bool((ordered[..., 1:] > ordered[..., :-1]).all())


def test_uniform_is_even_and_skewed_has_half_of_all_slots_with_four() -> None:
    for topk in (2, 4, 8):
        for routing, low, high in (("uniform", 0.03, 0.09), ("skewed", 0.5, 0.5)):
            ids = drawn(routing, 1, 2000, 128, topk)
            counts = torch.bincount(ids.flatten(), minlength=128).sort(descending=True).values
            share = float(counts[:4].sum()) / ids.numel()
            assert low <= share <= high, (routing, topk, share)
            # None of the others stands out, and each is met.
            rest = counts[4:].float()
            assert float(rest.max()) < 2 * float(rest.mean())
            assert float(rest.min()) > 0.4 * float(rest.mean())


def test_hot_experts_stand_anywhere_in_a_row() -> None:
    ids = drawn("skewed", 1, 2000, 64, 8)[0]
    hot = torch.bincount(ids.flatten()).argsort(descending=True)[:4]
    places = torch.isin(ids, hot).float().mean(0)
    assert torch.all((places - 0.5).abs() < 0.05)


def test_the_next_calls_take_other_experts() -> None:
    """Or the weights of a call would be in the cache when the next one wants them."""
    for routing in ("uniform", "skewed"):
        ids = drawn(routing, 16, 1, 128, 8)
        assert sorted(ids.flatten().tolist()) == sorted(range(128))
        ids = drawn(routing, 6, 5, 128, 4)
        for one, other in itertools.pairwise(ids):
            assert not set(one.flatten().tolist()) & set(other.flatten().tolist())


def test_other_names_are_the_same_draw() -> None:
    ids = torch.randint(0, 9, (5, 40, 3), generator=torch.Generator().manual_seed(1))
    again = renamed(ids, 9, torch.Generator().manual_seed(2))
    for one, other in zip(ids, again, strict=True):
        same = one.flatten()[:, None] == one.flatten()
        assert torch.equal(same, other.flatten()[:, None] == other.flatten())
    assert not torch.equal(ids, again)
    assert distinct(ids) == distinct(again)


def test_an_unknown_routing_is_told() -> None:
    with pytest.raises(Exception, match=r"unknown routing 'skwed'.*did you mean skewed"):
        drawn("skwed", 1, 1, 4, 2)


# --------------------------------------------------------------------------------- weights and cost


def test_bf16_holds_every_weight_and_experts_differ() -> None:
    experts = make_experts(SMALL, torch.bfloat16, CPU)
    for weight, dense in zip((experts.w13, experts.w2), experts.dense, strict=True):
        assert torch.equal(dense.double(), dequantize(weight, torch.float64))
        spread = dense.float().std((1, 2))
        assert 1.5 < float(spread[1::2].mean() / spread[::2].mean()) < 2.5
    assert experts.dense is experts.dense  # made once
    again = make_experts(SMALL, torch.bfloat16, CPU)
    assert torch.equal(again.w2.codes, experts.w2.codes)


def test_what_is_made_of_weights_goes_with_them() -> None:
    experts = make_experts(SMALL, torch.bfloat16, CPU)
    calls = make_calls(experts, "nvfp4_moe", 2, "uniform")
    assert experts_of(calls.sets[0]) is experts
    del experts
    with pytest.raises(KeyError):
        experts_of(calls.sets[0])


def test_only_the_experts_that_have_a_token_must_be_read() -> None:
    experts = make_experts(SMALL, torch.bfloat16, CPU)
    calls = make_calls(experts, "nvfp4_moe", 1, "uniform")
    packed = 3 * 64 * 48 * 9 // 16 + 4 * (2 * 48 + 64)
    assert expert_bytes(SMALL, torch.bfloat16) == packed
    assert calls.cost.bytes == 3 * packed + 2 * 64 * 2
    assert calls.cost.operations == 2 * 3 * 3 * 64 * 48
    many = make_calls(experts, "nvfp4_moe", 6, "uniform")
    used = [len(set(args[2].flatten().tolist())) for args in many.sets]
    assert 3 <= min(used) <= max(used) <= 8
    assert many.cost.bytes == round(sum(used) / len(used) * packed) + 2 * 6 * 64 * 2
    dense = make_calls(experts, "moe", 1, "uniform")
    assert dense.cost.bytes == 3 * 3 * 64 * 48 * 2 + 2 * 64 * 2
    biased = expert_bytes(replace(SMALL, bias=True), torch.bfloat16)
    assert biased == packed + 2 * (2 * 48 + 64)


def test_a_gpu_gets_calls_enough_to_stay_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    class Known:
        l2_bytes = 60_000_000

    monkeypatch.setattr(expert_inputs, "device_of", lambda device: Known)
    gpu = torch.device("cuda")
    for name, model in MODELS.items():
        each = expert_bytes(model, torch.bfloat16)
        for tokens in (1, 8, 32, 512, 4096):
            calls = calls_at(model, tokens, each, gpu)
            read = min(model.experts, tokens * model.topk) * each
            assert calls * read >= 300_000_000
            assert 2 <= calls <= 16, name
    small = expert_bytes(MODELS["qwen3-30b-a3b"], torch.bfloat16)
    assert calls_at(MODELS["qwen3-30b-a3b"], 1, small, gpu) == 15
    assert calls_at(TINY, 1, 1000, CPU) == 2


# ------------------------------------------------------------------------------------------- truth


def plain(experts: Experts, args: tuple[Any, ...], token: int) -> torch.Tensor:
    """A token's result in fp64, slot by slot."""
    x, shares, ids, model = args[0].double(), args[1].double(), args[2], experts.model
    w13, w2 = (dequantize(weight, torch.float64) for weight in (experts.w13, experts.w2))
    total = torch.zeros(model.hidden, dtype=torch.float64)
    for share, expert in zip(shares[token], ids[token].tolist(), strict=True):
        both = w13[expert] @ x[token]
        if experts.w13_bias is not None:
            both += experts.w13_bias[expert].double()
        gate, up = both[: model.inner], both[model.inner :]
        if model.limit is not None:
            gate, up = gate.clamp(max=model.limit), up.clamp(-model.limit, model.limit)
        if model.activation == "silu":
            h = F.silu(gate) * up
        else:
            h = gate * torch.sigmoid(1.702 * gate) * (up + 1)
        out = w2[expert] @ h
        if experts.w2_bias is not None:
            out += experts.w2_bias[expert].double()
        total += share * out
    return total


@pytest.mark.parametrize("model", [SMALL, OAI], ids=lambda model: model.name)
def test_the_truth_is_that_of_fp64(model: Model) -> None:
    experts = make_experts(model, torch.bfloat16, CPU)
    calls = make_calls(experts, "nvfp4_moe", 40, "skewed")
    truth = calls.truth
    assert isinstance(truth, Truth)
    chosen = truth.tokens.tolist()
    assert (chosen[0], chosen[-1], len(set(chosen))) == (0, 39, 16)
    right = torch.stack([plain(experts, calls.sets[0], token) for token in chosen])
    torch.testing.assert_close(truth.exact, right)
    # The pipeline rounds, and no more than that; the op's reference rounds less.
    error = truth.told["pipeline_fp64_error"]
    assert error is not None
    assert 0.002 < error < 0.008
    ours = truth.precision(OPS["nvfp4_moe"].reference(*calls.sets[0]))
    assert ours["fp64_error"] is not None
    assert 0.001 < ours["fp64_error"] < error
    assert ours["pipeline_fp64_error"] == error


def test_both_ops_are_asked_for_the_same() -> None:
    experts = make_experts(OAI, torch.bfloat16, CPU)
    packed, dense = (make_calls(experts, op, 20, "uniform") for op in ("nvfp4_moe", "moe"))
    assert torch.equal(packed.truth.exact, dense.truth.exact)
    for op, calls in (("nvfp4_moe", packed), ("moe", dense)):
        assert calls.truth.check(OPS[op].reference(*calls.sets[0])) < 0.02


@pytest.mark.parametrize(
    ("arch", "layouts"),
    [("sm_80", ("rows", "rows")), ("sm_90a", ("pairs", "fragments")), ("sm_100a", ("tiles",) * 2)],
)
def test_a_gpu_gets_weights_in_its_own_layout(arch: str, layouts: tuple[str, str]) -> None:
    experts = make_experts(OAI, torch.bfloat16, CPU)
    packed = (experts.w13.prepare(arch, pairs=True), experts.w2.prepare(arch))
    assert tuple(one.layout for one in packed) == layouts
    experts.kept["packed"] = packed
    calls = make_calls(experts, "nvfp4_moe", 9, "uniform")
    assert experts_of(calls.sets[0]) is experts
    assert calls.truth.check(OPS["nvfp4_moe"].reference(*calls.sets[0])) < 0.02


def test_what_is_wrong_anywhere_is_caught() -> None:
    experts = make_experts(SMALL, torch.bfloat16, CPU)
    calls = make_calls(experts, "nvfp4_moe", 60, "uniform")
    right = OPS["nvfp4_moe"].reference(*calls.sets[0])
    other = next(token for token in range(60) if token not in calls.truth.tokens.tolist())
    for token in (0, other):
        wrong = right.clone()
        wrong[token] *= 1.1
        with pytest.raises(WrongResultError, match=r"a row is off by 0\.1"):
            calls.truth.check(wrong)
    x, shares, ids, *rest = calls.sets[0]
    moved = ids.clone()
    moved[other, 0] = (moved[other, 0] + 1) % 8
    with pytest.raises(WrongResultError, match="a row is off"):
        calls.truth.check(OPS["nvfp4_moe"].reference(x, shares, moved, *rest))
    with pytest.raises(WrongResultError, match="instead of"):
        calls.truth.check(right[:50])
    with pytest.raises(WrongResultError, match="gives tuple"):
        calls.truth.check((right,))
    assert "fp64_error" not in calls.truth.precision(right[:50])


# --------------------------------------------------------------------------------------------- run


def test_a_row_for_each_routing_with_what_recorded_rows_have() -> None:
    tasks = [
        Task(name, TINY.shape(tokens), "bfloat16", routing)
        for name in ("nvfp4_moe", "moe")
        for tokens in (1, 9)
        for routing in ("uniform", "skewed")
    ]
    results = run([PEERS["torch"]], tasks)
    assert len(results.rows) == 16
    keys = ("op", "dtype", "model", "routing", "M", "impl")
    assert len({tuple(row[key] for key in keys) for row in results.rows}) == 16
    assert len(by_problem(results.rows)) == 8
    for row in results.rows:
        # Recorded rows have neither, and are found by what they lack, too.
        assert not {"N", "K"} & set(row)
        assert (row["model"], row["E"], row["topk"], row["H"], row["I"]) == ("tiny", 8, 2, 128, 64)
        assert row["us"] > 0, row["error"]
        assert row["roof_share"] > 0
        assert 0.001 < row["fp64_error"] < 0.01
        least = row["pipeline_fp64_error"]
        assert row["fp64_error"] == least if row["impl"] != OURS else row["fp64_error"] < least
    assert {row["impl"] for row in results.rows} == {OURS, "torch_grouped_mm_bf16"}


def test_a_model_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    def counted(model: Model, dtype: torch.dtype, device: torch.device) -> Experts:
        made.append(model.name)
        return make_experts(model, dtype, device)

    monkeypatch.setattr(runner, "make_experts", counted)
    models = (TINY, replace(TINY, name="8x2x64x32", hidden=64, inner=32))
    tasks = [
        Task("nvfp4_moe", model.shape(tokens), "bfloat16", routing)
        for model in models
        for tokens in (1, 4)
        for routing in ("uniform", "skewed")
    ]
    results = run([], tasks)
    assert made == ["tiny", "8x2x64x32"]
    assert [row["model"] for row in results.rows] == ["tiny"] * 4 + ["8x2x64x32"] * 4
    assert not results.failures()


def stand_in(name: str, builder: Any) -> Peer:
    return Peer(name, "torch", "torch", {"nvfp4_moe": builder}, cpu=True)


def changed(change: Callable[[torch.Tensor], Any]) -> Callable[[Sets], Function]:
    return lambda sets: lambda *args: change(OPS["nvfp4_moe"].reference(*args))


def test_peers_that_fail_are_lines_and_ours_goes_on() -> None:
    def no_memory(sets: Sets) -> Function:
        raise torch.OutOfMemoryError("no room for its weights")

    def part(sets: Sets) -> Function:
        return Part(
            lambda *args: OPS["nvfp4_moe"].reference(*args).float(), lambda out, *_: out.bfloat16()
        )

    given = [
        stand_in("right", changed(lambda y: y)),
        stand_in("part", part),
        stand_in("wrong", changed(lambda y: y * 1.2)),
        stand_in("nothing", changed(lambda y: y * float("nan"))),
        stand_in("large", no_memory),
    ]
    results = run(given, [TASK])
    rows = {row["impl"]: row for row in results.rows}
    for name in (OURS, "right", "part"):
        assert rows[name]["us"] > 0, rows[name]["error"]
    assert rows["wrong"]["error"].startswith("WrongResultError: a ")
    assert rows["wrong"]["fp64_error"] == pytest.approx(0.2, rel=0.05)
    assert rows["nothing"]["fp64_error"] is None
    assert rows["large"]["error"] == "out of memory: no room for its weights"
    json.loads(json.dumps(results.rows), parse_constant=pytest.fail)


def test_a_model_that_does_not_fit_is_timed_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(runner, "make_experts", full)
    results = run([stand_in("right", changed(lambda y: y))], [TASK])
    assert [row["impl"] for row in results.rows] == [OURS, "right"]
    assert all("not enough memory" in row["error"] for row in results.rows)


@pytest.mark.gpu
@pytest.mark.parametrize("model", [TINY, KNOWN["qwen3-30b-a3b"]], ids=lambda model: model.name)
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_suite_on_a_gpu(model: Model, tokens: int) -> None:
    tasks = [
        Task("nvfp4_moe", model.shape(tokens), "bfloat16", one) for one in ("uniform", "skewed")
    ]
    results = Results({})
    Runner(torch.device("cuda"), [PEERS["torch"]], results, samples=2).run(tasks, lambda _: None)
    for row in results.rows:
        assert row["us"] > 0, row["error"]
        assert row["method"] == "graph"
        assert row["fp64_error"] <= 1.1 * row["pipeline_fp64_error"]


# ------------------------------------------------------------------------------------------ report


def made(tokens: int, routing: str, impl: str, us: float | None, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"op": "nvfp4_moe", "dtype": "bfloat16", "model": "m", "M": tokens}
    row.update({"routing": routing, "shape": f"{tokens}x8x2x64x32", "impl": impl, **more})
    row.update({"error": 0.001, "pipeline_fp64_error": 0.004, "pipeline_fp64_roundings": 4.0})
    if us is not None:
        row.update({"us": us, "tflop_per_s": 1.0, "roof_share": 0.5, "bytes": 10, "roof_us": 5.0})
    return row


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [
        made(1, "uniform", OURS, 10.0, fp64_error=0.002, fp64_roundings=1.0, variant="cuda_wgmma"),
        made(1, "uniform", "humming", 20.0, fp64_error=0.003, fp64_roundings=1.0),
        made(1, "skewed", OURS, 12.0, fp64_error=0.005, fp64_roundings=1.0),
        made(8, "uniform", OURS, 40.0, fp64_error=0.003, fp64_roundings=1.0),
        made(8, "skewed", OURS, 30.0, fp64_error=None, fp64_roundings=None),
        made(8, "skewed", "humming", 15.0, fp64_error=0.003, fp64_roundings=1.0),
        made(64, "skewed", OURS, None),
    ]


def test_lines_about_errors_and_skew(rows: list[dict[str, Any]]) -> None:
    assert lines(rows) == [
        "nvfp4_moe: errors against fp64 are at most 1.25x those of a pipeline in 16 bits (m M=1), "
        "larger on 1 of 3 problems",
        "nvfp4_moe: skewed routing takes at most 1.20x the time of uniform (m M=1), 0.95x over 2 "
        "problems (geometric mean)",
    ]
    assert lines([row for row in rows if row["impl"] != OURS]) == []
    assert lines([{"op": "linear", "impl": OURS}]) == []


def test_the_page_has_both_errors_and_means_by_model(rows: list[dict[str, Any]]) -> None:
    page = markdown(Results({"device": "cuda"}, rows))
    header = "| problem | gristmill | humming | vs best peer | TFLOP/s | of roof | error | "
    assert header + "16-bit error | variant |" in page
    assert "| m M=1 uniform | 10.0 | 20.0 | 2.00x | 1.00 | 50% | 0.2% | 0.4% | cuda_wgmma |" in page
    assert "| m uniform | 2.00x | 2.00x | 1 | 0 |" in page
    assert "| m skewed | 0.50x | 0.50x | 1 | 1 |" in page
    assert "geometric means by M" in page
    assert "skewed routing takes at most" in page


def test_a_panel_for_each_model_and_routing(rows: list[dict[str, Any]]) -> None:
    text = charts.draw(Results({"gpu": "G"}, rows))["nvfp4_moe"].svg(standalone=True)
    for title in ("m, uniform", "m, skewed"):
        assert f">{title}</text>" in text
