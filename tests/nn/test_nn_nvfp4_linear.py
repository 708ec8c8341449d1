"""gristmill.nn.NVFP4Linear: made, moved, saved, loaded, compiled and trained beside."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import gristmill
from gristmill import nvfp4
from gristmill.checkpoints import Checkpoint, save_modelopt
from gristmill.errors import ArgumentError, DtypeError
from gristmill.nn import NVFP4Linear

DEVICES = [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def layer(bias: bool = True, **options: Any) -> NVFP4Linear:
    return NVFP4Linear.from_linear(torch.nn.Linear(64, 48, bias=bias), **options)


def parts(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Everything it holds, as bytes."""
    return {
        name: value.detach().contiguous().view(torch.uint8)
        for name, value in module.state_dict().items()
    }


def assert_same(one: torch.nn.Module, other: torch.nn.Module) -> None:
    left, right = parts(one), parts(other)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("method", ["amax", "four_over_six", "scale_sweep"])
@pytest.mark.parametrize("bias", [True, False])
def test_from_linear_is_the_quantised_linear(bias: bool, method: str) -> None:
    dense = torch.nn.Linear(64, 48, bias=bias)
    made = NVFP4Linear.from_linear(dense, method=method)
    weight = nvfp4.dequantize(nvfp4.quantize(dense.weight.detach(), method=method))
    assert torch.equal(nvfp4.dequantize(made.weight4), weight)
    x = torch.randn(2, 3, 64)
    torch.testing.assert_close(made(x), torch.nn.functional.linear(x, weight, dense.bias))
    assert (made.bias is not None) == bias
    if bias:
        # Its own: training one does not change the other.
        assert made.bias.data_ptr() != dense.bias.data_ptr()
        assert made.bias.requires_grad


def test_what_stays_of_a_linear() -> None:
    dense = torch.nn.Linear(32, 16, dtype=torch.bfloat16).eval()
    dense.bias.requires_grad_(False)
    made = NVFP4Linear.from_linear(dense)
    assert not made.training
    assert made.bias.dtype == torch.bfloat16
    assert not made.bias.requires_grad
    assert not any(value.requires_grad for value in made.parameters())


def test_names_and_words() -> None:
    made = layer()
    shapes = {name: (tuple(value.shape), value.dtype) for name, value in made.state_dict().items()}
    assert shapes == {
        "weight": ((48, 32), torch.uint8),
        "weight_scale": ((48, 4), torch.float8_e4m3fn),
        "weight_scale_2": ((48,), torch.float32),
        "bias": ((48,), torch.float32),
    }
    assert repr(made) == "NVFP4Linear(in_features=64, out_features=48, bias=True)"
    assert made.weight4.codes.data_ptr() == made.weight.data_ptr()


def test_a_new_layer_is_zero() -> None:
    made = NVFP4Linear(64, 48, dtype=torch.bfloat16)
    assert made.bias.dtype == torch.bfloat16
    assert not made(torch.randn(3, 64)).any()
    assert NVFP4Linear(64, 48, bias=False).bias is None


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.to(torch.bfloat16),
        lambda module: module.half(),
        lambda module: module.double(),
        lambda module: module.bfloat16().float(),
        lambda module: module.to("cpu", torch.float16),
        lambda module: torch.nn.Sequential(module).to(torch.bfloat16)[0],
    ],
    ids=["to bf16", "half", "double", "there and back", "device and dtype", "as a child"],
)
def test_a_change_of_dtype_is_one_of_the_bias(change: Any) -> None:
    made = layer()
    before = parts(made)
    changed = change(made)
    dtypes = (torch.uint8, torch.float8_e4m3fn, torch.float32)
    held = (changed.weight, changed.weight_scale, changed.weight_scale_2)
    assert tuple(part.dtype for part in held) == dtypes
    after = parts(changed)
    assert all(torch.equal(after[name], before[name]) for name in before if name != "bias")
    x = torch.randn(2, 64, dtype=changed.bias.dtype)
    assert changed(x).dtype == changed.bias.dtype


@pytest.mark.gpu
def test_it_moves_whole() -> None:
    made = layer()
    there = copy.deepcopy(made).to("cuda", torch.bfloat16)
    assert {value.device.type for value in there.state_dict().values()} == {"cuda"}
    assert there.weight_scale_2.dtype == torch.float32
    x = torch.randn(3, 64)
    torch.testing.assert_close(
        there(x.cuda().bfloat16()).float().cpu(), made(x), rtol=2e-2, atol=2e-2
    )
    assert_same(there.float().cpu(), copy.deepcopy(made).bfloat16().float())


def test_meta_and_empty() -> None:
    with torch.device("meta"):
        made = NVFP4Linear(64, 48)
    assert {value.device.type for value in made.state_dict().values()} == {"meta"}
    empty = made.to_empty(device="cpu")
    source = layer()
    empty.load_state_dict(source.state_dict())
    assert_same(empty, source)
    assigned = NVFP4Linear(64, 48, device="meta")
    assigned.load_state_dict(source.state_dict(), assign=True)
    assert assigned.weight.data_ptr() == source.weight.data_ptr()
    assert assigned(torch.randn(1, 64)).isfinite().all()


def test_it_survives_deepcopy_pickle_and_save() -> None:
    made = layer()
    x = torch.randn(2, 64)
    stored = io.BytesIO()
    torch.save(made.state_dict(), stored)
    stored.seek(0)
    loaded = NVFP4Linear(64, 48)
    loaded.load_state_dict(torch.load(stored, weights_only=True))
    for other in (copy.deepcopy(made), pickle.loads(pickle.dumps(made)), loaded):
        assert_same(other, made)
        assert torch.equal(other(x), made(x))


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("shape", [(), (1,)], ids=["scalar", "one"])
def test_a_layer_of_modelopt_loads(shape: tuple[int, ...], assign: bool) -> None:
    """One global scale for all rows, and a scale of activations that is not used."""
    weight = nvfp4.quantize(torch.randn(48, 64))
    stored = {
        "proj.weight": weight.codes,
        "proj.weight_scale": weight.scales,
        "proj.weight_scale_2": weight.global_scale.reshape(shape),
        "proj.input_scale": torch.tensor(0.5),
        "proj.bias": torch.randn(48),
    }
    kept = dict(stored)
    model = torch.nn.ModuleDict({"proj": NVFP4Linear(64, 48)})
    model.load_state_dict(stored, assign=assign)
    x = torch.randn(3, 64)
    expected = nvfp4.linear(x, weight, stored["proj.bias"])
    torch.testing.assert_close(model["proj"](x), expected)
    assert model["proj"].weight_scale_2.shape == (48,)
    assert stored.keys() == kept.keys()
    assert all(stored[name] is kept[name] for name in kept)


def test_what_does_not_fit_is_not_loaded() -> None:
    made = layer()
    state = {**made.state_dict(), "weight_scale_2": torch.ones(47)}
    with pytest.raises(RuntimeError, match="size mismatch for weight_scale_2"):
        made.load_state_dict(state)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*other"):
        made.load_state_dict({**made.state_dict(), "other": torch.ones(1)})
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_scale_2"):
        made.load_state_dict({k: v for k, v in made.state_dict().items() if "scale_2" not in k})


def test_wrong_arguments() -> None:
    with pytest.raises(DtypeError, match="NVFP4Linear: in_features must be an int, got str"):
        NVFP4Linear("64", 8)
    with pytest.raises(ArgumentError, match="NVFP4Linear: out_features must be at least 0, got -8"):
        NVFP4Linear(64, -8)
    with pytest.raises(DtypeError, match=r"NVFP4Linear: dtype must be .*got int32"):
        NVFP4Linear(64, 8, dtype=torch.int32)
    with pytest.raises(ArgumentError, match=r"NVFP4Linear: .*multiple of 16, got 40"):
        NVFP4Linear(40, 16)
    with pytest.raises(DtypeError, match=r"from_linear: linear must be .*got Conv1d"):
        NVFP4Linear.from_linear(torch.nn.Conv1d(16, 16, 1))
    with pytest.raises(ArgumentError, match=r"nvfp4_linear: x must end in K = 64"):
        layer()(torch.randn(3, 48))


# --- checkpoints


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    weights: dict[str, Any] = {}
    for number, (name, rows) in enumerate({"q": 64, "k": 32, "v": 32}.items()):
        # Shards with global scales of their own.
        weights[f"a.{name}_proj"] = nvfp4.quantize(torch.randn(rows, 64) * 4**number)
        weights[f"a.{name}_proj.bias"] = torch.randn(rows, dtype=torch.bfloat16)
    weights["a.o_proj"] = nvfp4.quantize(torch.randn(64, 64))
    weights["norm.weight"] = torch.ones(64)
    save_modelopt(tmp_path, weights)
    return tmp_path


@pytest.mark.parametrize("opened", [True, False], ids=["checkpoint", "path"])
def test_from_checkpoint(checkpoint: Path, opened: bool) -> None:
    source = Checkpoint(checkpoint) if opened else str(checkpoint)
    made = NVFP4Linear.from_checkpoint(source, "a.o_proj")
    assert made.bias is None
    x = torch.randn(3, 64)
    weight = Checkpoint(checkpoint).linear("a.o_proj")
    torch.testing.assert_close(made(x), nvfp4.linear(x, weight))
    biased = NVFP4Linear.from_checkpoint(source, "a.k_proj", dtype=torch.float32)
    assert biased.bias.dtype == torch.float32


def test_fused_rows_are_those_of_each(checkpoint: Path) -> None:
    """Exactly: no scale is shared between shards."""
    names = ["a.q_proj", "a.k_proj", "a.v_proj"]
    fused = NVFP4Linear.from_checkpoint(checkpoint, names)
    each = [NVFP4Linear.from_checkpoint(checkpoint, name) for name in names]
    assert len(set(fused.weight_scale_2.tolist())) == 3
    assert fused.bias.dtype == torch.bfloat16
    x = torch.randn(5, 64)
    torch.testing.assert_close(fused(x), torch.cat([one(x) for one in each], -1))
    state = fused.state_dict()
    assert torch.equal(state["weight_scale_2"], torch.cat([one.weight_scale_2 for one in each]))
    with pytest.raises(ArgumentError, match=r"a\.q_proj has a bias and a\.o_proj has none"):
        NVFP4Linear.from_checkpoint(checkpoint, ["a.q_proj", "a.o_proj"])


# --- compile


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_twelve_equal_layers_are_one_graph(dtype: torch.dtype) -> None:
    """Called one by one, compiled as one function or each by itself."""
    layers = [NVFP4Linear.from_linear(torch.nn.Linear(64, 64)).to(dtype) for _ in range(12)]
    x = torch.randn(5, 64).to(dtype)
    expected = [one(x) for one in layers]
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(lambda one, x: one(x), backend=counter, fullgraph=True)
    for one, want in zip(layers, expected, strict=True):
        assert torch.equal(run(one, x), want)
    assert counter.frame_count == 1
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    for one, want in zip(layers, expected, strict=True):
        one.compile(backend=counter, fullgraph=True)
        assert torch.equal(one(x), want)
    assert counter.frame_count == 1


def test_twelve_layers_in_a_row_are_one_graph_of_twelve_nodes() -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    model = torch.nn.Sequential(
        *(NVFP4Linear.from_linear(torch.nn.Linear(64, 64)) for _ in range(12))
    )
    x = torch.randn(5, 64)
    result = torch.compile(model, backend=backend, fullgraph=True)(x)
    assert torch.equal(result, model(x))
    assert (
        seen == ["gristmill.nvfp4_linear"] * 12 or seen == ["gristmill.nvfp4_linear.default"] * 12
    )


# --- training beside a frozen weight


class Adapted(torch.nn.Module):
    """A frozen layer with a low-rank adapter."""

    def __init__(self, base: NVFP4Linear, rank: int = 4) -> None:
        super().__init__()
        self.base = base
        self.down = torch.nn.Linear(base.in_features, rank, bias=False)
        self.up = torch.nn.Linear(rank, base.out_features, bias=False)
        torch.nn.init.zeros_(self.up.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.base(x) + self.up(self.down(x))
        return result


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("how", ["eager", "compiled", "autocast"])
def test_adapters_train_beside_frozen_weights(how: str, device: str) -> None:
    """Two layers, so that the first one's adapter learns through the second one's weight."""
    dense = [torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)]
    model = torch.nn.Sequential(
        Adapted(NVFP4Linear.from_linear(dense[0])),
        torch.nn.Tanh(),
        Adapted(NVFP4Linear.from_linear(dense[1])),
    ).to(device)
    x, target = torch.randn(2, 128, 64, device=device)
    frozen = parts(model[0].base)
    trained = [value for name, value in model.named_parameters() if "base" not in name]
    optimizer = torch.optim.Adam(trained, lr=1e-2)
    run = torch.compile(model, backend="aot_eager", fullgraph=True) if how == "compiled" else model
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=how == "autocast"):
            loss = torch.nn.functional.mse_loss(run(x).float(), target)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.8 * losses[0]
    assert all(value.grad is not None and value.grad.any() for value in trained)
    after = parts(model[0].base)
    assert all(torch.equal(after[name], frozen[name]) for name in frozen)


def test_the_gradient_of_x_is_that_of_the_dequantised_layer() -> None:
    made = layer()
    dense = nvfp4.dequantize(made.weight4)
    x = torch.randn(4, 64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    made(x).square().sum().backward()
    torch.nn.functional.linear(other, dense, made.bias.detach()).square().sum().backward()
    torch.testing.assert_close(x.grad, other.grad)
    assert made.bias.grad is not None
    assert not any(value.requires_grad for value in made.buffers())


def test_public_names() -> None:
    assert gristmill.nn.NVFP4Linear is NVFP4Linear
    assert set(nvfp4.__all__) >= {"linear", "moe", "quantize", "dequantize", "NVFP4Tensor"}
    assert gristmill.nvfp4 is nvfp4


def test_block_scales_load_as_bytes() -> None:
    """As some files have them; read as numbers they would be others."""
    made, other = layer(), NVFP4Linear(64, 48)
    state = made.state_dict()
    state["weight_scale"] = state["weight_scale"].view(torch.uint8)
    other.load_state_dict(state)
    x = torch.randn(3, 64)
    assert torch.equal(other(x), made(x))


@pytest.mark.parametrize("name", ["weight", "weight_scale", "weight_scale_2"])
def test_numbers_of_another_dtype_are_not_loaded(name: str) -> None:
    made, other = layer(), NVFP4Linear(64, 48)
    state = made.state_dict()
    state[name] = state[name].to(torch.float16)
    with pytest.raises(RuntimeError, match=rf"{name} must have dtype .*, got torch.float16"):
        other.load_state_dict(state)
    assert not other.weight_scale_2.any() or name != "weight_scale_2"


def test_from_checkpoint_needs_a_name(tmp_path: Path) -> None:
    save_modelopt(tmp_path, {"a": nvfp4.quantize(torch.randn(16, 32))})
    with pytest.raises(ArgumentError, match="modules must name at least one layer"):
        NVFP4Linear.from_checkpoint(tmp_path, [])
