"""The model that chooses launches of `cuda_wgmma`, against the times of launches on an H200."""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import astuple, replace
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gristmill.ops.nvfp4_linear.wgmma_configs import (
    _KNOWN,
    _SHAPES,
    CANDIDATES,
    COSTS,
    Costs,
    Cut,
    WgmmaConfig,
    _cuts,
    candidates,
    cut,
    estimate,
)
from gristmill.ops.registry import OPS
from gristmill.select.chooser import by_heuristics
from gristmill.select.device import KNOWN
from gristmill.select.problem import CANONICAL_ROWS

np = pytest.importorskip("numpy")

ROOT = Path(__file__).resolve().parents[2]
DEVICE = KNOWN["sm_90a"]
WEIGHTS = ((4096, 4096), (57344, 8192), (8192, 28672), (2112, 7168), (24576, 1536), (200, 1040))


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    path = ROOT / "tools" / "fit_nvfp4_linear.py"
    spec = importlib.util.spec_from_file_location("fit_nvfp4_linear", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def launches(tool: ModuleType) -> Any:
    return tool.read()


def _cut(config: WgmmaConfig, rows: int, n: int = 8192, k: int = 8192) -> Cut:
    return cut(config, rows, n, k, DEVICE)


def test_regret_of_what_is_chosen(tool: ModuleType, launches: Any) -> None:
    """Time of the first candidate over that of the best of all launches, minus 1."""
    problems = json.loads(tool.DATA.read_text())["problems"]
    regrets: dict[int, list[float]] = {}
    losses = []
    for number, problem in enumerate(problems):
        m, n, k = problem["M"], problem["N"], problem["K"]
        (those,) = np.nonzero(launches.problem == number)
        times = {tool.kind(launches.whole[one]): launches.us[one] for one in those}
        found = [
            times.get(tool.kind(cut(config, m, n, k, DEVICE)))
            for config in candidates(m, n, k, DEVICE)
        ]
        assert found[0] is not None, f"{m}x{n}x{k}: the launch that is chosen was not measured"
        regrets.setdefault(m, []).append(found[0] / launches.best[those[0]] - 1)
        # Tuning finds a launch that is about as fast as any.
        fastest = min(us for us in found if us is not None) / launches.best[those[0]]
        assert fastest < 1.06
        losses.append(fastest - 1)
    every = [regret for some in regrets.values() for regret in some]
    assert len(every) == 180
    assert np.mean(losses) < 0.002
    assert np.mean(every) < 0.02
    assert max(every) < 0.15
    assert max(np.mean(some) for some in regrets.values()) < 0.04


def test_what_is_predicted_is_near_what_was_measured(tool: ModuleType, launches: Any) -> None:
    us = np.array([estimate(whole, DEVICE) for whole in launches.whole])
    error = np.log(us / launches.us)
    near = launches.us < 1.5 * launches.best
    assert abs(error[near].mean()) < 0.03
    assert error[near].std() < 0.09
    assert error.std() < 0.13


def test_times_of_the_shipped_table_are_predicted_for_other_weights(launches: Any) -> None:
    """Of weights and of rows that took no part in the fit."""
    text = (resources.files("gristmill") / "tables" / "nvidia-h200.json").read_text()
    fitted = {(one.slabs, one.chunks) for one in launches.whole}
    errors = []
    for row in json.loads(text)["rows"]:
        if not row["key"].startswith("nvfp4_linear "):
            continue
        words = dict(word.split("=") for word in row["key"].split() if "=" in word)
        for one in (row, row.get("second")):
            if one is None or one["variant"] != "cuda_wgmma":
                continue
            config = WgmmaConfig(**one["config"])
            shape = (config.tokens, config.row_groups, config.k_groups, config.depth)
            assert (*shape, config.stages, config.blocks) in _KNOWN
            whole = _cut(config, int(words["rows"]), int(words["N"]), int(words["K"]))
            assert whole.reason is None
            if (whole.slabs, whole.chunks) not in fitted:
                errors.append(np.log(estimate(whole, DEVICE) / one["us"]))
    assert len(errors) > 50
    assert abs(np.mean(errors)) < 0.06
    assert np.std(errors) < 0.12


def test_the_fit_computes_what_the_model_does(tool: ModuleType, launches: Any) -> None:
    us = tool.Twin(launches)(np.array(astuple(COSTS)))
    expected = [estimate(whole, DEVICE) for whole in launches.whole]
    np.testing.assert_allclose(us, expected, rtol=1e-9)


def test_the_costs_are_those_of_the_fit(tool: ModuleType, launches: Any) -> None:
    pytest.importorskip("scipy")
    everything = np.full(len(launches.us), True)
    found = tool.fit(launches, tool.Twin(launches), everything)
    np.testing.assert_allclose(astuple(found), astuple(COSTS), rtol=0.05)


def test_costs_are_within_what_the_hardware_can_be(tool: ModuleType) -> None:
    for name in tool.NAMES:
        low, high = tool.BOUNDS[name]
        assert low <= getattr(COSTS, name) <= high, name


@pytest.mark.parametrize("name", list(Costs.__dataclass_fields__))
def test_no_launch_is_faster_when_a_cost_is_higher(name: str) -> None:
    higher = 0.5 if name in ("weight", "fill", "missing", "early") else 2.0  # rates, a saving
    dear = replace(COSTS, **{name: higher * getattr(COSTS, name)})
    slower = 0
    for rows in (8, 72, 1024):
        for n, k in WEIGHTS:
            for config in candidates(rows, n, k, DEVICE):
                whole = _cut(config, rows, n, k)
                before, after = estimate(whole, DEVICE), estimate(whole, DEVICE, dear)
                assert after >= before
                slower += after > before
    assert slower


@pytest.mark.parametrize("rows", [8, 64, 256, 1024])  # which fill their tiles
def test_more_work_takes_longer(rows: int) -> None:
    for config in candidates(rows, 8192, 8192, DEVICE):
        if config.split > 1 or config.persistent:
            continue
        us = estimate(_cut(config, rows), DEVICE)
        assert estimate(_cut(config, rows, n=16384), DEVICE) > us
        assert estimate(_cut(config, rows, k=16384), DEVICE) > us
        assert estimate(_cut(config, 4 * rows), DEVICE) >= us
        half = replace(DEVICE, multiprocessors=DEVICE.multiprocessors // 2)
        assert estimate(_cut(config, rows), half) > us


def test_never_faster_than_memory_and_tensor_cores() -> None:
    """4.8e6 bytes and 990e6 operations per microsecond, of the data sheet."""
    for n, k in WEIGHTS:
        for rows in (1, 64, 200, 4096):
            best = estimate(_cut(candidates(rows, n, k, DEVICE)[0], rows, n, k), DEVICE)
            assert best > n * k * 9 / 16 / 4.8e6
            assert best > 2 * rows * n * k / 990e6


def test_clusters_do_not_fill_the_device() -> None:
    """27 clusters of 4 run at once on an H200, and 32 do not."""
    one = WgmmaConfig(64, 2, 1, 4, 4, split=4)
    whole = _cut(one, 64, n=27 * 128)
    assert whole.units == 27
    assert whole.resident == 1
    more = _cut(one, 64, n=32 * 128)
    assert estimate(more, DEVICE) > 1.5 * estimate(whole, DEVICE)


def test_rows_beyond_the_end_cost_more_than_rows() -> None:
    """64 tokens of a tile for the last 8 of 72: measured at twice the time of 128."""
    one = WgmmaConfig(64, 1, 2, 4, 3, blocks=2)
    assert estimate(_cut(one, 72), DEVICE) > 1.2 * estimate(_cut(one, 128), DEVICE)


@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_small_devices_have_an_estimate(split: int) -> None:
    small = replace(DEVICE, multiprocessors=2)
    whole = cut(WgmmaConfig(64, 1, 1, 4, 3, split=split), 8, 4096, 4096, small)
    assert estimate(whole, small) > 0


@pytest.mark.parametrize("rows", [70, 100, 160, 192, 320, 1000])
def test_tiles_of_any_size_are_considered(rows: int) -> None:
    """Not only those that were the best at nearby rows, and none twice."""
    cuts = list(_cuts(rows, 4096, 4096, DEVICE))
    fitting = {
        tokens for tokens in _SHAPES if _cut(WgmmaConfig(tokens, 1, 1, 1, 2), rows).tokens == tokens
    }
    assert {64, 96} <= fitting
    assert {whole.tokens for whole in cuts} >= fitting
    kinds = {(one.tokens, one.depth, one.stages, one.blocks, one.config) for one in cuts}
    assert len(kinds) == len(cuts)
    assert len(candidates(rows, 4096, 4096, DEVICE)) == CANDIDATES


@pytest.mark.parametrize("weight", WEIGHTS, ids=str)
def test_what_serves_any_batch_has_a_launch_for_any_number_of_rows(weight: tuple[int, int]) -> None:
    """Batch invariance: the config for 256 rows is used for all."""
    n, k = weight
    configs = candidates(CANONICAL_ROWS, n, k, DEVICE)
    assert configs
    for config in configs:
        for rows in (*range(1, 300), 500, 1000, 4096, 70000):
            whole = cut.__wrapped__(config, rows, n, k, DEVICE)
            assert whole.reason is None, (rows, config)


@pytest.mark.parametrize(
    ("arch", "m", "n", "k", "expected"),
    [
        # Measured: 27.8 us in FP8 and 24.7 exact; 90.9 and 91.1; 163 and 176; 589 and 645 us.
        ("sm_90a", 512, 4096, 4096, "cuda_wgmma"),
        ("sm_90a", 512, 28672, 4096, "scaled_mm_fp8"),
        ("sm_90a", 512, 57344, 8192, "scaled_mm_fp8"),
        ("sm_90a", 256, 57344, 8192, "cuda_wgmma"),
        # 40.6 and 44.1; 888 and 1333 us.
        ("sm_90a", 1024, 4096, 4096, "scaled_mm_fp8"),
        ("sm_90a", 1024, 57344, 8192, "scaled_mm_fp8"),
        ("sm_89", 768, 57344, 8192, "dequantized"),
        ("sm_89", 1024, 57344, 8192, "scaled_mm_fp8"),
    ],
)
def test_fp8_where_it_is_faster(arch: str, m: int, n: int, k: int, expected: str) -> None:
    op, device = OPS["nvfp4_linear"], KNOWN[arch]
    args = op.example_with({"act": "fp8"}, (m, n, k), torch.bfloat16, "meta", device)
    choice = by_heuristics(op.name, op.variants, op.problem(*args, device=device))
    assert choice is not None
    assert choice.variant.name == expected
