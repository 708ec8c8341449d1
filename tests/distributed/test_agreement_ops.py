"""Ranks that tune real ops as they meet them end with the same choices: four processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from filelock import FileLock

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"
RANKS = 4
# Four ops, each at three sizes that share no bucket.
PROBLEMS = 12

if not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank has seen; they run once, for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "agreement ops"
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "done").exists():
            run_ranks(folder)
            (folder / "done").touch()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def run_ranks(folder: Path) -> None:
    kept = {name: it for name, it in os.environ.items() if not name.startswith("GRISTMILL_")}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "agreement_ops_rank.py"), str(folder)],
        env={**kept, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": ""},
        start_new_session=True,
    )
    try:
        process.wait(90)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the ranks as well
        process.wait()
    output = "\n".join((folder / f"{rank}.txt").read_text() for rank in range(RANKS))
    assert json.loads((folder / "ends.json").read_text()) == [0, 0, 0, 9], output


def every(ranks: list[Any], scenario: str, name: str) -> list[Any]:
    """One result of a scenario, of all ranks that lived to see it."""
    return [one[scenario][name] for one in ranks if scenario in one]


def measured(ranks: list[Any], scenario: str) -> list[str]:
    return [key for keys in every(ranks, scenario, "measured") for key in keys]


def the_same(values: list[Any]) -> Any:
    assert len(values) > 1
    assert all(value == values[0] for value in values), values
    return values[0]


def test_all_run_what_one_has_measured(ranks: list[Any]) -> None:
    ran = the_same(every(ranks, "together", "ran"))
    # Both favourites won somewhere: each rank has decided something.
    assert set(ran.values()) == {"library", "reference"}
    assert all(every(ranks, "together", "measured"))
    keys = measured(ranks, "together")
    assert len(keys) == len(set(keys)) == PROBLEMS
    assert the_same(every(ranks, "together", "warned")) == []
    for chosen in every(ranks, "together", "chosen"):
        # A rank may have found a row in the file before it was told of it.
        assert {name: word.split()[0] for name, word in chosen.items()} == ran
        assert all("by tuning of this" in it or "by user" in it for it in chosen.values())


def test_sizes_of_one_bucket_run_alike(ranks: list[Any]) -> None:
    ran = ranks[0]["together"]["ran"]
    for op in ("rms_norm", "layer_norm", "softmax", "doubled"):
        assert ran[f"{op} 300"] == ran[f"{op} 310"]


def test_a_second_run_measures_nothing(ranks: list[Any]) -> None:
    ran = the_same(every(ranks, "together", "ran") + every(ranks, "second run", "ran"))
    assert measured(ranks, "second run") == []
    chosen = the_same(every(ranks, "second run", "chosen"))
    assert chosen == {name: f"{variant} by user table" for name, variant in ran.items()}


def test_threads_of_all_ranks_and_backward_passes(ranks: list[Any]) -> None:
    assert the_same(every(ranks, "threads", "errors")) == []
    rows: dict[str, str] = {}
    for found in every(ranks, "threads", "rows"):
        for key, launch in found.items():
            assert rows.setdefault(key, launch) == launch
    keys = measured(ranks, "threads")
    assert len(keys) == len(set(keys)) == PROBLEMS + 1
    assert sorted(rows) == sorted(keys)
    assert any(key.startswith("rms_norm_backward ") for key in keys)


def test_a_rank_that_never_calls_keeps_nobody_waiting(ranks: list[Any]) -> None:
    the_same(every(ranks, "absent", "ran"))
    assert ranks[2]["absent"]["measured"] == []
    assert len(measured(ranks, "absent")) == 2
    # They would wait for 30 s.
    assert max(every(ranks, "absent", "seconds")) < 10
    assert the_same(every(ranks, "absent", "warned")) == []


def test_unequal_tables_and_settings_are_named(ranks: list[Any]) -> None:
    raised = every(ranks, "unequal", "raised")
    assert raised[0] == raised[2] == [None, None]
    assert raised[1][0].startswith(
        "choices on cpu: ranks 0 and 1 would run different kernels. "
        "GRISTMILL_USE: nothing on rank 0, layer_norm:library on rank 1. Give all ranks"
    )
    found = ranks[3]["unequal"]
    assert raised[3][0].startswith(
        "choices on cpu: ranks 0 and 3 would run different kernels. "
        f"{found['key']}: {found['there']} null on rank 0, {found['here']} null on rank 3. Give all"
    )
    # Who catches it and calls again sees it again.
    assert raised[1][0] == raised[1][1]
    assert raised[3][0] == raised[3][1]


def test_a_stale_row_that_was_tuned_anew_meanwhile_is_no_difference(ranks: list[Any]) -> None:
    assert the_same(every(ranks, "stale", "raised")) is None
    the_same(every(ranks, "stale", "ran"))
    assert sorted({key.split()[0] for key in measured(ranks, "stale")}) == [
        "layer_norm",
        "rms_norm",
    ]
    assert ranks[2]["stale"]["measured"] == ranks[3]["stale"]["measured"] == []


def test_ranks_with_folders_of_their_own_can_run_again(ranks: list[Any]) -> None:
    """What one has measured is in the tables of all."""
    assert the_same(every(ranks, "apart", "raised") + every(ranks, "apart again", "raised")) is None
    the_same(every(ranks, "apart", "ran") + every(ranks, "apart again", "ran"))
    assert len(measured(ranks, "apart")) == PROBLEMS
    assert measured(ranks, "apart again") == []


def test_a_rank_that_dies_while_it_tunes(ranks: list[Any]) -> None:
    assert "dead" not in ranks[3]
    ran = the_same(every(ranks, "dead", "ran"))
    # The usual choice, and no row of it; of what came later nothing was tuned, and nobody waited.
    assert ran["rms_norm 20"] == "library"
    assert the_same(every(ranks, "dead", "chosen")) == "library by preference"
    assert measured(ranks, "dead") == []
    assert every(ranks, "dead", "rows") == [[]] * 3
    assert 1.5 <= max(every(ranks, "dead", "seconds")) < 10
    assert max(every(ranks, "dead", "later seconds")) < 1
    warned = [text for texts in every(ranks, "dead", "warned") for text in texts]
    assert any("rank 3 has not said within 1.5 s" in text for text in warned)
    assert all("nothing else is tuned in this job" in text for text in warned)
