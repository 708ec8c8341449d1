"""The checker of wheels and sdists finds what it is for. `make test-dist` runs it on real ones."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent
RELEASE = "1.2.3"
ABOUT = f"gristmill-{RELEASE}.dist-info/"
METADATA = """\
Metadata-Version: 2.4
Name: gristmill
Version: 1.2.3
License-Expression: Apache-2.0
Requires-Python: >=3.10
Requires-Dist: regex>=2024.5.15
Requires-Dist: rich<16,>=13.7
Requires-Dist: safetensors<1,>=0.4.3
Requires-Dist: torch>=2.11
Requires-Dist: typer<1,>=0.12
Requires-Dist: triton<3.8,>=3.6; extra == 'triton'
{extras}
Description-Content-Type: text/markdown

# gristmill

Run `pip install gristmill`, then read [the docs](https://example.org/docs).
"""
ENTRY_POINTS = """\
[console_scripts]
gristmill = gristmill.cli:main

[vllm.general_plugins]
gristmill_norms = gristmill.plugin:norms
gristmill_nvfp4 = gristmill.plugin:nvfp4
"""


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_dist", ROOT / "tools" / "check_dist.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["check_dist"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def tree(tool: ModuleType) -> dict[str, bytes]:
    names = ["__init__.py", "plugin.py", "cli/__init__.py"]
    names += [kind.replace("*", "one") for kind in tool.KINDS]
    return {f"gristmill/{name}": name.encode() for name in names}


@pytest.fixture
def wheel(tool: ModuleType, tree: dict[str, bytes]) -> dict[str, bytes]:
    """One that is fit."""
    extras = "\n".join(f"Provides-Extra: {name}" for name in sorted(tool.EXTRAS))
    return {
        **tree,
        f"{ABOUT}METADATA": METADATA.format(extras=extras).encode(),
        f"{ABOUT}WHEEL": b"Wheel-Version: 1.0\nTag: py3-none-any\n",
        f"{ABOUT}entry_points.txt": ENTRY_POINTS.encode(),
        f"{ABOUT}licenses/LICENSE": b"Apache",
        f"{ABOUT}RECORD": b"",
    }


def test_a_fit_wheel_has_no_problem(
    tool: ModuleType, wheel: dict[str, bytes], tree: dict[str, bytes]
) -> None:
    assert tool.wheel_problems(wheel, 1_000_000, tree, RELEASE) == []


def test_whatever_is_missing_is_named(
    tool: ModuleType, wheel: dict[str, bytes], tree: dict[str, bytes]
) -> None:
    for name in set(wheel) - {f"{ABOUT}RECORD"}:
        left = {other: data for other, data in wheel.items() if other != name}
        problems = tool.wheel_problems(left, 1_000_000, tree, RELEASE)
        assert any(f"{name} is missing" in line for line in problems), name


def test_a_kind_of_file_that_the_tree_lacks_too_is_named(
    tool: ModuleType, wheel: dict[str, bytes], tree: dict[str, bytes]
) -> None:
    for kind in tool.KINDS:
        name = f"gristmill/{kind.replace('*', 'one')}"
        less = [{key: it for key, it in one.items() if key != name} for one in (wheel, tree)]
        problems = tool.wheel_problems(less[0], 1_000_000, less[1], RELEASE)
        assert problems == [f"there is no gristmill/{kind}"]


@pytest.mark.parametrize("name", ["tests/test_a.py", "gristmill/left.o", "benchmarks/a.json"])
def test_what_does_not_belong_there_is_named(
    tool: ModuleType, wheel: dict[str, bytes], tree: dict[str, bytes], name: str
) -> None:
    problems = tool.wheel_problems({**wheel, name: b""}, 1_000_000, tree, RELEASE)
    assert problems == [f"{name} does not belong into a wheel"]


def test_another_text_than_the_trees_is_named(
    tool: ModuleType, wheel: dict[str, bytes], tree: dict[str, bytes]
) -> None:
    wheel["gristmill/tables/one.json"] = b"{}"
    problems = tool.wheel_problems(wheel, 1_000_000, tree, RELEASE)
    assert problems == ["gristmill/tables/one.json is not that of the tree"]


def test_three_megabytes_are_too_many(
    tool: ModuleType, wheel: dict[str, bytes], tree: dict[str, bytes]
) -> None:
    (problem,) = tool.wheel_problems(wheel, 3_000_000, tree, RELEASE)
    assert problem == "it has 3.00 MB; less than 3 are allowed"


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("Version: 1.2.3", "Version: 1.2.4", "Version is '1.2.4', not '1.2.3'"),
        ("Requires-Python: >=3.10", "Requires-Python: >=3.9", "Requires-Python is '>=3.9'"),
        ("License-Expression: Apache-2.0\n", "", "License-Expression is None"),
        ("Requires-Dist: torch>=2.11\n", "", "it requires ['regex', 'rich', 'safet"),
        ("Requires-Dist: rich", "Requires-Dist: cuda-bindings\nRequires-Dist: rich", "cuda-bind"),
        ("Provides-Extra: nvrtc\n", "", "its extras are"),
        ("pip install gristmill", "install it", "does not say how to install"),
        ("(https://example.org/docs)", "(docs/index.md)", "dead there: ](docs/index.md)"),
        ("# gristmill", '<img src="docs/a.svg">', 'dead there: src="docs/a.svg"'),
    ],
)
def test_metadata(
    tool: ModuleType,
    wheel: dict[str, bytes],
    tree: dict[str, bytes],
    old: str,
    new: str,
    problem: str,
) -> None:
    text = wheel[f"{ABOUT}METADATA"].decode()
    assert old in text
    wheel[f"{ABOUT}METADATA"] = text.replace(old, new).encode()
    (line,) = tool.wheel_problems(wheel, 1_000_000, tree, RELEASE)
    assert line.startswith("metadata: ")
    assert problem in line


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("gristmill_norms = gristmill.plugin:norms\n", "", "entry points: "),
        ("gristmill.plugin:nvfp4", "gristmill.gone:nvfp4", "there is no gristmill.gone:nvfp4"),
    ],
)
def test_entry_points(
    tool: ModuleType,
    wheel: dict[str, bytes],
    tree: dict[str, bytes],
    old: str,
    new: str,
    problem: str,
) -> None:
    wheel[f"{ABOUT}entry_points.txt"] = ENTRY_POINTS.replace(old, new).encode()
    (line,) = tool.wheel_problems(wheel, 1_000_000, tree, RELEASE)
    assert problem in line


def test_an_sdist_has_all_of_the_package_and_no_litter(
    tool: ModuleType, tree: dict[str, bytes]
) -> None:
    files = {**dict.fromkeys(tool.IN_SDIST, b""), **{f"src/{name}": b"" for name in tree}}
    assert tool.sdist_problems(files, tree) == []
    for name in files:
        less = {other: data for other, data in files.items() if other != name}
        assert f"{name} is missing" in tool.sdist_problems(less, tree)
    for name in (".venv/bin/a", "src/gristmill/__pycache__/a.pyc", "bench-results/results.json"):
        problems = tool.sdist_problems({**files, name: b""}, tree)
        assert problems == [f"{name} does not belong into an sdist"]


def test_archives_are_read_as_they_are(tool: ModuleType, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr("gristmill/a.py", "text")
    assert tool.of_wheel(tmp_path / "a.whl") == {"gristmill/a.py": b"text"}
    with tarfile.open(tmp_path / "a.tar.gz", "w:gz") as archive:
        member = tarfile.TarInfo("gristmill-1.2.3/src/a.py")
        member.size = 4
        archive.addfile(member, io.BytesIO(b"text"))
    assert tool.of_sdist(tmp_path / "a.tar.gz") == {"src/a.py": b"text"}


def test_the_tree_is_taken_without_what_python_leaves_in_it(
    tool: ModuleType, tmp_path: Path
) -> None:
    (tmp_path / "jit" / "__pycache__").mkdir(parents=True)
    (tmp_path / "jit" / "__pycache__" / "a.pyc").write_bytes(b"")
    (tmp_path / "jit" / "a.py").write_text("text")
    assert tool.of_tree(tmp_path) == {"gristmill/jit/a.py": b"text"}
    assert "gristmill/py.typed" in tool.of_tree()


def test_a_folder_without_a_release_is_refused(
    tool: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("sys.argv", ["check_dist.py", str(tmp_path)])
    assert tool.main() == 1
    assert "run `make dist`" in capfd.readouterr().err


@pytest.mark.long
def test_a_real_wheel_passes_and_fails_without_its_tables(
    tool: ModuleType, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("build")
    words = [sys.executable, "-m", "build", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(words, check=True, capture_output=True)
    wheel = tool.check_files(tmp_path)
    files = tool.of_wheel(wheel)
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            if "/tables/" not in name:
                archive.writestr(name, data)
    with pytest.raises(tool.Unfit, match=r"nvidia-h200\.json is missing"):
        tool.check_files(tmp_path)
