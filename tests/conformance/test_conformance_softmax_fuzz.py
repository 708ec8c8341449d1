"""Calls of the softmax ops that nobody thought of, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES, SOFTMAX_NAMES, allowed, copied, run_by, supporting
from conformance_truth import truth_of
from test_conformance_fuzz import DTYPES, _moved, laid_out, layouts, shapes

from gristmill.ops.registry import OPS

hypothesis = pytest.importorskip("hypothesis")
st = hypothesis.strategies
NONE = float("-inf")


@st.composite
def masks(draw: Any, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor | None:
    """None, or something that broadcasts to `shape`: some dims of one, some not there at all."""
    if draw(st.booleans()):
        return None
    sizes = [size if draw(st.booleans()) else 1 for size in shape]
    sizes = sizes[draw(st.integers(0, len(sizes))) :]
    keep = torch.rand(sizes, generator=generator) < draw(st.sampled_from([0.1, 0.7, 1.0]))
    kind = draw(st.sampled_from([torch.bool, *DTYPES]))
    if kind != torch.bool:
        numbers = torch.randn(sizes, generator=generator).to(kind)
        keep = numbers.masked_fill(~keep, NONE)
    return laid_out(keep, draw(layouts())) if keep.dim() else keep


@st.composite
def calls(draw: Any) -> tuple[str, tuple[Any, ...]]:
    """An op and its arguments, on the CPU."""
    name = draw(st.sampled_from(SOFTMAX_NAMES))
    shape = draw(shapes())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    size = draw(st.sampled_from([1.0, 1e-3, 30.0]))
    scale = draw(st.sampled_from([1.0, 1.0, 0.125, 3.0, -1.0, 0.0]))
    causal = None
    if len(shape) > 1:
        causal = draw(st.sampled_from([None, "top_left", "bottom_right"]))
    values = (size * torch.randn(shape, generator=generator)).to(draw(st.sampled_from(DTYPES)))
    values[torch.rand(shape, generator=generator) < draw(st.sampled_from([0.0, 0.3, 0.99]))] = NONE
    mask = draw(masks(shape, generator))
    if not name.endswith("_backward"):
        if scale <= 0:
            values = values.masked_fill(values == NONE, -1.0)  # else +inf, or NaN
        return name, (laid_out(values, draw(layouts())), scale, mask, causal)
    y = OPS[name.removesuffix("_backward")].reference(values, 1.0, mask, causal)
    dy = torch.randn(shape, generator=generator).to(draw(st.sampled_from(DTYPES)))
    return name, (laid_out(dy, draw(layouts())), laid_out(y, draw(layouts())), scale, causal)


@pytest.mark.parametrize("device", DEVICES)
@hypothesis.settings(
    max_examples=250 if torch.cuda.is_available() else 80,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(call=calls())
def test_any_call(device: str, call: tuple[str, tuple[Any, ...]]) -> None:
    name, args = call
    op = OPS[name]
    args = tuple(_moved(one, device) if isinstance(one, torch.Tensor) else one for one in args)
    truths = truth_of(name, args)
    (limit,) = allowed(op, args, truths)
    promised = op.outputs(*args)
    for variant in supporting(op, args):
        result = run_by(op, variant.name, copied(args))
        assert (result.stride(), result.dtype) == (promised.stride(), promised.dtype), variant.name
        error = truths[0].roundings(result)
        assert error <= limit, f"{variant.name}: {error:.2f} roundings > {limit}"
