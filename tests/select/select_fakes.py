"""Variants and problems that compile nothing, for testing how one is chosen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from gristmill.select import KNOWN, Device, Problem, Variant

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

    def digest(self) -> str:
        return self._digest


class Fake(Variant):
    """Refuses with `refusal` (or what it returns for a problem), declines with `declined`, fails to
    build with `failure`.
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
    ) -> None:
        self.name = name
        self.refusal = refusal
        self.failure = failure
        self.source = source
        self.config_type = Config if configured else None
        self.declined = declined
        self.bound: list[tuple[Problem, Any]] = []

    def supports(self, problem: Problem) -> str | None:
        return self.refusal(problem) if callable(self.refusal) else self.refusal

    def declines(self, problem: Problem) -> str | None:
        return self.declined

    def config(self, problem: Problem) -> Any:
        return None if self.config_type is None else Config(threads=128)

    def programs(self, problem: Problem, config: Any) -> tuple[Any, ...]:
        return (FakeProgram(self.source),) if self.source else ()

    def bind(self, problem: Problem, config: Any) -> Callable[..., Any]:
        if self.failure is not None:
            raise self.failure
        self.bound.append((problem, config))
        return lambda *args: (self.name, *args)


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
