"""The emulation itself: right kernels give right results in any order, wrong ones are told."""

from __future__ import annotations

import os
import re
import struct
import time
from pathlib import Path

import pytest
import torch

from emulation.harness import (
    BuildError,
    EmulationError,
    Emulator,
    Traffic,
    emulator_for,
    readable,
    writable,
)
from gristmill.jit.program import Program

KERNELS = (
    *(f"copy<{width}>" for width in (2, 4, 8, 16)),
    *(f"sum_segments<{lanes}>" for lanes in (2, 8, 32)),
    "sum_halves",
    "shuffle_from_exited_lane",
    "shuffle_outside_mask",
    "pass_through_warp",
    "reverse_block",
    "barrier_without_leavers",
    "half_waits_elsewhere",
    "disagree_about_shuffle",
    "write_past_shared",
    "read_wild_pointer",
    "read_uninitialised_shared",
    "sum_cluster",
    "wait_without_arriving",
    "arrive_twice",
    "meet_in_grid",
    "scale_tiles<1>",
    "scale_tiles<3>",
    "copy_in_bulk",
    "wait_for_no_barrier",
    "copy_after_wait",
    "widen_bf16",
    "widen_f16",
    "narrow<true>",
    "narrow<false>",
    "inverse_root",
    "many_barriers",
)
PROGRAM = Program("self_test.cu", KERNELS, root=Path(__file__).parent)
PARAMS = struct.Struct("@QQQqIf")
ORDERS = (0, 1, 2, 3)


class Lab:
    """Launches of the kernels in self_test.cu."""

    def __init__(self, emulator: Emulator) -> None:
        self.emulator = emulator
        emulator.prepare([PROGRAM])

    def run(
        self,
        name: str,
        source: torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        counter: torch.Tensor | None = None,
        *,
        count: int = 0,
        value: int = 0,
        scale: float = 1.0,
        grid: int = 1,
        block: int = 32,
        **launch: int,
    ) -> Traffic:
        tensors = (source, out, counter)
        pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
        return self.emulator.launch(
            PROGRAM,
            name,
            PARAMS.pack(*pointers, count, value, scale),
            grid=grid,
            block=block,
            buffers=[
                *([] if source is None else [readable(source)]),
                *(writable(tensor) for tensor in (out, counter) if tensor is not None),
            ],
            **launch,
        )


@pytest.fixture(scope="module", params=("registers", "ucontext"))
def lab(request: pytest.FixtureRequest, emulator: Emulator) -> Lab:
    """Everything is tried with both kinds of fiber switch."""
    if request.param == "registers":
        return Lab(emulator)
    return Lab(emulator_for(request.config, ("EMULATION_UCONTEXT",)))


def numbers(*shape: int) -> torch.Tensor:
    """Small whole numbers: sums of them are exact in any order."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(-100, 100, shape, generator=generator).float()


def unset(*shape: int) -> torch.Tensor:
    return torch.full(shape, float("nan"))


@pytest.mark.parametrize("width", [2, 4, 8, 16])
def test_every_width_copies_exactly_its_bytes(lab: Lab, width: int) -> None:
    source = numbers(1000)
    out = unset(1000)
    count = 3984  # a multiple of 16, and not of the grid's size
    traffic = lab.run(f"copy<{width}>", source, out, count=count, grid=63, block=32 * 16 // width)
    assert torch.equal(out[:996], source[:996])
    assert out[996:].isnan().all()
    assert (traffic.loaded, traffic.stored) == (count, count)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("lanes", [2, 8, 32])
def test_shuffles_sum_segments(lab: Lab, lanes: int, order: int) -> None:
    source = numbers(3, 96)
    out = unset(3, 96)
    lab.run(f"sum_segments<{lanes}>", source, out, grid=3, block=96, order=order)
    expected = source.view(3, -1, lanes).sum(-1, keepdim=True).expand(-1, -1, lanes).reshape(3, 96)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("order", ORDERS)
def test_half_warps_shuffle_at_their_own_pace(lab: Lab, order: int) -> None:
    source = numbers(64)
    out = unset(64)
    lab.run("sum_halves", source, out, block=64, order=order)
    lower, upper = source.view(2, 2, 16).sum(-1).unbind(1)
    halves = torch.stack([upper * 16**2, lower], 1)  # the upper one sums its sum twice more
    assert torch.equal(out.view(2, 2, 16), halves[:, :, None].expand(-1, -1, 16))


@pytest.mark.parametrize("order", ORDERS)
def test_syncwarp_orders_shared_memory(lab: Lab, order: int) -> None:
    source = numbers(3)
    out = unset(96)
    lab.run("pass_through_warp", source, out, value=1, block=96, shared=12, order=order)
    assert torch.equal(out, source.repeat_interleave(32))


def test_without_syncwarp_some_order_shows_it(lab: Lab) -> None:
    results = set()
    for order in ORDERS:
        out = unset(96)
        lab.run("pass_through_warp", numbers(3), out, block=96, shared=12, order=order)
        results.add(out.isnan().any().item())
    assert True in results


@pytest.mark.parametrize("order", ORDERS)
def test_block_barrier(lab: Lab, order: int) -> None:
    source = numbers(4, 1000)
    out = unset(3, 4, 1000)
    lab.run("reverse_block", source, out, grid=4, block=1000, shared=4000, order=order)
    expected = source.flip(-1) + torch.arange(3.0)[:, None, None]
    assert torch.equal(out, expected)


@pytest.mark.parametrize("left_out", [1, 2])
def test_a_missing_block_barrier_shows_in_some_order(lab: Lab, left_out: int) -> None:
    source = numbers(1, 64)
    expected = source.flip(-1) + torch.arange(3.0)[:, None, None]
    wrong = 0
    for order in ORDERS:
        out = unset(3, 1, 64)
        lab.run("reverse_block", source, out, value=left_out, block=64, shared=256, order=order)
        wrong += not torch.equal(out, expected)
    assert wrong > 0


def test_threads_that_returned_count_at_barriers(lab: Lab) -> None:
    out = unset(64)
    lab.run("barrier_without_leavers", out=out, value=40, block=64)
    assert torch.equal(out[:40], torch.ones(40))
    assert out[40:].isnan().all()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("cluster", [1, 2, 4, 16])
def test_cluster_sums_through_remote_stores(lab: Lab, cluster: int, order: int) -> None:
    source = numbers(32 // cluster, cluster, 96)
    out = unset(32 // cluster, cluster, 96)
    shared = 16 + 2 * cluster * 96 * 4
    lab.run(
        "sum_cluster", source, out, grid=32, block=96, cluster=cluster, shared=shared, order=order
    )
    total = source.sum(1, keepdim=True) * cluster**2  # the second and third time all are equal
    assert torch.equal(out, total.expand(-1, cluster, -1))


@pytest.mark.parametrize("order", ORDERS)
def test_cooperative_blocks_meet(lab: Lab, order: int) -> None:
    blocks = 13
    out = unset(6, blocks)
    counter = torch.zeros(1, dtype=torch.int32)
    lab.run(
        "meet_in_grid", None, out, counter, grid=blocks, block=64, cooperative=True, order=order
    )
    sums = torch.arange(blocks).sum() + blocks * torch.arange(3)
    assert torch.equal(out[3:], sums[:, None].expand(3, blocks).float())
    assert counter.item() == 3 * blocks


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("stages", [1, 3])
def test_bulk_copies_over_several_phases(lab: Lab, stages: int, order: int) -> None:
    source = numbers(7, 100)
    out = unset(7, 100)
    shared = 64 + stages * 400
    traffic = lab.run(
        f"scale_tiles<{stages}>",
        source,
        out,
        count=100,
        scale=0.5,
        block=64,
        shared=shared,
        order=order,
    )
    assert torch.equal(out, source * 0.5)
    assert (traffic.bulk, traffic.loaded) == (7 * 400, 0)


@pytest.mark.parametrize("mistake", [1, 2], ids=["no wait", "filled while read"])
def test_a_race_with_a_bulk_copy_shows_as_nan(lab: Lab, mistake: int) -> None:
    wrong = 0
    for order in ORDERS:
        out = torch.zeros(7, 100)
        launch = {"count": 100, "value": mistake, "block": 64, "shared": 464, "order": order}
        try:
            lab.run("scale_tiles<1>", numbers(7, 100), out, **launch)
        except EmulationError as error:  # copies that nobody waited for are still in flight
            assert re.search("in flight|more arrivals", str(error))  # noqa: PT017
        wrong += out.isnan().any().item()
    assert wrong > 0


@pytest.mark.parametrize(
    ("name", "launch", "reason"),
    [
        ("shuffle_from_exited_lane", {}, r"lane 0 reads lane 1, which does not take part"),
        ("shuffle_outside_mask", {}, r"thread 16: .* lane 16 calls with mask 0xffff"),
        ("disagree_about_shuffle", {}, r"deadlock(.|\n)*__syncwarp(.|\n)*__shfl_xor_sync"),
        ("half_waits_elsewhere", {"block": 64}, r"deadlock(.|\n)*__syncthreads(.|\n)*load_acquire"),
        ("write_past_shared", {"shared": 64, "count": 64}, "past the end of shared memory"),
        ("read_wild_pointer", {"count": 64}, "memory that is not mapped, at 0x40"),
        ("sum_cluster", {"cluster": 2, "grid": 2, "value": 1, "shared": 528}, "not have started"),
        ("sum_cluster", {"cluster": 2, "grid": 2, "value": 2, "shared": 528}, "more arrivals"),
        ("sum_cluster", {"cluster": 2, "grid": 2, "value": 3, "shared": 528}, "rank 0, which has"),
        ("sum_cluster", {"cluster": 2, "grid": 2, "value": 4, "shared": 528}, "no initialised"),
        ("sum_cluster", {"cluster": 2, "grid": 3}, "not a whole number of clusters"),
        ("wait_without_arriving", {}, "cluster_wait.. without cluster_arrive"),
        ("arrive_twice", {"cluster": 2, "grid": 2}, "cluster_arrive.. twice"),
        ("meet_in_grid", {"grid": 4, "value": 1, "cooperative": True}, "deadlock: threads spin"),
        ("meet_in_grid", {"grid": 4}, "deadlock: threads spin"),
        ("scale_tiles<1>", {"count": 4, "value": 3, "shared": 128}, "barrier_init_fence"),
        ("scale_tiles<1>", {"count": 4, "value": 4, "shared": 128}, "is in flight"),
        ("copy_in_bulk", {"count": 32, "value": 4, "block": 1, "shared": 64}, "multiples of 16"),
        ("copy_in_bulk", {"count": 24, "block": 1, "shared": 64}, "multiples of 16"),
        ("copy_in_bulk", {"count": 64, "block": 1, "shared": 64}, "leaves the shared memory"),
        ("copy_in_bulk", {"count": 1088, "block": 1, "shared": 2048}, "64 bytes past the end"),
        ("wait_for_no_barrier", {"shared": 8}, "no initialised barrier"),
        ("copy_after_wait", {"value": 1, "dependent": True}, "before wait_for_previous_grid"),
        ("copy_after_wait", {"value": 2, "dependent": True}, "must call wait_for_previous_grid"),
        ("many_barriers", {"block": 1025}, "1 to 1024 threads"),
        ("many_barriers", {"grid": 0}, "at least one block"),
        ("many_barriers", {"cluster": 17, "grid": 17}, "1 to 16 blocks"),
        ("many_barriers", {"shared": 300_000}, "more shared memory"),
    ],
)
def test_mistakes_are_told(lab: Lab, name: str, launch: dict[str, int], reason: str) -> None:
    source, out = numbers(256), unset(256)
    counter = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(EmulationError, match=reason):
        lab.run(name, source, out, counter, **launch)
    # And the next launch is as good as ever.
    lab.run("copy<16>", source, out, count=1024, grid=2)
    assert torch.equal(out, source)


@pytest.mark.parametrize(
    ("width", "offset", "count", "reason"),
    [
        (16, 8, 16, r"load_global of 16 bytes at 0x\w+: the address is not a multiple of 16"),
        (4, 2, 4, "not a multiple of 4"),
        (4, -4, 4, "out of bounds: 4 bytes before the start of buffer 0"),
        (8, 72, 8, r"out of bounds: 16 bytes past the end of buffer 0 \(64 bytes\)"),
        (8, 60, 8, "not a multiple of 8"),
        (2, 62, 4, "thread 1: load_global of 2 bytes .* 2 bytes past the end"),
    ],
)
def test_global_accesses_are_checked(
    lab: Lab, width: int, offset: int, count: int, reason: str
) -> None:
    source, out = torch.zeros(64)[24:40], torch.zeros(64)
    params = PARAMS.pack(source.data_ptr() + offset, out.data_ptr(), 0, count, 0, 0.0)
    with pytest.raises(EmulationError, match=reason):
        lab.emulator.launch(
            PROGRAM,
            f"copy<{width}>",
            params,
            grid=1,
            block=32,
            buffers=[readable(source), writable(out)],
        )


def test_inputs_cannot_be_written(lab: Lab) -> None:
    source = numbers(16)
    before = source.clone()
    with pytest.raises(EmulationError, match=r"store_global of 4 bytes .* the buffer is read-only"):
        lab.emulator.launch(
            PROGRAM,
            "copy<4>",
            PARAMS.pack(source.data_ptr(), source.data_ptr(), 0, 64, 0, 0.0),
            grid=1,
            block=32,
            buffers=[readable(source)],
        )
    assert torch.equal(source, before)


def test_parameters_must_be_the_kernels_struct(lab: Lab) -> None:
    with pytest.raises(EmulationError, match="not as long as the kernel's parameter struct"):
        lab.emulator.launch(PROGRAM, "many_barriers", PARAMS.pack(*[0] * 6)[:-8], grid=1, block=1)


def test_dependent_launch(lab: Lab) -> None:
    source, out = numbers(32), unset(32)
    lab.run("copy_after_wait", source, out, dependent=True)
    assert torch.equal(out, source)


def test_shared_memory_starts_as_nan(lab: Lab) -> None:
    out = torch.zeros(32)
    lab.run("read_uninitialised_shared", out=out, shared=128)
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_half_code_widens_as_in_torch(lab: Lab, dtype: torch.dtype) -> None:
    out = unset(65536)
    name = "widen_bf16" if dtype == torch.bfloat16 else "widen_f16"
    lab.run(name, out=out, grid=64, block=1024)
    expected = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    assert torch.equal(out.isnan(), expected.isnan())
    numbers_only = ~expected.isnan()
    assert torch.equal(
        out.view(torch.int32)[numbers_only], expected.view(torch.int32)[numbers_only]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_floats_narrow_as_in_torch(lab: Lab, dtype: torch.dtype) -> None:
    """All codes, the ties between neighbours and what lies beside the ties; random bit patterns."""
    codes = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    codes = codes[codes.isfinite()]
    steps = codes.view(torch.int32)
    half = 1 << (15 if dtype == torch.bfloat16 else 12)  # half a unit, for a normal number
    near_ties = torch.cat([steps + half + off for off in (-1, 0, 1)]).view(torch.float32)
    tiny_ties = (torch.arange(-2049, 2050).double() * 2.0**-25).float()  # fp16's subnormals
    generator = torch.Generator().manual_seed(1)
    random = torch.randint(-(2**31), 2**31, (1_000_000,), generator=generator).int()
    edges = torch.tensor([65503.9, 65519.996, 65520.0, 65536.0, 3.3895e38, 3.4e38, -3.4e38])
    special = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan")])
    around = torch.cat([tiny_ties, torch.nextafter(tiny_ties, torch.ones(()))])
    parts = [codes, near_ties, around, random.view(torch.float32), edges, special]
    source = torch.cat(parts)
    source = torch.cat([source, source[: source.numel() % 2]])
    out = torch.zeros(source.numel(), dtype=dtype)
    name = "narrow<true>" if dtype == torch.bfloat16 else "narrow<false>"
    lab.run(name, source, out, count=source.numel(), grid=8, block=256)
    expected = source.to(dtype)
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isnan(), source.isnan())
    numbers_only = ~expected.isnan()
    assert torch.equal(
        out.view(torch.int16)[numbers_only], expected.view(torch.int16)[numbers_only]
    )


def test_inverse_root_is_correctly_rounded(lab: Lab) -> None:
    source = torch.rand(4096, generator=torch.Generator().manual_seed(2)) * 100 + 1e-6
    out = unset(4096)
    lab.run("inverse_root", source, out, grid=4, block=1024)
    assert torch.equal(out, source.double().rsqrt().float())


def test_a_fiber_switch_is_cheap(emulator: Emulator) -> None:
    """Far below the price of a system call, which is what the hand-made switch is for."""
    lab = Lab(emulator)
    best = float("inf")
    for _ in range(5):
        begin = time.perf_counter()
        traffic = lab.run("many_barriers", value=500, block=1024)
        best = min(best, (time.perf_counter() - begin) / traffic.switches)
    assert traffic.switches >= 500 * 1023
    assert best < 1e-6, f"{best * 1e9:.0f} ns per switch"


def test_a_kernel_that_does_not_compile_shows_the_compilers_message(emulator: Emulator) -> None:
    program = Program("self_test.cu", ("copy<3>",), root=Path(__file__).parent)
    with pytest.raises(BuildError, match="no such access width"):
        emulator.prepare([program])


def test_builds_are_found_again(emulator: Emulator, tmp_path: Path) -> None:
    fresh = Emulator(tmp_path, emulator.compiler)
    program = Program("self_test.cu", ("copy<16>", "copy<8>"), root=Path(__file__).parent)
    fresh.prepare([program])
    made = {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()}
    Emulator(tmp_path, emulator.compiler).prepare([program])
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.iterdir()} == made


def test_a_missing_compiler_fails_in_ci_and_skips_elsewhere(
    pytestconfig: pytest.Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.setenv("CI", "1")
    with pytest.raises(pytest.fail.Exception, match=r"g\+\+ is installed"):
        emulator_for(pytestconfig)
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=r"g\+\+ is installed"):
        emulator_for(pytestconfig)
