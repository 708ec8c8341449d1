"""Check what `make dist` has built, then install it into a clean environment and try it there.

    python tools/check_dist.py dist --venv .venv-dist --torch torch==2.13.0

`build` makes the wheel of the sdist. Here it is held against the tree: the same files, byte by
byte, and nothing else. A wheel that is built of the tree itself must be the same. The environment
has torch and what the wheel asks for, and is kept: before each run everything but torch is taken
out again.
"""

from __future__ import annotations

import argparse
import configparser
import email
import re
import shlex
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Mapping
from email.message import Message
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "gristmill"
SMOKE = Path(__file__).resolve().parent / "dist_smoke.py"
LARGEST_WHEEL = 3_000_000
# All that a user's environment gets; torch's CUDA wheels bring the compiler themselves.
REQUIRED = {"regex", "rich", "safetensors", "torch", "typer"}
EXTRAS = {"cutedsl", "dev", "docs", "nvrtc", "transformers", "triton"}
ENTRY_POINTS = {
    "console_scripts": {"gristmill"},
    "vllm.general_plugins": {"gristmill_norms", "gristmill_nvfp4"},
}
# At least one of each: a tree that has lost them would otherwise agree with its wheel.
KINDS = (
    "kernels/cuda/*.cu",
    "kernels/cuda/*.cuh",
    "kernels/triton/*.py",
    "tables/*.json",
    "bench/page/*.css",
    "bench/page/*.js",
    "py.typed",
)
IN_SDIST = (
    *("CHANGELOG.md", "LICENSE", "Makefile", "PACKAGE.md", "README.md", "mkdocs.yml"),
    *("pyproject.toml", "docs/index.md", "src/gristmill/py.typed", "tests/conftest.py"),
    *("tools/check_dist.py", "tools/environment"),
)
LITTER = re.compile(r"(^|/)(\.git|\.venv[^/]*|__pycache__|bench-results|dist|site)/|\.(pyc|so|o)$")
# Links and pictures that hold on a page of their own.
LINK = re.compile(r"\]\((?!https?://|#)([^)]*)\)|(?:src|href)=\"(?!https?://|#)([^\"]*)\"")

Files = Mapping[str, bytes]


class Unfit(Exception):  # noqa: N818 - reads as what it says
    """What was built must not be released."""


def version() -> str:
    text = (PACKAGE / "version.py").read_text()
    found = re.search(r'__version__ = "([^"]+)"', text)
    if found is None:
        raise Unfit(f"{PACKAGE / 'version.py'} has no __version__")
    return found.group(1)


def of_wheel(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def of_sdist(path: Path) -> dict[str, bytes]:
    """By the path within its one folder."""
    found: dict[str, bytes] = {}
    with tarfile.open(path) as archive:
        for member in archive.getmembers():
            stream = archive.extractfile(member)
            if stream is not None:
                found[member.name.partition("/")[2]] = stream.read()
    return found


def of_tree(package: Path = PACKAGE) -> dict[str, bytes]:
    """What a wheel must have of the package, by its name there."""
    paths = (path for path in package.rglob("*") if path.is_file())
    return {
        f"gristmill/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in paths
        if "__pycache__" not in path.parts
    }


def wheel_problems(files: Files, size: int, tree: Files, release: str) -> list[str]:
    """Everything that is wrong with a wheel; of nothing the list is empty."""
    about = f"gristmill-{release}.dist-info/"
    inside = {name: data for name, data in files.items() if not name.startswith(about)}
    found = [f"{name} is missing" for name in sorted(tree.keys() - inside.keys())]
    found += [
        f"{name} does not belong into a wheel" for name in sorted(inside.keys() - tree.keys())
    ]
    found += [
        f"{name} is not that of the tree"
        for name in sorted(tree.keys() & inside.keys())
        if tree[name] != inside[name]
    ]
    for kind in KINDS:
        if not any(Path(name).match(f"gristmill/{kind}") for name in inside):
            found.append(f"there is no gristmill/{kind}")
    if size >= LARGEST_WHEEL:
        found.append(f"it has {size / 1e6:.2f} MB; less than {LARGEST_WHEEL / 1e6:.0f} are allowed")
    for name in ("METADATA", "WHEEL", "entry_points.txt", "licenses/LICENSE"):
        if about + name not in files:
            return [*found, f"{about}{name} is missing"]
    metadata = email.message_from_bytes(files[about + "METADATA"])
    found += metadata_problems(metadata, release)
    found += entry_point_problems(files[about + "entry_points.txt"].decode(), inside)
    if b"Tag: py3-none-any" not in files[about + "WHEEL"]:
        found.append("it is not for every machine (py3-none-any)")
    return found


def metadata_problems(metadata: Message, release: str) -> list[str]:
    found = []
    wanted = {"Name": "gristmill", "Version": release, "License-Expression": "Apache-2.0"}
    wanted |= {"Requires-Python": ">=3.10", "Description-Content-Type": "text/markdown"}
    for name, value in wanted.items():
        if metadata.get(name) != value:
            found.append(f"metadata: {name} is {metadata.get(name)!r}, not {value!r}")
    lines = metadata.get_all("Requires-Dist", [])
    names = {re.split(r"[^\w-]", line)[0] for line in lines if "extra ==" not in line}
    if names != REQUIRED:
        found.append(f"metadata: it requires {sorted(names)}, not {sorted(REQUIRED)}")
    extras = set(metadata.get_all("Provides-Extra", []))
    if extras != EXTRAS:
        found.append(f"metadata: its extras are {sorted(extras)}, not {sorted(EXTRAS)}")
    text = str(metadata.get_payload())
    if "pip install gristmill" not in text:
        found.append("metadata: the description does not say how to install it")
    for link in LINK.finditer(text):
        found.append(f"metadata: a link of the description is dead there: {link.group()}")
    return found


def entry_point_problems(text: str, inside: Iterable[str]) -> list[str]:
    parser = configparser.ConfigParser()
    parser.read_string(text)
    there = {section: set(parser[section]) for section in parser.sections()}
    found = []
    if there != ENTRY_POINTS:
        found.append(f"entry points: {there}, not {ENTRY_POINTS}")
    for section in parser.sections():
        for name, target in parser[section].items():
            path = target.partition(":")[0].replace(".", "/")
            if not {f"{path}.py", f"{path}/__init__.py"} & set(inside):
                found.append(f"entry point {name}: there is no {target}")
    return found


def sdist_problems(files: Files, tree: Files) -> list[str]:
    found = [f"{name} is missing" for name in IN_SDIST if name not in files]
    wanted = {f"src/{name}" for name in tree}
    found += [f"{name} is missing" for name in sorted(wanted - files.keys())]
    found += [
        f"{name} does not belong into an sdist" for name in sorted(filter(LITTER.search, files))
    ]
    return found


def only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise Unfit(f"{folder} has {len(found)} files {pattern}, not one; run `make dist`")
    return found[0]


def check_files(dist: Path) -> Path:
    """The wheel, if it and the sdist are fit."""
    release, tree = version(), of_tree()
    wheel = only(dist, f"gristmill-{release}-*.whl")
    sdist = only(dist, f"gristmill-{release}.tar.gz")
    files = of_wheel(wheel)
    problems = {wheel.name: wheel_problems(files, wheel.stat().st_size, tree, release)}
    problems[sdist.name] = sdist_problems(of_sdist(sdist), tree)
    with tempfile.TemporaryDirectory(prefix="gristmill-dist-") as folder:
        words = [sys.executable, "-m", "build", "--wheel", "--outdir", folder, str(ROOT)]
        run(words)
        direct = of_wheel(only(Path(folder), "*.whl"))
    differing = sorted(
        name for name in direct.keys() | files.keys() if direct.get(name) != files.get(name)
    )
    problems["a wheel of the tree itself"] = [f"{name} differs" for name in differing]
    lines = [f"{name}: {line}" for name, found in problems.items() for line in found]
    if lines:
        raise Unfit("\n".join(lines))
    say(f"{wheel.name}: {len(files)} files, {wheel.stat().st_size / 1e6:.2f} MB; {sdist.name}")
    return wheel


def clean_environment(venv: Path, torch: str) -> Path:
    """The Python of an environment with `torch`, what that requires, and nothing else."""
    python, stamp = venv / "bin" / "python", venv / ".torch-only"
    pip = [str(python), "-m", "pip"]
    if not stamp.exists() or stamp.read_text().partition("\n")[0] != torch:
        say(f"installing {torch} into {venv}")
        run([sys.executable, "-m", "venv", "--clear", str(venv)])
        run([*pip, "install", "--quiet", *shlex.split(torch)])
        stamp.write_text("\n".join([torch, *installed(pip)]))
    kept = set(stamp.read_text().splitlines()[1:])
    if others := [name for name in installed(pip) if name not in kept]:
        run([*pip, "uninstall", "--quiet", "--yes", *others])
    return python


def installed(pip: list[str]) -> list[str]:
    listed = run([*pip, "list", "--format", "freeze"])
    return sorted(line.partition("==")[0] for line in listed.splitlines())


def try_wheel(python: Path, wheel: Path) -> None:
    pip = [str(python), "-m", "pip"]
    run([*pip, "install", "--quiet", str(wheel)])
    run([*pip, "check"])
    with tempfile.TemporaryDirectory(prefix="gristmill-smoke-") as folder:
        # Isolated (-I): neither PYTHONPATH nor this folder nor the user's packages take part.
        words = [str(python), "-I", str(SMOKE), version(), folder]
        say(run(words, cwd=folder).strip())


def run(words: list[str], *, cwd: str | None = None) -> str:
    done = subprocess.run(words, cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        raise Unfit(f"{shlex.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("dist", type=Path, help="the folder with a wheel and an sdist")
    parser.add_argument(
        "--venv", type=Path, help="where to install it; by default only files are checked"
    )
    parser.add_argument(
        "--torch", default="torch==2.13.0", help="what pip is told to install as torch"
    )
    options = parser.parse_args()
    try:
        wheel = check_files(options.dist)
        if options.venv is not None:
            try_wheel(clean_environment(options.venv.absolute(), options.torch), wheel)
    except Unfit as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
