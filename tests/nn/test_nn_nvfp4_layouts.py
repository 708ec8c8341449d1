"""Modules with NVFP4 weights in the layouts of GPUs, here on a CPU that passes for one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from nn_layouts import (
    LAYOUTS,
    NAMES,
    PACKED,
    SHAPES,
    addresses,
    assert_same,
    assert_state,
    copied,
    dense,
    fresh_state,
    state,
)
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.func import functional_call, stack_module_state

from gristmill import nvfp4
from gristmill.errors import ArgumentError
from gristmill.nn import NVFP4Linear

Become = Callable[[str], None]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- made and moved


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_buffers_are_what_prepare_gives(shape: tuple[int, int], arch: str) -> None:
    linear = dense(shape)
    weight = nvfp4.quantize(linear.weight.detach())
    made, packed = NVFP4Linear.from_linear(linear), weight.prepare(arch)
    assert made.layout == packed.layout == LAYOUTS[arch]
    wanted = (packed.codes, packed.scales, packed.row_scale)
    for name, part in zip(NAMES, wanted, strict=True):
        held = made.get_buffer(name)
        assert held.dtype == part.dtype
        assert torch.equal(held.view(torch.uint8), part.view(torch.uint8))
    # Nothing else is kept of it.
    assert sum(buffer.nbytes for buffer in made.buffers()) == packed.nbytes
    assert_state(made, state(weight, linear.bias))
    assert torch.equal(nvfp4.dequantize(made.weight4), nvfp4.dequantize(weight))
    x = torch.randn(3, shape[1])
    torch.testing.assert_close(made(x), nvfp4.linear(x, weight, linear.bias))


def test_a_new_layer_is_zero(arch: str) -> None:
    made = NVFP4Linear(48, 40)
    assert made.layout == LAYOUTS[arch]
    assert not made(torch.randn(3, 48)).any()


@pytest.mark.parametrize("there", PACKED)
@pytest.mark.parametrize("here", LAYOUTS)
def test_a_move_lays_the_weight_out_anew(here: str, there: str, become: Become) -> None:
    become(here)
    linear = dense()
    made = NVFP4Linear.from_linear(linear)
    wanted = state(nvfp4.quantize(linear.weight.detach()), linear.bias)
    x = torch.randn(3, 48)
    expected = made(x)
    for arch in (there, here, "cpu"):
        become(arch)
        assert made.to("cpu") is made
        assert made.layout == LAYOUTS[arch]
        assert list(made._buffers) == list(NAMES)
        assert_state(made, wanted)
        torch.testing.assert_close(made(x), expected)
    assert {name: made.get_buffer(name).shape for name in NAMES} == {
        name: wanted[name].shape for name in NAMES
    }


def test_what_stays_on_its_device_stays_where_it_is(arch: str) -> None:
    made = torch.nn.Sequential(NVFP4Linear.from_linear(dense()))
    before = addresses(made)
    assert addresses(made.to("cpu", torch.bfloat16).eval()) == before
    assert made[0].bias.dtype == torch.bfloat16
    assert made[0].weight_scale_2.dtype == torch.float32


def test_between_kinds_of_devices_weights_travel_in_rows(become: Become) -> None:
    """Unpacked before they leave: what has been asked to come to a CPU may not be there yet."""
    made = NVFP4Linear.from_linear(dense())
    rows = [(40,), (40, 24), (40, 3)]
    packed = [(40,), (1, 1, 2048), (1, 1, 256)]
    for arch, wanted in (("sm_90a", rows), ("sm_90a", packed), ("cpu", rows), ("cpu", rows)):
        become(arch)
        seen: list[tuple[int, ...]] = []

        def fn(tensor: torch.Tensor, seen: list[tuple[int, ...]] = seen) -> torch.Tensor:
            seen.append(tuple(tensor.shape))
            return tensor

        made._apply(fn)
        assert seen[1:] == wanted  # after the bias
        assert made.layout == LAYOUTS[arch]


def test_a_move_that_fails_leaves_the_weight(arch: str) -> None:
    linear = dense()
    made = NVFP4Linear.from_linear(linear)

    def fn(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype == torch.uint8:
            raise RuntimeError("out of memory")
        return tensor

    with pytest.raises(RuntimeError, match="out of memory"):
        made._apply(fn)
    assert_state(made, state(nvfp4.quantize(linear.weight.detach()), linear.bias))
    assert made.layout == LAYOUTS[arch]


def test_packing_on_arrival_leaves_what_others_hold(become: Become) -> None:
    """Only what a move has just made is overwritten."""
    stored = fresh_state(128, 128)
    kept = copied(stored)
    made = NVFP4Linear(128, 128, device="meta")
    made.load_state_dict(stored, assign=True)
    assert made.weight.data_ptr() == stored["weight"].data_ptr()
    become("sm_90a")
    assert made.to("cpu").layout == "fragments"
    assert_state(made, kept)
    assert_same(stored, kept)


def test_packing_on_arrival_leaves_what_did_not_move(become: Become) -> None:
    """Of a weight whose parts were on two devices."""
    become("sm_90a")
    stored = fresh_state(128, 128)
    kept = copied(stored)
    made = NVFP4Linear(128, 128)
    parts = {**stored, "weight": stored["weight"].to("meta")}
    made.load_state_dict(parts, assign=True)
    assert made.weight_scale.data_ptr() == stored["weight_scale"].data_ptr()
    made._apply(lambda tensor: kept["weight"].clone() if tensor.is_meta else tensor)
    assert made.layout == "fragments"
    assert_state(made, kept)
    assert_same(stored, kept)


@pytest.mark.parametrize("here", LAYOUTS)
def test_a_type_for_everything_leaves_the_weight(here: str, become: Become) -> None:
    """`Module.type` converts even integers."""
    become(here)
    made = NVFP4Linear.from_linear(dense())
    wanted = copied(made.state_dict())
    made.type(torch.float16)
    assert made.layout == LAYOUTS[here]
    assert_state(made, {**wanted, "bias": wanted["bias"].half()})


@pytest.mark.parametrize("shape", [(128, 0), (0, 64)])
@pytest.mark.parametrize("here", LAYOUTS)
def test_a_weight_of_nothing(here: str, shape: tuple[int, int], become: Become) -> None:
    become(here)
    rows, columns = shape
    made = NVFP4Linear(columns, rows)
    assert made.layout == LAYOUTS[here]
    made.load_state_dict(made.state_dict())
    assert copy.deepcopy(made)(torch.ones(3, columns)).tolist() == torch.zeros(3, rows).tolist()


def test_meta_and_empty(arch: str) -> None:
    made = NVFP4Linear(48, 40, device="meta")
    assert made.layout == "rows"
    assert made.to_empty(device="cpu").layout == LAYOUTS[arch]
    source = fresh_state()
    made.load_state_dict(source)
    assert_state(made, source)
    assert made.to("meta").layout == "rows"


# --- run


def test_k_is_checked_though_the_weight_is_padded(become: Become) -> None:
    become("sm_90a")
    made = NVFP4Linear.from_linear(dense())
    with pytest.raises(ArgumentError, match=r"nvfp4_linear: x must end in K = 48.*\(3, 64\)"):
        made(torch.randn(3, 64))


def test_a_state_dict_runs_through_the_module(arch: str) -> None:
    """As `torch.func` and offloading do it: the buffers are exchanged behind its back."""
    made, stored = NVFP4Linear.from_linear(dense()), fresh_state()
    x = torch.randn(3, 48)
    weight = nvfp4.NVFP4Tensor(*(stored[name] for name in NAMES))
    torch.testing.assert_close(
        functional_call(made, stored, (x,)), nvfp4.linear(x, weight, stored["bias"])
    )


def test_an_ensemble_is_run_by_vmap(arch: str) -> None:
    layers = [NVFP4Linear.from_linear(dense()) for _ in range(3)]
    parameters, buffers = stack_module_state(layers)
    x = torch.randn(3, 5, 48)

    def run(parameters: Any, buffers: Any, x: torch.Tensor) -> Any:
        return functional_call(layers[0], (parameters, buffers), (x,))

    expected = torch.stack([one(each) for one, each in zip(layers, x, strict=True)])
    torch.testing.assert_close(torch.vmap(run)(parameters, buffers, x), expected)


def test_the_gradient_passes_through(arch: str) -> None:
    made = NVFP4Linear.from_linear(dense())
    x = torch.randn(4, 48, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    made(x).square().sum().backward()
    weight = nvfp4.dequantize(made.weight4)
    bias = made.bias
    assert bias is not None
    torch.nn.functional.linear(other, weight, bias.detach()).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    assert bias.grad is not None


def test_twelve_equal_layers_are_one_graph(arch: str) -> None:
    layers = [NVFP4Linear.from_linear(dense()) for _ in range(12)]
    x = torch.randn(5, 48)
    expected = [one(x) for one in layers]
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda one, x: one(x), backend=counter, fullgraph=True)
    for one, want in zip(layers, expected, strict=True):
        assert torch.equal(run(one, x), want)
    assert counter.frame_count == 1


def test_what_may_be_rounded_is_passed_on() -> None:
    linear = dense()
    made = NVFP4Linear.from_linear(linear, act="fp8")
    assert made.act == copy.deepcopy(made).act == "fp8"
    assert repr(made) == "NVFP4Linear(in_features=48, out_features=40, bias=True, act='fp8')"
    seen: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(node.args for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(made, backend=backend, fullgraph=True)(torch.randn(3, 48))
    assert [args[-1] for args in seen] == ["fp8"]
    with pytest.raises(ArgumentError, match=r"NVFP4Linear: act must be .*got 'int8'"):
        NVFP4Linear(48, 40, act="int8")


# --- with ranks


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore:.broadcast_buffers. is deprecated")
def test_packed_layers_are_run_by_ddp_and_fsdp(arch: str) -> None:
    model = torch.nn.Sequential(
        NVFP4Linear.from_linear(dense((64, 48))), NVFP4Linear.from_linear(dense((40, 64)))
    )
    wanted = copied(model.state_dict())
    x = torch.randn(3, 48)
    expected = model(x)
    replica = torch.nn.parallel.DistributedDataParallel(
        copy.deepcopy(model), broadcast_buffers=False
    )
    sharded = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (1,))
    for one in sharded:
        fully_shard(one, mesh=mesh)
    for ranked in (replica, fully_shard(sharded, mesh=mesh)):
        y = ranked(x)
        torch.testing.assert_close(y, expected)
        y.sum().backward()
        assert all(value.grad is not None for value in ranked.parameters())
    assert sharded[0].layout == LAYOUTS[arch]
    options = StateDictOptions(full_state_dict=True)
    stored = get_model_state_dict(sharded, options=options)
    assert stored.keys() == wanted.keys()
    other = torch.nn.Sequential(NVFP4Linear(48, 64), NVFP4Linear(64, 40))
    set_model_state_dict(other, stored, options=options)
    torch.testing.assert_close(other(x), expected)


# --- on a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(128, 192), (40, 48)], ids=str)
def test_on_a_gpu_there_is_one_copy_and_it_comes_back(shape: tuple[int, int]) -> None:
    linear = dense(shape)
    weight = nvfp4.quantize(linear.weight.detach())
    wanted = state(weight, linear.bias)
    made = NVFP4Linear.from_linear(linear)
    x = torch.randn(3, shape[1])
    expected = made(x)
    there = copy.deepcopy(made).cuda()
    assert there.layout == weight.to("cuda").prepare().layout
    assert {value.device.type for value in there.state_dict().values()} == {"cuda"}
    torch.testing.assert_close(there(x.cuda()).cpu(), expected, rtol=1e-3, atol=1e-3)
    assert_state(there.cpu(), wanted)
    assert there.layout == "rows"
    on_gpu = NVFP4Linear.from_linear(linear.cuda())
    assert on_gpu.layout == weight.to("cuda").prepare().layout
    assert_state(on_gpu.cpu(), wanted)


@pytest.mark.gpu
def test_a_large_layer_is_packed_in_its_own_memory() -> None:
    """Moved to a GPU it needs its bytes and a small buffer, no second copy."""
    made = NVFP4Linear(8192, 16384, bias=False)
    nbytes = sum(buffer.nbytes for buffer in made.buffers())
    torch.cuda.synchronize()
    NVFP4Linear(64, 64, device="cuda").cpu()  # whatever the first of all makes
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made.cuda()
    assert torch.cuda.memory_allocated() - before < nbytes * 1.01 + (1 << 20)
    assert torch.cuda.max_memory_allocated() - before < nbytes + (40 << 20)
