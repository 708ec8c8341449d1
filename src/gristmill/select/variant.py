"""A variant: one way to compute an op, with the reasons why it may not apply."""

from __future__ import annotations

import dataclasses
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, ClassVar

from gristmill.select.choices import why_unlisted

if TYPE_CHECKING:
    from gristmill.jit.compilers import Compilable
    from gristmill.select.problem import Problem


class Variant(ABC):
    """One implementation of an op.

    Subclasses set `name` and `summary` (one line, for `explain` and the docs) and, where a launch
    has something to choose, `config_type`: a frozen dataclass of plain values, so that a table can
    hold it. `is_reference`: it is there to be right, not fast.
    """

    name: str
    summary: str
    config_type: ClassVar[type | None] = None
    is_reference: bool = False

    @abstractmethod
    def supports(self, problem: Problem) -> str | None:
        """None if it can run `problem`, else the reason why not, in a few words."""

    def declines(self, problem: Problem) -> str | None:
        """Why another variant should be preferred for `problem`, if so.

        Ability is `supports`; this is only advice to the order of preference. A table, a name or
        the lack of any other variant overrules it.
        """
        return None

    @abstractmethod
    def bind(self, problem: Problem, config: Any) -> Callable[..., Any]:
        """The plan: a callable that takes the op's positional arguments and returns its outputs.

        Compiles and loads what it needs, so it may raise CompileError, CompilerUnavailable,
        DriverError (the chooser then degrades) or KernelNotCached (always the user's to see).
        """

    def config(self, problem: Problem) -> Any:
        """The configuration for `problem` when no table knows better."""
        return None

    def configs(self, problem: Problem) -> Sequence[Any]:
        """The configurations worth timing for `problem`, that of `config` first."""
        return (self.config(problem),)

    def all_configs(self, problem: Problem) -> Sequence[Any]:
        """Every config that is enumerated for `problem`, where that is more than `configs`.

        Too many to time for a table; the `regret` suite can measure a choice against them.
        """
        return self.configs(problem)

    def rejects(self, problem: Problem, config: Any) -> str | None:
        """Why `config` is not a launch of this variant for `problem`; None if it is one.

        A config that is read from a table runs only if this returns None. It must return None for
        every config that `config` and `configs` return for this problem, and may for other valid
        ones. The types of the fields were checked before, their values were not.
        """
        if self.config_type is None:
            return None
        names = [field.name for field in dataclasses.fields(self.config_type)]
        known = list(map(attrgetter(*names), self.configs(problem)))
        return why_unlisted(config, {" ".join(names): known})

    def indeterminate(self, problem: Problem) -> str | None:
        """Why two runs on the same input may differ in their bits, if so.

        Asked under torch.use_deterministic_algorithms(True).
        """
        return None

    def varies_with_batch(self, problem: Problem) -> str | None:
        """Why the bits of one row may depend on the other rows, or on how many there are.

        Asked under gristmill.batch_invariant(), where `config` is asked with a fixed number of
        rows. A variant that answers None promises it for every launch that `config` gives.
        """
        return "does not promise that rows are independent of the batch"

    def programs(self, problem: Problem, config: Any) -> tuple[Compilable, ...]:
        """What `bind` would compile; empty when nothing is compiled."""
        return ()

    def source_hash(self, problem: Problem, config: Any) -> str:
        """Changes whenever the device code does: a measured row with another hash is stale.

        Of the texts, not of what is instantiated from them: that may differ within a bucket.
        """
        programs = self.programs(problem, config)
        if not programs:
            return ""
        joined = "\n".join(sorted({program.source_digest() for program in programs}))
        return hashlib.sha256(joined.encode()).hexdigest()[:16]

    def __repr__(self) -> str:
        return f"<variant {self.name}>"
