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
    "x float32 weight bfloat16 bias float32",
    "x bfloat16 weight None bias bfloat16",
    "x float64 weight float16 bias None",
    "x float16 weight None bias None",
    "mean 1e4",
    "out float32",
    "offset",
    "eps none",
    "row slices",
    "transposed rows",
    "columns strided",
    "expanded rows",
    "residual float32 x bfloat16",
    "a scale per row, amax",
    "given scale",
    "dsum",
    "frozen weight",
    "frozen bias",
    "expanded dy",
    "vector by 48x32",
    "2x3 by 33x80",
    "0 by 16x32",
    "x bfloat16 bias float32",
    "x float64 bias bfloat16",
    "tiles",
    "per row",
    "zero row scales",
    "40 rows, 2 of 8 experts, 128 by 64",
    "2 rows, 4 of 16 experts, 96 by 80",
    "0 rows, 2 of 4 experts, 32 by 16",
    "swiglu_oai float16 limit",
    "gelu float64",
    "some missing",
    "0x64 none",
    "float32 mean",
    "bfloat16 sum",
    "float16 none",
    "float64 mean",
    "targets of 32 bits",
    "ignored rows, lse wanted",
    "weights of float32",
    "smoothing and weights",
    "everything",
    "dlse",
    "one of two shards, smoothing",
    "chunks of four, all options",
    "chunks, weight frozen",
    "class weights",
    "5x7, 3 shards",
    "softcap, 1 shards",
    "mapped",
    "float64 521",
    "top_left 2x40x136",
    "bottom_right 2x136x40",
    "nobody",
    "bool mask 2x1x1x64",
    "mask of numbers 20x64",
    "mask float64 x bfloat16",
    "mask expanded, one column",
    "mask and causal",
    "dy float32",
    "4 by 24x0",
    "bfloat16 silu bias",
    "float16 relu",
    "float32 gelu_tanh bias",
    "float64 gelu",
    "weight transposed",
    "bias strided",
    "2x1x7x24 by 3x24x33",
    "7x24 by 5x24x33",
    "heads of a row",
    "b transposed",
    "alpha float32",
    "fragments, gpt-oss",
    "frozen",
    "odd sizes",
    "weights transposed",
    "7 rows, 2 of 8",
    "0 rows, 8 of 64",
    "bfloat16 sigmoid",
    "float64 softmax, as they are",
    "long ids",
    "deepseek v3",
    "groups of seven, sigmoid",
    "dweights bfloat16",
)
ARGUMENTS = [
    pytest.param(op, name, id=f"{op.name}-{name}".replace(" ", "_"))
    for op in OPS.values()
    for name in NAMES
    if name in {case.name for case in op.cases()}
]
# Of each op with a gradient, the arguments that can have one.
TRAINED = {
    "rms_norm": ("x", "weight"),
    "add_rms_norm": ("x", "residual", "weight"),
    "layer_norm": ("x", "weight", "bias"),
    "add_layer_norm": ("x", "residual", "weight", "bias"),
    "cross_entropy": ("logits",),
    "cross_entropy_one_pass": ("logits",),
    "linear_cross_entropy": ("x", "weight", "bias"),
    "linear": ("x", "weight", "bias"),
    "linear_with_pre": ("x", "weight", "bias"),
    "matmul": ("a", "b"),
    "softmax": ("x", "mask"),
    "log_softmax": ("x", "mask"),
    "nvfp4_linear": ("x", "bias"),
    "topk_router": ("logits",),
    "nvfp4_moe": ("hidden_states", "topk_weights"),
    "moe": ("hidden_states", "topk_weights", "w13", "w2", "w13_bias", "w2_bias"),
}


@pytest.fixture(autouse=True)
def fp8_can_be_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch looks for writes to its arguments by allclose, which knows no fp8."""
    allclose = torch.allclose

    def by_bytes(one: torch.Tensor, other: torch.Tensor, **options: Any) -> bool:
        if one.dtype == torch.float8_e4m3fn:
            return torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        return allclose(one, other, **options)

    monkeypatch.setattr(torch, "allclose", by_bytes)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_opcheck(op: Op, name: str, device: str) -> None:
    torch.library.opcheck(op.overload, case_of(op, name).make(device, 0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("op", "name"), [param for param in ARGUMENTS if param.values[0].name in TRAINED]
)
def test_opcheck_with_gradients(op: Op, name: str, device: str) -> None:
    arguments = op.overload._schema.arguments
    args = tuple(
        arg.detach().requires_grad_()
        if argument.name in TRAINED[op.name]
        and isinstance(arg, torch.Tensor)
        and arg.is_floating_point()
        else arg
        for arg, argument in zip(case_of(op, name).make(device, 0), arguments, strict=True)
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
