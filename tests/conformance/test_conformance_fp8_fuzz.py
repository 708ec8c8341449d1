"""Norms into FP8 of calls that nobody thought of, against fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES, FP8_NAMES, allowed, run_by, supporting
from conformance_truth import truth_of

from gristmill.ops.registry import OPS

hypothesis = pytest.importorskip("hypothesis")
fuzz = pytest.importorskip("test_conformance_fuzz")
st = hypothesis.strategies


@st.composite
def calls(draw: Any) -> tuple[str, tuple[Any, ...]]:
    """An op and its arguments, on the CPU."""
    name, shape = draw(st.sampled_from(FP8_NAMES)), draw(fuzz.shapes())
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
    size = draw(st.sampled_from([1.0, 1e-3, 30.0]))

    def tensor(*sizes: int) -> torch.Tensor:
        dtype = draw(st.sampled_from(fuzz.DTYPES))
        return (torch.randn(sizes, generator=generator) * size).to(dtype)

    def vector() -> torch.Tensor | None:
        return tensor(shape[-1]) if draw(st.booleans()) else None

    count = 2 if name.startswith("add_") else 1
    tensors: list[Any] = [fuzz.laid_out(tensor(*shape), draw(fuzz.layouts())) for _ in range(count)]
    tensors.append(vector())
    options = [draw(st.sampled_from([1e-6, 1e-5, 0.1])), draw(st.sampled_from([0.0, 1.0]))]
    if "layer" in name:
        tensors.append(vector())
    else:
        options.append(draw(st.sampled_from(["once", "llama"])))
    given = draw(st.sampled_from([None, None, 1.0, 0.01, 1e-4, 100.0]))
    scale = None if given is None else torch.tensor(given)
    return name, (*tensors, scale, *options, draw(st.booleans()))


@pytest.mark.parametrize("device", DEVICES)
@hypothesis.settings(
    max_examples=150 if torch.cuda.is_available() else 40,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(hypothesis.HealthCheck),
)
@hypothesis.given(call=calls())
def test_any_call(device: str, call: tuple[str, tuple[Any, ...]]) -> None:
    name, args = call
    op = OPS[name]
    args = tuple(fuzz._moved(arg, device) if isinstance(arg, torch.Tensor) else arg for arg in args)
    truths = truth_of(name, args)
    limits = allowed(op, args, truths)
    for variant in supporting(op, args):
        results = run_by(op, variant.name, args)
        promised = op.outputs(*args)
        for truth, limit, result, want in zip(truths, limits, results, promised, strict=True):
            assert (result.stride(), result.dtype) == (want.stride(), want.dtype), variant.name
            error = truth.roundings(result)
            bound = 2.5 if variant.name == "reference" else limit
            assert error <= bound, f"{variant.name}: {error:.2f} roundings > {bound}"
