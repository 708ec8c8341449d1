"""Benchmarks: suites of problems, adapters for peers, a runner, and the reports made of its rows.

The verdict is always against peers measured in the same run: absolute times move by a few percent
from one machine, driver or day to the next, ratios within one interleaved run do not.
"""
