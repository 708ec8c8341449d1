"""Variants and problems that compile nothing, for testing how one is chosen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from gristmill.select import KNOWN, Device, Problem, Row, RunnerUp, Table, Variant
from gristmill.select.choices import why_unlisted
from gristmill.select.configs import config_to_json
from gristmill.select.problem import Span

H200 = KNOWN["sm_90a"]


@dataclass(frozen=True)
class Config:
    threads: int
    vector: int = 16
    order: tuple[int, ...] = ()
    scope: Literal["warp", "block"] = "warp"
    cap: float | None = None


class FakeProgram:
    def __init__(self, digest: str) -> None:
        self._digest = digest

    def source_digest(self) -> str:
        return self._digest


class Fake(Variant):
    """Refuses with `refusal` (or what it returns for a problem), declines with `declined`, fails to
    build with `failure`; `random` and `varies` are why it is not deterministic or batch-invariant,
    `more` are configs worth timing beside the usual one. A plan gives its name, or what `work`
    returns for the arguments.
    """

    summary = "a fake"

    def __init__(
        self,
        name: str,
        *,
        refusal: str | Callable[[Problem], str | None] | None = None,
        failure: Exception | None = None,
        source: str = "",
        configured: bool = False,
        declined: str | None = None,
        random: str | None = None,
        varies: str | None = None,
        more: Sequence[Config] = (),
        work: Callable[..., Any] | None = None,
    ) -> None:
        self.name = name
        self.is_reference = name == "reference"
        self.refusal = refusal
        self.failure = failure
        self.source = source
        self.config_type = Config if configured else None
        self.declined = declined
        self.random = random
        self.varies = varies
        self.more = tuple(more)
        self.work = work
        self.bound: list[tuple[Problem, Any]] = []

    def supports(self, problem: Problem) -> str | None:
        return self.refusal(problem) if callable(self.refusal) else self.refusal

    def declines(self, problem: Problem) -> str | None:
        return self.declined

    def config(self, problem: Problem) -> Any:
        return None if self.config_type is None else Config(threads=128)

    def configs(self, problem: Problem) -> Sequence[Any]:
        return (self.config(problem), *self.more)

    def rejects(self, problem: Problem, config: Any) -> str | None:
        return None if config is None else why_unlisted(config, {"threads": range(32, 1025, 32)})

    def indeterminate(self, problem: Problem) -> str | None:
        return self.random

    def varies_with_batch(self, problem: Problem) -> str | None:
        return self.varies

    def programs(self, problem: Problem, config: Any) -> tuple[Any, ...]:
        return (FakeProgram(self.source),) if self.source else ()

    def bind(self, problem: Problem, config: Any) -> Callable[..., Any]:
        if self.failure is not None:
            raise self.failure
        self.bound.append((problem, config))
        return self.work or (lambda *args: (self.name, *args))


def problem(rows: int = 1000, device: Device = H200, **changes: Any) -> Problem:
    base = Problem(
        op="toy",
        rows=rows,
        dims=(("N", 4096),),
        dtypes=(("x", "bfloat16"), ("weight", "float32")),
        flags=("strided", "llama"),
        device=device,
    )
    return replace(base, **changes)


def row_of(
    solved: Problem,
    variant: Variant,
    config: Any = None,
    *,
    stop: int | None = None,
    covers: tuple[int, int | None] | None = None,
    **changes: Any,
) -> Row:
    """The row of a win by `variant`, then with `changes`.

    Its key names `stop` (that of the problem's rows), and it covers the row counts of that stop.
    """
    named = solved.sizes.stop(solved.rows) if stop is None else stop
    row = Row(
        key=solved.key(named),
        covers=solved.sizes.span(named) if covers is None else Span(*covers),
        variant=variant.name,
        config=config_to_json(config),
        us=10.5,
        spread_us=0.2,
        second=RunnerUp("second", 12.0),
        date="2026-11-15",
        source_hash=variant.source_hash(solved, config),
        rows=solved.rows,
        times={variant.name: 10.5, "second": 12.0},
        candidates=2,
        torch="2.11.0",
    )
    return replace(row, **changes)


def table_of(*rows: Row, device: Device = H200) -> Table:
    made = Table.for_device(device)
    for row in rows:
        made.put(row)
    return made
