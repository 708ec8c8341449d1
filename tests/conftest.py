"""What every test shares: without a GPU its tests are left out, and the user keeps his cache."""

from __future__ import annotations

import gc
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gristmill.settings import reload_settings

# With a umask of 002 a group can write to the tests' files, and the library would not read them.
os.umask(0o022)

if "PYTEST_XDIST_WORKER" in os.environ:
    # The workers share the cores; more threads than cores only wait for each other, spinning: the
    # tests of experts in NVFP4 alone took 160 s of CPU time for 26. Their children, too.
    torch.set_num_threads(1)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Else Inductor starts a pool of processes, each with a torch of its own, in every process.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


def pytest_report_header() -> str | None:
    return None if torch.cuda.is_available() else "no CUDA device: tests marked gpu are left out"


ALONE = "needs a GPU that nothing else uses"

# Folders whose tests go through cases that are alike by the hundred: of a test with so many, one in
# three runs with every change, the same in every process, and all of them with the long tests.
SAMPLED = ("conformance", "kernels")
MANY, STEP = 12, 3


@pytest.hookimpl(tryfirst=True, specname="pytest_collection_modifyitems")
def pytest_mark_all_but_a_sample(items: list[pytest.Item]) -> None:
    alike: dict[tuple[Path, str], list[pytest.Item]] = {}
    for item in items:
        apart = item.get_closest_marker("gpu") or item.get_closest_marker("long")
        if item.path.parent.name in SAMPLED and not apart:
            alike.setdefault((item.path, item.name.partition("[")[0]), []).append(item)
    for some in alike.values():
        for item in some if len(some) >= MANY else ():
            if zlib.crc32(item.name.encode()) % STEP:
                item.add_marker(pytest.mark.long)


@pytest.hookimpl(trylast=True)  # what -m and -k leave out is gone by then
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without a GPU a third of all tests is left out; to skip 12,000 one by one takes a while."""
    if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:
        for item in items:
            if item.get_closest_marker("alone"):
                item.add_marker(pytest.mark.skip(reason=f"{ALONE}: run by `make test-gpu`"))
    if torch.cuda.is_available():
        return
    others = [item for item in items if not item.get_closest_marker("gpu")]
    if others:
        mine = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=mine)
        items[:] = others
        return
    for item in items:  # nothing else was asked for
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(scope="module", autouse=True)
def little_garbage_to_search() -> None:
    """What 25,000 tests, torch and its compilers hold stays: to search it takes seconds each time.

    Tuning and measuring search before each time they take, and Python does now and then.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="module", autouse=True)
def memory_goes_back() -> Iterator[None]:
    """What torch keeps of a GPU's memory for later is missing to the other workers."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


@pytest.fixture(scope="session", autouse=True)
def own_cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Kernels and tables of a test run go to a folder of that run, for child processes as well.

    Workers have tables of their own, and share what they compile.
    """
    folder = tmp_path_factory.mktemp("cache")
    if "PYTEST_XDIST_WORKER" in os.environ:
        kernels = tmp_path_factory.getbasetemp().parent / "kernels"
        kernels.mkdir(mode=0o700, exist_ok=True)
        (folder / "kernels").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRISTMILL_CACHE_DIR", str(folder))
        reload_settings()
        yield folder
    reload_settings()
