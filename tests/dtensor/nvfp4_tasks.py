"""What a rank does with column- and row-parallel NVFP4 layers."""

from __future__ import annotations

from typing import Any

import torch
from mesh_pool import device_mesh
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import gristmill
from gristmill.distributed import NVFP4ColwiseParallel, NVFP4RowwiseParallel
from gristmill.errors import GristmillError
from gristmill.formats.nvfp4 import tensor as formats

WIDTH, INNER, ROWS = 64, 128, (4, 8)


class Mlp(nn.Module):
    """Two NVFP4 layers with something between them."""

    def __init__(self, width: int = WIDTH, inner: int = INNER, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = gristmill.nn.NVFP4Linear.from_linear(nn.Linear(width, inner, bias))
        self.down = gristmill.nn.NVFP4Linear.from_linear(nn.Linear(inner, width, bias))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.up(x)))


def batch(width: int = WIDTH) -> torch.Tensor:
    return torch.randn(*ROWS, width, generator=torch.Generator().manual_seed(1))


def biases(model: Mlp) -> list[torch.Tensor]:
    return [layer.bias for layer in (model.up, model.down) if layer.bias is not None]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The output and the gradient of x, as they come; biases keep theirs."""
    leaf = x.detach().clone().requires_grad_()
    y = model(leaf)
    (y.to_local() if isinstance(y, DTensor) else y).square().sum().backward()
    return y.detach(), leaf.grad


STYLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "usual": ({}, {}),
    "sequence parallel": ({"input_layouts": Shard(1)}, {"output_layouts": Shard(1)}),
    "whole between": ({"output_layouts": Replicate()}, {"input_layouts": Replicate()}),
    "dtensors": ({"use_local_output": False}, {"use_local_output": False}),
}


def parallel(model: Mlp, style: str = "usual") -> Mlp:
    up, down = STYLES[style]
    plan = {"up": NVFP4ColwiseParallel(**up), "down": NVFP4RowwiseParallel(**down)}
    return parallelize_module(model, device_mesh(4), plan)


def run_style(style: str, bias: bool, dtype: torch.dtype) -> dict[str, Any]:
    mesh = device_mesh(4)
    model = parallel(Mlp(bias=bias).to(dtype), style)
    x = batch().to(dtype)
    sequence = style == "sequence parallel"
    if sequence:
        x = x.chunk(4, 1)[mesh.get_local_rank()].contiguous()
    y, gradient = step(model, x)
    if sequence:
        y, gradient = (
            DTensor.from_local(one, mesh, [Shard(1)]).full_tensor() for one in (y, gradient)
        )
    return {
        "y": whole(y),
        "is local": not isinstance(y, DTensor),
        "dx": gradient,
        "dbias": [whole(one.grad) for one in biases(model)],
        "bytes": [sum(part.nbytes for part in layer.buffers()) for layer in model.children()],
        "held": [
            sum(part.untyped_storage().nbytes() for part in layer.buffers())
            for layer in model.children()
        ],
    }


def run_styles() -> dict[Any, dict[str, Any]]:
    cases = [(style, True, torch.float32) for style in STYLES]
    cases += [("usual", False, torch.float32), ("usual", True, torch.bfloat16)]
    return {case: run_style(*case) for case in cases}


def uneven() -> dict[str, Any]:
    """Outputs that the ranks cannot have as many of."""
    mesh = device_mesh(4)
    torch.manual_seed(0)
    layer = gristmill.nn.NVFP4Linear.from_linear(nn.Linear(64, 37))
    layer = parallelize_module(layer, mesh, NVFP4ColwiseParallel(output_layouts=Replicate()))
    y, gradient = step(layer, batch())
    return {"y": y, "dx": gradient, "features": [layer.in_features, layer.out_features]}


def states() -> dict[str, Any]:
    """Saving, loading, and a source other than each rank's own weights."""
    rank, x = device_mesh(4).get_local_rank(), batch()
    with torch.no_grad():
        original = Mlp()
        saved = {name: part.clone() for name, part in original.state_dict().items()}
        want = original(x)
        torch.manual_seed(0)
        model = parallel(original)
        own = model.state_dict()
        found: dict[str, Any] = {"shapes": {name: tuple(part.shape) for name, part in own.items()}}
        found["kinds"] = {name: type(part).__name__ for name, part in own.items()}

        def zeroed() -> Mlp:
            bare = parallel(Mlp())
            for part in [*bare.buffers(), *[one.to_local() for one in biases(bare)]]:
                part.zero_()
            return bare

        again = zeroed()
        found["zeroed"] = float(again(x).abs().sum())
        again.load_state_dict(own)
        found["own"] = torch.equal(again(x), model(x))
        again = zeroed()
        again.load_state_dict(saved)
        found["of the whole"] = torch.equal(again(x), model(x))
        empty = Mlp()
        empty.up = gristmill.nn.NVFP4Linear(WIDTH, INNER, device="meta")
        empty.down = gristmill.nn.NVFP4Linear(INNER, WIDTH, device="meta")
        empty = parallel(empty).to_empty(device="cpu")
        empty.load_state_dict(saved)
        found["from meta"] = torch.equal(empty(x), model(x))
        found["near"] = float((model(x) - want).abs().max())
        # Ranks that start from other numbers get those of the first.
        other = Mlp()
        for layer in (other.up, other.down):
            layer.weight.add_(rank)
            layer.bias.add_(rank)
        found["from the first"] = torch.equal(parallel(other)(x), model(x))
        moved = parallel(Mlp()).to(torch.float64)
        found["moved"] = [str(moved.up.weight.dtype), str(moved.up.bias.dtype)]
    return found


def rejected() -> dict[str, tuple[str, bool]]:
    """What is said of bad tensors for a rank's layer, and whether that is as it was."""
    layer = parallel(Mlp()).up
    own = {name: part.clone() for name, part in layer.state_dict().items()}
    saved = {name: part.clone() for name, part in Mlp().up.state_dict().items()}
    given = {name: part + part for name, part in own.items() if name != "weight_scale"}
    given["weight_scale"] = own["weight_scale"]
    mesh = layer.bias.device_mesh
    other = init_device_mesh("cpu", (mesh.size() // 2, 2))
    bad = {
        "rows": ("weight", given["weight"][:-1]),
        "scales": ("weight_scale", given["weight_scale"].view(torch.uint8) * 0 + 255),
        "scales of all ranks": ("weight_scale_2", -saved["weight_scale_2"]),
        "a weight for all": ("weight", distribute_tensor(saved["weight"], mesh, [Shard(0)])),
        "bias": ("bias", saved["bias"][:-1]),
        "dtype": ("bias", saved["bias"].int()),
        "mesh": ("bias", distribute_tensor(saved["bias"], other, [Replicate(), Replicate()])),
    }
    found = {}
    for what, (name, part) in bad.items():
        try:
            layer.load_state_dict({**given, name: part})
            problem = ""
        except RuntimeError as error:
            problem = str(error)
        now = layer.state_dict()
        same = all(
            torch.equal(whole(now[key]).view(torch.uint8), whole(own[key]).view(torch.uint8))
            for key in own
        )
        found[what] = problem, same
    return found


def packed(arch: str) -> dict[str, Any]:
    """Ranks whose CPUs pass for GPUs of some architecture, and lay weights out as those want."""
    own = formats.arch_of
    formats.arch_of = lambda device: arch if device.type == "cpu" else "cpu"
    try:
        model = parallel(Mlp())
        y, gradient = step(model, batch())
        state = model.state_dict()
        again = parallel(Mlp())
        again.load_state_dict(state)
        return {
            "layouts": [layer.layout for layer in model.children()],
            "shapes": [tuple(layer.weight.shape) for layer in model.children()],
            "saved": tuple(state["up.weight"].shape),
            "y": y,
            "dx": gradient,
            "again": torch.equal(again(batch()), y),
        }
    finally:
        formats.arch_of = own


def train() -> dict[str, Any]:
    """Biases under AdamW with clipped gradients, three steps."""
    model = parallel(Mlp())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for _ in range(3):
        loss = model(batch()).square().mean()
        losses.append(loss.item())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "losses": losses,
        "norm": float(whole(norm)),
        "biases": [whole(b).detach() for b in biases(model)],
    }


def under_fsdp() -> dict[str, Any]:
    """Two ranks for each half of the batch, biases sharded over the halves as well."""
    mesh = device_mesh(2, 2, names=("dp", "tp"))
    plan = {"up": NVFP4ColwiseParallel(), "down": NVFP4RowwiseParallel()}
    model = fully_shard(parallelize_module(Mlp(), mesh["tp"], plan), mesh=mesh["dp"])
    own = batch().chunk(2)[mesh["dp"].get_local_rank()]
    (model(own).square().sum() * 2).backward()  # FSDP2 takes the mean over ranks
    return {"dbias": [whole(one.grad) for one in biases(model)]}


def compiled() -> list[Any]:
    model = parallel(Mlp())
    results = []
    for one in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        y, gradient = step(one, batch())
        results.append([y, gradient, *[whole(bias.grad) for bias in biases(model)]])
    return results


def refusals() -> dict[str, str]:
    mesh = device_mesh(4)

    def column(module: nn.Module, on: Any = mesh) -> Any:
        return parallelize_module(module, on, NVFP4ColwiseParallel())

    layer = gristmill.nn.NVFP4Linear(96, 64)
    done = column(gristmill.nn.NVFP4Linear(64, 64))
    calls = {
        "linear": lambda: column(nn.Linear(64, 64)),
        "other": lambda: column(nn.LayerNorm(64)),
        "columns": lambda: parallelize_module(layer, mesh, NVFP4RowwiseParallel()),
        "few": lambda: parallelize_module(
            gristmill.nn.NVFP4Linear(16, 64), mesh, NVFP4RowwiseParallel()
        ),
        "twice": lambda: column(done),
        "subclass": lambda: column(type("Mine", (gristmill.nn.NVFP4Linear,), {})(64, 64)),
        "mesh": lambda: NVFP4ColwiseParallel()._apply(layer, device_mesh(2, 2)),
        "x": lambda: done(torch.randn(2, 48)),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing was raised"
        except GristmillError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def beside_torch() -> dict[str, Any]:
    """NVFP4 and torch's own layers in one model: what goes in and out fits together."""
    mesh = device_mesh(4)
    torch.manual_seed(0)
    first, second = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)
    model = nn.Sequential(first, nn.SiLU(), gristmill.nn.NVFP4Linear.from_linear(second))
    want, _ = step(model, batch())
    plan = {"0": ColwiseParallel(), "2": NVFP4RowwiseParallel()}
    y, _ = step(parallelize_module(model, mesh, plan), batch())
    x = distribute_tensor(batch(), mesh, [Shard(0)])
    z = model(x)
    return {"want": want, "found": y, "of a dtensor": whole(z).detach()}
