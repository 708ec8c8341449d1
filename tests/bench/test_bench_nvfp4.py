"""Linear layers over NVFP4: errors that are right, liars that are caught, peers by stand-ins."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from gristmill.bench.check import WrongResultError, check, check_lines
from gristmill.bench.inputs import argument_sets, arguments
from gristmill.bench.peers import PEERS, Function, Peer, Sets
from gristmill.bench.peers import nvfp4_linear as peers
from gristmill.bench.precision import in_fp64, precision
from gristmill.bench.product_report import peer_lines, tables
from gristmill.bench.report import markdown
from gristmill.bench.results import OURS, Results
from gristmill.bench.runner import Runner
from gristmill.bench.suites import Task
from gristmill.formats.nvfp4 import NVFP4Tensor, PackedNVFP4, dequantize
from gristmill.ops.registry import OPS

CPU = torch.device("cpu")
TASK = Task("nvfp4_linear", (5, 128, 192), "bfloat16")
ROUNDED = Task("nvfp4_linear_fp8", (48, 128, 192), "bfloat16")


def run(given: list[Peer], tasks: list[Task]) -> Results:
    results = Results({"device": "cpu"})
    Runner(CPU, given, results, samples=2).run(tasks, lambda text: None)
    return results


def exact(task: Task) -> torch.Tensor:
    """The layer in fp64 over the values of its weight, not by way of the op."""
    x, codes, scales, row_scale, *_ = arguments(task, CPU)
    weight = dequantize(NVFP4Tensor(codes, scales, row_scale), torch.float64)
    return F.linear(x.double(), weight)


def peer(name: str, change: Callable[[torch.Tensor], Any], task: str = "nvfp4_linear") -> Peer:
    def builder(sets: Sets) -> Function:
        right = exact(TASK if task == "nvfp4_linear" else ROUNDED)
        return lambda *args: change(right.clone())

    return Peer(name, "torch", "torch", {task: builder}, cpu=True)


# ------------------------------------------------------------------------------------------ errors


def test_the_truth_is_that_of_fp64() -> None:
    torch.testing.assert_close(in_fp64(OPS[TASK.op], arguments(TASK, CPU)), exact(TASK))


def test_one_rounding_is_one_rounding() -> None:
    right = torch.randn(64, 200, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for dtype, usual in ((torch.bfloat16, 0.00166), (torch.float16, 0.000207)):
        told = precision(right.to(dtype), right)
        assert told["fp64_error"] == pytest.approx(usual, rel=0.05)
        assert 0.9 < (told["fp64_roundings"] or 0) <= 1.0


def test_errors_are_relative_to_the_whole_and_count_the_worst_element() -> None:
    right = torch.full((10, 10), 2.0, dtype=torch.float64)
    wrong = right.float()
    wrong[3, 4] = 2.5
    told = precision(wrong, right)
    assert told["fp64_error"] == pytest.approx(0.5 / (2.0 * 10))
    assert told["fp64_roundings"] == pytest.approx(0.25 / 2**-24, rel=1e-3)
    assert precision(right.float(), right) == {"fp64_error": 0.0, "fp64_roundings": 0.0}
    wrong[0, 0] = float("nan")
    assert precision(wrong, right) == {"fp64_error": None, "fp64_roundings": None}
    assert precision(wrong[:5], right) == {}
    assert precision((wrong,), right) == {}


def test_every_row_tells_its_error() -> None:
    results = run([PEERS["cublas"]], [TASK, ROUNDED])
    for row in results.rows:
        # One rounding of the result; a weight in bf16 is rounded, too, as its scales are odd ones.
        least, most = (0.0012, 0.0018) if row["impl"] == OURS else (0.0018, 0.004)
        assert least < row["fp64_error"] < most
        assert row["us"] > 0
        assert row["roof_share"] > 0
        assert row["K"] == 192
    times = {(row["op"], row["impl"]) for row in results.timed()}
    assert times == {(op, impl) for op in peers.TASKS for impl in (OURS, "cublas_bf16")}


def test_a_wrong_peer_is_caught_and_tells_how_wrong_it_is() -> None:
    def one_row(y: torch.Tensor) -> torch.Tensor:
        y[2] *= 1.2
        return y.bfloat16()

    given = [
        peer("right", lambda y: y.bfloat16()),
        peer("off", one_row),
        peer("other_weight", lambda y: y.flip(1).bfloat16()),
        peer("other_form", lambda y: y[:, :64].bfloat16()),
        peer("other_dtype", lambda y: y.half()),
        peer("nothing", lambda y: torch.full_like(y, float("nan")).bfloat16()),
    ]
    rows = {row["impl"]: row for row in run(given, [TASK]).rows}
    assert rows["right"]["us"] > 0
    for name in ("off", "other_weight", "other_form", "other_dtype", "nothing"):
        assert rows[name]["error"].startswith("WrongResultError: output 0 is "), name
        assert "us" not in rows[name]
    assert rows["off"]["fp64_error"] == pytest.approx(0.2 / 5**0.5, rel=0.3)
    assert rows["other_weight"]["fp64_error"] > 1
    assert rows["nothing"]["fp64_error"] is None
    assert "fp64_error" not in rows["other_form"]
    json.loads(json.dumps(list(rows.values())), parse_constant=pytest.fail)


def noisy(y: torch.Tensor, size: float = 0.035) -> torch.Tensor:
    """As much off as activations and weights in E4M3 make it, element by element."""
    generator = torch.Generator().manual_seed(5)
    noise = torch.randn(y.shape, generator=generator, dtype=y.dtype)
    return (y + size * noise * y.square().mean(0).sqrt()).bfloat16()


def test_rounded_activations_are_let_through_and_a_wrong_line_is_not() -> None:
    def row(y: torch.Tensor) -> torch.Tensor:
        y[7] *= 1.2
        return noisy(y)

    def column(y: torch.Tensor) -> torch.Tensor:
        y[:, 9] = y[:, 10]
        return noisy(y)

    name = "nvfp4_linear_fp8"
    given = [
        peer("rounded", noisy, name),
        peer("row", row, name),
        peer("column", column, name),
        peer("coarse", lambda y: noisy(y, 0.1), name),
        peer("nothing", lambda y: (y * float("nan")).bfloat16(), name),
        peer("other_dtype", lambda y: y, name),
    ]
    rows = {row["impl"]: row for row in run(given, [ROUNDED]).rows}
    assert rows["rounded"]["fp64_error"] == pytest.approx(0.035, rel=0.05)
    assert 0.035 < rows["rounded"]["error"] < 0.08
    assert rows["rounded"]["us"] > 0
    reasons = {one: rows[one]["error"] for one in rows if "us" not in rows[one]}
    assert set(reasons) == {"row", "column", "coarse", "nothing", "other_dtype"}
    assert "a row is off by 0.2" in reasons["row"]
    assert "a column is off by" in reasons["column"]
    assert "torch.float64 instead of" in reasons["other_dtype"]
    # An element by itself may be off by more than the usual check allows.
    with pytest.raises(WrongResultError):
        check(noisy(exact(ROUNDED)), exact(ROUNDED).bfloat16())


def test_lines_of_hardly_anything_are_measured_by_the_others() -> None:
    right = torch.ones(40, 60)
    right[2] = 0.0
    left = right.clone()
    left[2] = 1e-4
    assert 0.001 < check_lines(left, right, limit=0.01) < 0.01
    left[2] = 0.01
    with pytest.raises(WrongResultError, match=r"a row is off by 0\.6"):
        check_lines(left, right, limit=0.12)
    zeros = torch.zeros(40, 60)
    assert check_lines(zeros, zeros, limit=0.0) == 0.0


def test_a_single_row_may_be_rounded_too() -> None:
    """Its columns have one element each, some of them close to zero."""
    right = exact(Task("nvfp4_linear", (1, 4096, 64), "bfloat16"))
    noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(6))
    left = (right + 0.035 * right.square().mean().sqrt() * noise).bfloat16()
    assert check_lines(left, right.bfloat16(), limit=0.08) < 0.06
    left[0, 77] += 1.5 * right.square().mean().sqrt()
    with pytest.raises(WrongResultError, match="a column is off"):
        check_lines(left, right.bfloat16(), limit=0.08)


# ------------------------------------------------------------------------------------------- peers


def test_a_weight_comes_back_from_the_layout_of_a_gpu() -> None:
    x, codes, scales, row_scale, *rest = arguments(TASK, CPU)
    weight = NVFP4Tensor(codes, scales, row_scale)
    for arch in ("sm_90a", "sm_100a"):
        packed: PackedNVFP4 = weight.prepare(arch)
        parts = (packed.codes, packed.scales, packed.row_scale)
        back = peers.checkpoint((x, *parts, None, packed.layout, *rest[2:]))
        for one in ("codes", "scales", "row_scale"):
            assert torch.equal(
                getattr(back, one).view(torch.uint8), getattr(weight, one).view(torch.uint8)
            )


def test_equal_weights_are_prepared_once_and_copied() -> None:
    sets = argument_sets(arguments(TASK, CPU), CPU)
    other = list(sets[1])
    other[1] = 255 - other[1]
    seen: list[NVFP4Tensor] = []

    def prepare(weight: NVFP4Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        seen.append(weight)
        return (dequantize(weight, dtype),)

    third = tuple(other)
    made = peers.ahead_of([*sets, third], prepare)
    assert len(made) == 3
    assert len(seen) == 2
    places = [made[args[1].data_ptr()][0] for args in (*sets, third)]
    assert len({place.data_ptr() for place in places}) == 3  # cold: none is another's
    assert torch.equal(places[0], places[1])
    assert torch.equal(places[2], dequantize(NVFP4Tensor(*other[1:4]), torch.bfloat16))
    assert not torch.equal(places[0], places[2])


def modules(monkeypatch: pytest.MonkeyPatch, **contents: dict[str, Any]) -> None:
    """Stand-ins: `a__b={...}` is the module a.b with these names."""
    for name, inside in contents.items():
        path = name.replace("__", ".").split(".")
        for end in range(1, len(path) + 1):
            whole = ".".join(path[:end])
            module = sys.modules.get(whole) if end < len(path) else None
            module = module or ModuleType(whole)
            vars(module).update({"__path__": [], **(inside if end == len(path) else {})})
            monkeypatch.setitem(sys.modules, whole, module)


def quack(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare_w4_weight(q: Any, sf: Any, wformat: str) -> Any:
        assert wformat == "nvfp4"
        return q.clone(), sf.clone()

    def gemm_w4a16(
        act: Any, blob: Any, sf: Any, *, tensor_scale: float, n_out: int, wformat: str
    ) -> Any:
        assert (wformat, n_out) == ("nvfp4", blob.shape[0])
        return _product(act, blob, sf, tensor_scale)

    modules(
        monkeypatch,
        quack={},
        quack__gemm_w4={"gemm_w4a16": gemm_w4a16, "prepare_w4_weight": prepare_w4_weight},
    )


def humming(monkeypatch: pytest.MonkeyPatch) -> None:
    class HummingLayer(torch.nn.Module):
        def __init__(
            self, shape_n: int, shape_k: int, weight_config: Any, torch_dtype: torch.dtype
        ):
            super().__init__()
            assert weight_config == {"quant_method": "modelopt", "quant_algo": "nvfp4"}
            self.humming_config: object = None
            for name, shape, dtype in (
                ("weight", (shape_n, shape_k // 2), torch.uint8),
                ("weight_scale", (shape_n, shape_k // 16), torch.float8_e4m3fn),
                ("weight_scale_2", (1,), torch.float32),
            ):
                part = torch.nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
                setattr(self, name, part)
            self.register_buffer("locks", torch.zeros(8, dtype=torch.int32))

        def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
            self.load_state_dict(tensors, strict=False)

        def transform(self) -> None:
            self.humming_config = object()

    def humming_forward(
        config: Any, inputs: Any, weight: Any, *, weight_scale: Any, weight_scale_2: Any, locks: Any
    ) -> Any:
        assert config is not None
        assert not locks.any()
        return _product(inputs, weight, weight_scale, float(weight_scale_2))

    modules(
        monkeypatch,
        humming__forward={"humming_forward": humming_forward},
        humming__layer={"HummingLayer": HummingLayer},
    )


def marlin(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepare_fp4_layer_for_marlin(layer: Any) -> None:
        rows, columns = layer.output_size_per_partition, layer.input_size_per_partition
        assert layer.weight.shape == (rows, columns // 2)
        assert layer.params_dtype == torch.bfloat16
        layer.workspace = torch.zeros(4, dtype=torch.int32)
        scale = layer.weight_global_scale / 2
        layer.weight_global_scale = torch.nn.Parameter(scale, requires_grad=False)

    def apply_fp4_marlin_linear(
        x: Any,
        weight: Any,
        weight_scale: Any,
        weight_global_scale: Any,
        workspace: Any,
        size_n: int,
        size_k: int,
    ) -> Any:
        assert (size_n, size_k) == (weight.shape[0], x.shape[1])
        return _product(x, weight, weight_scale, 2 * float(weight_global_scale))

    path = "vllm__model_executor__layers__quantization__utils__marlin_utils_fp4"
    names = {
        "apply_fp4_marlin_linear": apply_fp4_marlin_linear,
        "prepare_fp4_layer_for_marlin": prepare_fp4_layer_for_marlin,
    }
    modules(monkeypatch, **{path: names})


def _product(x: Any, codes: Any, scales: Any, scale: float) -> torch.Tensor:
    weight = NVFP4Tensor(codes, scales, torch.tensor(scale))
    return F.linear(x.float(), dequantize(weight)).to(x.dtype)


@pytest.mark.parametrize("stand_in", [humming, quack, marlin], ids=lambda one: one.__name__)
def test_adapters_hand_over_the_weight_of_each_set(
    stand_in: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    name = "vllm" if stand_in is marlin else stand_in.__name__
    sets = argument_sets(arguments(TASK, CPU), CPU)
    flipped = [part.flip(0) if torch.is_tensor(part) else part for part in sets[1]]
    flipped[2] = sets[1][2].view(torch.uint8).flip(0).view(torch.float8_e4m3fn)
    sets.append(tuple(flipped))
    (builder,) = PEERS[name].implementations("nvfp4_linear").values()
    function = builder(sets)
    for args in sets:
        check(function(*args), OPS[TASK.op].reference(*args))


@pytest.mark.parametrize("stand_in", [humming, quack, marlin], ids=lambda one: one.__name__)
def test_scales_of_single_rows_are_not_for_the_others(
    stand_in: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch)
    name = "vllm" if stand_in is marlin else stand_in.__name__
    args = list(arguments(TASK, CPU))
    args[3] = args[3] * torch.arange(1.0, 129.0)
    (impl,) = PEERS[name].implementations("nvfp4_linear")
    found = run([Peer(name, "", "torch", PEERS[name].builders, cpu=True)], [TASK])
    assert next(row for row in found.rows if row["impl"] == impl)["us"] > 0
    monkeypatch.setattr("gristmill.bench.runner.arguments", lambda task, device: tuple(args))
    found = run([Peer(name, "", "torch", PEERS[name].builders, cpu=True)], [TASK])
    rows = {row["impl"]: row for row in found.rows}
    assert "one global scale for a whole matrix" in rows[impl]["error"]
    assert "us" in rows[OURS]


def test_quack_says_that_it_takes_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    quack(monkeypatch)
    only = Peer("quack", "", "torch", PEERS["quack"].builders, cpu=True)
    row = run([only], [Task("nvfp4_linear", (5, 128, 192), "float16")]).rows[1]
    assert row["error"].endswith("takes bfloat16 only, not torch.float16")


def test_an_adapter_whose_library_is_half_there_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    modules(monkeypatch, quack={})
    monkeypatch.setitem(sys.modules, "quack.gemm_w4", None)
    only = Peer("quack", "", "torch", PEERS["quack"].builders, cpu=True)
    row = run([only], [TASK]).rows[1]
    assert row["impl"] == "quack_w4a16"
    assert "quack.gemm_w4" in row["error"]


@pytest.mark.gpu
@pytest.mark.parametrize("task", [TASK, ROUNDED], ids=str)
def test_the_suite_on_a_gpu(task: Task) -> None:
    results = Results({})
    Runner(torch.device("cuda"), [PEERS["cublas"]], results, samples=2).run([task], lambda _: None)
    ours, dense = results.rows
    for row in (ours, dense):
        assert row["us"] > 0, row["error"]
        assert row["host_us"] > 0
        assert 0 < row["roof_share"] < 1.5
    assert dense["fp64_error"] < 0.004
    assert ours["fp64_error"] < (0.0018 if task is TASK else 0.05)


# ------------------------------------------------------------------------------------------ report


def made(m: int, n: int, impl: str, us: float | None, **more: Any) -> dict[str, Any]:
    row: dict[str, Any] = {"op": "nvfp4_linear", "dtype": "bfloat16", "M": m, "N": n, "K": 64}
    row.update({"shape": f"{m}x{n}x64", "impl": impl, "error": 0.001, **more})
    if us is not None:
        row.update({"us": us, "tflop_per_s": 1.0, "roof_share": 0.5})
    return row


@pytest.fixture
def rows() -> list[dict[str, Any]]:
    return [
        made(1, 8, OURS, 10.0, fp64_error=0.0016, fp64_roundings=1.0, variant="cuda_mma"),
        made(1, 8, "cublas_bf16", 40.0, fp64_error=0.0023, fp64_roundings=2.0),
        made(1, 8, "humming", 20.0, fp64_error=0.0016, fp64_roundings=1.0),
        made(1, 16, OURS, 10.0, fp64_error=0.0017, fp64_roundings=0.9),
        made(1, 16, "cublas_bf16", 10.0, fp64_error=0.0025, fp64_roundings=1.9),
        made(1, 16, "humming", None, fp64_error=None, fp64_roundings=None),
        made(64, 8, OURS, 20.0, fp64_error=0.0018, fp64_roundings=1.1),
        made(64, 8, "cublas_bf16", 10.0, fp64_error=0.0022, fp64_roundings=2.1),
    ]


def test_means_by_peer(rows: list[dict[str, Any]]) -> None:
    assert peer_lines(rows) == [
        "nvfp4_linear: 1.26x cublas_bf16 over 3 problems (geometric mean), "
        "behind by more than 3% on 1",
        "nvfp4_linear: 2.00x humming over 1 problem (geometric mean), behind by more than 3% on 0",
    ]
    without = [row for row in rows if row["impl"] != "humming"]
    assert peer_lines(without) == []  # the line about the fastest peer says the same


def test_means_by_rows_and_errors(rows: list[dict[str, Any]]) -> None:
    (_, means), (_, errors) = tables(rows)
    header = ["M", "cublas_bf16", "humming", "vs best peer", "problems", "behind by >3%"]
    assert means == (
        header,
        [["1", "2.00x", "2.00x", "1.41x", "2", "0"], ["64", "0.50x", "", "0.50x", "1", "1"]],
    )
    assert errors[1] == [
        [OURS, "3", "0.17%", "0.18%", "1.1", ""],
        ["cublas_bf16", "3", "0.23%", "0.25%", "2.1", ""],
        ["humming", "2", "0.16%", "0.16%", "1", "1"],
    ]
    alone = [row for row in rows if row["M"] == 64 and row["impl"] == OURS]
    ((title, _),) = tables(alone)
    assert title == "nvfp4_linear: errors against fp64"
    others = ("fp64_error", "fp64_roundings", "tflop_per_s")
    plain = [{name: row[name] for name in row if name not in others} for row in rows]
    assert tables(plain) == []  # no product, and no errors told


def test_the_page_has_the_errors_and_the_losses(rows: list[dict[str, Any]]) -> None:
    page = markdown(Results({"device": "cuda"}, rows))
    header = "| problem | gristmill | cublas_bf16 | humming | vs best peer | TFLOP/s | of roof | "
    assert header + "error | variant |" in page
    assert "| 1x8x64 | 10.0 | 40.0 | 20.0 | 2.00x | 1.00 | 50% | 0.16% | cuda_mma |" in page
    assert "| 64x8x64 | 20.0 | 10.0 | – | 0.50x | 1.00 | 50% | 0.18% |  |" in page
    assert "### nvfp4_linear: times of others over ours, geometric means by M" in page
    assert "### nvfp4_linear: errors against fp64" in page


def test_rows_have_the_keys_of_recorded_ones() -> None:
    """op, dtype, M, N, K and impl name a row, once; "gristmill" is what a user would get."""
    results = run([PEERS["cublas"]], [TASK, ROUNDED, Task("nvfp4_linear", (1, 64, 64), "bfloat16")])
    keys = [
        tuple(row[key] for key in ("op", "dtype", "M", "N", "K", "impl")) for row in results.rows
    ]
    assert len(set(keys)) == len(keys) == 6
    assert ("nvfp4_linear", "bfloat16", 5, 128, 192, "gristmill") in keys
    assert ("nvfp4_linear", "bfloat16", 1, 64, 64, "cublas_bf16") in keys
    for row in results.rows:
        assert row["us"] > 0
        assert row["tb_per_s"] >= 0
    assert results.meta["copy_tb_per_s"] > 0


def test_products_are_drawn_weight_by_weight() -> None:
    from gristmill.bench.charts import draw

    sizes = [(2**power, 64 * layer) for layer in range(1, 6) for power in range(9)]
    rows = [
        {**made(m, n, impl, us), "bytes": 10, "roof_us": 5.0}
        for m, n in sizes
        for impl, us in ((OURS, 10.0), ("humming", 12.0))
    ]
    text = draw(Results({"gpu": "G"}, rows))["nvfp4_linear"].svg(standalone=True)
    for layer in range(1, 6):
        assert f">N × K = {64 * layer} × 64</text>" in text
    assert text.count(">256</text>") == 5
