"""What `gristmill doctor` says of the cache: its folder and layers. Without the ops, for speed."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gristmill.cli import doctor
from gristmill.cli.app import app
from gristmill.jit import bundle, cache, entry
from gristmill.jit.binary import Binary
from gristmill.jit.program import Program
from gristmill.settings import reload_settings

Run = Callable[..., Any]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Run]:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(doctor, "OPS", {})
    monkeypatch.setenv("COLUMNS", "500")

    def invoke(*layers: Path, line: str = "doctor --json", **environment: str) -> Any:
        monkeypatch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path / "cache"))
        monkeypatch.setenv("GRISTMILL_CACHE_LAYERS", os.pathsep.join(map(str, layers)))
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        reload_settings()
        cache.forget()
        return CliRunner().invoke(app, line.split())

    yield invoke
    monkeypatch.undo()
    reload_settings()
    cache.forget()


@pytest.fixture
def kernel(tmp_path: Path) -> tuple[str, bytes]:
    """A file of a cache as a compiler would have left it: its name and content."""
    (tmp_path / "toy.cu").write_text("__global__ void toy() {}")
    program = Program("toy.cu", ("toy",), (), tmp_path)
    binary = Binary(b"cubin", {"toy": "_Z3toyv"}, "", "nvrtc 13.0", "", {})
    name = entry.file_name(program.key("sm_90a"), binary.compiler, binary.headers)
    return name, entry.encode(program, "sm_90a", binary)


def folder_of(path: Path, *files: tuple[str, bytes]) -> Path:
    (path / "kernels").mkdir(parents=True)
    for name, content in files:
        (path / "kernels" / name).write_bytes(content)
        (path / "kernels" / name).chmod(0o600)
    for place in (path, path / "kernels"):
        place.chmod(0o700)
    return path


def bundle_of(path: Path, *files: tuple[str, bytes]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.parent.chmod(0o700)
    bundle.write(path, files)
    return path


def test_layers_that_are_in_order(run: Run, kernel: tuple[str, bytes], tmp_path: Path) -> None:
    baked = bundle_of(tmp_path / "image" / "all.bundle", kernel)
    shared = folder_of(tmp_path / "shared", kernel)
    result = run(baked, shared)
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["layers"] == [
        {"path": str(baked), "kind": "bundle", "problem": None, "programs": 1, "damaged": []},
        {"path": str(shared), "kind": "folder", "problem": None, "programs": 1, "damaged": []},
    ]
    assert report["warnings"] == []
    values = {setting["name"]: setting["value"] for setting in report["settings"]}
    assert values["GRISTMILL_CACHE_LAYERS"] == f"{baked}{os.pathsep}{shared}"
    text = run(baked, shared, line="doctor").stdout
    assert f"{baked} (bundle, 1 program; trusted)" in text
    assert f"{shared} (folder, 1 program; trusted)" in text


def missing(kernel: tuple[str, bytes], path: Path) -> Path:
    return path / "nowhere"


def open_folder(kernel: tuple[str, bytes], path: Path) -> Path:
    made = folder_of(path / "open", kernel)
    (made / "kernels").chmod(0o777)
    return made


def open_bundle(kernel: tuple[str, bytes], path: Path) -> Path:
    made = bundle_of(path / "image" / "open.bundle", kernel)
    made.chmod(0o666)
    return made


def no_bundle(kernel: tuple[str, bytes], path: Path) -> Path:
    made = bundle_of(path / "image" / "text.bundle")
    made.write_text("hello")
    return made


def cut_bundle(kernel: tuple[str, bytes], path: Path) -> Path:
    made = bundle_of(path / "image" / "cut.bundle", kernel)
    made.write_bytes(made.read_bytes()[:-1])
    return made


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (missing, "is not there"),
        (open_folder, "can be written to by others"),
        (open_bundle, "can be written to by others"),
        (no_bundle, "is not a bundle"),
        (cut_bundle, "was cut off"),
    ],
)
def test_a_layer_that_is_passed_over_is_named_with_the_reason(
    run: Run,
    kernel: tuple[str, bytes],
    tmp_path: Path,
    make: Callable[..., Path],
    reason: str,
) -> None:
    path = make(kernel, tmp_path)
    result = run(path)
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    (warning,) = report["warnings"]
    assert warning.startswith(f"layer {path} is passed over: ")
    assert reason in warning
    assert report["layers"][0]["programs"] == 0
    assert f"{path} (not used)" in run(path, line="doctor").stdout


def spoilt(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


@pytest.mark.parametrize("kind", ["folder", "bundle"])
def test_damaged_files_of_a_layer_are_found(
    run: Run, kernel: tuple[str, bytes], tmp_path: Path, kind: str
) -> None:
    name, content = kernel
    other = "0" * 8 + name[8:]
    files = [kernel, (other, spoilt(content))]
    if kind == "folder":
        layer = folder_of(tmp_path / "shared", *files)
    else:
        layer = bundle_of(tmp_path / "image" / "all.bundle", *files)
    report = json.loads(run(layer).stdout)
    (damaged,) = report["layers"][0]["damaged"]
    assert other in damaged
    (warning,) = report["warnings"]
    assert warning.startswith(f"layer {layer}: 1 file is damaged and passed over: ")
    assert "1 damaged; trusted" in run(layer, line="doctor").stdout


def test_a_file_that_holds_another_kernel_is_damaged(
    run: Run, kernel: tuple[str, bytes], tmp_path: Path
) -> None:
    name, content = kernel
    layer = folder_of(tmp_path / "shared", ("f" * 8 + name[8:], content))
    (damaged,) = json.loads(run(layer).stdout)["layers"][0]["damaged"]
    assert "holds another kernel than its name says" in damaged


def test_where_nothing_may_be_compiled_a_bad_layer_is_broken(run: Run, tmp_path: Path) -> None:
    result = run(tmp_path / "nowhere", GRISTMILL_JIT="off")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["warnings"] == []
    assert "is passed over" in report["broken"][0]


def test_a_user_without_a_home(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.settings._cache_dir", lambda environment: None)
    result = run()
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert report["cache"]["folder"] is None
    assert "has no home folder" in report["warnings"][0]
    assert "none: this user has no home folder" in run(line="doctor").stdout


@pytest.mark.skipif(os.geteuid() == 0, reason="root can write anywhere")
def test_a_folder_that_cannot_be_written_to(run: Run, tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "cache") / "kernels"
    folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
    (warning,) = json.loads(run().stdout)["warnings"]
    assert warning == f"kernels are kept in memory only: {folder} cannot be written to"


def test_paths_are_not_taken_for_markup(run: Run, tmp_path: Path) -> None:
    layers = [tmp_path / name for name in ("a[/b]", "[red]c")]
    said = run(*layers, line="doctor").stdout
    assert all(str(layer) in said for layer in layers)
