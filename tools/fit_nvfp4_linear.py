"""Fit the costs in the model of nvfp4_linear's Hopper kernel to measured launches.

    PYTHONPATH=src python tools/fit_nvfp4_linear.py              # fit, print costs and regret
    PYTHONPATH=src python tools/fit_nvfp4_linear.py --leave-out  # and regret of weights left out
    PYTHONPATH=src python tools/fit_nvfp4_linear.py --no-fit     # regret of the costs as shipped
    PYTHONPATH=src python tools/fit_nvfp4_linear.py --data other.json --no-fit

Every number of benchmarks/results/README.md, "launches of NVFP4 linear", that follows from the data
is among what --leave-out prints; --no-fit prints all but those of parts that are left out.
Needs numpy and, for fitting, scipy, which nothing else of gristmill needs. The costs are the fields
of `Costs` in src/gristmill/ops/nvfp4_linear/wgmma_configs.py; put what is printed there by hand.

The regret of a problem is the measured time of the launch that the model puts first over that of
the fastest launch, minus 1. With --leave-out each weight (and each range of rows) is judged by
costs that were fitted to the others. The fit minimises the relative error of the predicted times,
least squares with an outlier-tolerant loss; launches far from the best of their problem count less.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from gristmill.ops.nvfp4_linear import wgmma_configs as configs
from gristmill.ops.nvfp4_linear.wgmma_configs import COSTS, Costs, Cut, WgmmaConfig, cut
from gristmill.select.configs import config_from_json
from gristmill.select.device import KNOWN, Device
from gristmill.select.table import Table

DATA = (
    Path(__file__).parents[1]
    / "benchmarks/results/h200-2026-11-16/nvfp4_linear-launches/launches.json"
)
TABLE = Path(__file__).parents[1] / "src/gristmill/tables/nvidia-h200.json"
NAMES = tuple(field.name for field in dataclasses.fields(Costs))
# What the hardware can be like; a fit outside of these would predict by accident.
BOUNDS = {
    "issue": (40, 300),
    "issue_token": (0, 3),
    "tensor_token": (2.0, 2.6),
    "wait": (50, 600),
    "wait_token": (0, 6),
    "copy": (20, 200),
    "refill": (300, 3000),
    "fill": (20, 130),
    "add": (0, 40),
    "start": (0.3, 4),
    "split": (0, 4),
    "early": (0, 1.5),
    "weight": (4.799, 4.801),  # the data sheet's
    "latency": (300, 3000),
    "missing": (5, 30),
}
FAR = 0.3  # regret at which a launch counts 1/e
LARGE = 0.05  # relative error beyond which it counts linearly
ROWS = (12, 20, 40, 80, 140, 220, 400, 800)  # bounds of the ranges of rows that are left out


class Launches(NamedTuple):
    """What was measured: an entry for each launch."""

    whole: list[Cut]
    problem: np.ndarray  # a number
    weight: np.ndarray  # a number
    rows: np.ndarray
    considered: np.ndarray  # whether `candidates` looks at it
    us: np.ndarray
    best: np.ndarray  # of all launches of the problem, us


def kind(whole: Cut) -> tuple[int, ...]:
    """What a kernel is compiled for, and whether its grid is persistent."""
    one = whole.config
    shape = (whole.tokens, one.row_groups, one.k_groups, whole.depth, whole.stages)
    return (*shape, one.split, whole.blocks, one.persistent)


def read(path: Path = DATA, device: Device = KNOWN["sm_90a"]) -> Launches:
    data = json.loads(path.read_text())
    cuts: list[Cut] = []
    entries, weights = [], {}
    for number, problem in enumerate(data["problems"]):
        m, n, k = problem["M"], problem["N"], problem["K"]
        best = min(launch[8] for launch in problem["launches"])
        considered = [
            kind(dataclasses.replace(whole, config=one))
            for whole in configs._cuts(m, n, k, device)
            for one in configs._ways(whole, device)
        ]
        # In the order of `candidates`, which decides between launches that the model holds equal.
        places = {one: place for place, one in enumerate(considered)}
        found = []
        for *shape, persistent, us in (launch[:9] for launch in problem["launches"]):
            whole = cut(WgmmaConfig(*shape, bool(persistent)), m, n, k, device)
            found.append((places.get(kind(whole), len(places)), us, whole))
        weight = weights.setdefault((n, k), len(weights))
        for place, us, whole in sorted(found, key=lambda one: one[0]):
            cuts.append(whole)
            entries.append((number, weight, m, place < len(places), us, best))
    columns = [np.array(column) for column in zip(*entries, strict=True)]
    return Launches(cuts, *columns)


class Twin:
    """`wgmma_configs.estimate` of many launches at once."""

    def __init__(self, launches: Launches, device: Device = KNOWN["sm_90a"]) -> None:
        def of(value: Any) -> np.ndarray:
            return np.array([value(one) for one in launches.whole], float)

        self.tokens, self.resident = of(lambda o: o.tokens), of(lambda o: o.resident)
        self.split, self.depth = of(lambda o: o.config.split), of(lambda o: o.depth)
        self.row_groups, self.groups = of(lambda o: o.config.row_groups), of(lambda o: o.groups)
        self.stages, self.units = of(lambda o: o.stages), of(lambda o: o.units)
        self.persistent = of(lambda o: o.config.persistent) > 0
        self.adds = (self.split > 1) | (of(lambda o: o.config.k_groups) > 1)
        slots = np.ceil(of(lambda o: o.share) / self.depth)
        self.slots, self.pieces = slots, slots * self.depth * self.row_groups
        self.slot_bytes = of(lambda o: o.slot_bytes)
        self.room = of(lambda o: configs._room(device, o.config.split))
        self.passes, self.rest = np.divmod(self.units, self.room * self.resident)
        last = np.where(self.rest > 0, np.ceil(self.rest / self.room), self.resident)
        self.last = np.where(self.persistent & (self.passes > 0), self.resident, last)
        chunks, row_units = of(lambda o: o.chunks), of(lambda o: o.row_units)
        self.bytes = of(lambda o: o.slabs) * chunks * configs.PIECE_BYTES
        beyond = of(lambda o: o.token_tiles) * self.tokens - launches.rows
        self.missing = row_units * chunks * beyond

    def __call__(self, values: np.ndarray) -> np.ndarray:
        c = Costs(*values)
        busy = np.maximum(c.issue + c.issue_token * self.tokens, c.tensor_token * self.tokens)
        work = self.pieces * busy
        ends = np.where(self.adds, c.add * self.tokens * self.row_groups, 0.0)
        alone = np.maximum.reduce(
            [
                self.pieces / self.groups * (c.wait + c.wait_token * self.tokens),
                self.slots * (2 * self.row_groups + self.depth) * c.copy,
                self.slots / (self.stages - 1) * (c.refill + self.slot_bytes / c.fill),
            ]
        )

        def together(blocks: np.ndarray) -> np.ndarray:
            return np.maximum(blocks * work, alone) + blocks * ends

        turns = self.passes + (self.rest > 0)
        last = np.where(self.rest > 0, together(self.last), 0.0)
        full = together(self.resident)
        cycles = np.where(self.persistent, turns * full, self.passes * full + last)
        arithmetic = cycles / configs._CLOCK + np.where(self.persistent, 1, turns) * c.start
        memory = self.bytes / (c.weight * 1e6)
        memory = memory + turns * self.slots / self.stages * c.latency / configs._CLOCK
        power = configs._OVERLAP
        parts = (arithmetic, memory, self.missing / (c.missing * 1e3))
        us = sum(part**power for part in parts) ** (1 / power)
        us = us - np.where(self.resident >= 2 * self.last, c.early, 0.0)
        return us + np.where(self.split > 1, c.split, 0.0)


def fit(launches: Launches, twin: Twin, part: np.ndarray, start: Costs = COSTS) -> Costs:
    """The costs that predict the launches of `part` (booleans) best."""
    from scipy.optimize import least_squares

    low, high = np.array([BOUNDS[name] for name in NAMES], float).T
    scale = high / 4
    counts = np.sqrt(np.exp(-(launches.us / launches.best - 1) / FAR))

    def errors(values: np.ndarray) -> np.ndarray:
        return (np.log(twin(values * scale) / launches.us) * counts)[part]

    first = np.clip(dataclasses.astuple(start), low + 1e-6 * scale, high - 1e-6 * scale)
    found = least_squares(
        errors, first / scale, bounds=(low / scale, high / scale), loss="soft_l1", f_scale=LARGE
    )
    return Costs(*(float(value) for value in found.x * scale))


def regrets(launches: Launches, us: np.ndarray) -> np.ndarray:
    """Of each problem, when its launch is chosen by `us`."""
    found = np.empty(launches.problem.max() + 1)
    for number in range(len(found)):
        (those,) = np.nonzero((launches.problem == number) & launches.considered)
        chosen = those[np.argmin(us[those])]
        found[number] = launches.us[chosen] / launches.best[chosen] - 1
    return found


def left_out(launches: Launches, twin: Twin, part: np.ndarray) -> np.ndarray:
    """Regrets of each problem by costs that were fitted without its part."""
    found = np.empty(launches.problem.max() + 1)
    for one in np.unique(part):
        costs = fit(launches, twin, part != one)
        those = np.unique(launches.problem[part == one])
        found[those] = regrets(launches, twin(np.array(dataclasses.astuple(costs))))[those]
    return found


class Tabled(NamedTuple):
    """Launches of the shipped table whose weights are not in the data."""

    whole: list[Cut]
    us: np.ndarray
    weights: int


def tabled(launches: Launches, path: Path = TABLE, device: Device = KNOWN["sm_90a"]) -> Tabled:
    """The `cuda_wgmma` rows of a table, at every number of rows that they were measured at."""
    seen = {_weight(whole) for whole in launches.whole}
    cuts, times = [], []
    for row in Table.load(path).rows.values():
        if not row.key.startswith("nvfp4_linear ") or row.variant != "cuda_wgmma":
            continue
        named = dict(word.split("=") for word in row.key.split() if "=" in word)
        n, k = int(named["N"]), int(named["K"])
        config = config_from_json(WgmmaConfig, row.config)
        for rows, us in {row.rows: row.us, **{int(m): us for m, us in row.also.items()}}.items():
            whole = cut(config, rows, n, k, device)
            if _weight(whole) not in seen:
                cuts.append(whole)
                times.append(us)
    return Tabled(cuts, np.array(times), len({_weight(whole) for whole in cuts}))


def _weight(whole: Cut) -> tuple[int, int]:
    return whole.slabs, whole.chunks


def log_error(found: Tabled, costs: Costs, device: Device = KNOWN["sm_90a"]) -> float:
    """The standard deviation of the logarithm of predicted over measured times."""
    us = np.array([configs.estimate(whole, device, costs) for whole in found.whole])
    return float(np.log(us / found.us).std())


def say(text: str) -> None:
    sys.stdout.write(text + "\n")


def show(what: str, launches: Launches, found: np.ndarray) -> None:
    worst = launches.whole[int(np.argmax(launches.problem == np.argmax(found)))]
    say(f"{what}: mean {found.mean():.2%}, worst {found.max():.1%} at {_problem(worst)}")
    rows = np.array([launches.rows[launches.problem == one][0] for one in range(len(found))])
    for m in np.unique(rows):
        some = found[rows == m]
        say(f"  M={m:<5d} mean {some.mean():6.2%}  worst {some.max():6.1%}")


def _problem(whole: Cut) -> str:
    return f"{whole.rows}x{whole.slabs * configs.SLAB}x{whole.chunks * configs.CHUNK}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--no-fit", action="store_true", help="judge the costs as shipped")
    parser.add_argument("--leave-out", action="store_true", help="judge by costs of the others")
    parser.add_argument("--worst", type=int, default=0, help="problems to show in full")
    options = parser.parse_args()
    launches = read(options.data)
    weights, counts = launches.weight.max() + 1, np.unique(launches.rows)
    say(
        f"{len(launches.us)} launches: {weights} weights, {len(counts)} numbers of rows from "
        f"{counts.min()} to {counts.max()}"
    )
    twin = Twin(launches)
    everything = np.full(len(launches.us), True)
    costs = COSTS if options.no_fit else fit(launches, twin, everything)
    for name, value in dataclasses.asdict(costs).items():
        say(f"{name:13s} {value:9.4g}  (shipped {getattr(COSTS, name):.4g})")
    us = twin(np.array(dataclasses.astuple(costs)))
    error = np.log(us / launches.us)
    near = launches.us < 1.5 * launches.best
    say(f"log error: {error[near].std():.3f} within 1.5x of the best, {error.std():.3f} of all")
    others = tabled(launches)
    if len(others.us):
        rows = [whole.rows for whole in others.whole]
        say(
            f"log error: {log_error(others, costs):.3f} of the shipped table's {len(others.us)} "
            f"launches with {others.weights} other weights, M={min(rows)} to {max(rows)}"
        )
    found = regrets(launches, us)
    show("in sample", launches, found)
    for number in np.argsort(-found)[: options.worst]:
        (those,) = np.nonzero(launches.problem == number)
        looked_at = those[launches.considered[those]]
        chosen, best = looked_at[np.argmin(us[looked_at])], those[np.argmin(launches.us[those])]
        for name, one in (("chosen", chosen), ("best", best)):
            whole = launches.whole[one]
            say(f"  {name:7s} {_problem(whole)}")
            say(f"    {whole.tokens} tokens, {whole.config}")
            say(f"    {launches.us[one]:.2f} us, predicted {us[one]:.2f}")
    if options.leave_out:
        show("each weight left out", launches, left_out(launches, twin, launches.weight))
        ranges = np.digitize(launches.rows, ROWS)
        show("each range of rows left out", launches, left_out(launches, twin, ranges))


if __name__ == "__main__":
    main()
