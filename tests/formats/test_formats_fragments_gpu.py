"""The kernels that pack and unpack, on a GPU: the bytes of torch, at the speed of memory."""

from __future__ import annotations

import pytest
import torch
from formats_weights import E4M3, SHAPES, packed, same, weight

from gristmill.formats.nvfp4 import NVFP4Tensor, fragments, packing

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _by_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "warn_once", lambda key, message: pytest.fail(message))


@pytest.mark.parametrize("shape", [*SHAPES, (3, 200, 336), (640, 2080)])
def test_a_gpu_gives_the_same_bytes(shape: tuple[int, ...]) -> None:
    q = weight(*shape)
    expected = packed(q)
    p = packed(q.to("cuda"))
    assert same(p.to("cpu"), expected)
    assert same(p.unpack().to("cpu"), expected.unpack())


@pytest.mark.parametrize("shape", [(16, 16), (96, 80), (3, 208, 336), (5, 192, 2080)])
def test_a_gpu_gives_the_same_pairs(shape: tuple[int, ...]) -> None:
    q = weight(*shape)
    expected = packed(q, pairs=True)
    p = packed(q.to("cuda"), pairs=True)
    assert same(p.to("cpu"), expected)
    assert same(p.unpack().to("cpu"), expected.unpack())
    again = q.to("cuda").prepare("sm_90a", in_place=True, pairs=True)
    assert same(again.to("cpu"), expected)


def test_a_gpu_packs_experts_in_place_and_a_matrix_beside() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    codes, scales = (
        torch.randint(limit, shape, dtype=torch.uint8, device="cuda", generator=generator)
        for limit, shape in ((256, (16, 4096, 3584)), (127, (16, 4096, 448)))
    )
    q = NVFP4Tensor(codes, scales.view(E4M3), torch.ones(16, device="cuda"))
    last = NVFP4Tensor(codes[-1].cpu(), scales[-1].cpu().view(E4M3), torch.ones(()))
    weight(64, 64).to("cuda").prepare("sm_90a", in_place=True, pairs=True)  # compiled
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    p = q.prepare("sm_90a", in_place=True, pairs=True)
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before <= last.nbytes + (1 << 20)
    assert p.codes.data_ptr() == codes.data_ptr()
    expected = packed(last, pairs=True)
    assert torch.equal(p.codes[-1].cpu(), expected.codes)
    assert torch.equal(p.scales[-1].cpu(), expected.scales)


def test_a_gpu_reads_any_strides() -> None:
    q = weight(130, 208)
    expected = packed(q)
    for first, stride in ((3, 301), (8, 120), (16, 144)):  # accesses of 1, 8 and 16 bytes
        room = torch.zeros(2, 130, stride, dtype=torch.uint8, device="cuda")
        codes = room[0, :, first : first + 104].copy_(q.codes)
        scales = room[1, :, first : first + 13]
        scales.copy_(q.scales.view(torch.uint8))
        strided = NVFP4Tensor(codes, scales.view(E4M3), q.row_scale.cuda())
        assert same(packed(strided).to("cpu"), expected)


def large_weight() -> NVFP4Tensor:
    generator = torch.Generator("cuda").manual_seed(0)
    codes, scales = (
        torch.randint(limit, shape, dtype=torch.uint8, device="cuda", generator=generator)
        for limit, shape in ((256, (57344, 4096)), (127, (57344, 512)))
    )
    return NVFP4Tensor(codes, scales.view(E4M3), torch.ones((), device="cuda"))


@pytest.mark.alone
def test_a_gpu_packs_in_place_with_little_beside_and_at_once() -> None:
    weight(64, 64).to("cuda").prepare("sm_90a", in_place=True)  # the kernel is compiled
    q = large_weight()
    slabs = (0, 446, 895)
    rows = [q.rows(64 * slab, 64 * slab + 64).to("cpu") for slab in slabs]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    p = q.prepare("sm_90a", in_place=True)
    end.record()
    torch.cuda.synchronize()
    assert start.elapsed_time(end) < 50
    assert torch.cuda.max_memory_allocated() - before <= 20 << 20
    assert p.codes.data_ptr() == q.codes.data_ptr()
    for slab, some in zip(slabs, rows, strict=True):
        expected = fragments.pack(some.codes, some.scales)
        assert torch.equal(p.codes[slab].cpu(), expected[0][0])
        assert torch.equal(p.scales[slab].cpu(), expected[1][0])


def test_a_gpu_packs_within_a_capture() -> None:
    q = weight(128, 192)
    expected = packed(q)
    held = q.to("cuda")
    packed(held)  # the kernel is compiled
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        p = packed(held)
        back = p.unpack()
        again = held.prepare("sm_90a", in_place=True)
    graph.replay()
    torch.cuda.synchronize()
    assert same(p.to("cpu"), expected)
    assert same(back.to("cpu"), expected.unpack())
    assert same(again.to("cpu"), expected)
