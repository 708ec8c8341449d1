"""A forked process can compute on its CPU, and says in plain words what CUDA does not let it do."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fault_helpers import run_child
from process_census import LOCKS, walk
from process_driver import run_with_fake_driver
from process_fork import busy, one_after_another

from gristmill import locks

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def child(function: Callable[..., Any], folder: Path, *arguments: Any) -> Any:
    return run_child(
        function,
        str(folder),
        *arguments,
        alone=False,
        GRISTMILL_CACHE_DIR=str(folder / "cache"),
        GRISTMILL_RECORD=str(folder / "record.jsonl"),
        PYTHONWARNINGS="ignore::DeprecationWarning",  # of forks beside threads: that is the test
    )


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What became of forks in one process after another way of being busy."""
    result: dict[str, Any] = child(one_after_another, tmp_path_factory.mktemp("forks"))
    return result


def test_every_lock_of_the_library_is_one_that_a_fork_renews() -> None:
    """Or a child would wait for ever for a thread that does not exist in it."""
    renewed = (locks.Lock, locks.RLock, logging.Handler)
    kept = [one for one in walk() if isinstance(one.value, LOCKS)]
    assert [one.path for one in kept if not isinstance(one.holder, renewed)] == []
    assert len(kept) > 8


def test_no_lock_that_another_thread_held_stops_a_child(found: dict[str, Any]) -> None:
    status, count = found["all_locks_held"]
    assert status == 0
    assert count > 8


def test_a_child_waits_for_no_thread_that_it_does_not_have(found: dict[str, Any]) -> None:
    assert found["kernel_being_made"] == 0


def test_a_tuning_of_another_thread_is_none_of_the_child(found: dict[str, Any]) -> None:
    assert found["turns_at_a_fork"] == 0


def test_a_file_lock_is_not_kept_by_a_fork(found: dict[str, Any]) -> None:
    assert found["file_lock_across_a_fork"] < 2.5


def test_workers_of_a_data_loader_may_call_ops(found: dict[str, Any]) -> None:
    assert found["data_loader"] == pytest.approx([1.0] * 6, rel=1e-3)


def test_forks_of_a_busy_process(found: dict[str, Any]) -> None:
    assert found["busy"] == [0] * 10


@pytest.mark.long
def test_many_forks_of_a_busy_process(tmp_path: Path) -> None:
    for number in range(4):
        folder = tmp_path / str(number)
        folder.mkdir()
        assert child(busy, folder, 100) == [0] * 100


LAUNCH_AFTER_FORK = """
import ctypes, os, pathlib, struct, sys
from gristmill.errors import DriverError
from gristmill.jit.kernel import kernel
from gristmill.jit.program import Program

program = Program("probe.cu", ("fill<2>", "fill<3>"), root=pathlib.Path(sys.argv[1]))
params = struct.Struct("QQqf")
fill = kernel(program, "fill<2>", 0)
launch = fill.prepare(grid=1, block=32, params=params)
launch(0, 1, 2, 3, 4.0)

def said(action):
    try:
        action()
    except DriverError as error:
        return f"{error.code} {error}"
    return "nothing"

child = os.fork()
if child == 0:
    # As the driver answers in a process that did not initialise it.
    ctypes.c_int.in_dll(ctypes.CDLL("libcuda.so.1"), "next_result").value = 3
    print(said(lambda: launch(0, 1, 2, 3, 4.0)), flush=True)
    os._exit(0)
os.waitpid(child, 0)
ctypes.c_int.in_dll(ctypes.CDLL("libcuda.so.1"), "next_result").value = 3
print(said(lambda: launch(0, 1, 2, 3, 4.0)), flush=True)
launch(0, 1, 2, 3, 4.0)
"""


def test_a_launch_in_a_fork_says_what_is_wrong(tmp_path: Path) -> None:
    out = run_with_fake_driver(tmp_path, LAUNCH_AFTER_FORK)
    forked, parent = out.splitlines()
    assert forked.startswith("3 launching fill<2>")
    assert "this process was forked after CUDA was initialised; start it with spawn" in forked
    assert parent.startswith("3 launching fill<2>")
    assert "fork" not in parent


ON_A_GPU = """
import os, sys
import torch
import gristmill
from gristmill.errors import DriverError
from gristmill.ops import launch
from gristmill.ops.registry import OPS

x = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16)
with gristmill.use("rms_norm", "cuda_block"):
    expected = gristmill.rms_norm(x)
torch.cuda.synchronize()

def said(action):
    try:
        action()
    except BaseException as error:
        return f"{type(error).__name__}: {error}".replace(chr(10), " ")
    return "nothing"

def ours():
    # The launch itself, as a plan does it: torch's allocator may have refused before.
    from gristmill.jit.driver import current_device
    with current_device(0):
        pass

child = os.fork()
if child == 0:
    print("ours", said(ours), flush=True)
    print("torch", said(lambda: torch.ones(3, device="cuda")), flush=True)
    with gristmill.use("rms_norm", "cuda_block"):
        print("op", said(lambda: gristmill.rms_norm(x)), flush=True)
    y = gristmill.rms_norm(torch.ones(3, 64))
    print("cpu", bool(torch.allclose(y, torch.ones(3, 64), atol=1e-3)), flush=True)
    os._exit(0)
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status))
with gristmill.use("rms_norm", "cuda_block"):
    print("parent", bool(torch.equal(gristmill.rms_norm(x), expected)))
"""


@pytest.mark.gpu
def test_a_fork_of_a_process_that_uses_a_gpu(tmp_path: Path) -> None:
    """It computes on its CPU; CUDA's refusal is told in words; the parent goes on."""
    env = {**os.environ, "PYTHONPATH": ":".join(filter(None, sys.path))}
    found = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ON_A_GPU)],
        env={**env, "GRISTMILL_CACHE_DIR": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    said = dict(line.split(" ", 1) for line in found.stdout.splitlines())
    assert found.returncode == 0, found.stderr
    assert said["ours"].startswith("DriverError"), said
    assert "forked after CUDA was initialised; start it with spawn" in said["ours"]
    assert "forked subprocess" in said["torch"]
    assert said["op"] != "nothing"
    assert (said["cpu"], said["child"], said["parent"]) == ("True", "0", "True")
