"""Parameters of which a part runs with every change, and all of them with the long tests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], step: int) -> list[Any]:
    """One in `step` of `values`, the others marked long; a tuple has a value for each argument.

    For tests whose values differ in little: a step that divides none of their counts meets all.
    """
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=[pytest.mark.long] if number % step else [],
        )
        for number, value in enumerate(values)
    ]
