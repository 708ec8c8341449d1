"""A call as words: which op, and what its arguments are made of."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from fuzz_layouts import laid_out
from fuzz_values import Drawn, filled
from hypothesis import strategies as st

Arguments = tuple[Any, ...]


@dataclass(frozen=True)
class Plan:
    """A call of `op`: a seed for its numbers, and whatever words its family needs."""

    op: str
    seed: int
    words: dict[str, Any] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["words"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def has_specials(self) -> bool:
        return any(isinstance(one, Drawn) and one.special for one in self.words.values())

    def __repr__(self) -> str:
        """Python that makes it again: to be pasted into test_fuzz_kept.py."""
        words = "".join(f", {name}={value!r}" for name, value in self.words.items())
        return f"plan({self.op!r}, {self.seed}{words})"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For hypothesis, which would take it apart."""
        printer.text(repr(self))


def plan(op: str, seed: int, **words: Any) -> Plan:
    return Plan(op, seed, words)


@dataclass(frozen=True)
class Family:
    """How calls of one op are drawn and made.

    `rows`: positions of the arguments that have a row for each row of the call; `results`: of the
    results that do. What is special in one row must not be seen in another.
    `alike`: NaN and infinities are, because sums of infinities depend on how a formula is written.
    `lost`: how large something may be that was lost below the smallest normal number on the way,
    and then multiplied.
    `reference`: the roundings that the reference may be off by, of ordinary numbers and with
    specials among them; the worst of some ten thousand calls are not far below.
    `least`: so many count as its own error if there are fewer.
    `settled`: mends words that do not go together, which other words may bring about.
    """

    plans: Callable[[str], st.SearchStrategy[Plan]]
    make: Callable[[Maker], Arguments]
    rows: tuple[int, ...] = (0,)
    results: tuple[int, ...] = (0,)
    lost: float = 0.0
    alike: bool = False
    reference: tuple[float, float] = (4.0, 6.0)
    least: float = 1.0
    settled: Callable[[dict[str, Any]], dict[str, Any]] = dict


class Maker:
    """Makes the tensors of a plan. Each has random numbers of its own, whatever the others are.

    `ordinary`: no specials, and otherwise the same call.
    """

    def __init__(self, given: Plan, device: str, *, ordinary: bool = False) -> None:
        self.plan, self.device, self.ordinary = given, device, ordinary

    def generator(self, name: str) -> torch.Generator:
        seed = zlib.crc32(f"{self.plan.op} {name} {self.plan.seed}".encode())
        return torch.Generator().manual_seed(seed)

    def tensor(
        self,
        name: str,
        shape: tuple[int, ...],
        how: Drawn | None = None,
        *,
        huge: float = float("inf"),
        factor: float = 1.0,
        changed: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Any:
        """Of the plan's word `name`, or of `how`; None if that is. `factor`: of ordinary values.

        `changed`: what becomes of the values before they are laid out.
        """
        how = how or getattr(self.plan, name)
        if how is None:
            return None
        how = how._replace(scale=how.scale * factor)
        values = filled(how, shape, self.generator(name), huge, ordinary=self.ordinary)
        values = values.to(self.device)
        return laid_out(values if changed is None else changed(values), how.layout, how.by)

    def integers(self, name: str, low: int, high: int, shape: tuple[int, ...]) -> torch.Tensor:
        """From `low` to `high` - 1, on the CPU."""
        return torch.randint(low, high, shape, generator=self.generator(name))

    def uniform(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """From 0 to 1, on the CPU."""
        return torch.rand(shape, generator=self.generator(name))


def dtype_of(name: str | None) -> torch.dtype | None:
    return None if name is None else getattr(torch, name)


SEEDS = st.integers(0, 1 << 30)
