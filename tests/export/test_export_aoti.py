"""Programs that AOTInductor has compiled, in a new process that has torch and gristmill."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from export_models import SIZES, exported, inputs, layer, run_python
from test_export_ops import Calls, kinds_of

from gristmill.ops.op import Arguments
from gristmill.ops.registry import OPS

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs g++")

# There AOTInductor takes the numbers that torch.export has for dtypes for those of c10, which are
# others: https://github.com/pytorch/pytorch/issues/169157, mended after that version.
MISREADS_DTYPES = torch.__version__.startswith("2.11.")

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

RUN = """
import sys
import torch
import gristmill

package, calls, results = sys.argv[1:]
module = torch._inductor.aoti_load_package(package)
print("loaded", flush=True)
found = {}
for name, args in torch.load(calls).items():
    found[name] = module(*args)
    print("called:", name, flush=True)
torch.save(found, results)
print("saved", flush=True)
"""

WITHOUT = """
import sys
import torch

assert "gristmill" not in sys.modules
torch._inductor.aoti_load_package(sys.argv[1])
"""

# Nothing of gristmill: ops in Python, one of two results, an option left out, a symbolic size.
TORCH_ALONE = """
import sys
import torch

what, device, package = sys.argv[1:]
library = torch.library.Library("alone", "DEF")
library.define("scaled(Tensor x, Tensor? y=None, float s=2.0) -> Tensor")
library.define("pair(Tensor x, SymInt n) -> (Tensor, Tensor)")
for name, body in {
    "scaled": lambda x, y=None, s=2.0: x * s,
    "pair": lambda x, n: (x + n, x.float() - n),
}.items():
    library.impl(name, body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"alone::{name}", body, lib=library)


class Model(torch.nn.Module):
    def forward(self, x):
        one, other = torch.ops.alone.pair(torch.ops.alone.scaled(torch.relu(x)), x.shape[0])
        return torch.sin(one + other)


if what == "make":
    args = (torch.randn(12, 64, device=device),)
    sizes = ({0: torch.export.Dim("rows", min=2, max=512)},)
    program = torch.export.export(Model(), args, dynamic_shapes=sizes)
    torch._inductor.aoti_compile_and_package(program, package_path=package)
else:
    module = torch._inductor.aoti_load_package(package)
    x = torch.randn(5, 64, device=device)
    torch.testing.assert_close(module(x), Model()(x))
assert "gristmill" not in sys.modules
"""


def packaged(program: torch.export.ExportedProgram, folder: Path) -> str:
    path = torch._inductor.aoti_compile_and_package(
        program, package_path=str(folder / "package.pt2")
    )
    assert isinstance(path, str)
    return path


def elsewhere(package: str, calls: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the package gives in a new process, for each call."""
    torch.save(calls, folder / "calls.pt")
    done = run_python(RUN, package, folder / "calls.pt", folder / "results.pt")
    # A crash may come while it loads, in a call, or only when the process ends: all three differ.
    if done.returncode < 0 and dies_alone(calls, folder):
        pytest.xfail(f"torch {torch.__version__} crashes here without gristmill, too")
    told = f"got as far as {done.stdout.split(chr(10))}, then {done.returncode}:\n{done.stderr}"
    assert done.returncode == 0, told
    found: dict[str, Any] = torch.load(folder / "results.pt")
    return found


def dies_alone(calls: dict[str, Any], folder: Path) -> bool:
    """Whether a signal ends a process that runs a package without gristmill on this device."""
    device, package = str(next(iter(calls.values()))[0].device.type), folder / "alone.pt2"
    made = run_python(TORCH_ALONE, "make", device, package)
    assert made.returncode == 0, made.stderr
    return run_python(TORCH_ALONE, "run", device, package).returncode < 0


@pytest.mark.long
def test_torch_alone_is_not_to_blame_where_it_works(tmp_path: Path) -> None:
    assert not dies_alone({"any": (torch.zeros(1),)}, tmp_path)


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_is_compiled_ahead_of_time(device: str, tmp_path: Path) -> None:
    """With sizes that stay open, NVFP4 weights among its constants, ops of several results."""
    model = layer(device)
    with torch.no_grad():
        package = packaged(exported(model, device), tmp_path)
        calls = {name: inputs(device, *sizes) for name, sizes in SIZES.items()}
        found = elsewhere(package, calls, tmp_path)
        for name, args in calls.items():
            for one, other in zip(found[name], model(*args), strict=True):
                torch.testing.assert_close(one, other)
    if device == "cpu":
        done = run_python(WITHOUT, package)
        assert done.returncode == 1
        assert "RuntimeError: Could not find schema for gristmill::" in done.stderr


class Everything(torch.nn.Module):
    """Calls of all ops, each with tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        kinds = ((op, [args for args in kinds_of(op, 3) if _is_read(args)]) for op in OPS.values())
        self.all = torch.nn.ModuleList(Calls(op, calls) for op, calls in kinds if calls)

    def inputs(self, device: str) -> tuple[torch.Tensor, ...]:
        return tuple(it.to(device) for calls in self.all for it in calls.inputs())

    def forward(self, *tensors: torch.Tensor) -> list[Any]:
        left, results = list(tensors), []
        for calls in self.all:
            count = calls.count
            # What is written to is a copy: inputs of the program stay as they are.
            results.append(calls(*[it.clone() for it in left[:count]]))
            left = left[count:]
        return results


def _is_read(args: Arguments) -> bool:
    return not MISREADS_DTYPES or not any(isinstance(it, torch.dtype) for it in args)


@pytest.mark.long
@pytest.mark.skipif(not MISREADS_DTYPES, reason="torch reads dtypes rightly")
def test_what_torch_2_11_makes_of_a_dtype(tmp_path: Path) -> None:
    """Should it be mended there, too, the calls that are left out below belong back in."""
    op = OPS["topk_router"]
    model = Calls(op, [op.example((16, 64), torch.bfloat16, "cpu")])
    args = model.inputs()
    assert model(*args)[0][1].dtype == torch.int32
    with torch.no_grad():
        package = packaged(torch.export.export(model, args), tmp_path)
    assert elsewhere(package, {"ids": args}, tmp_path)["ids"][0][1].dtype == torch.int64


@pytest.mark.long
@pytest.mark.parametrize("device", DEVICES)
def test_every_op_is_compiled_ahead_of_time(device: str, tmp_path: Path) -> None:
    """Words, dtypes, None, and defaults that are left out, through torch's executor of ops."""
    model = Everything()
    args = model.inputs(device)
    with torch.no_grad():
        package = packaged(torch.export.export(model, args), tmp_path)
        found = elsewhere(package, {"all": args}, tmp_path)["all"]
        results = (torch.utils._pytree.tree_leaves(it) for it in (found, model(*args)))
    for one, other in zip(*results, strict=True):
        if isinstance(other, torch.Tensor):
            torch.testing.assert_close(one, other, equal_nan=True)
