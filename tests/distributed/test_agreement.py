"""Ranks agree on a choice: four processes of their own."""

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

if not dist.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


@pytest.fixture(scope="module", params=["tcp", "file"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank has found; they run once, for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "agreement"
    folder = folder / request.param
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "done").exists():
            run_ranks(folder, request.param)
            (folder / "done").touch()
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(RANKS)]


def run_ranks(folder: Path, kind: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(
        [sys.executable, str(HERE / "agreement_rank.py"), str(folder), kind],
        env=environment,
        start_new_session=True,
    )
    try:
        process.wait(90)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the ranks as well
        process.wait()
    ends = json.loads((folder / "ends.json").read_text())
    output = "\n".join((folder / f"{rank}.txt").read_text() for rank in range(RANKS))
    assert ends == {**({"0": 0} if kind == "file" else {}), "1": 0, "2": 0, "3": 9}, output


def every(ranks: list[Any], scenario: str, name: str) -> list[Any]:
    """One result of a scenario, of all ranks that took part in it."""
    return [one[scenario][name] for one in ranks if scenario in one]


def test_one_decides_and_all_have_its_answer(ranks: list[Any]) -> None:
    assert sorted(every(ranks, "one answer", "decided")) == [0, 0, 0, 1]
    first = every(ranks, "one answer", "decided").index(1)
    # Whatever is in it: another alphabet, the end of a line.
    answer = f"from {first}, ä {{'x': 1}}\n"
    assert every(ranks, "one answer", "answer") == [answer] * RANKS
    assert every(ranks, "asked again", "decided") == [0] * RANKS
    assert every(ranks, "asked again", "answer") == [answer] * RANKS
    assert every(ranks, "asked again", "published") == [answer] * RANKS
    assert every(ranks, "nobody asked", "published") == [None] * RANKS


def test_a_rank_that_never_calls_is_not_waited_for(ranks: list[Any]) -> None:
    answers = every(ranks, "some never call", "answer")
    assert len(answers) == 2
    assert answers[0] == answers[1] in ("from 1", "from 2")
    assert max(every(ranks, "some never call", "seconds")) < 5


def test_a_decision_that_comes_too_late_is_taken_by_nobody(ranks: list[Any]) -> None:
    assert every(ranks, "slow", "decided") == [0, 1, 0, 0]
    assert every(ranks, "slow", "answer") == [None] * RANKS
    assert every(ranks, "slow", "published") == [None] * RANKS
    seconds = every(ranks, "slow", "seconds")
    assert 1.0 <= max(seconds[:1] + seconds[2:]) < 10.0
    for again in every(ranks, "slow", "again"):
        assert (again["answer"], again["decided"]) == (None, 0)
    texts = [text for one in ranks for text in one["a_claim_from_before warned"]["warned"]]
    assert "rank 1 has not said within 1 s which kernel is best for slow: all ranks" in str(texts)
    assert "rank 1 was too slow in choosing for slow" in str(ranks[1]["a_claim_from_before warned"])


def test_after_one_wait_in_vain_nobody_decides_or_waits(ranks: list[Any]) -> None:
    assert every(ranks, "after slow", "decided") == [0] * RANKS
    assert every(ranks, "after slow", "answer") == [None] * RANKS
    assert max(every(ranks, "after slow", "seconds")) < 0.9
    # What was decided or claimed before that is for all.
    assert every(ranks, "before slow", "answer") == ["known"] * RANKS
    assert every(ranks, "claimed before", "answer") == ["from before"] * RANKS
    assert every(ranks, "claimed before", "decided") == [1, 0, 0, 0]
    texts = [text for one in ranks for text in one["a_claim_from_before warned"]["warned"]]
    assert sum("ranks have waited for each other for too long, as rank" in it for it in texts) > 0


def test_a_decision_that_fails(ranks: list[Any]) -> None:
    assert every(ranks, "raising", "decided") == [0, 0, 1, 0]
    assert every(ranks, "raising", "answer") == [None] * RANKS
    raised = every(ranks, "raising", "raised")
    assert raised == [None, None, "ValueError: no kernel could be timed", None]
    assert every(ranks, "undecided", "decided") == [1, 0, 0, 0]
    assert every(ranks, "undecided", "answer") == [None] * RANKS
    # Nobody waited until its patience was at an end, which is 30 s.
    assert max(every(ranks, "raising took", "seconds")) < 10
    assert every(ranks, "raising warned", "warned") == [[]] * RANKS


def test_many_keys_from_many_threads(ranks: list[Any]) -> None:
    answers = [found for one in ranks for found in one["threads"]["answers"]]
    assert len(answers) == 8 * RANKS
    assert all(found == answers[0] for found in answers)
    keys = [f"key {n}" for n in range(30)]
    assert sorted(answers[0]) == sorted(keys)
    assert all(value.startswith(f"{key} by ") for key, value in answers[0].items())
    # Each was decided once, by the rank whose answer was taken.
    decided = [(key, rank) for rank, one in enumerate(ranks) for key in one["threads"]["decided"]]
    assert sorted(decided) == sorted((key, int(value[-1])) for key, value in answers[0].items())


def test_what_differs_is_named_by_the_rank_that_comes_later(ranks: list[Any]) -> None:
    for rank, one in enumerate(ranks):
        assert one["equal"]["same"] == [None, None]
        assert one["equal"]["GPU"] == [None, None]  # each rank had a topic of its own
        if rank < 3:
            assert one["equal"]["H200"] == [None, None]
    first, again = ranks[3]["equal"]["H200"]
    assert first == again
    assert first.startswith(
        "H200: ranks 0 and 3 would run different kernels. linear rows=1 N=4096: triton_tiles "
        "{'m': 0} on rank 0, nothing on rank 3; linear rows=1024 N=4096: triton_tiles {'m': 10} on "
        "rank 0, triton_split {'m': 10} on rank 3; "
    )
    assert first.count(" on rank 3") == 5
    assert "; and 16 more. " in first
    assert first.endswith(
        "Give all ranks the same version of gristmill, the same GRISTMILL_* settings and the same "
        "tuned table: copy the table of one to all, or set GRISTMILL_TABLE=off on all"
    )


def test_what_was_tuned_in_this_run_is_no_difference(ranks: list[Any]) -> None:
    for first in (0, 2):
        scenario = f"tuned meanwhile, {first}"
        assert every(ranks, scenario, "more") == [None] * RANKS
        differing = [2] if first == 0 else [0, 1, 3]
        for name, shown in (("wrong", "cuda_block"), ("unknown", "cuda_warp")):
            for rank, text in enumerate(every(ranks, scenario, name)):
                assert (text is not None) == (rank in differing), text
                assert text is None or f"{shown} on rank 2" in text


def test_a_value_of_another_version_is_an_error(ranks: list[Any]) -> None:
    for raised in every(ranks, "foreign", "raised"):
        assert raised.startswith(
            "RanksDisagree: the store of the process group holds 'gristmill/9 result x' under "
            "gristmill/choice/foreign, which is not"
        )
    for raised in every(ranks, "foreign", "equal"):
        assert "holds 'gristmill/9 equal x'" in raised
    assert every(ranks, "foreign", "decided") == [0] * RANKS


def test_a_thread_that_waits_for_a_key_keeps_nobody_waiting(ranks: list[Any]) -> None:
    """The one that waits does so for 1.5 s, of which 0.1 have passed."""
    assert max(every(ranks, "busy store", "seconds")) < 1.2
    assert len(set(every(ranks, "busy store", "answer"))) == 1


def test_a_fork_has_a_connection_of_its_own(ranks: list[Any]) -> None:
    (answer,) = set(every(ranks, "forked", "answer"))
    assert ranks[1]["forked"]["child"] == f"{answer} 0 True"


def test_without_a_group_and_with_the_next(ranks: list[Any]) -> None:
    assert every(ranks, "destroyed", "answer") == [f"local {rank}" for rank in range(RANKS)]
    assert every(ranks, "destroyed", "store") == [True] * RANKS
    # The store of a destroyed group was let go.
    assert every(ranks, "group 3", "opened") == [0] * RANKS
    # The same store still has its answers; another one has none.
    (earlier,) = set(every(ranks, "one answer", "answer"))
    assert set(every(ranks, "group 2", "answer")) <= {earlier}
    assert every(ranks, "group 3", "answer") == ["group 3"] * RANKS
    for number in (2, 3) if "group 2" in ranks[0] else (3,):
        news = every(ranks, f"group {number}", "new")
        assert [new["answer"] for new in news] == [f"group {number}"] * RANKS
        assert sum(new["decided"] for new in news) == 1
        # Compared anew, and not with what an earlier group had.
        differs = every(ranks, f"group {number}", "differs")
        assert differs[:3] == [None] * 3
        assert "later: 0 on rank 0, 1 on rank 3" in differs[3]


def test_a_rank_that_dies_while_it_decides(ranks: list[Any]) -> None:
    left = ranks[:3]
    assert "dead" not in ranks[3]
    assert every(left, "dead", "answer") == [None] * 3
    assert every(left, "dead", "decided") == [0] * 3
    assert 1.0 <= max(every(left, "dead", "seconds")) < 10.0
    for again in every(left, "dead", "again"):
        assert (again["answer"], again["decided"]) == (None, 0)
    assert every(left, "after a death", "answer") == [None] * 3
    assert every(left, "after a death", "decided") == [0] * 3
    assert max(every(left, "after a death", "seconds")) < 0.9


def test_a_store_that_stops_to_answer(ranks: list[Any]) -> None:
    found = [one["stopped store"] for one in ranks if "stopped store" in one]
    if not found:
        pytest.skip("a file does not stop")
    assert len(found) == 2
    for one in found:
        assert (one["first"]["answer"], one["first"]["decided"]) == (None, 0)
        assert 1.0 <= one["first"]["seconds"] < 10.0
        # It is not asked again.
        assert (one["again"]["answer"], one["again"]["decided"]) == (None, 0)
        assert one["again"]["seconds"] < 0.9
    for one in ranks[1:3]:
        assert "the store of the process group cannot be used (it has not answered for 1 s)" in str(
            one["warned"]
        )
