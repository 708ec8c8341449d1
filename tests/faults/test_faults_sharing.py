"""Many processes, compilers, architectures and versions of gristmill with one cache folder."""

from __future__ import annotations

import os
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from disk_child import killed_at_random
from fault_helpers import ARCH, result_of, run_child, start_child, write_source
from race_child import compile_and_hang, load_numbers, load_while_another_hangs, race

import gristmill
from gristmill.jit import cache


def run_race(tmp_path: Path, processes: int, numbers: int, real: bool) -> None:
    sources = write_source(tmp_path / "sources")
    home, log, go = tmp_path / "cache", tmp_path / "log", tmp_path / "go"
    children = [
        start_child(race, str(home), str(sources), str(log), str(go), numbers, seed, real)
        for seed in range(processes)
    ]
    for child in children:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
    go.touch()
    results = [result_of(child) for child in children]
    compiled = Counter(log.read_text().splitlines())
    assert len(compiled) == numbers
    assert set(compiled.values()) == {1}
    assert sum(one["compiles"] for one in results) == numbers
    for one in results:
        assert one["compiles"] + one["hits"] == numbers
        assert one["wrong"] == one["warnings"] == []
        assert one["cubins"] == results[0]["cubins"]
    left = [path.name for path in (home / "kernels").iterdir()]
    assert len(left) == numbers
    assert all(name.endswith(".kernel") for name in left)


def test_processes_that_start_at_once_compile_each_kernel_once(tmp_path) -> None:
    run_race(tmp_path, 3, 8, real=False)


@pytest.mark.long
@pytest.mark.parametrize("real", [False, True], ids=["fake", "nvrtc"])
def test_eight_processes_compile_fifty_kernels_once(real, tmp_path) -> None:
    if real:
        pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
    run_race(tmp_path, 8, 50, real)


@pytest.mark.parametrize("times", [10, pytest.param(200, marks=pytest.mark.long)])
def test_kill_at_random_points_of_a_write(times, tmp_path, faulty_disk) -> None:
    result = run_child(killed_at_random, str(tmp_path), times, 6, 500, LD_PRELOAD=faulty_disk)
    assert result["wrong"] == []
    # It was killed amid its work: not before it, not after it, sometimes amid a file.
    assert 0 < result["found"] < 6 * times
    assert 0 < result["left"] <= times
    # What is left behind goes with the first write an hour later.
    folder = tmp_path / "cache" / "kernels"
    parts = list(folder.glob(".*.part"))
    for path in parts:
        os.utime(path, (time.time() - 7200,) * 2)
    young = folder / ".young.part"
    young.touch()
    sources = str(write_source(tmp_path / "sources"))
    run_child(load_numbers, str(tmp_path / "cache"), sources, str(tmp_path / "log"), 12, ARCH)
    assert [path.name for path in folder.glob(".*")] == [young.name]


def test_a_stopped_process_is_not_waited_for_without_end(tmp_path) -> None:
    sources = write_source(tmp_path / "sources")
    home = tmp_path / "cache"
    stopped = start_child(compile_and_hang, str(home), str(sources))
    try:
        assert stopped.stdout is not None
        assert stopped.stdout.readline() == "compiling\n"
        stopped.send_signal(signal.SIGSTOP)
        result = run_child(load_while_another_hangs, str(home), str(sources), 2.0)
        # The others do not wait at all.
        assert result["seconds"][0] < 1.5
        assert 2.0 <= result["seconds"][1] < 20
        assert result["seconds"][2] < 1.5
        assert result["kept"] == 3
        assert result["warnings"] == []
    finally:
        stopped.kill()
        stopped.communicate()


def other_version(folder: Path) -> Path:
    """This gristmill's jit with another format of its files, as another version would have."""
    here = Path(gristmill.__file__).parent
    package = folder / "gristmill"
    shutil.copytree(here / "jit", package / "jit", ignore=shutil.ignore_patterns("__pycache__"))
    for path in here.glob("*.py"):
        shutil.copy(path, package)
    module = package / "jit" / "entry.py"
    text = module.read_text()
    assert text.count('b"gristmill kernel 1\\n"') == 1
    module.write_text(text.replace("gristmill kernel 1", "gristmill kernel 9"))
    return package


def test_versions_compilers_and_architectures_share_a_folder(tmp_path) -> None:
    sources = str(write_source(tmp_path / "sources"))
    others = write_source(tmp_path / "other sources")
    (others / "a.cu").write_text((others / "a.cu").read_text() + "// of another version\n")
    package = other_version(tmp_path / "version")
    home = str(tmp_path / "cache")
    users = [
        (sources, ARCH, "nvrtc 13.0", None),
        (sources, ARCH, "nvrtc 13.1", None),
        (sources, "sm_80", "nvrtc 13.0", None),
        (str(others), ARCH, "nvrtc 13.0", None),
        (sources, ARCH, "nvrtc 13.0", package),
    ]

    def all_load(turn: str) -> list[dict[str, object]]:
        log = str(tmp_path / turn)
        # At once, so that they also meet.
        children = [
            start_child(load_numbers, home, source, log, 4, arch, version, package=of)
            for source, arch, version, of in users
        ]
        return [result_of(child) for child in children]

    first, second = all_load("first"), all_load("second")
    for one in (*first, *second):
        assert one["wrong"] == one["warnings"] == []
        assert one["rejected"] == 0
    assert [one["compiles"] for one in first] == [4] * len(users)
    assert [one["compiles"] for one in second] == [0] * len(users)
    assert [one["hits"] for one in second] == [4] * len(users)
    assert len(list((tmp_path / "cache" / "kernels").glob("*.kernel"))) == 4 * len(users)


def test_without_a_compiler_another_ones_kernels_are_used(tmp_path, home, monkeypatch) -> None:
    """Of two, one; and none that another version of the format wrote."""
    sources = str(write_source(tmp_path / "sources"))
    package = other_version(tmp_path / "version")
    log = str(tmp_path / "log")
    run_child(load_numbers, str(home), sources, log, 1, ARCH, "nvrtc 13.7", package=package)
    from fault_helpers import program

    monkeypatch.setenv("GRISTMILL_JIT", "off")
    from gristmill.errors import KernelNotCached
    from gristmill.settings import reload_settings

    reload_settings()
    with pytest.raises(KernelNotCached):
        cache.load_or_compile(program(sources), ARCH)
    for version in ("nvrtc 13.1", "nvrtc 13.2"):
        run_child(load_numbers, str(home), sources, log, 1, ARCH, version)
    assert cache.load_or_compile(program(sources), ARCH).compiler in ("nvrtc 13.1", "nvrtc 13.2")
