"""The runner on a CPU with tiny problems: numbers that are sane, liars that are caught."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.bench import explained
from gristmill.bench.peers import GRISTMILL, PEERS, Function, Peer, Sets
from gristmill.bench.results import OURS, Results, by_problem, fastest_peer, load
from gristmill.bench.runner import Runner
from gristmill.bench.suites import KINDS, Task
from gristmill.errors import GristmillError

CPU = torch.device("cpu")
SHAPE = {"softmax_causal": (2, 4, 64), "softmax_causal_bwd": (2, 4, 64)}
# Mixtures of experts are measured in another way, and tested by themselves.
NAMES = [name for name, kind in KINDS.items() if not kind.experts]
TASKS = [Task(name, SHAPE.get(name, (8, 64)), "bfloat16") for name in NAMES]
# What a reader of result files keys on, and what it needs of a row that was timed.
PROBLEM_KEYS = {"op", "dtype", "M", "N", "shape", "impl", "peer", "sets"}
TIMED_KEYS = {"us", "spread_us", "tb_per_s", "roof_us", "roof_share", "l2", "host_us"}


def run(peers: list[Peer], tasks: list[Task], path: Path | None = None) -> Results:
    results = Results({}, path=path)
    Runner(CPU, peers, results, samples=3).run(tasks, lambda text: None)
    return results


def wrong_forward(sets: Sets) -> Function:
    def call(x: torch.Tensor, weight: torch.Tensor, eps: float, *_: Any) -> torch.Tensor:
        y = torch.nn.functional.rms_norm(x, weight.shape, weight, eps).clone()
        y[-1] = y[-1] * 1.05
        return y

    return call


def failing_forward(sets: Sets) -> Function:
    def call(*_: Any) -> None:
        raise ValueError("no such kernel\nand a second line")

    return call


def missing_forward(sets: Sets) -> Function:
    raise ImportError("half an install")


def peer(name: str, builder: Any) -> Peer:
    return Peer(name, "torch", "torch", {"rms_norm": builder}, cpu=True)


@pytest.fixture(scope="module")
def results() -> Results:
    return run([PEERS["eager"], PEERS["cublas"]], TASKS)


def test_one_row_per_problem_and_implementation(results: Results) -> None:
    assert [(row["op"], row["impl"]) for row in results.rows] == [
        (name, impl)
        for name in NAMES
        for impl in (OURS, "cublas_bf16" if KINDS[name].fp64 else "eager")
    ]
    assert {(row["M"], row["N"]) for row in results.rows} == {(8, 64)}
    shapes = {row["op"]: row["shape"] for row in results.rows}
    assert shapes["rms_norm"] == "8x64"
    assert shapes["softmax_causal"] == "2x4x64"


def test_rows_have_what_readers_need(results: Results) -> None:
    for row in results.rows:
        assert set(row) >= PROBLEM_KEYS | TIMED_KEYS, row
        coarse = row["impl"] == "eager" and "cross_entropy" in row["op"]
        assert row["error"] <= (2**-4 if coarse else 2**-6)
        assert row["first_call_s"] >= 0
    ours = [row for row in results.rows if row["impl"] == OURS]
    assert all(row["variant"] in ("library", "reference") for row in ours)
    assert all({"config", "source"} <= set(row) for row in ours)


def test_numbers_are_sane(results: Results) -> None:
    for row in results.rows:
        assert 0.5 < row["us"] < 1e6
        assert row["spread_us"] >= 0
        assert row["tb_per_s"] == pytest.approx(row["bytes"] / row["us"] / 1e6, rel=0.01)
        assert row["roof_share"] == pytest.approx(row["roof_us"] / row["us"], rel=0.01, abs=1e-4)


def test_a_product_has_a_depth_operations_and_a_roof_of_both(results: Results) -> None:
    products = [row for row in results.rows if KINDS[row["op"]].product]
    assert len(products) == 2 * 6
    assert not any(
        "K" in row or "tflop_per_s" in row for row in results.rows if row not in products
    )
    rate = results.meta["mm_tflop_per_s"]["bfloat16"]
    for row in products:
        operations = 2 * row["M"] * row["N"] * row["K"]
        assert row["K"] == 64
        assert row["tflop_per_s"] == pytest.approx(operations / row["us"] / 1e6, abs=1e-3)
    assert rate >= 0


def test_the_roof_of_a_product_is_the_longer_of_both(monkeypatch: pytest.MonkeyPatch) -> None:
    roofs = []
    for rate, copied in ((1e-9, 5.0), (1e9, 5.0)):
        monkeypatch.setattr(Runner, "_rate", lambda self, dtype, rate=rate: rate)
        monkeypatch.setattr(Runner, "_roof", lambda self, moved, copied=copied: copied)
        (ours,) = run([], [Task("linear", (8, 64), "float32")]).rows
        roofs.append(ours["roof_us"])
    assert roofs == [pytest.approx(2 * 8 * 64 * 64 / 1e-9 / 1e6), 5.0]


def test_bytes_are_what_must_move(results: Results) -> None:
    element, m, n = 2, 8, 64
    moved = {row["op"]: row["bytes"] for row in results.rows}
    matrices = {
        "rms_norm": 2,
        "add_rms_norm": 4,
        "rms_norm_bwd": 3,
        "layer_norm": 2,
        "add_layer_norm": 4,
        "layer_norm_bwd": 3,
        "softmax": 2,
        "softmax_bwd": 3,
        "cross_entropy": 1,
        "cross_entropy_bwd": 2,
        "cross_entropy_fwd_bwd": 2,
        "cross_entropy_train": 2,
    }
    for name, count in matrices.items():
        least = count * m * n * element
        # and rows of weights, their gradients, or a few numbers per row
        assert least <= moved[name] <= least + 5 * n * 4, name


def test_a_causal_softmax_need_not_read_what_is_masked() -> None:
    """(..., 64, 64): half is read (and a bit of the diagonal), all is written."""
    found = run([], [Task(f"softmax_causal{end}", (2, 64, 64), "bfloat16") for end in ("", "_bwd")])
    forward, backward = (row["bytes"] for row in found.rows)
    whole, half = 2 * 64 * 64 * 2, 2 * (64 * 65 // 2) * 2
    assert forward == whole + half
    assert backward == whole + 2 * half


def test_the_copies_are_in_the_meta(results: Results) -> None:
    by_size = results.meta["copy_tb_per_s_by_mb"]
    sizes = {row["bytes"] for row in results.rows}
    assert set(by_size) == {f"{size / 1e6:.3g}" for size in sizes}
    assert results.meta["copy_tb_per_s"] == list(by_size.values())[-1]
    assert "only ratios" in results.meta["method"]


def test_liars_and_wrecks_are_reported_and_not_timed() -> None:
    liars = [peer("liar", wrong_forward), peer("wreck", failing_forward)]
    liars.append(peer("half", missing_forward))
    found = run([*liars, PEERS["eager"]], TASKS[:1])
    rows = {row["impl"]: row for row in found.rows}
    assert "off by" in rows["liar"]["error"]
    assert rows["wreck"]["error"] == "ValueError: no such kernel"
    assert rows["half"]["error"] == "ImportError: half an install"
    for name in ("liar", "wreck", "half"):
        assert "us" not in rows[name]
    assert {row["impl"] for row in found.failures()} == {"liar", "wreck", "half"}
    assert rows[OURS]["us"] > 0
    best = fastest_peer(rows)
    assert best is not None
    assert best["impl"] == "eager"


def test_several_ways_of_one_peer_are_several_implementations() -> None:
    right = PEERS["eager"].implementations("rms_norm")["eager"]
    ways = {"good": right, "bad": wrong_forward}
    rows = {row["impl"]: row for row in run([peer("two", ways)], TASKS[:1]).rows}
    assert list(rows) == [OURS, "two_good", "two_bad"]
    assert rows["two_good"]["us"] > 0
    assert "off by" in rows["two_bad"]["error"]


def test_a_problem_that_does_not_fit_is_told_for_every_implementation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no more\nsecond line")

    monkeypatch.setattr("gristmill.bench.runner.arguments", full)
    found = run([peer("two", {"a": wrong_forward, "b": wrong_forward})], TASKS[:1])
    assert [row["impl"] for row in found.rows] == [OURS, "two_a", "two_b"]
    assert all(row["error"].endswith("problem: no more") for row in found.rows)


# What torch says on a CPU, where a lack of memory has no kind of its own.
CPU_LACK = "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 byte"


def test_a_problem_that_does_not_fit_a_cpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise RuntimeError(CPU_LACK)

    monkeypatch.setattr("gristmill.bench.runner.arguments", full)
    (row,) = run([], TASKS[:1]).rows
    assert row["error"] == f"not enough memory for this problem: {CPU_LACK}"
    monkeypatch.setattr("gristmill.bench.runner.arguments", failing_forward([]))
    with pytest.raises(ValueError, match="no such kernel"):
        run([], TASKS[:1])


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no room"), RuntimeError(CPU_LACK)])
@pytest.mark.parametrize("name", ["rms_norm", "linear"])
def test_times_stand_without_a_roof(
    monkeypatch: pytest.MonkeyPatch, name: str, error: Exception
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr("gristmill.bench.runner.time_copy", full)
    task = next(task for task in TASKS if task.name == name)
    found = run([PEERS["eager"]], [task])
    assert len(found.rows) == 2
    for row in found.rows:
        assert row["us"] > 0
        assert not {"roof_us", "roof_share"} & set(row)
    assert found.meta["notes"] == [f"{task} has no roof: {error}"]


def full_forward(sets: Sets) -> Function:
    def call(*_: Any) -> None:
        raise torch.OutOfMemoryError("no more\nsecond line")

    return call


def full_builder(sets: Sets) -> Function:
    raise torch.OutOfMemoryError("no room")


def full_later(sets: Sets) -> Function:
    """Right at the first call, and out of memory when it is timed."""
    right, calls = PEERS["eager"].implementations("rms_norm")["eager"](sets), []

    def call(*args: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise torch.OutOfMemoryError("no more")
        return right(*args)

    return call


def test_a_peer_that_runs_out_of_memory_is_out_alone() -> None:
    greedy = [peer("large", full_builder), peer("larger", full_forward), peer("late", full_later)]
    found = run([*greedy, PEERS["eager"]], TASKS[:1])
    rows = {row["impl"]: row for row in found.rows}
    assert rows["large"]["error"] == "out of memory: no room"
    assert rows["larger"]["error"] == "out of memory: no more"
    assert rows["late"]["error"] == "while timing: out of memory: no more"
    assert {name for name, row in rows.items() if "us" in row} == {OURS, "eager"}


@pytest.mark.parametrize(
    ("others", "says"),
    [
        # Somebody had memory enough: it is ours that lacked it.
        ({"wreck": failing_forward, "eager": None}, "out of memory: no more"),
        # Nobody ran: the problem does not fit.
        ({}, "not enough memory for this problem: out of memory: no more"),
        ({"wreck": failing_forward}, "not enough memory for this problem: out of memory: no more"),
    ],
)
def test_when_ours_runs_out_of_memory_others_are_timed(
    monkeypatch: pytest.MonkeyPatch, others: dict[str, Any], says: str
) -> None:
    monkeypatch.setattr("gristmill.rms_norm", full_forward([]))
    peers = [peer(name, one) if one else PEERS[name] for name, one in others.items()]
    rows = {row["impl"]: row for row in run(peers, TASKS[:1]).rows}
    assert rows[OURS]["error"] == says
    assert {name for name, row in rows.items() if "us" in row} == {*others} - {"wreck"}
    if "wreck" in others:
        assert rows["wreck"]["error"] == "ValueError: no such kernel"


def test_rows_name_the_library_and_the_sets() -> None:
    ways = {"good": PEERS["eager"].implementations("rms_norm")["eager"]}
    (ours, other) = run([peer("two", ways)], [Task("rms_norm", (16, 4096), "bfloat16")]).rows
    assert (ours["impl"], ours["peer"]) == (OURS, OURS)
    assert (other["impl"], other["peer"]) == ("two_good", "two")
    assert ours["sets"] == other["sets"] == ["decode"]


def test_on_a_cpu_a_row_says_why_its_variant_ran(results: Results) -> None:
    rows = {row["op"]: row for row in results.rows if row["impl"] == OURS}
    plain = rows["softmax"]
    assert plain["variant"] == "library"
    assert set(plain["variants"]) == {"library", "reference"}
    assert all(us > 0 for us in plain["variants"].values())
    assert "in the order of preference" in plain["reason"]
    assert plain["declined"]["cuda_warp"] == "needs a CUDA device, not cpu"
    causal = rows["softmax_causal"]
    assert (causal["variant"], list(causal["variants"])) == ("reference", ["reference"])
    assert "causal" in causal["declined"]["library"]
    for row in rows.values():
        assert row["variant"] in row["variants"]
        assert not set(row["variants"]) & set(row["declined"])
    found = explained.table(results.rows)
    assert found is not None
    _, (header, lines) = found
    assert len(lines) == len(NAMES)
    line = dict(zip(header, lines[NAMES.index("softmax_causal")], strict=True))
    assert line["problem"] == "softmax_causal 2x4x64"
    assert line["variant"] == "reference"
    assert "cuda_warp, cuda_block" in line["could not"]
    assert line["could not"].count("needs a CUDA device") == 1  # once for all of them
    assert explained.table([{"op": "softmax", "variant": "cuda_warp"}]) is None


def test_sizes_that_differ_by_a_row_of_weights_share_a_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    copied: list[int] = []

    def time_copy(moved: int, device: torch.device, **_: Any) -> Any:
        copied.append(moved)
        return SimpleNamespace(us=moved / 1e6)

    monkeypatch.setattr("gristmill.bench.runner.time_copy", time_copy)
    runner = Runner(CPU, [], Results({"copy_tb_per_s_by_mb": {"9": 4.0}}), samples=1)
    assert runner._roof(1_000_000_000) == pytest.approx(1000.0)
    assert runner._roof(1_001_000_000) == pytest.approx(1001.0)
    assert runner._roof(2_000_000_000) == pytest.approx(2000.0)
    assert copied == [1_000_000_000, 2_000_000_000]
    # What a run has that goes on is kept.
    assert runner.results.meta["copy_tb_per_s_by_mb"] == {"9": 4.0, "1e+03": 1.0, "2e+03": 1.0}
    assert runner.results.meta["copy_tb_per_s"] == 1.0


def test_the_rate_of_a_slow_copy_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = SimpleNamespace(us=3e6)
    monkeypatch.setattr("gristmill.bench.runner.time_copy", lambda *_, **__: slow)
    runner = Runner(CPU, [], Results({}), samples=1)
    runner._roof(100_000)
    assert runner.results.meta["copy_tb_per_s"] == pytest.approx(1e5 / 3e6 / 1e6, rel=1e-4)


def test_a_device_that_is_lost_ends_the_run_and_leaves_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """After an illegal access nothing runs: others would be blamed for it, problem by problem."""
    wreck = peer("wreck", failing_forward)
    results = Results({})
    runner = Runner(CPU, [wreck], results, samples=1)
    synchronize = runner._synchronize

    def lost() -> None:
        if results.meta.get("lost"):
            raise RuntimeError("CUDA error: an illegal memory access")
        synchronize()

    def broken(sets: Sets) -> Function:
        results.meta["lost"] = True
        raise RuntimeError("CUDA error: an illegal memory access")

    monkeypatch.setattr(runner, "_synchronize", lost)
    runner.implementations = (GRISTMILL, peer("wreck", broken))
    with pytest.raises(GristmillError, match=r"wreck broke the device.*go on with --resume"):
        runner.run([TASKS[0], TASKS[3]], lambda text: None)
    assert [(row["op"], row["impl"]) for row in results.rows] == [
        ("rms_norm", OURS),
        ("rms_norm", "wreck"),
    ]
    assert all("wreck broke the device" in row["error"] for row in results.rows)
    # The next process passes it over.
    again = Runner(CPU, [peer("wreck", broken)], results, samples=1)
    assert again.todo([TASKS[0], TASKS[3]]) == [TASKS[3]]


def test_first_calls_of_what_was_compiled_ahead_are_not_told() -> None:
    right = PEERS["eager"].implementations("rms_norm")["eager"]
    compiles = Peer("jit", "torch", "torch", {"rms_norm": right}, cpu=True, compiles=True)
    tunes = Peer(
        *("tuner", "torch", "torch", {"rms_norm": right}),
        cpu=True,
        compiles=True,
        tunes=frozenset(["rms_norm"]),
    )
    for ahead, told in ((True, {"tuner"}), (False, {OURS, "jit", "tuner"})):
        results = Results({})
        Runner(CPU, [compiles, tunes], results, samples=1, ahead=ahead).run(
            TASKS[:1], lambda text: None
        )
        assert {row["impl"] for row in results.rows if row["first_call_s"] is not None} == told


def test_a_peer_without_the_op_has_no_row() -> None:
    found = run([peer("forward_only", wrong_forward)], TASKS[1:2])
    assert [row["impl"] for row in found.rows] == [OURS]


def test_a_crash_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "results.json"
    results = Results({}, path=path)
    seen = []

    def crash_at_the_second(text: str) -> None:
        seen.append(text)
        if len(seen) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Runner(CPU, [], results, samples=1).run(TASKS, crash_at_the_second)
    data = json.loads(path.read_text())
    assert [row["op"] for row in data["rows"]] == ["rms_norm"]
    assert data["meta"]["copy_tb_per_s"] > 0


def test_files_read_back(tmp_path: Path, results: Results) -> None:
    written = Results(results.meta, results.rows, tmp_path / "r.json")
    written.save()
    again = load(tmp_path / "r.json")
    assert (again.meta, again.rows) == (results.meta, results.rows)
    keys = [tuple(row[key] for key in ("op", "dtype", "M", "N", "impl")) for row in again.rows]
    assert len(keys) == len(set(keys))
    assert len(by_problem(again.rows)) == len(NAMES)


def test_the_same_task_gets_the_same_numbers() -> None:
    from gristmill.bench.inputs import arguments

    torch.manual_seed(7)
    before = torch.rand(3)
    first, second = arguments(TASKS[0], CPU), arguments(TASKS[0], CPU)
    assert torch.equal(first[0], second[0])
    torch.manual_seed(7)
    assert torch.equal(before, torch.rand(3))
    torch.manual_seed(7)
    arguments(TASKS[0], CPU)
    assert torch.equal(before, torch.rand(3))  # the caller's generator was left alone
