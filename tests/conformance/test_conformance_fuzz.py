"""Calls that nobody thought of: shapes, dtypes, layouts and options at random, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES, ROW_NAMES, allowed, composed, copied, run_by, supporting
from conformance_truth import results_of, truth_of

from gristmill.ops.registry import OPS

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LENGTHS = st.one_of(
    st.integers(1, 300),
    st.sampled_from([512, 520, 768, 1000, 1024, 1536, 2048, 2056, 3072, 4096, 5120, 8192, 12288]),
    st.integers(300, 20000),
)


@st.composite
def shapes(draw: Any) -> tuple[int, ...]:
    columns = draw(LENGTHS)
    most = max(1, min(300, 60000 // columns))
    leading = draw(st.lists(st.integers(1, most), min_size=0, max_size=3))
    while len(leading) > 1 and torch.Size(leading).numel() > most:
        leading.pop()
    return (*leading, columns)


@st.composite
def layouts(draw: Any) -> tuple[str, int]:
    kind = draw(st.sampled_from(["dense", "dense", "padded", "shifted", "permuted", "columns"]))
    return kind, draw(st.integers(1, 16))


def laid_out(values: torch.Tensor, layout: tuple[str, int]) -> torch.Tensor:
    """The same numbers, somewhere else in memory."""
    kind, by = layout
    if kind == "padded":
        wide = values.new_zeros((*values.shape[:-1], values.shape[-1] + by))
        wide[..., : values.shape[-1]] = values
        return wide[..., : values.shape[-1]]
    if kind == "shifted":
        flat = values.new_zeros(values.numel() + by)
        flat[by:] = values.reshape(-1)
        return flat[by:].view(values.shape)
    if kind == "permuted" and values.dim() > 2:
        return values.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == "columns" and values.dim() > 1:
        return values.movedim(-1, 0).contiguous().movedim(0, -1)
    return values


@st.composite
def calls(draw: Any) -> tuple[str, tuple[Any, ...]]:
    """An op and its arguments, on the CPU."""
    name = draw(st.sampled_from(ROW_NAMES))
    shape = draw(shapes())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    scale = draw(st.sampled_from([1.0, 1e-3, 30.0]))

    def tensor(*sizes: int) -> torch.Tensor:
        dtype = draw(st.sampled_from(DTYPES))
        return (torch.randn(sizes, generator=generator) * scale).to(dtype)

    x, other, extra = (laid_out(tensor(*shape), draw(layouts())) for _ in range(3))
    weight = tensor(shape[-1]) if draw(st.booleans()) else None
    eps = draw(st.sampled_from([1e-6, 1e-5, 0.1]))
    offset = draw(st.sampled_from([0.0, 1.0]))
    casting = draw(st.sampled_from(["once", "llama"]))
    out = draw(st.sampled_from([None, *DTYPES]))
    if name == "rms_norm":
        return name, (x, weight, eps, offset, casting, out)
    if name == "add_rms_norm":
        return name, (x, other, weight, eps, offset, casting, out)
    if name == "fused_add_rms_norm_":
        return name, (x, other, weight, eps)
    bias = tensor(shape[-1]) if draw(st.booleans()) else None
    if name == "layer_norm":
        return name, (x, weight, bias, eps, offset, out)
    if name == "add_layer_norm":
        return name, (x, other, weight, bias, eps, offset, out)
    dsum = extra.to(x.dtype) if draw(st.booleans()) else None
    weight_grad = weight is not None and draw(st.booleans())
    if name == "layer_norm_backward":
        bias_dtype = None if bias is None else bias.dtype
        return name, (other, x, weight, dsum, eps, offset, weight_grad, bias_dtype)
    return name, (other, x, weight, dsum, eps, offset, weight_grad)


@pytest.mark.parametrize("device", DEVICES)
@hypothesis.settings(
    max_examples=150 if torch.cuda.is_available() else 60,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(call=calls())
def test_any_call(device: str, call: tuple[str, tuple[Any, ...]]) -> None:
    name, args = call
    op = OPS[name]
    args = tuple(
        there if not isinstance(there, torch.Tensor) else _moved(there, device) for there in args
    )
    truths = truth_of(name, args)
    limits = allowed(op, args, truths)
    for variant in supporting(op, args):
        own = copied(args)
        results = results_of(name, own, run_by(op, variant.name, own))
        promised = results if op.outputs(*args) is None else op.outputs(*args)
        promised = [promised] if isinstance(promised, torch.Tensor) else list(promised)
        for truth, limit, result, want in zip(truths, limits, results, promised, strict=True):
            assert (result.stride(), result.dtype) == (want.stride(), want.dtype), variant.name
            rounding = composed(op, variant.name, args)
            error = truth.roundings(result, composed=rounding)
            assert error <= limit, f"{variant.name}: {error:.2f} roundings > {limit}"


def _moved(tensor: torch.Tensor, device: str) -> torch.Tensor:
    """To the device with its strides and its place in memory, which `.to` would not keep."""
    if device == "cpu":
        return tensor
    there = torch.empty(0, dtype=tensor.dtype, device=device)
    storage = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device=device)
    source = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    storage.copy_(source)
    return there.set_(
        storage.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )
