"""Measures tasks: every implementation checked, then all timed in turns, beside the roof.

Per task: arguments enough to keep the L2 cold, the first call of each implementation (timed: that
is where compilers hide), its outputs against the reference (of some tasks in fp64, and how far they
are off is told), interleaved timing of those that were right, the roof, and for small problems the
host's time per call. Who fails is out alone, if the device survives. The experts of a model are
made once for all its tasks. The roof is the time of a copy of as many bytes; of a product of
matrices also that of its operations, at the rate of the fastest large product of torch's in the
same run, whichever is longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from gristmill.bench import explained, runs
from gristmill.bench.experts.inputs import Experts, make_calls, make_experts
from gristmill.bench.experts.models import Model
from gristmill.bench.inputs import Arguments, argument_sets, arguments, dtype_of, saved
from gristmill.bench.peers import GRISTMILL, Builder, Function, Part, Peer
from gristmill.bench.results import Results, Row, described, first_line, label
from gristmill.bench.suites import Task
from gristmill.bench.truth import Truth, by_reference
from gristmill.errors import GristmillError
from gristmill.ops.op import Cost
from gristmill.ops.registry import OPS
from gristmill.select.chooser import resolve
from gristmill.select.configs import config_to_json
from gristmill.select.timing import Timing, time_copy, time_host, time_interleaved

SAMPLES = 11
QUICK_SAMPLES = 5
# Sizes of the products whose rate is a roof: the faster of these counts.
ROOF_PRODUCTS = {"cuda": (4096, 8192), "cpu": (512,)}
# Up to here a launch can take longer than its kernel, so that the host's time matters.
HOST_BYTES = 80_000_000
# Of a problem that does not fit the device, where nobody is wrong; and of one who lacks memory for
# a problem that fits.
NO_MEMORY = "not enough memory for this problem"
OUT_OF_MEMORY = "out of memory"

METHODS = {
    "cuda": "CUDA-graph replay over rotated sets of arguments (cold L2), implementations "
    "interleaved, median and interquartile range; the roof is a copy of the same bytes in the "
    "same run (for products of matrices also the operations at the rate of torch's fastest large "
    "product in the run, if that takes longer); bytes are what must move, the same for every "
    "implementation",
    "cpu": "wall clock, implementations interleaved, median and interquartile range; "
    "only ratios mean anything",
}


class Problem(NamedTuple):
    """A task on a device: the op's arguments, and as often as they take turns; what is right."""

    args: Arguments
    sets: list[Arguments]
    cost: Cost
    truth: Truth


class DeviceLostError(GristmillError):
    """A kernel has left the device in a state in which nothing can be run by this process."""

    def __init__(self, impl: str, error: BaseException) -> None:
        super().__init__(f"{impl} broke the device: {first_line(error)}")
        self.impl = impl


class Runner:
    """Runs tasks on one device and collects their rows.

    `ahead`: code was compiled before, so that a first call says nothing about that.
    """

    def __init__(
        self,
        device: torch.device,
        peers: Sequence[Peer],
        results: Results,
        *,
        samples: int,
        ahead: bool = False,
    ) -> None:
        self.device = device
        self.implementations = (GRISTMILL, *peers)
        self.results = results
        self.samples = samples
        self.ahead = ahead
        self._roofs: dict[str, float] = {}  # µs of a byte
        self._rates: dict[str, float] = {}
        self._experts: Experts | None = None
        results.meta["method"] = f"{METHODS.get(device.type, METHODS['cpu'])}; {samples} samples"

    def todo(
        self, tasks: Sequence[Task], tell: Callable[[str], None] = lambda text: None
    ) -> list[Task]:
        """Those that the results lack, or lack an implementation of; `tell` is told of others."""
        keys = {task: (task.name, task.dtype, label(task.sizes)) for task in tasks}
        asked = {
            key: {impl: peer.name for peer, impl, _ in self._implementations(task)}
            for task, key in keys.items()
        }
        left = runs.left(self.results, asked, tell)
        return [task for task in tasks if keys[task] in left]

    def run(self, tasks: Sequence[Task], advance: Callable[[str], None]) -> None:
        """Measure every task; `advance` is told about each before it starts."""
        for task in tasks:
            advance(str(task))
            try:
                rows = self._measure(task)
            except DeviceLostError as error:
                # The problem has rows now: who goes on with --resume does not meet it again.
                self.results.add(self._failed(task, str(error)))
                raise GristmillError(
                    f"{task}: {error}; nothing more can run in this process: go on with --resume"
                ) from error
            except RuntimeError as error:
                if not _is_lack(error):
                    raise
                rows = self._failed(task, f"{NO_MEMORY}: {first_line(error)}")
            self.results.add(rows)
            self._release()
        self._experts = None

    def _failed(self, task: Task, reason: str) -> list[Row]:
        return [
            self._row(task, peer, impl, reason) for peer, impl, _ in self._implementations(task)
        ]

    def _problem(self, task: Task) -> Problem:
        model = task.model
        if model is not None:
            experts = self._experts_of(model, dtype_of(task.dtype))
            calls = make_calls(experts, task.op, task.rows, str(task.routing))
            return Problem(calls.sets[0], calls.sets, calls.cost, calls.truth)
        op = OPS[task.op]
        args = arguments(task, self.device)
        sets = argument_sets((*args, *saved(task, args)), self.device)
        return Problem(args, sets, op.cost(*args), by_reference(task, args))

    def _experts_of(self, model: Model, dtype: torch.dtype) -> Experts:
        """The weights of a model; those of the one before are gone by then."""
        there = self._experts
        if there is None or (there.model, there.dtype) != (model, dtype):
            self._experts = there = None
            self._experts = there = make_experts(model, dtype, self.device)
        return there

    def _measure(self, task: Task) -> list[Row]:
        args, sets, cost, truth = self._problem(task)
        rows: dict[str, Row] = {}
        runnable: dict[str, Function] = {}
        function: Function | None
        for peer, impl, builder in self._implementations(task):
            row = rows[impl] = self._row(task, peer, impl, None)
            try:
                function = builder(sets)
                seconds, outputs = self._first_call(function, sets[0])
                row["first_call_s"] = None if self.ahead and peer.is_ahead(task.name) else seconds
                if isinstance(function, Part):
                    outputs = function.finish(outputs, *sets[0])
                row.update(truth.precision(outputs))  # also of what is wrong: by how much
                row["error"] = truth.check(outputs, coarse=task.name in peer.coarse)
                runnable[impl] = function
            except Exception as error:  # a peer may fail in any way: it is reported, not timed
                self._check_device(impl, error)
                row["error"] = _reason(error)
            outputs = function = None  # before the next implementation needs the memory
            if str(row["error"]).startswith(OUT_OF_MEMORY):
                self._release()
        del truth  # before those that are timed need the memory
        ours = rows.get(GRISTMILL.name, {})
        if not runnable and str(ours.get("error")).startswith(OUT_OF_MEMORY):  # nor has anybody any
            ours["error"] = f"{NO_MEMORY}: {ours['error']}"
            return list(rows.values())
        if GRISTMILL.name in runnable:
            rows[GRISTMILL.name].update(self._chosen(task, args))
        self._time(task, rows, runnable, sets, cost)
        return list(rows.values())

    def _implementations(self, task: Task) -> list[tuple[Peer, str, Builder]]:
        return [
            (peer, impl, builder)
            for peer in self.implementations
            for impl, builder in peer.implementations(task.name).items()
        ]

    def _row(self, task: Task, peer: Peer, impl: str, error: str | None) -> Row:
        return {
            "op": task.name,
            "dtype": task.dtype,
            **task.sizes,
            "sets": task.sets,
            "impl": impl,
            "peer": peer.name,
            "error": error,
        }

    def _check_device(self, impl: str, error: BaseException) -> None:
        """DeviceLostError if nothing runs on it after an error of this implementation."""
        try:
            self._synchronize()
        except RuntimeError:
            raise DeviceLostError(impl, error) from error

    def _first_call(self, function: Function, args: Arguments) -> tuple[float, Any]:
        self._synchronize()
        start = time.perf_counter()
        outputs = function(*args)
        self._synchronize()
        return round(time.perf_counter() - start, 4), outputs

    def _chosen(self, task: Task, args: Arguments) -> Row:
        """Which variant these arguments run on, as the chooser tells it."""
        op = OPS[task.op]
        choice, _ = resolve(op.name, op.variants, op.problem(*args))
        row = {
            "variant": choice.variant.name,
            "config": config_to_json(choice.config),
            "source": choice.source,
        }
        if self.device.type == "cuda":
            return row
        return {**row, **explained.told(op, args, samples=self.samples)}

    def _time(
        self,
        task: Task,
        rows: dict[str, Row],
        runnable: dict[str, Function],
        sets: list[Arguments],
        cost: Cost,
    ) -> None:
        timings = time_interleaved(runnable, sets, samples=self.samples) if runnable else {}
        moved, roof = cost.bytes, self._roof_of(task, cost)
        small = self.device.type == "cuda" and moved <= HOST_BYTES
        for name, timing in timings.items():
            row = rows[name]
            if not isinstance(timing, Timing):
                self._check_device(name, timing)
                row["error"] = f"while timing: {_reason(timing)}"
                continue
            row["us"] = round(timing.us, 3)
            row["spread_us"] = round(timing.spread_us, 3)
            row["samples"] = timing.samples
            row["method"] = timing.method
            row["bytes"] = moved
            row["tb_per_s"] = _five_digits(moved / timing.us / 1e6)
            if task.kind.product:
                row["tflop_per_s"] = _five_digits(cost.operations / timing.us / 1e6)
            if roof is not None:
                row["roof_us"] = round(roof, 3)
                row["roof_share"] = round(roof / timing.us, 4)
            row["l2"] = "cold"
            row["host_us"] = round(time_host(runnable[name], sets[0]), 2) if small else None

    def _roof_of(self, task: Task, cost: Cost) -> float | None:
        """None where its copy finds no memory beside the arguments: the times stand without it."""
        try:
            roof = self._roof(cost.bytes)
            if task.kind.product:
                roof = max(roof, cost.operations / self._rate(task.dtype) / 1e6)
        except RuntimeError as error:
            if not _is_lack(error):
                raise
            self.results.note(f"{task} has no roof: {first_line(error)}")
            return None
        return roof

    def _roof(self, moved: int) -> float:
        """Microseconds of a copy that moves as many bytes.

        Measured once per run and size, to three digits: of ops that differ by a row of weights the
        copies are one.
        """
        size = f"{moved / 1e6:.3g}"
        if size not in self._roofs:
            us = time_copy(moved, self.device, samples=self.samples).us
            self._roofs[size] = us / moved
            meta = self.results.meta
            # A run that goes on has rates from before.
            rates = {**meta.get("copy_tb_per_s_by_mb", {}), size: _five_digits(moved / us / 1e6)}
            rates = dict(sorted(rates.items(), key=lambda one: float(one[0])))
            meta["copy_tb_per_s_by_mb"], meta["copy_tb_per_s"] = rates, [*rates.values()][-1]
        return self._roofs[size] * moved

    def _rate(self, dtype: str) -> float:
        """TFLOP/s of torch's fastest large product; measured once per dtype and run."""
        if dtype not in self._rates:
            rates = []
            for size in ROOF_PRODUCTS.get(self.device.type, ROOF_PRODUCTS["cpu"]):
                made = torch.randn((2, size, size), device=self.device).to(dtype_of(dtype))
                timing = time_interleaved({"mm": torch.mm}, [tuple(made)], samples=self.samples)
                if isinstance(timing["mm"], Exception):
                    raise timing["mm"]
                rates.append(2 * size**3 / timing["mm"].us / 1e6)
            self._rates[dtype] = max(rates)
            known = self.results.meta.setdefault("mm_tflop_per_s", {})
            known[dtype] = round(self._rates[dtype], 2)
        return self._rates[dtype]

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _release(self) -> None:
        """Give back what torch holds of memory that nobody uses: not all allocate through it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def _is_lack(error: Exception) -> bool:
    """Whether memory was lacking; on a CPU torch has no error of its own for that, only words."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def _reason(error: Exception) -> str:
    """What a row says of it."""
    if _is_lack(error):
        return f"{OUT_OF_MEMORY}: {first_line(error)}"
    return described(error)


def _five_digits(rate: float) -> float:
    """Digits that count: a slow machine's rates are no zeros."""
    return float(f"{rate:.5g}")
