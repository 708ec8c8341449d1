"""What tools/sanitize.py would launch, and whether it sees a wrong result. No GPU is needed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sanitize_modules import H200, ROOT, code_in, load

from gristmill.jit import Program
from gristmill.jit.nvrtc import compile_program
from gristmill.ops.registry import OPS
from gristmill.ops.rows.variant import RowVariant

SOURCES = ROOT / "src" / "gristmill" / "kernels" / "cuda"


@pytest.fixture(scope="module")
def tool() -> SimpleNamespace:
    return load()


@pytest.fixture(scope="module")
def found(tool: SimpleNamespace) -> list[Any]:
    """The runs of ops that together have every kernel."""
    words = ["add_rms_norm", "layer_norm_backward", "softmax", "softmax_backward", "cross_entropy"]
    words += ["cross_entropy_one_pass", "cross_entropy_backward", "scale_gradient_", "linear"]
    words += ["moe", "nvfp4_linear", "nvfp4_moe", "topk_router", "topk_router_backward"]
    return tool.runs.every_run(H200, [*words, *tool.parts.PARTS])


@pytest.fixture(scope="module")
def some(found: list[Any]) -> list[Any]:
    """Those of one op of each kind."""
    ops = ("softmax_backward", "nvfp4_linear", "linear", "topk_router", "nvfp4_packing")
    return [run for run in found if run.op in ops]


# ---- what is run ----


def test_it_knows_every_kernel(tool: SimpleNamespace) -> None:
    cuda = tool.runs.cuda_kernels()
    count = sum(path.read_text().count("__global__") for path in SOURCES.glob("*.cu*"))
    assert len(cuda) == count
    assert {"norm_forward", "pack", "nvfp4_mma_add", "moe_shift"} <= cuda
    triton = {"tiles", "add_partials", "persistent", "nvfp4_linear", "nvfp4_experts"}
    assert tool.runs.triton_kernels() == triton


@pytest.mark.long
def test_every_kernel_is_launched(tool: SimpleNamespace) -> None:
    everything = tool.runs.every_run(H200, [])
    kernels = tool.runs.cuda_kernels() | tool.runs.triton_kernels()
    assert tool.runs.reached(everything) == kernels
    assert len(everything) < 2500  # all tools take minutes with that
    assert {run.op for run in everything} >= {op.name for op, _ in tool.runs.variants([])}


def test_a_few_ops_reach_every_kernel(tool: SimpleNamespace, found: list[Any]) -> None:
    kernels = tool.runs.cuda_kernels() | tool.runs.triton_kernels()
    assert kernels - tool.runs.reached(found) == set()


def test_it_walks_every_variant_with_kernels(tool: SimpleNamespace) -> None:
    walked = {(op.name, variant.name) for op, variant in tool.runs.variants([])}
    rows = {
        (op.name, variant.name)
        for op in OPS.values()
        for variant in op.variants
        if isinstance(variant, RowVariant)
    }
    assert rows < walked
    assert {
        ("linear", "triton_persistent"),
        ("linear_cross_entropy", "chunked"),
        ("nvfp4_linear", "cuda_mma"),
        ("nvfp4_linear", "dequantized"),
        ("nvfp4_moe", "cuda_wgmma"),
        ("moe", "grouped_mm"),
        ("topk_router_backward", "cuda_warp"),
    } <= walked
    assert not any(name in ("library", "reference") for _, name in walked)
    (only,) = tool.runs.variants(["softmax", "cuda_block"])
    assert (only[0].name, only[1].name) == ("softmax", "cuda_block")


def test_every_source_with_feeds_has_its_feeds_tried(tool: SimpleNamespace) -> None:
    fed = {path.name for path in SOURCES.glob("*.cu") if "Feed<" in path.read_text()}
    assert set(tool.runs.FEEDS) == fed


def test_every_kind_of_launch_is_among_the_runs(found: list[Any]) -> None:
    shown = {one for run in found for one in run.features}

    def values(variant: str, source: str, field: str) -> set[Any]:
        return {one[3] for one in shown if one[:3] == (variant, source, field)}

    moe = ("cuda_wgmma", "nvfp4_moe.cu")
    assert values(*moe, "routing") == {"scan", "launch"}
    for field in ("added", "wide", "persistent"):
        assert values(*moe, field) == {False, True}
    assert values(*moe, "tile") == {8, 16, 32, 48, 64, 96, 128, 192}
    assert {one[4] for one in values(*moe, "up")} >= {1, 2}  # its split
    assert {one[4] for one in values(*moe, "down")} >= {1, 4, 8}
    wgmma = ("cuda_wgmma", "nvfp4_wgmma.cu")
    assert values(*wgmma, "persistent") == {False, True}
    assert values(*wgmma, "split") == {1, 2, 4, 8}
    assert values("cuda_mma", "nvfp4_mma.cu", "partial") == {False, True}
    assert values("triton_tiles", "matmul.py", "swap") == {False, True}
    assert values("triton_split_k", "matmul.py", "split_k") == {2, 4, 8, 16}
    assert len(values("triton_persistent", "matmul_persistent.py", "parts")) > 1


@pytest.mark.parametrize(
    ("name", "wanted"), [("softmax", 3), ("cross_entropy_backward", 6), ("rms_norm_fp8", 2)]
)
def test_cases_bring_what_examples_do_not_have(
    tool: SimpleNamespace, name: str, wanted: int
) -> None:
    op, present = OPS[name], set()  # of an optional argument: a mask, weights, a given scale
    for variant in op.variants:
        if isinstance(variant, RowVariant) and variant.name == "cuda_warp":
            for _, make, problem, _ in tool.runs._inputs(op, H200):
                if variant.supports(problem) is None:
                    present.add(make("cpu")[wanted] is not None)
                    config = variant.config(problem)
                    room = variant.shared_bytes(problem.layout, config)
                    assert room <= H200.shared_per_block
    assert present == {True, False}


def test_thinning_loses_no_feature(tool: SimpleNamespace) -> None:
    op = OPS["softmax"]
    variant = next(one for one in op.variants if one.name == "cuda_cluster")
    everything = list(tool.runs.runs(op, variant, H200))
    kept = tool.runs.thinned(everything, set())
    assert len(kept) < len(everything)
    assert _shown(kept) == _shown(everything)
    again = tool.runs.thinned(everything, _shown(everything))  # all was seen elsewhere
    assert again[0] == everything[0]
    assert {program for run in again for program in run.programs} == set(everything[0].programs)


def _shown(some: list[Any]) -> set[Any]:
    return {one for run in some for one in run.features}


# ---- arguments and results ----


def test_arguments_lie_as_they_did(tool: SimpleNamespace) -> None:
    moved = tool.parts.moved
    wide = torch.arange(60.0).view(6, 10)
    for value in (
        wide,
        wide[:, 1:8],
        wide[1:, ::3],
        wide.t(),
        wide[:1].expand(4, 10),
        torch.arange(20, dtype=torch.uint8)[3:].view(torch.float8_e4m3fn),
        torch.ones(5, dtype=torch.bool),
        torch.empty(0, 7),
    ):
        copy = moved(value, "cpu")
        assert copy.stride() == value.stride()
        assert copy.data_ptr() % 16 == value.data_ptr() % 16 or not value.numel()
        assert torch.equal(copy.contiguous().view(torch.uint8), _bytes(value))
        assert copy.data_ptr() != value.data_ptr() or not value.numel()
        end = copy.untyped_storage().nbytes() - copy.storage_offset() * copy.element_size()
        span = 1 + sum((n - 1) * step for n, step in zip(copy.shape, copy.stride(), strict=True))
        assert end == span * copy.element_size() or not value.numel()  # not a byte more
    assert moved("silu", "cpu") == "silu"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


class Fake:
    """A variant that runs a function of the test."""

    name = "fake"

    def __init__(self, function: Any) -> None:
        self.function = function

    def bind(self, problem: Any, config: Any) -> Any:
        return self.function


def _outcome(tool: SimpleNamespace, op: Any, function: Any, args: Any) -> str | None:
    expected = tool.runs.right(op, args)
    return tool.runs.outcome(op, Fake(function), None, None, args, expected, "cpu")


def test_a_wrong_result_is_seen(tool: SimpleNamespace) -> None:
    op = OPS["softmax"]
    args = op.example((4, 4096), torch.bfloat16, "cpu")
    assert _outcome(tool, op, op.reference, args) is None

    def wrong(*values: Any) -> torch.Tensor:
        y = op.reference(*values)
        y[2, y[2].argmax()] *= 2  # not one that is nearly zero twice
        return y

    assert "output 0 is off by" in str(_outcome(tool, op, wrong, args))


def test_what_is_written_in_place_is_compared(tool: SimpleNamespace) -> None:
    op = OPS["fused_add_rms_norm_"]
    args = op.example((4, 64), torch.bfloat16, "cpu")
    before = args[0].clone()
    assert _outcome(tool, op, op.reference, args) is None
    assert torch.equal(args[0], before)  # it works on copies
    assert _outcome(tool, op, lambda *_: None, args) is not None


def test_next_to_nothing_is_nothing_only_beside_zeros(tool: SimpleNamespace) -> None:
    nothing, some = torch.zeros(3), torch.tensor([1e-9, 0.0, 0.0])
    assert torch.equal(tool.runs.settled(some, nothing), nothing)
    assert torch.equal(tool.runs.settled(some * 1e6, nothing), some * 1e6)
    assert torch.equal(tool.runs.settled(some, nothing + 1e-12), some)
    missing = torch.tensor([torch.nan, 0.0, 1e-9])
    assert tool.runs.settled(missing, nothing)[0].isnan()


def test_products_made_on_the_cpu_are_those_of_torch(tool: SimpleNamespace) -> None:
    torch.manual_seed(0)
    a, b, c = (torch.randn(shape, dtype=torch.float64) for shape in ((5, 7), (7, 4), (5, 4)))
    a, b, c = a.float(), b.float(), c.float()
    expected = torch.mm(a, b), torch.addmm(c, a, b), c + 2
    with tool.blind.products_for("memcheck"):
        assert torch.mm is not tool.blind.mm
    with tool.blind.products_for("racecheck"):
        assert torch.mm is tool.blind.mm
        out = torch.full_like(c, torch.nan)
        torch.mm(a, b, out=out)
        torch.testing.assert_close(out, expected[0])
        wide = torch.mm(a.bfloat16(), b.bfloat16(), out_dtype=torch.float32)
        assert wide.dtype == torch.float32
        torch.testing.assert_close(wide, a.bfloat16().float() @ b.bfloat16().float())
        total = c.clone()
        torch.testing.assert_close(torch.addmm(total, a, b, out=total), expected[1])
    assert torch.mm is not tool.blind.mm


def test_rows_are_multiplied_in_groups_on_the_cpu(tool: SimpleNamespace) -> None:
    torch.manual_seed(0)
    rows, matrices = torch.randn(6, 3), torch.randn(3, 3, 2)
    found = tool.blind.grouped_mm(rows, matrices, offs=torch.tensor([2, 2, 5]))
    torch.testing.assert_close(found[:2], rows[:2] @ matrices[0])
    torch.testing.assert_close(found[2:5], rows[2:5] @ matrices[2])
    assert not found[5].any()


def test_products_in_fp8_are_scaled_on_the_cpu(tool: SimpleNamespace) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(4, 16).to(torch.float8_e4m3fn), torch.randn(8, 16).to(torch.float8_e4m3fn)
    scale_a, scale_b, bias = torch.rand(4, 1), torch.rand(1, 8), torch.randn(8)
    out = torch.empty(4, 8)
    options = {"out_dtype": torch.float32, "use_fast_accum": True, "out": out}
    tool.blind.scaled_mm(a, b.t(), scale_a=scale_a, scale_b=scale_b, bias=bias, **options)
    torch.testing.assert_close(out, (a.float() * scale_a) @ (b.float().t() * scale_b) + bias)


def test_under_racecheck_rings_are_as_shipped_with_line_numbers(tool: SimpleNamespace) -> None:
    names = {path.name for path in SOURCES.glob("*.cu")}
    spoken = {name for name in names if "if (lane == 0) barrier_arrive(" in _text(name)}
    assert spoken == set(tool.blind.RINGS)
    before = {name: Program(name, ("f<1>",)).key("sm_90a") for name in names}
    with tool.blind.rings_for("racecheck"):
        for name in names:
            program = Program(name, ("f<1>",))
            assert program.texts()[name] == _text(name)
            lined = tool.blind.LINES in program.compiler_options("sm_90a")
            assert lined == (name in spoken)
            assert (program.key("sm_90a") != before[name]) == (name in spoken)
    for name in names:
        assert Program(name, ("f<1>",)).key("sm_90a") == before[name]
    with tool.blind.rings_for("memcheck", every_lane=True):
        program = Program("nvfp4_moe.cu", ("f<1>",))
        assert program.texts()["nvfp4_moe.cu"] == _text("nvfp4_moe.cu")
        assert program.key("sm_90a") == before["nvfp4_moe.cu"]


def test_every_lane_gives_slots_back_in_the_second_run(tool: SimpleNamespace) -> None:
    with tool.blind.rings_for("racecheck"):
        shipped = {name: Program(name, ("f<1>",)).key("sm_90a") for name in tool.blind.RINGS}
    with tool.blind.rings_for("racecheck", every_lane=True):
        for name, key in shipped.items():
            program = Program(name, ("f<1>",))
            text = program.texts()[name]
            assert "if (lane == 0) barrier_arrive(" not in text
            assert "barrier_init(empty + i, CONSUMERS);" in text
            assert _undone(text) == _text(name)
            assert program.key("sm_90a") != key
        assert Program("norm.cu", ()).texts()["norm.cu"] == _text("norm.cu")


def _undone(text: str) -> str:
    """The shipped source, from that with an arrival of every lane."""
    text = text.replace("(empty + i, CONSUMERS);", "(empty + i, CONSUMERS / 32);")
    return text.replace(" barrier_arrive(empty + ", " if (lane == 0) barrier_arrive(empty + ")


@pytest.mark.parametrize("name", ["nvfp4_wgmma", "nvfp4_moe"])
def test_line_numbers_change_no_instruction(
    tool: SimpleNamespace, found: list[Any], name: str
) -> None:
    program = next(one for run in found for one in run.programs if one.source == f"{name}.cu")
    plain = compile_program(program, "sm_90a").cubin
    with tool.blind.rings_for("racecheck"):
        lined = compile_program(program, "sm_90a").cubin
    (code,), (same,) = code_in(plain), code_in(lined)
    assert len(lined) > len(plain)
    assert code == same


def _text(name: str) -> str:
    return (SOURCES / name).read_text()


def test_kernels_that_a_tool_does_not_see_are_kernels(tool: SimpleNamespace) -> None:
    # Whoever leaves out another one says so here and in docs/threat-model.md.
    assert set(tool.blind.UNSEEN) == {("initcheck", "persistent")}
    kernels = tool.runs.cuda_kernels() | tool.runs.triton_kernels()
    for name, kernel in tool.blind.UNSEEN:
        assert name in tool.report.TOOLS
        assert kernel in kernels
    assert tool.blind.unseen("memcheck") == set()  # which has to see all of them


@pytest.mark.parametrize("name", ["nvfp4_packing", "nvfp4_tokens"])
def test_parts_give_on_a_cpu_what_torch_makes(
    tool: SimpleNamespace, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = list(tool.parts.PARTS[name]())
    for part in parts:
        assert part.start("cpu") is None
    spoiled = parts[0].expected()[0].contiguous()
    spoiled.view(torch.uint8).view(-1)[5] ^= 1
    monkeypatch.setattr(type(parts[0]), "outputs", lambda self, place: [spoiled])
    monkeypatch.setattr(type(parts[0]), "expected", lambda self, kept=parts[0].expected: kept()[:1])
    assert "output 0" in parts[0].start("cpu")


def test_packing_is_tried_by_every_width_of_access(tool: SimpleNamespace) -> None:
    names = {name for part in tool.parts.PARTS["nvfp4_packing"]() for name in part.program.names}
    assert {"pack<16,4>", "pack<8,4>", "pack<1,1>", "unpack<16,4>"} <= names


# ---- shards ----


def test_shards_have_every_run_once_and_about_the_same_to_do(
    tool: SimpleNamespace, some: list[Any]
) -> None:
    for count in (1, 3, 10):
        pieces = tool.command.shards(some, count)
        assert [name for piece in pieces for name in piece] == [run.name for run in some]
        assert len(pieces) == count
        costs = [_cost(tool, some, piece) for piece in pieces]
        assert max(costs) <= 1.6 * sum(costs) / count
    assert len({run.name for run in some}) == len(some)
    assert tool.command.shards(some[:2], 10) == [[some[0].name], [some[1].name]]
    assert len(tool.command.shards(some, 0)) == 1


def _cost(tool: SimpleNamespace, some: list[Any], piece: list[str]) -> int:
    runs = [run for run in some if run.name in piece]
    programs = {program for run in runs for program in run.programs}
    return len(runs) + tool.command.LOADING * len(programs)


def test_a_process_finds_its_runs_by_their_names(tool: SimpleNamespace, some: list[Any]) -> None:
    names = [run.name for run in some if run.op in ("topk_router", "nvfp4_packing")][-9:]
    found = tool.command.chosen(names, H200)
    assert [run.name for run in found] == names
    mine = {run.name: run for run in some}
    assert all(run.words == mine[run.name].words for run in found)


def test_a_list_needs_no_gpu(tool: SimpleNamespace, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool.command.main(["--list", "topk_router", "--arch", "sm_80"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last.startswith(f"{len(lines)} runs, ")
    assert lines[0].startswith("topk_router/cuda_warp/0 (70, 128): ")


def test_a_list_without_a_kernel_fails(
    tool: SimpleNamespace, some: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.command.listed(some, {"pack", "moe_route", "tiles"}) == 1
    assert "no run launches moe_route" in capsys.readouterr().out


@pytest.mark.gpu
def test_it_runs_without_a_sanitizer(tool: SimpleNamespace) -> None:
    words = ["softmax", "cuda_warp"]
    assert tool.command.main(words) == 0
    assert tool.command.main([*tool.parts.PARTS]) == 0
