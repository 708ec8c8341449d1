"""Modules of NVFP4 experts in the layouts of GPUs, here on a CPU that passes for one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from nn_layouts import addresses, assert_state, copied
from torch.func import functional_call

from gristmill import nvfp4
from gristmill.errors import ArgumentError
from gristmill.nn import NVFP4MoE

Become = Callable[[str], None]

# As the op is told, and what w13 is then.
LAYOUTS = {
    "cpu": ("rows", "rows"),
    "sm_80": ("rows", "rows"),
    "sm_90a": ("fragments", "pairs"),
    "sm_100a": ("tiles", "tiles"),
}
# H and I: whole pieces of 64, and parts of them.
SIZES = [(64, 64), (80, 48)]
EXPERTS = 4


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=LAYOUTS)
def arch(request: pytest.FixtureRequest, become: Become) -> str:
    become(request.param)
    return str(request.param)


def experts(hidden: int = 80, inner: int = 48) -> NVFP4MoE:
    wide = [torch.randn(EXPERTS, inner, hidden) / 8 * factor for factor in (1, 3)]
    return NVFP4MoE.from_experts(*wide, torch.randn(EXPERTS, hidden, inner) / 8)


def routing(hidden: int = 80) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    weights, ids = torch.softmax(torch.randn(5, EXPERTS), -1).topk(2)
    return torch.randn(5, hidden), weights, ids


@pytest.mark.parametrize(("hidden", "inner"), SIZES)
def test_the_buffers_are_what_prepare_gives(
    hidden: int, inner: int, arch: str, become: Become
) -> None:
    made = experts(hidden, inner)
    assert made.layout == LAYOUTS[arch][0]
    held = {"w13": made.w13, "w2": made.w2}
    for name, weight in held.items():
        packed = weight.prepare(arch, pairs=name == "w13")
        assert packed.layout == LAYOUTS[arch][name == "w13"]
        for buffer, part in (("weight", packed.codes), ("weight_scale", packed.scales)):
            found = made.get_buffer(f"{name}_{buffer}")
            assert found.dtype == part.dtype
            assert torch.equal(found.view(torch.uint8), part.view(torch.uint8))
    args = routing(hidden)
    torch.testing.assert_close(made(*args), nvfp4.moe(*args, made.w13, made.w2))
    # Nothing else is kept of them.
    wanted = copied(made.state_dict())
    become("cpu")
    assert made.to("cpu").layout == "rows"
    assert_state(made, wanted)
    assert {name: part.shape for name, part in made.named_buffers()} == {
        name: part.shape for name, part in wanted.items()
    }


@pytest.mark.parametrize(("hidden", "inner"), SIZES)
def test_experts_follow_their_device(hidden: int, inner: int, become: Become) -> None:
    made = experts(hidden, inner)
    wanted, args = copied(made.state_dict()), routing(hidden)
    expected = made(*args)
    values = nvfp4.dequantize(made.w13)
    for arch in ("sm_100a", "sm_90a", "sm_80", "sm_90a", "cpu"):
        become(arch)
        assert made.to("cpu").layout == LAYOUTS[arch][0]
        assert_state(made, wanted)
        assert torch.equal(nvfp4.dequantize(made.w13), values)
        torch.testing.assert_close(made(*args), expected)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(("hidden", "inner"), SIZES)
def test_a_state_dict_loads(hidden: int, inner: int, assign: bool, arch: str) -> None:
    stored = copied(experts(hidden, inner).state_dict())
    kept, args = copied(stored), routing(hidden)
    made = NVFP4MoE(EXPERTS, hidden, inner)
    assert not made(*args).any()
    before = addresses(made)
    made.load_state_dict(stored, assign=assign)
    assert assign or addresses(made) == before
    assert made.layout == LAYOUTS[arch][0]
    assert_state(made, kept)
    w13 = nvfp4.NVFP4Tensor(*(kept[f"w13_weight{end}"] for end in ("", "_scale", "_scale_2")))
    w2 = nvfp4.NVFP4Tensor(*(kept[f"w2_weight{end}"] for end in ("", "_scale", "_scale_2")))
    torch.testing.assert_close(made(*args), nvfp4.moe(*args, w13, w2))


@pytest.mark.parametrize("there", LAYOUTS)
def test_a_pickle_comes_out_as_its_device_wants_it(there: str, arch: str, become: Become) -> None:
    made = experts()
    wanted, args = copied(made.state_dict()), routing()
    expected, stored = made(*args), pickle.dumps(made)
    become(there)
    other = pickle.loads(stored)
    assert other.layout == LAYOUTS[there][0]
    assert_state(other, wanted)
    torch.testing.assert_close(other(*args), expected)


def test_copies_and_exchanged_buffers(arch: str) -> None:
    made, other, args = experts(), experts(), routing()
    twin = copy.deepcopy(made)
    assert twin.layout == made.layout
    assert not set(addresses(twin).values()) & set(addresses(made).values())
    assert torch.equal(twin(*args), made(*args))
    found = functional_call(made, dict(other.named_buffers()), args)
    assert torch.equal(found, other(*args))
    assert made.bfloat16().w13_weight_scale_2.dtype == torch.float32
    assert torch.equal(made(*args), twin(*args))


def test_one_graph_for_a_compiled_module(arch: str) -> None:
    torch._dynamo.reset()
    made, args = experts(), routing()
    expected = made(*args)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*args), expected)
    torch._dynamo.reset()


def test_wrong_sizes_are_named(arch: str) -> None:
    for inner in (40, 20):
        told = rf"NVFP4MoE: .*multiple of 16, got {inner} in \(4, 80, {inner}\)"
        with pytest.raises(ArgumentError, match=told):
            NVFP4MoE(EXPERTS, 80, inner)
    with pytest.raises(ArgumentError, match=r"NVFP4MoE: .*multiple of 16, got 72"):
        NVFP4MoE(EXPERTS, 72, 48)


@pytest.mark.gpu
def test_on_a_gpu_there_is_one_copy_and_it_comes_back() -> None:
    made = NVFP4MoE(8, 2048, 768)
    stored = copied(made.state_dict())
    for part in stored.values():
        if part.dtype == torch.uint8:
            part.random_(generator=torch.Generator().manual_seed(0))
        elif part.dtype == torch.float8_e4m3fn:
            part.copy_(torch.ones(part.shape))  # beside zeros codes would come back as zeros
    made.load_state_dict(stored)
    wanted = copied(made.state_dict())
    nbytes = sum(buffer.nbytes for buffer in made.buffers())
    NVFP4MoE(1, 64, 64, device="cuda").cpu()  # whatever the first of all makes
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made.cuda()
    assert torch.cuda.memory_allocated() - before < nbytes * 1.01 + (1 << 20)
    assert torch.cuda.max_memory_allocated() - before < nbytes + (40 << 20)
    assert made.layout == made.w2.prepare().layout
    assert_state(made.cpu(), wanted)
    assert made.layout == "rows"
