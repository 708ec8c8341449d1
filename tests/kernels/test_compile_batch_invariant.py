"""The kernels of rows that must not depend on the batch, compiled, within their limits.

Odd lengths have kernels of their own then: their rows go by narrow vectors, not by ragged ones.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sampled import sampled
from test_compile_archs import (
    COLUMNS,
    LONG_COLUMNS,
    MIXES,
    SOURCES,
    _check_compiled,
    _launches,
    compiler,  # noqa: F401 - a fixture
)

import gristmill
from gristmill.select.device import KNOWN

ODD_COLUMNS = (1, 100, 127, 1001, 10001, 50257, 262143)
FEW_ODD_COLUMNS = (127, 10001, 262143)


@pytest.fixture(autouse=True)
def _invariant() -> Iterator[None]:
    with gristmill.batch_invariant():
        yield


@pytest.mark.parametrize("arch", sampled(["sm_90a", *(one for one in KNOWN if one != "sm_90a")], 3))
def test_every_launch_fits_the_device(arch: str) -> None:
    misfits = [
        f"{launch}: {reason}"
        for mix in MIXES.values()
        for launch in _launches(arch, mix, (*COLUMNS, *LONG_COLUMNS, *ODD_COLUMNS))
        if (reason := launch.misfit()) is not None
    ]
    assert not misfits


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("arch", "columns"),
    [
        pytest.param("sm_90a", FEW_ODD_COLUMNS, id="sm_90a few"),
        pytest.param("sm_90a", ODD_COLUMNS, id="sm_90a", marks=pytest.mark.long),
        pytest.param("sm_80", ODD_COLUMNS, id="sm_80", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("source", sampled(SOURCES, 3))
def test_kernels_of_odd_lengths_compile_within_limits(
    arch: str, columns: tuple[int, ...], source: str
) -> None:
    _check_compiled(arch, source, MIXES["bf16"], columns)
