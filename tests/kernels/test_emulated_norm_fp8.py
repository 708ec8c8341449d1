"""The norm kernels with FP8 results, run on the CPU by the variants' own host code."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import exact
import exact_fp8
import pytest
import torch
from emulated_host import EmulatedHost, Run, build_cases
from rms_norm_cases import BF16, F16, F32, LAYOUTS, SCOPES, _tensor

from gristmill.ops.registry import OPS
from gristmill.ops.rows.config import AHEAD, ASYNC, STRAIGHT, TWICE, RowConfig
from gristmill.select.device import KNOWN
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

FP8 = torch.float8_e4m3fn
ROUNDINGS = 4.0  # as without FP8: test_emulated_rms_norm
ORDERS = (0, 1, 7)
OP_NAMES = ("rms_norm_fp8", "add_rms_norm_fp8", "layer_norm_fp8", "add_layer_norm_fp8")
# x, its residual, the weight; a bias has the dtype of the residual, or is not there.
DTYPES = (
    (BF16, BF16, BF16),
    (F32, F32, F32),
    (BF16, BF16, F32),
    (F16, F16, F16),
    (BF16, F32, None),
    (F32, BF16, F16),
)


@dataclass(frozen=True)
class Case:
    op: str
    variant: str
    shape: tuple[int, ...]
    dtypes: tuple[torch.dtype | None, ...] = DTYPES[0]
    layouts: tuple[str, str] = LAYOUTS[0]
    scale: float | None = None
    amax: bool = True
    casting: str = "once"
    bias: bool = True
    eps: float = 1e-6
    weight_offset: float = 0.0
    arch: str = "sm_90a"
    multiprocessors: int = 3
    config: RowConfig | None = None

    def __str__(self) -> str:
        words = [self.op, self.variant, "x".join(map(str, self.shape))]
        words += ["-".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)]
        words += [name for name in self.layouts if name != "dense"]
        words += ["per row" if self.scale is None else "given", "amax" * self.amax]
        words += [self.casting] if self.casting != "once" else []
        if self.config is not None:
            c = self.config
            words.append(f"{c.threads}t{c.items}i{c.lanes}l{c.cluster}c{c.feed}f{c.hold:d}h")
        return " ".join(filter(None, words)).replace(" ", "_")

    @property
    def added(self) -> bool:
        return self.op.startswith("add_")

    @property
    def centered(self) -> bool:
        return "layer" in self.op

    def scale_of(self, args: tuple[Any, ...]) -> torch.Tensor | None:
        return args[2 + self.added + self.centered]

    def arguments(self, seed: int = 0) -> tuple[Any, ...]:
        """The op's positional arguments, on the CPU."""
        generator = torch.Generator().manual_seed(seed)
        x = _tensor(self.shape, self.dtypes[0], self.layouts[0], generator)
        residual = _tensor(self.shape, self.dtypes[1], self.layouts[1], generator)
        weight = None
        if self.dtypes[2] is not None:
            weight = torch.randn(self.shape[-1], generator=generator).to(self.dtypes[2])
        scale = None if self.scale is None else torch.tensor([self.scale])
        rows = (x, residual) if self.added else (x,)
        options = (self.eps, self.weight_offset)
        if not self.centered:
            return (*rows, weight, scale, *options, self.casting, self.amax)
        bias = None
        if self.bias:
            bias = torch.randn(self.shape[-1], generator=generator).to(self.dtypes[1])
        return (*rows, weight, bias, scale, *options, self.amax)

    def problem(self, args: tuple[Any, ...]) -> Problem:
        device = replace(KNOWN[self.arch], multiprocessors=self.multiprocessors)
        return OPS[self.op].problem(*args, device=device)

    def find_variant(self) -> Variant:
        return next(one for one in OPS[self.op].variants if one.name == self.variant)

    def supported(self) -> bool:
        return self.find_variant().supports(self.problem(self.arguments())) is None


def sweep() -> Iterator[Case]:
    """Every op, scope and scaling over lengths of a row; the rest takes turns."""
    lengths = {
        "cuda_warp": (1, 3, 40, 127, 256, 257, 1022, 1024),
        "cuda_block": (1, 36, 129, 1000, 4096, 8192, 20480),
        "cuda_cluster": (8, 2048, 8200, 16384),
        "cuda_cooperative": (24, 4096, 10001),
    }
    turn = itertools.count()
    for scope, op, scale in itertools.product(SCOPES, OP_NAMES, (None, 0.01)):
        for place, length in enumerate(lengths[scope]):
            index = next(turn)
            if (index + place) % 2:
                continue  # every second one: the ops differ in few places
            yield Case(
                op=op,
                variant=scope,
                shape=(3, 5 if length < 10000 else 2, length),
                dtypes=DTYPES[(index // 2) % len(DTYPES)],
                layouts=LAYOUTS[index % len(LAYOUTS)],
                scale=scale,
                amax=index % 2 == 0,
                casting="llama" if index % 5 < 2 and "rms" in op else "once",
                bias=index % 3 > 0,
                eps=(1e-6, 1e-5, 0.1)[index % 3],
                weight_offset=(0.0, 1.0)[index % 2],
                arch=("sm_90a", "sm_80")[index % 4 == 3 and scope != "cuda_cluster"],
                multiprocessors=24 if scope == "cuda_cooperative" else 3,
            )


def configurations() -> Iterator[Case]:
    """Launches that a table could ask for: every feed, held or not, in every scope."""
    for scale, op in ((None, "add_layer_norm_fp8"), (0.02, "add_rms_norm_fp8")):
        base = Case(op, "cuda_block", (13, 1536), (BF16, BF16, F32), scale=scale)
        for feed, hold in itertools.product((STRAIGHT, AHEAD, ASYNC, 2, 3), (True, False)):
            yield replace(base, config=RowConfig(threads=64, items=3, feed=feed, hold=hold))
        for cluster, feed in ((2, STRAIGHT), (3, 2), (4, ASYNC), (16, AHEAD)):
            threads = -(-1536 // (8 * cluster * 32)) * 32
            config = RowConfig(threads, items=1, cluster=cluster, feed=feed, hold=cluster < 4)
            yield replace(base, variant="cuda_cluster", config=config)
        for members in (1, 6):
            threads = -(-1536 // (8 * members * 32)) * 32
            config = RowConfig(threads, items=1, cluster=members, feed=AHEAD)
            yield replace(
                base, variant="cuda_cooperative", config=config, multiprocessors=12, arch="sm_80"
            )
        for lanes, feed in itertools.product((1, 4, 32), (STRAIGHT, AHEAD)):
            config = RowConfig(threads=64, items=-(-16 // lanes), lanes=lanes, feed=feed)
            dtypes = (F32, F32, BF16)
            yield replace(base, variant="cuda_warp", shape=(203, 64), dtypes=dtypes, config=config)
        for cluster, name in itertools.product((1, 4), OP_NAMES):
            config = RowConfig(64, items=3, cluster=cluster, feed=TWICE, hold=False)
            variant = "cuda_cluster" if cluster > 1 else "cuda_block"
            yield replace(base, op=name, variant=variant, shape=(5, 4104), config=config)


def _launch(host: EmulatedHost, case: Case, args: tuple[Any, ...], order: int = 0) -> Run:
    variant, problem = case.find_variant(), case.problem(args)
    config = case.config or variant.config(problem)
    return host.run(variant, problem, config, args, order=order)


def _norm(case: Case, args: tuple[Any, ...]) -> exact.Range:
    """What z may be, before it is quantised."""
    h, weight = args[0], args[2 if case.added else 1]
    if case.added:
        dtype = torch.promote_types(args[0].dtype, args[1].dtype)
        h = (args[0].float() + args[1].float()).to(dtype)
    if case.centered:
        bias = args[2 + case.added]
        return exact.layer_norm(h, weight, bias, case.eps, case.weight_offset, roundings=ROUNDINGS)
    normalised = product = F32
    if case.casting == "llama":
        normalised = product = h.dtype
        if weight is not None:
            product = torch.promote_types(h.dtype, weight.dtype)
    return exact.forward(
        h,
        weight,
        case.eps,
        case.weight_offset,
        normalised=normalised,
        product=product,
        roundings=ROUNDINGS,
    )


def _check_outputs(case: Case, args: tuple[Any, ...], outputs: tuple[torch.Tensor, ...]) -> None:
    y, *total, row_scale, largest = outputs
    scale = case.scale_of(args)
    allowed_y, allowed_scale, allowed_amax = exact_fp8.quantised(_norm(case, args), scale)
    assert (y.dtype, y.stride()) == (FP8, torch.empty_like(args[0]).stride())
    value = y.double()
    wrong = (value < allowed_y.low) | (value > allowed_y.high) | value.isnan()
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} codes are wrong"
    if case.added:
        dtype = torch.promote_types(args[0].dtype, args[1].dtype)
        assert torch.equal(total[0], (args[0].float() + args[1].float()).to(dtype))
    if scale is None:
        assert row_scale.shape == (*case.shape[:-1], 1)
        allowed_scale.check(row_scale, "scale")
    else:
        assert row_scale.numel() == 0
    if case.amax:
        assert largest.shape == ()
        allowed_amax.check(largest, "amax")
    else:
        assert largest.numel() == 0


def _check(host: EmulatedHost, case: Case) -> None:
    """Right, with the strides that are promised, and the same bits in every order of threads."""
    answers = []
    for order in ORDERS:
        args = case.arguments()
        outputs = _launch(host, case, args, order).outputs
        _check_outputs(case, args, outputs)
        answers.append([output.reshape(-1).view(torch.uint8) for output in outputs])
    for other in answers[1:]:
        for mine, theirs in zip(answers[0], other, strict=True):
            assert torch.equal(mine, theirs)


CASES = [case for case in (*sweep(), *configurations()) if case.supported()]


@pytest.fixture(autouse=True, scope="module")
def _all_at_once(request: pytest.FixtureRequest) -> None:
    build_cases(request)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel(host: EmulatedHost, case: Case) -> None:
    _check(host, case)


@pytest.mark.parametrize(
    ("op", "scale"), [("layer_norm_fp8", None), ("rms_norm_fp8", 0.01)], ids=["per row", "given"]
)
@pytest.mark.parametrize("variant", SCOPES)
def test_many_rows_per_team(host: EmulatedHost, variant: str, op: str, scale: float | None) -> None:
    """Loops over rows, their last turn ragged; amax comes from all of them."""
    host.resident = 2 if variant != "cuda_cluster" else 5
    lanes, threads = (4, 64) if variant == "cuda_warp" else (32, 32)
    config = RowConfig(threads, items=1, lanes=lanes, feed=AHEAD)
    if variant == "cuda_cluster":
        config = replace(config, cluster=2)
    case = Case(op, variant, (509, 24), scale=scale, config=config, multiprocessors=20)
    _check(host, case)


@pytest.mark.parametrize("feed", [STRAIGHT, TWICE])
@pytest.mark.parametrize("variant", SCOPES)
def test_a_row_that_is_not_finite_leaves_the_others_alone(
    host: EmulatedHost, variant: str, feed: int
) -> None:
    if feed == TWICE and variant not in ("cuda_block", "cuda_cluster"):
        pytest.skip("rows are always kept")
    for scale in (None, 0.01):
        config = None
        if feed == TWICE:
            cluster = 2 if variant == "cuda_cluster" else 1
            config = RowConfig(32, items=2, cluster=cluster, feed=TWICE, hold=False)
        case = Case("rms_norm_fp8", variant, (9, 256), scale=scale, config=config)
        expected = _launch(host, case, case.arguments()).outputs
        args = case.arguments()
        args[0][4, 17] = float("nan")
        args[0][6, 255] = float("inf")
        y, row_scale, largest = _launch(host, case, args).outputs
        others = [row for row in range(9) if row not in (4, 6)]
        assert torch.equal(y[others].view(torch.uint8), expected[0][others].view(torch.uint8))
        assert y[4].isnan().all()
        assert y[6].isnan()[255]
        assert largest.isnan()
        if scale is None:
            assert torch.equal(row_scale[others], expected[1][others])
            assert row_scale[[4, 6]].isnan().all()
            assert y[6].isnan().all()
        else:
            assert (y[6, :255].float() == 0).all()


@pytest.mark.parametrize("variant", SCOPES)
@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (4, 0)])
def test_nothing_to_do_launches_nothing(
    host: EmulatedHost, variant: str, shape: tuple[int, ...]
) -> None:
    for scale in (None, 0.5):
        case = Case("add_rms_norm_fp8", variant, shape, scale=scale)
        run = _launch(host, case, case.arguments())
        y, total, row_scale, largest = run.outputs
        assert y.shape == total.shape == shape
        assert row_scale.shape == ((*shape[:-1], 1) if scale is None else (0,))
        assert row_scale.eq(2.0**-126).all()
        assert float(largest) == 0.0
        assert run.calls == []


@pytest.mark.parametrize("variant", SCOPES)
@pytest.mark.parametrize("scale", [None, 1e-6, 1e5], ids=["per row", "saturates", "vanishes"])
def test_rows_of_all_sizes(host: EmulatedHost, variant: str, scale: float | None) -> None:
    """Zeros, rows that eps makes small, and values far beyond what a scale was meant for."""
    case = Case("rms_norm_fp8", variant, (9, 256), (F32, F32, F32), scale=scale)
    args = list(case.arguments())
    sizes = torch.tensor([0.0, 1e-30, 1e-12, 1e-6, 1e-3, 1.0, 1e3, 1e8, 1e15]).view(9, 1)
    args[0] = args[0] * sizes
    outputs = _launch(host, case, tuple(args)).outputs
    _check_outputs(case, tuple(args), outputs)
    if scale is None:
        assert float(outputs[1][0]) == 2.0**-126
        assert (outputs[0][0].float() == 0).all()
    if scale == 1e-6:
        assert (outputs[0][5:].float().abs() == 448).float().mean() > 0.99


@pytest.mark.parametrize("variant", SCOPES)
def test_a_large_mean_costs_no_digits(host: EmulatedHost, variant: str) -> None:
    case = Case("layer_norm_fp8", variant, (5, 1000), (F32, F32, F32))
    args = list(case.arguments())
    args[0] = args[0] + 1e4
    _check_outputs(case, tuple(args), _launch(host, case, tuple(args)).outputs)


@pytest.mark.parametrize("length", [8, 12, 2, 7])
def test_every_tie_goes_to_the_even_one(host: EmulatedHost, length: int) -> None:
    """Rows of ones have the norm 1: z is the weight. By vectors of several lengths."""
    codes = torch.arange(0x7F, dtype=torch.uint8).view(FP8).float()
    points = torch.cat([codes, (codes[:-1] + codes[1:]) / 2, torch.tensor([464.0, 480.0, 1e9])])
    points = torch.cat([points, -points, points * (1 + 2.0**-23), points * (1 - 2.0**-23)])
    points = torch.nn.functional.pad(points, (0, -len(points) % length))
    config = RowConfig(threads=32, items=1)
    case = Case("rms_norm_fp8", "cuda_block", (1, length), (F32, F32, F32), config=config)
    for weight in points.view(-1, length)[:: 1 if length > 8 else 3]:
        args = (torch.ones(1, length), weight, torch.ones(1), 0.0, 0.0, "once", True)
        y, _, largest = _launch(host, case, args).outputs
        expected = weight.clamp(-448, 448).to(FP8)
        assert torch.equal(y[0].float(), expected.float())
        assert float(largest) == float(weight.abs().max())


def test_each_byte_moves_once(host: EmulatedHost) -> None:
    """Half the bytes are written, four more for each row; x is read once, whatever the scale."""
    rows, columns = 7, 2048
    for scale, amax in itertools.product((None, 0.1), (False, True)):
        config = RowConfig(threads=128, items=2)
        case = Case("rms_norm_fp8", "cuda_block", (rows, columns), scale=scale, config=config)
        case = replace(case, amax=amax)
        run = _launch(host, case, case.arguments())
        (traffic,) = run.traffic
        read = rows * columns * 2 + rows * columns * 2  # x, and the weight once per team
        scales = 0 if scale is None else 4 * rows * config.threads
        assert traffic.loaded - scales in range(read, read + 4 * rows * amax + 1)
        assert traffic.stored - (4 * rows if scale is None else 0) == rows * columns


@pytest.mark.parametrize("op", OP_NAMES)
def test_the_check_notices_a_small_error(host: EmulatedHost, op: str) -> None:
    case = Case(op, "cuda_block", (5, 512), (F32, F32, F32))
    args = case.arguments()
    outputs = _launch(host, case, args).outputs
    _check_outputs(case, args, outputs)
    for position in (0, len(outputs) - 2, len(outputs) - 1):
        wrong = [output.clone() for output in outputs]
        bits = wrong[position].reshape(-1).view(torch.uint8 if position == 0 else torch.int32)
        bits[-1] += 1 if position == 0 else 40
        wrong[position] = bits.view(wrong[position].dtype).reshape(wrong[position].shape)
        with pytest.raises(AssertionError):
            _check_outputs(case, args, tuple(wrong))
