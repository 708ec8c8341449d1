"""torch's own test of an op: schema, fake, autograd registration, AOT dispatch with symbolic M."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_helpers import ALL_OPS, DEVICES, case_of

from gristmill.ops.op import Op
from gristmill.ops.registry import OPS

NAMES = (
    "5x7",
    "7",
    "0x64",
    "2x3x4x96",
    "x float32 weight None",
    "x bfloat16 weight float32",
    "x float64 weight float32",
    "x float16 weight float16 llama",
    "out float32",
    "offset",
    "eps none",
    "row slices",
    "transposed rows",
    "columns strided",
    "expanded rows",
    "residual float32 x bfloat16",
    "dsum",
    "frozen weight",
    "expanded dy",
)
ARGUMENTS = [
    pytest.param(op, name, id=f"{op.name}-{name}".replace(" ", "_"))
    for op in OPS.values()
    for name in NAMES
    if name in {case.name for case in op.cases()}
]
FUNCTIONAL = ("rms_norm", "add_rms_norm")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_opcheck(op: Op, name: str, device: str) -> None:
    torch.library.opcheck(op.overload, case_of(op, name).make(device, 0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("op", "name"), [param for param in ARGUMENTS if param.values[0].name in FUNCTIONAL]
)
def test_opcheck_with_gradients(op: Op, name: str, device: str) -> None:
    args = tuple(
        arg.detach().requires_grad_() if isinstance(arg, torch.Tensor) else arg
        for arg in case_of(op, name).make(device, 0)
    )
    torch.library.opcheck(op.overload, args)


@pytest.mark.parametrize("op", ALL_OPS)
def test_the_fake_promises_what_comes(op: Op) -> None:
    """Strides too, for every case: opcheck compares them for the few above."""
    for case in op.cases():
        args = case.make("cpu", 0)
        if args[0].numel() > 300_000:
            continue
        promised = _list(op.overload(*_meta(args)))
        found = _list(op.overload(*args))
        for want, result in zip(promised, found, strict=True):
            assert want.device.type == "meta"
            assert (want.shape, want.stride(), want.dtype) == (
                result.shape,
                result.stride(),
                result.dtype,
            ), case.name


def _meta(args: tuple[Any, ...]) -> list[Any]:
    return [
        torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device="meta")
        if isinstance(arg, torch.Tensor)
        else arg
        for arg in args
    ]


def _list(value: Any) -> list[torch.Tensor]:
    if value is None:
        return []
    return [value] if isinstance(value, torch.Tensor) else list(value)
