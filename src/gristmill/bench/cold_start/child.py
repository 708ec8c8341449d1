"""What the suite `cold_start` runs in a fresh process: a start, timed part by part, as JSON.

First comes what torch takes for itself: its import, a CUDA context, cuBLAS, the kernels of torch's
that the model calls. Only then does the clock of ours run, and only over what gristmill does.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

import gristmill
from gristmill.bench.cold_start.models import FORMS, LLAMA, Shapes, checkpoint
from gristmill.ops.op import Arguments, Op
from gristmill.ops.registry import OPS

if TYPE_CHECKING:
    from gristmill.warmup import Warmed

# And counts beside them.
Seconds = dict[str, float]


def main(words: Sequence[str], imports: Mapping[str, float]) -> None:
    """`words`: "import"; "model", its form and the device; "kernels", the form and an architecture;
    or "call", the op, its shape as 256x4096, the dtype and the device.
    """
    what, *rest = words
    answer: dict[str, Any] = {**imports, **_MEASURES[what](*rest)}
    sys.stdout.write(json.dumps(answer) + "\n")


def _import() -> Seconds:
    return {"compiles": 0}


def _model(form: str, place: str) -> Seconds:
    """A whole model: weights put in order, all kernels made ready, then two steps."""
    device = torch.device(place)
    seconds = _torch_ready(device)
    model = FORMS[form](LLAMA, device)
    seconds["torch_step_s"] = _timed(model.run_torch, device)
    seconds["prepare_s"] = _timed(model.prepare, device)
    before = _compiles()
    seconds |= _warm(model.needs(LLAMA), device, device=device)
    seconds["compiles"] += before
    before = _compiles()
    seconds["first_step_s"] = _timed(model.run, device)
    seconds["step_compiles"] = _compiles() - before
    seconds["second_step_s"] = _timed(model.run, device)
    return seconds


def _kernels(form: str, arch: str) -> Seconds:
    """The kernels of a model, for a GPU that is not here: compiled or read, and no more."""
    return _warm(FORMS[form].needs(LLAMA), torch.device("cpu"), arch=arch)


def _warm(needs: Shapes, here: torch.device, **target: Any) -> Seconds:
    done: list[Warmed] = []
    seconds = _timed(lambda: done.extend(gristmill.warmup(needs, **target)), here)
    how = [one.how for one in done]
    counts = {"compiles": how.count("compiled"), "failures": how.count("failed")}
    return {"warmup_s": seconds, "programs": len(done), **counts}


def _call(name: str, shape: str, dtype: str, place: str) -> Seconds:
    """One call; of an NVFP4 weight with putting it in the order of kernels."""
    device = torch.device(place)
    seconds = _torch_ready(device)
    op, sizes = OPS[name], tuple(map(int, shape.split("x")))
    example = _nvfp4_linear if name == "nvfp4_linear" else _example
    prepared = example(op, sizes, getattr(torch, dtype), device)
    args: Arguments = ()

    def prepare() -> None:
        nonlocal args
        args = prepared()

    seconds["prepare_s"] = _timed(prepare, device)
    seconds["first_call_s"] = _timed(lambda: op.run(*args), device)
    seconds["compiles"] = _compiles()
    seconds["second_call_s"] = _timed(lambda: op.run(*args), device)
    return seconds


_MEASURES: Mapping[str, Callable[..., Seconds]] = {
    "import": _import,
    "model": _model,
    "kernels": _kernels,
    "call": _call,
}


def _torch_ready(device: torch.device) -> Seconds:
    """What torch takes to get hold of a device."""
    context_s = _timed(lambda: torch.ones(1, device=device).sum().item(), device)
    square = torch.ones((256, 256), dtype=torch.bfloat16, device=device)
    return {"context_s": context_s, "cublas_s": _timed(lambda: square @ square, device)}


def _example(
    op: Op, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Arguments]:
    """Arguments that are ready before the clock starts."""
    args = op.example(sizes, dtype, device)
    return lambda: args


def _nvfp4_linear(
    op: Op, sizes: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> Callable[[], Arguments]:
    """A weight that is prepared while the clock runs."""
    rows, *weight = sizes
    x = torch.randn((rows, weight[-1]), dtype=dtype, device=device)
    held = checkpoint((weight[0], weight[-1]), device)

    def prepare() -> Arguments:
        packed = held.prepare(in_place=True)
        parts = (packed.codes, packed.scales, packed.row_scale)
        return op.bind_arguments(x, *parts, layout=packed.layout)

    return prepare


def _compiles() -> int:
    """By this process so far."""
    return int(gristmill.counters()["compiles"])


def _timed(function: Callable[[], Any], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    function()
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
