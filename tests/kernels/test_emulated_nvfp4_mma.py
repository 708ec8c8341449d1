"""The kernel that streams NVFP4 weights through warps' matrix instructions, run on the CPU.

What runs is the variant's own plan, with the launches that a GPU would get. Sums are judged against
fp64 by what fp32 sums may lose; a weight that is left out, or taken twice, is a hundred times that.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from emulated_host import EmulatedHost, Run
from emulation.harness import emulator_for

from gristmill.formats.nvfp4 import fragments
from gristmill.ops.nvfp4_common import Weight
from gristmill.ops.nvfp4_linear.cases import random_weight
from gristmill.ops.nvfp4_linear.mma import Mma
from gristmill.ops.nvfp4_linear.mma_configs import MmaConfig, Shares, Slots
from gristmill.ops.nvfp4_linear.problem import forward_problem
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import Problem

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ORDERS = (0, 1)
ONE_SM = replace(KNOWN["sm_90a"], multiprocessors=1)
THREE_SMS = replace(KNOWN["sm_90a"], multiprocessors=3)

ALONE = MmaConfig(8, 1, 4, 8)
# Every way to share columns, every number of tokens, tiles of one and of two slabs.
CONFIGS = (
    ALONE,
    MmaConfig(8, 1, 2, 8, shares=2),
    MmaConfig(8, 2, 4, 4, shares=4),
    MmaConfig(8, 2, 2, 4, shares=2, partial=True),
    MmaConfig(16, 1, 4, 4),
    MmaConfig(16, 2, 3, 4, shares=8),
    MmaConfig(32, 2, 2, 4, shares=4),
    MmaConfig(32, 2, 3, 4, shares=4, partial=True),
    MmaConfig(64, 1, 2, 2, shares=2),
    MmaConfig(64, 2, 2, 2),
)
# Tokens, rows and columns: one piece; tails of rows (also within four) and of columns; several
# tiles of tokens; shares of different length; columns that take several rounds and slots.
SIZES = (
    (1, 64, 64),
    (5, 200, 272),
    (19, 131, 592),
    (70, 66, 80),
    (3, 65, 4112),
)


@dataclass(frozen=True)
class Call:
    """A call of the op, drawn from its sizes."""

    tokens: int
    rows: int
    columns: int
    dtype: torch.dtype = BF16
    out: torch.dtype | None = F32
    bias: torch.dtype | None = None

    def weight(self) -> Weight:
        generator = torch.Generator().manual_seed(self.rows * 7919 + self.columns)
        shape = (self.rows, self.columns)
        return random_weight(shape, "cpu", layout="fragments", generator=generator, per_row=True)

    def x(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.tokens)
        return torch.randn(self.tokens, self.columns, generator=generator).to(self.dtype)

    def arguments(self, x: torch.Tensor | None = None) -> tuple[object, ...]:
        weight = self.weight()
        shift = None
        if self.bias is not None:
            shift = torch.randn(self.rows, generator=torch.Generator().manual_seed(5))
            shift = shift.to(self.bias)
        x = self.x() if x is None else x
        return (x, *weight[:3], shift, weight.layout, self.out, None)

    def exact(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The result, and the sum of the terms' sizes."""
        x, shift = self.x().double(), self.arguments()[4]
        values = self.weight().whole(torch.float64)
        exact, size = x @ values.t(), x.abs() @ values.t().abs()
        if isinstance(shift, torch.Tensor):
            exact, size = exact + shift.double(), size + shift.double().abs()
        return exact, size


def _problem(args: tuple[object, ...], device: Device = KNOWN["sm_90a"]) -> Problem:
    return forward_problem(device, *args)  # type: ignore[arg-type]


def _run(
    host: EmulatedHost,
    args: tuple[object, ...],
    config: MmaConfig,
    device: Device = KNOWN["sm_90a"],
    order: int = 0,
) -> Run:
    problem = _problem(args, device)
    assert Mma().supports(problem) is None
    return host.run(Mma(), problem, config, args, order=order)


def _check(y: torch.Tensor, call: Call) -> None:
    exact, size = call.exact()
    assert y.dtype == F32
    assert ((y.double() - exact).abs() <= 2.0**-20 * size).all()


@pytest.fixture(autouse=True, scope="module")
def _all_at_once(pytestconfig: pytest.Config) -> None:
    programs = []
    for config in CONFIGS:
        for dtype in (BF16, F16):
            problem = _problem(Call(1, 64, 64, dtype).arguments())
            programs.append(Mma().program(problem, config))
    for out in (BF16, F16):
        programs.append(Mma().program(_problem(Call(1, 64, 64, F16, out).arguments()), ALONE))
    emulator_for(pytestconfig).prepare(programs)


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_sums(host: EmulatedHost, config: MmaConfig, size: tuple[int, int, int]) -> None:
    """As exact as fp32 sums are, and the same bits in every order of threads."""
    call = Call(*size, F16 if size[0] == 5 else BF16)
    answers = [_run(host, call.arguments(), config, order=order).outputs for order in ORDERS]
    _check(answers[0], call)
    assert all(torch.equal(answers[0], other) for other in answers[1:])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize(("rows", "columns"), [(700, 80), (270, 1040)])
def test_many_tiles_for_a_block(
    host: EmulatedHost, config: MmaConfig, rows: int, columns: int
) -> None:
    """Loads run ahead from tile to tile. The order of a sum is that of the config, whoever does it.

    Clusters are one at a time here.
    """
    call = Call(5, rows, columns)
    args = call.arguments()
    answers = [
        _run(host, args, config, ONE_SM).outputs,
        _run(host, args, config, THREE_SMS, order=1).outputs,
        _run(host, args, config, replace(ONE_SM, multiprocessors=100)).outputs,
    ]
    _check(answers[0], call)
    assert all(torch.equal(answers[0], other) for other in answers[1:])


def test_tokens_come_once_more_for_every_tile_where_they_do_not_fit(host: EmulatedHost) -> None:
    small = replace(ONE_SM, shared_per_block=80 << 10)
    call = Call(8, 129, 4112)
    args = call.arguments()
    staying = _run(host, args, ALONE, ONE_SM)
    anew = _run(host, args, ALONE, small)
    assert torch.equal(staying.outputs, anew.outputs)
    _check(anew.outputs, call)
    assert anew.calls[0].shared <= small.shared_per_block < staying.calls[0].shared
    tiles = 3
    assert anew.traffic[0].loaded - staying.traffic[0].loaded == (tiles - 1) * 8 * 4112 * 2


@pytest.mark.parametrize("tokens", [1, 8])
def test_each_byte_moves_once(host: EmulatedHost, tokens: int) -> None:
    call = Call(tokens, 320, 1040)
    (traffic,) = _run(host, call.arguments(), ALONE, ONE_SM).traffic
    slabs, chunks = fragments.padded(320, 1040)
    # Each quad of lanes reads the same scales, each token's threads the same row scales.
    weight = slabs * chunks * (fragments.CODES + 4 * fragments.SCALES) + tokens * 320 * 4
    assert traffic.loaded == weight + tokens * 1040 * 2
    assert traffic.stored == tokens * 320 * 4


@pytest.mark.parametrize("bias", [None, F32, BF16, F16], ids=str)
@pytest.mark.parametrize("rows", [128, 130])
def test_results_are_rounded_once_after_the_bias(
    host: EmulatedHost, rows: int, bias: torch.dtype | None
) -> None:
    call = Call(9, rows, 272, F16, F32, bias)
    precise = _run(host, call.arguments(), ALONE).outputs
    _check(precise, call)
    for out in (BF16, F16):
        rounded = _run(host, replace(call, out=out).arguments(), ALONE).outputs
        assert rounded.dtype == out
        assert torch.equal(rounded, precise.to(out))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_token_does_not_depend_on_the_others(host: EmulatedHost, config: MmaConfig) -> None:
    call = Call(37, 70, 272)
    together = _run(host, call.arguments(), config).outputs
    for first, count in ((36, 1), (7, 13)):
        some = call.x()[first : first + count]
        alone = _run(host, call.arguments(some), config, THREE_SMS).outputs
        assert torch.equal(alone, together[first : first + count])


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_tokens_that_are_not_finite_leave_the_others_alone(
    host: EmulatedHost, config: MmaConfig
) -> None:
    call = Call(11, 70, 272)
    expected = _run(host, call.arguments(), config).outputs
    x = call.x()
    x[4, 17] = float("nan")
    x[9, 271] = float("inf")
    y = _run(host, call.arguments(x), config).outputs
    others = [token for token in range(11) if token not in (4, 9)]
    assert torch.equal(y[others], expected[others])
    assert y[4].isnan().all()
    assert not y[9].isfinite().any()


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_nothing_beside_the_tokens_is_read(host: EmulatedHost, config: MmaConfig) -> None:
    """Rows of a wider tensor, whose rest is NaN; columns end within a chunk, and within a share."""
    call = Call(10, 34, 1168)
    wide = torch.full((10, 1168 + 24), float("nan"), dtype=BF16)
    wide[:, 8:-16] = call.x()
    y = _run(host, call.arguments(wide[:, 8:-16]), config).outputs
    _check(y, call)


@pytest.mark.parametrize("layout", ["unaligned", "columns first", "expanded", "three dims"])
def test_x_of_any_strides(host: EmulatedHost, layout: str) -> None:
    call = Call(6, 66, 272)
    x = call.x()
    if layout == "unaligned":
        x = torch.cat([x.new_zeros(1), x.flatten()])[1:].view(6, 272)
    elif layout == "columns first":
        x = x.t().contiguous().t()
    elif layout == "expanded":
        x = x[:1].expand(6, 272)
    else:
        x = x.view(2, 3, 272)
    y = _run(host, call.arguments(x), ALONE).outputs
    assert y.shape == (*x.shape[:-1], 66)
    expected = _run(host, call.arguments(x.contiguous().view(6, 272)), ALONE).outputs
    assert torch.equal(y.view(6, 66), expected)


def test_tokens_more_than_2_31_elements_apart(host: EmulatedHost, tmp_path: Path) -> None:
    """In a file of which only a few pages exist."""
    call, apart = Call(3, 66, 272), 2**31 + 8
    far = torch.from_file(str(tmp_path / "sparse"), shared=True, size=3 * apart, dtype=BF16)
    far = far.as_strided((3, 272), (apart, 1)).copy_(call.x())
    _check(_run(host, call.arguments(far), ALONE).outputs, call)


def test_every_code_beside_every_scale_is_exact(host: EmulatedHost) -> None:
    """One weight at a time: x has a single one in every row, so each result is a value."""
    scales = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = torch.arange(16, dtype=torch.uint8)
    bytes_ = (codes[0::2] | codes[1::2] << 4).repeat(127, 1)
    packed = fragments.pack(bytes_, scales.unsqueeze(1))
    for dtype in (BF16, F16):
        args = (torch.eye(16, dtype=dtype), *packed, torch.ones(127), None, "fragments", F32, None)
        y = _run(host, args, ALONE).outputs
        expected = Weight(*packed, torch.ones(127), "fragments", 16).whole(F32)
        assert torch.equal(y, expected.t())


def test_shares_and_slots_are_what_the_kernel_takes() -> None:
    """Every chunk is in one share; all rounds of a share are in its slots."""
    for config in CONFIGS:
        for _, rows, columns in SIZES:
            shares = Shares.of(rows, columns, config)
            assert shares.share * config.shares >= shares.chunks == -(-columns // 64)
            assert shares.rounds * config.stripe >= shares.share
            assert shares.tiles * config.slabs >= shares.slabs
            for passes in (1, 2):
                slots = Slots.of(shares, config, passes, KNOWN["sm_90a"])
                assert slots.count == 2 or slots.rounds == shares.rounds
