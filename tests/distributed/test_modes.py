"""Losses over ranks: a backward pass runs under the modes of its forward pass."""

from __future__ import annotations

from types import SimpleNamespace

import gristmill
from gristmill.distributed.modes import keep_modes, modes_of
from gristmill.select.overrides import is_batch_invariant


def test_the_backward_pass_is_under_the_modes_of_the_forward_pass() -> None:
    with gristmill.batch_invariant():
        inside = SimpleNamespace()
        keep_modes(inside)
    outside = SimpleNamespace()
    keep_modes(outside)
    assert not is_batch_invariant()
    with modes_of(inside):
        assert is_batch_invariant()
    with modes_of(outside):
        assert not is_batch_invariant()
