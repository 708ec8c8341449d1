"""Which kernel runs a problem: problems, variants, tables, overrides, the chooser, timing."""

from gristmill.select.chooser import Choice, ranked, resolve
from gristmill.select.copies import rotate, rotation_count
from gristmill.select.counters import Counters, counters, reset_counters
from gristmill.select.device import KNOWN, Device, device_of
from gristmill.select.explain import ExplainedVariant, Explanation, explain_problem
from gristmill.select.history import Report, report
from gristmill.select.overrides import active, batch_invariant, register_variants, token, use
from gristmill.select.problem import HINTS, Problem, Sizes, Span
from gristmill.select.table import Row, RunnerUp, Table
from gristmill.select.tables import remember, reset_tables, tables_for
from gristmill.select.timing import (
    Timing,
    time_copy,
    time_host,
    time_interleaved,
)
from gristmill.select.variant import Variant

__all__ = [
    "HINTS",
    "KNOWN",
    "Choice",
    "Counters",
    "Device",
    "ExplainedVariant",
    "Explanation",
    "Problem",
    "Report",
    "Row",
    "RunnerUp",
    "Sizes",
    "Span",
    "Table",
    "Timing",
    "Variant",
    "active",
    "batch_invariant",
    "counters",
    "device_of",
    "explain_problem",
    "ranked",
    "register_variants",
    "remember",
    "report",
    "reset_counters",
    "reset_tables",
    "resolve",
    "rotate",
    "rotation_count",
    "tables_for",
    "time_copy",
    "time_host",
    "time_interleaved",
    "token",
    "use",
]
