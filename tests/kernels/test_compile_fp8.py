"""The norm kernels with FP8 results, compiled for every architecture, within their limits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_compile_archs import (
    COLUMNS,
    FITTED,
    LONG_COLUMNS,
    LONGEST,
    MIXES,
    MORE_MIXES,
    TARGETS,
    Mix,
    _check_compiled,
    _launches,
    _rows,
    compiler,  # noqa: F401 - a fixture
)

from gristmill.select.device import KNOWN

SOURCE = "norm.cu"


def _calls(
    mix: Mix, rows: int, columns: int, out_dtype: torch.dtype | None, both: bool = False
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Both norms, by a scale per row and by a given one and amax; `both`: amax with either."""
    del out_dtype
    x_dtype, other_dtype, weight_dtype, layout = mix
    x, other = (_rows((rows, columns), dtype, layout) for dtype in (x_dtype, other_dtype))
    weight = None
    if weight_dtype is not None:
        weight = torch.empty(columns, dtype=weight_dtype, device="meta")
    given = torch.empty(1, device="meta")
    options = [(None, False), (given, True)]
    for scale, amax in [*options, (None, True), (given, False)] if both else options:
        yield "rms_norm_fp8", (x, weight, scale, 1e-6, 0.0, "once", amax)
        yield "add_rms_norm_fp8", (x, other, weight, scale, 1e-6, 0.0, "once", amax)
        yield "layer_norm_fp8", (x, weight, weight, scale, 1e-5, 0.0, amax)
        yield "add_layer_norm_fp8", (x, other, weight, weight, scale, 1e-5, 0.0, amax)


def _all_calls(
    mix: Mix, rows: int, columns: int, out_dtype: torch.dtype | None
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    return _calls(mix, rows, columns, out_dtype, both=True)


@pytest.mark.parametrize(("arch", "mixes"), FITTED)
def test_every_launch_fits_the_device(arch: str, mixes: dict[str, Mix]) -> None:
    columns = tuple({*COLUMNS, *LONG_COLUMNS, *(2**k + 8 for k in range(4, 18)), *LONGEST})
    misfits = sorted(
        {
            f"{launch}: {reason}"
            for mix in mixes.values()
            for launch in _launches(arch, mix, columns, calls=_calls)
            if (reason := launch.misfit()) is not None
        }
    )
    assert not misfits, "\n".join([f"{len(misfits)} launches do not fit {arch}:", *misfits[:20]])


def test_vectors_are_as_long_as_those_of_x() -> None:
    """A result of one byte an element does not make the loads of x two registers wider."""
    lengths = [("bf16", 4096, 8), ("bf16", 100, 4), ("bf16", 127, 1)]
    for mix, columns, vector in [*lengths, ("fp32", 4096, 4), ("fp32", 102, 2)]:
        for launch in _launches("sm_90a", MIXES[mix], (columns,), calls=_calls):
            details = launch.problem.layout
            assert details.layout.vector == vector
            assert details.layout.views[2].access == vector
            assert f"Tensor<f8,{vector}>" in launch.program().names[0]
            assert ("narrow" in launch.problem.flags) == (columns != 4096)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernels_compile_within_limits(arch: str) -> None:
    _check_compiled(arch, SOURCE, MIXES["bf16"], TARGETS[arch], _calls)


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("mix", MIXES | MORE_MIXES)
@pytest.mark.parametrize("arch", KNOWN)
def test_more_kernels_compile_within_limits(arch: str, mix: str) -> None:
    columns = (*COLUMNS, *LONG_COLUMNS)
    _check_compiled(arch, SOURCE, (MIXES | MORE_MIXES)[mix], columns, _all_calls)
