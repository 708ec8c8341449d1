"""No NVRTC, or no driver: what is kept is used, and what is not is an error that says so."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from fault_helpers import ARCH, run_child, write_source
from missing_child import (
    call_without_compiler,
    launch_from_bundle,
    load_without_compiler,
    load_without_driver,
    make_bundle,
)
from race_child import load_numbers

from gristmill.jit import bundle

pytest.importorskip("cuda.bindings.nvrtc", reason="needs cuda-bindings")
HOW = ["no bindings", "no library", "an old one"]


def compiled_c(source: Path, library: Path) -> Path:
    """The folder of a library made of a C source."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library.parent.mkdir(exist_ok=True)
    subprocess.run([compiler, "-O1", "-shared", "-fPIC", "-o", library, source], check=True)
    return library.parent


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> tuple[Path, Path, Path]:
    """Sources of kernels; a folder that has two of them; a bundle of the same."""
    top = tmp_path_factory.mktemp("kept")
    sources = write_source(top / "sources")
    folder = top / "cache"
    run_child(load_numbers, str(folder), str(sources), str(top / "log"), 2, ARCH)
    files = [(path.name, path.read_bytes()) for path in (folder / "kernels").glob("*.kernel")]
    assert len(files) == 2
    bundle.write(top / "kernels.bundle", files)
    return sources, folder, top / "kernels.bundle"


@pytest.mark.parametrize("jit", ["on", "off"])
@pytest.mark.parametrize("how", HOW)
def test_what_is_kept_needs_no_compiler(how, jit, kept, tmp_path) -> None:
    sources, folder, file = kept
    error = "CompilerUnavailable: " if jit == "on" else "KernelNotCached: "
    for home, layers in ((folder, ""), (tmp_path / "empty", file)):
        result = run_child(load_without_compiler, how, str(home), str(layers), jit, str(sources), 3)
        *found, missing = result["results"]
        assert found == ["right", "right"]
        assert missing.startswith(error)
        assert result["warnings"] == []
        assert (result["hits"], result["layer hits"]) == ((0, 2) if layers else (2, 0))
        assert result["home"] == (home == folder)
        if jit == "off":
            assert "gristmill warmup" in missing
            assert "--program" in missing
        else:
            assert "pip install" in missing


def test_a_bundle_is_launched_where_no_compiler_is(tmp_path) -> None:
    driver = Path(__file__).parent.parent / "jit" / "fake_driver.c"
    place = str(compiled_c(driver, tmp_path / "driver" / "libcuda.so.1"))
    path = tmp_path / "kernels.bundle"
    assert run_child(make_bundle, str(tmp_path / "a"), str(path), LD_LIBRARY_PATH=place) == 2
    result = run_child(launch_from_bundle, str(tmp_path / "b"), str(path), LD_LIBRARY_PATH=place)
    assert result == {"launches": 2, "layer hits": 1, "compiles": 0, "home": False}


def test_a_missing_driver_is_an_error_that_says_so(tmp_path) -> None:
    """As a library without a single function, which also stands before one that is there."""
    (tmp_path / "empty.c").write_text("int nothing_at_all;\n")
    place = str(compiled_c(tmp_path / "empty.c", tmp_path / "driver" / "libcuda.so.1"))
    message = run_child(load_without_driver, str(tmp_path / "home"), LD_LIBRARY_PATH=place)
    assert message.startswith("DriverError: the CUDA driver cannot be ")
    assert not (tmp_path / "home").exists()


@pytest.mark.gpu
@pytest.mark.parametrize("how", HOW)
def test_an_op_goes_on_without_a_compiler(how, tmp_path) -> None:
    result = run_child(
        call_without_compiler,
        how,
        str(tmp_path / "home"),
        alone=False,
        LD_LIBRARY_PATH=os.environ.get("LD_LIBRARY_PATH", ""),
    )
    assert result["error"] < 0.05
    about = [message for message in result["warnings"] if "CompilerUnavailable" in message]
    assert about
    assert len(set(result["warnings"])) == len(result["warnings"])
    assert "NVRTC" in result["named"] or "cuda-bindings" in result["named"]
    assert not (tmp_path / "home" / "kernels").exists()
