"""The NVFP4 ops beyond their cases: pieces, memory, empty calls, bad numbers, what users call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from conformance_helpers import (
    DEVICES,
    allowed,
    composed,
    copied,
    run_by,
    same_bits,
    supporting,
)
from conformance_truth import results_of, truth_of
from sampled import sampled
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

import gristmill
from gristmill import nvfp4
from gristmill.errors import GristmillError
from gristmill.ops import nvfp4_common
from gristmill.ops.nvfp4_linear import linear_of
from gristmill.ops.nvfp4_linear.cases import backward_example, forward_example, random_weight
from gristmill.ops.nvfp4_moe import moe_of, slots
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.select import KNOWN

LINEAR, MOE = OPS["nvfp4_linear"], OPS["nvfp4_moe"]
NAMES = ("nvfp4_linear", "nvfp4_linear_backward", "nvfp4_moe", "nvfp4_moe_backward")
NVFP4_OPS = [pytest.param(OPS[name], id=name) for name in NAMES]
MIB = 1 << 20


def check(op: Op, args: tuple[Any, ...]) -> None:
    """Every variant that runs `args` against fp64."""
    truths = truth_of(op.name, args)
    limits = allowed(op, args, truths)
    for variant in supporting(op, args):
        own = copied(args)
        results = results_of(op.name, own, run_by(op, variant.name, own))
        for truth, result, limit in zip(truths, results, limits, strict=True):
            rounding = composed(op, variant.name, args)
            error = truth.roundings(result, composed=rounding)
            assert error <= limit, f"{variant.name}: {error:.2f} roundings > {limit}"


# --- pieces


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time, and fewer experts than there are."""
    monkeypatch.setattr(nvfp4_common, "PIECE_BYTES", 24 << 10)
    monkeypatch.setattr(slots, "NARROW", 16)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("name", "layout"), sampled(product(NAMES, ["rows", "tiles", "fragments"]), 2)
)
def test_many_pieces_are_one_result(name: str, layout: str, device: str) -> None:
    op = OPS[name]
    for case in op.cases():
        args = case.make(device, 3)
        if args[-2 if "moe" in name else -3] == layout:
            check(op, args)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("name", NAMES)
def test_products_of_16_bit_tensors(name: str) -> None:
    """What a GPU computes, with its roundings, on a CPU: elements times scales are exact."""
    op = OPS[name]
    for case in op.cases():
        args = case.make("cpu", 4)
        if not any(variant.name == "library" for variant in supporting(op, args)):
            continue
        if "moe" in name and args[-16].dtype == torch.float16:
            continue  # sums without their scale leave fp16's range: a GPU runs the reference
        truths = truth_of(name, args)
        limits = allowed(op, args, truths)
        results = results_of(name, args, run_by(op, "library", args))
        for truth, result, limit in zip(truths, results, limits, strict=True):
            rounding = composed(op, "library", args, "cuda")
            error = truth.roundings(result, composed=rounding)
            assert error <= limit, f"{case.name}: {error:.2f} roundings > {limit}"


class Memory(TorchDispatchMode):
    """The most that tensors made inside take at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in given:
                self._live[storage.data_ptr()] = (StorageWeakRef(storage), storage.nbytes())
        self._live = {at: one for at, one in self._live.items() if not one[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return result


def _tensors(values: Any) -> list[torch.Tensor]:
    leaves = torch.utils._pytree.tree_leaves(values)
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def peak(op: Op, args: tuple[Any, ...]) -> int:
    run_by(op, "library", args)  # what is kept from the first call on is not of a call
    memory = Memory()
    with gristmill.use(op.name, "library"), memory:
        op.run(*args)
    return memory.peak


SIZES = [(1, 4096, 2048), (3000, 512, 1024), (5, 64, 65536), (70000, 64, 64)]


@pytest.mark.parametrize(
    ("piece", "dtype"),
    [
        pytest.param(32 * MIB, torch.float32, id="32 MB fp32"),
        pytest.param(8 * MIB, torch.bfloat16, id="8 MB bf16"),
        pytest.param(32 * MIB, torch.bfloat16, id="32 MB bf16", marks=pytest.mark.long),
        pytest.param(8 * MIB, torch.float32, id="8 MB fp32", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("shape", SIZES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("name", ["nvfp4_linear", "nvfp4_linear_backward"])
@pytest.mark.parametrize("arch", ["cpu", "sm_90a"])
def test_a_linear_stays_within_a_piece(
    arch: str, piece: int, name: str, shape: tuple[int, ...], dtype: torch.dtype, monkeypatch: Any
) -> None:
    if (arch, name, shape[-1], piece) == ("sm_90a", "nvfp4_linear", 65536, 8 * MIB):
        pytest.skip("64 rows of fragments are decoded at once, however long they are")
    monkeypatch.setattr(nvfp4_common, "PIECE_BYTES", piece)
    op = OPS[name]
    example = forward_example if name == "nvfp4_linear" else backward_example
    args = example(shape, dtype, "cpu", arch)
    result = op.outputs(*args)
    assert peak(op, args) - result.nbytes <= piece


@pytest.mark.parametrize("layout", ["rows", "tiles", "fragments"])
def test_pieces_come_out_of_tiles_alone(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large weight, or its scales alone, is not put in order as a whole."""
    monkeypatch.setattr(nvfp4_common, "PIECE_BYTES", MIB)
    weight = random_weight((8192, 512), "cpu", layout=layout)
    args = (torch.randn(1, 512), *weight[:3], None, layout, None, None)
    assert peak(LINEAR, args) <= MIB + args[0].nbytes + 8192 * 4


@pytest.mark.parametrize("shape", [(3, 8, 2, 512, 768), (300, 8, 2, 512, 768)], ids=["few", "many"])
@pytest.mark.parametrize("name", ["nvfp4_moe", "nvfp4_moe_backward"])
def test_experts_stay_within_a_piece(
    name: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside what the slots themselves take: their rows, what the experts make of them."""
    monkeypatch.setattr(nvfp4_common, "PIECE_BYTES", 4 * MIB)
    op, (rows, _, topk, hidden, inner) = OPS[name], shape
    args = op.example(shape, torch.bfloat16, "cpu")
    slots_taken = rows * topk
    taken = slots_taken * (hidden + inner) * 4 + rows * hidden * 2
    if name == "nvfp4_moe_backward":
        taken = slots_taken * (2 * hidden + 2 * inner) * 4 + rows * hidden * 2
    routing = slots_taken * 8 * 8 + 8 * (2 * inner + hidden) * 8
    whole = 3 * 8 * hidden * inner * 4
    assert peak(op, args) - taken - routing <= 4 * MIB < whole / 4


@pytest.mark.parametrize("name", ["nvfp4_moe", "nvfp4_moe_backward"])
def test_many_tokens_stay_within_two_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for what is computed, one for the rows of the slots: these come some at a time."""
    monkeypatch.setattr(nvfp4_common, "PIECE_BYTES", 2 * MIB)
    op = OPS[name]
    args = op.example((2000, 8, 4, 256, 128), torch.bfloat16, "cpu")
    made = sum(result.nbytes for result in results_of(name, args, op.outputs(*args)))
    rows_of_all_slots = 2000 * 4 * (256 + 128) * 4
    assert peak(op, args) - made <= 4 * MIB < rows_of_all_slots / 2


# --- nothing to do


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 16), (0, 5, 32), (3, 0, 32), (2, 8, 0), (0, 0, 0)])
@pytest.mark.parametrize("name", ["nvfp4_linear", "nvfp4_linear_backward"])
def test_an_empty_linear(name: str, shape: tuple[int, ...], device: str) -> None:
    op = OPS[name]
    args = op.example(shape, torch.bfloat16, device)
    for variant in supporting(op, args):
        result, want = run_by(op, variant.name, args), op.outputs(*args)
        assert (result.shape, result.dtype) == (want.shape, want.dtype)
        assert not result.any()  # the empty sum
    if name == "nvfp4_linear":
        bias = torch.randn(len(args[3]), device=device)
        y = linear_of(*args[:4], bias, args[5], torch.float32)
        assert same_bits(y, bias.expand(y.shape) if y.shape[0] else y)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 4, 2, 32, 16), (3, 4, 0, 32, 16), (3, 0, 2, 32, 16)])
@pytest.mark.parametrize("name", ["nvfp4_moe", "nvfp4_moe_backward"])
def test_an_empty_mixture(name: str, shape: tuple[int, ...], device: str) -> None:
    op = OPS[name]
    args = op.example(shape, torch.bfloat16, device)
    for variant in supporting(op, args):
        results = results_of(op.name, args, run_by(op, variant.name, args))
        for result in results:
            assert result.dtype in (torch.bfloat16, torch.float32)
            assert not result.any()


# --- numbers that are none


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("op", NVFP4_OPS)
def test_nan_and_inf_stay_in_their_row(op: Op, value: float, device: str) -> None:
    shape = (40, 8, 2, 64, 32) if "moe" in op.name else (40, 64)
    args = op.example(shape, torch.bfloat16, device)
    spoiled = copied(args)
    spoiled[0][7, 5] = value
    healthy = [row for row in range(40) if row != 7]
    for variant in supporting(op, args):
        clean = results_of(op.name, args, run_by(op, variant.name, args))
        dirty = results_of(op.name, spoiled, run_by(op, variant.name, spoiled))
        for one, other in zip(clean, dirty, strict=True):
            assert same_bits(one[healthy], other[healthy]), variant.name
            assert not other[7].isfinite().all(), variant.name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [2, 40])
@pytest.mark.parametrize("name", ["nvfp4_moe", "nvfp4_moe_backward"])
def test_an_expert_harms_nobody_it_does_not_serve(name: str, rows: int, device: str) -> None:
    """NaN scales in an idle expert, and values that overflow in the wrong one."""
    op = OPS[name]
    args = list(op.example((rows, 8, 2, 64, 32), torch.float32, device))
    at = 1 if name == "nvfp4_moe_backward" else 0
    args[at + 2] = torch.where(args[at + 2] == 5, -1, args[at + 2])
    ids = args[at + 2]
    for part in (4, 7):
        args[at + part].view(torch.uint8)[5] = 0x7F
    args[at + 5][3] = 1e36  # what this one makes of a token overflows
    served = ~(ids == 3).any(-1)
    expected = None
    for variant in supporting(op, tuple(args)):
        results = results_of(op.name, tuple(args), run_by(op, variant.name, tuple(args)))
        for result in results:
            assert result[served].isfinite().all(), variant.name
        expected = results if expected is None else expected
        for one, other in zip(results, expected, strict=True):
            torch.testing.assert_close(one[served], other[served], rtol=1e-4, atol=1e-5)


# --- the public functions


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("arch", ["cpu", "sm_80", "sm_90a", "sm_100a"])
@pytest.mark.parametrize("per_row", [False, True])
def test_linear_takes_what_users_hold(per_row: bool, arch: str, device: str) -> None:
    torch.manual_seed(0)
    dense = torch.randn(200, 80, device=device)
    weight = nvfp4.quantize(dense)
    if per_row:
        scale = weight.row_scale * torch.rand(200, device=device)
        weight = nvfp4.NVFP4Tensor(weight.codes, weight.scales, scale)
    values = nvfp4.dequantize(weight, torch.float64)
    x, bias = torch.randn(3, 4, 80, device=device), torch.randn(200, device=device)
    expected = torch.nn.functional.linear(x.double(), values, bias.double())
    for held in (weight, weight.prepare(arch)):
        y = nvfp4.linear(x, held, bias)
        assert (y.shape, y.dtype) == ((3, 4, 200), torch.float32)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-4)
        # fp64 knows no rounding worth the name: the weight's values are exact.
        precise = nvfp4.linear(x.double(), held, bias)
        torch.testing.assert_close(precise, expected, rtol=1e-13, atol=1e-12)
    assert nvfp4.linear(x, weight, out_dtype=torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 30])
@pytest.mark.parametrize("arch", ["cpu", "sm_90a", "sm_100a"])
def test_moe_takes_what_users_hold(arch: str, rows: int, device: str) -> None:
    torch.manual_seed(0)
    gate, up = torch.randn(2, 4, 48, 64, device=device) / 8
    down = torch.randn(4, 64, 48, device=device) / 8
    w13, w2 = nvfp4.quantize(torch.cat((gate, up), 1)), nvfp4.quantize(down)
    x = torch.randn(rows, 64, device=device)
    weights, ids = torch.rand(rows, 4, device=device).topk(2)
    expected = torch.zeros(rows, 64, dtype=torch.float64, device=device)
    wide, back = (nvfp4.dequantize(one, torch.float64) for one in (w13, w2))
    for row in range(rows):
        for weight, expert in zip(weights[row].double(), ids[row], strict=True):
            both = wide[expert] @ x[row].double()
            h = torch.nn.functional.silu(both[:48]) * both[48:]
            expected[row] += weight * (back[expert] @ h)
    for held in ((w13, w2), (w13.prepare(arch, pairs=True), w2.prepare(arch))):
        y = nvfp4.moe(x, weights, ids, *held)
        torch.testing.assert_close(y.double(), expected, rtol=1e-5, atol=1e-5)


def test_experts_of_one_rank_of_two_add_up() -> None:
    """Each rank holds half of the experts and a map; their sums are the whole."""
    args = list(MOE.example((20, 8, 3, 64, 48), torch.float64, "cpu"))
    whole = moe_of(*args)
    half = torch.zeros_like(whole)
    for rank in range(2):
        own = slice(4 * rank, 4 * rank + 4)
        mapped = torch.full((8,), -1, dtype=torch.int32)
        mapped[own] = torch.arange(4, dtype=torch.int32)
        parts = [part[own] for part in args[3:9]]
        half += moe_of(*args[:3], *parts, *args[9:13], mapped, "rows")
    torch.testing.assert_close(half, whole, rtol=1e-12, atol=1e-14)


def test_explain_takes_the_public_functions() -> None:
    weight = nvfp4.quantize(torch.randn(32, 64))
    x = torch.randn(2, 64)
    found = gristmill.explain(nvfp4.linear, x, weight, bias=torch.randn(32))
    assert found.chosen == "library"
    assert (found.problem.dims, found.problem.flags) == ((("N", 32), ("K", 64)), ("bias",))
    for arch, layout in (("sm_100a", "tiles"), ("sm_90a", "fragments")):
        packed = gristmill.explain(nvfp4.linear, x, weight.prepare(arch), act="fp8")
        assert packed.problem.flags == (layout, "act_fp8")
        assert packed.problem.dims == found.problem.dims
    stack = nvfp4.quantize(torch.randn(4, 64, 64)), nvfp4.quantize(torch.randn(4, 64, 32))
    weights, ids = torch.rand(2, 2), torch.zeros(2, 2, dtype=torch.int64)
    found = gristmill.explain(nvfp4.moe, x, weights, ids, *stack, activation="gelu")
    assert dict(found.problem.dims) == {"E": 4, "k": 2, "H": 64, "I": 32}
    assert found == gristmill.explain("nvfp4_moe", *MOE.adapt(x, weights, ids, *stack))
    assert found == gristmill.explain("nvfp4_moe", x, weights, ids, *stack)
    # One function for all experts; what it would run over these is the other op.
    for moe in (gristmill.moe, "moe"):
        assert found == gristmill.explain(moe, x, weights, ids, *stack, activation="gelu")
        dense = gristmill.explain(moe, x, weights, ids, *(nvfp4.dequantize(one) for one in stack))
        assert dense.as_dict()["op"] == "moe"
    with pytest.raises(GristmillError):  # as the call itself would
        gristmill.explain(gristmill.linear, x, weight)


@pytest.mark.parametrize("arch", KNOWN)
def test_where_the_library_runs(arch: str) -> None:
    """Wherever torch's grouped mm does not wait for the host; few tokens need none of it."""
    (library,) = (one for one in MOE.variants if one.name == "library")
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        for rows in (1, 4, 5, 4096):
            args = MOE.example((rows, 8, 2, 64, 32), dtype, "meta")
            reason = library.supports(MOE.problem(*args, device=KNOWN[arch]))
            if dtype == torch.float64:
                assert reason == "products are taken in fp32 at most"
            elif rows <= 4 or (
                dtype == torch.bfloat16 and arch in ("sm_90a", "sm_100a", "sm_103a")
            ):
                assert reason is None
            else:
                assert reason is not None
                assert "waits for the host" in reason


def test_a_stride_of_zero_is_read_as_such() -> None:
    """Global scales of a matrix are an expanded view; so may rows be."""
    weight = nvfp4.quantize(torch.randn(48, 64))
    assert weight.row_scale.stride() == (0,)
    x = torch.randn(1, 64).expand(5, 64)
    torch.testing.assert_close(
        nvfp4.linear(x, weight), x @ nvfp4.dequantize(weight).t(), rtol=1e-5, atol=1e-4
    )


@contextlib.contextmanager
def counted(function: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[torch.Size]]:
    shapes: list[torch.Size] = []
    blocks = nvfp4_common.Weight.blocks

    def spy(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        found = blocks(self, *args, **kwargs)
        shapes.append(found.shape)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(nvfp4_common.Weight, function, spy)
        yield shapes


def test_few_tokens_read_few_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    args = MOE.example((1, 64, 2, 64, 32), torch.bfloat16, "cpu")
    with counted("blocks", monkeypatch) as shapes:
        run_by(MOE, "library", args)
    assert {shape[0] for shape in shapes} == {2}
    args = MOE.example((100, 64, 2, 64, 32), torch.bfloat16, "cpu")
    with counted("blocks", monkeypatch) as shapes:
        run_by(MOE, "library", args)
    assert {shape[0] for shape in shapes} == {64}
