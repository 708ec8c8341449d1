"""The documents say what is true: settings, public names, examples and links are checked."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from typer.main import get_command
from typer.testing import CliRunner

import gristmill
import gristmill.checkpoints
import gristmill.distributed
import gristmill.integrations.transformers
from gristmill import settings
from gristmill.cli.app import app
from gristmill.ops.registry import OPS

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("**/*.md")])
LINKING = [*PAGES, ROOT / "benchmarks" / "results" / "README.md"]
COMMAND = re.compile(r"^\$ (?:[A-Z_]+=\S+ )*gristmill (.+?)(?:\s+#.*)?$", re.MULTILINE)
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# With or without a title, as the files of the walk have one: no heading and no link is in these.
CODE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def page(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(text: str, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(text) if kind == language]


def anchors(text: str) -> set[str]:
    """The anchors a page has, made from its headings as code hosts make them."""
    titles = re.findall(r"^#+ (.+)$", CODE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def test_every_setting_named_anywhere_exists() -> None:
    known = {variable.name for variable in settings.VARIABLES}
    for path in PAGES:
        named = set(re.findall(r"GRISTMILL_[A-Z_]*[A-Z]", path.read_text(encoding="utf-8")))
        assert named <= known, path.name


def public_names() -> dict[str, Any]:
    """Everything a user may call, by the name the page has for it."""
    modules = {
        "": gristmill,
        "nn.": gristmill.nn,
        "nvfp4.": gristmill.nvfp4,
        "checkpoints.": gristmill.checkpoints,
        "distributed.": gristmill.distributed,
        "integrations.transformers.": gristmill.integrations.transformers,
    }
    found: dict[str, Any] = {}
    for prefix, module in modules.items():
        for name in module.__all__:
            value = getattr(module, name)
            # What the package itself has (`patch`) stands on the page once, by its short name.
            again = prefix != "" and getattr(gristmill, name, None) is value
            if not (name.startswith("__") or isinstance(value, ModuleType) or again):
                found[prefix + name] = value
    return found


def test_api_page_has_a_section_for_every_public_name() -> None:
    titles = re.findall(r"^#{2,3} `(?:gristmill\.)?([\w.]+)", page("docs/api.md"), re.M)
    assert sorted(titles) == sorted(public_names())


def test_api_page_has_the_signatures_as_they_are() -> None:
    """Names, order, kinds and defaults; a default may be left out as `...`."""
    titles = re.findall(r"^### `(?:gristmill\.)?([\w.]+)\((.*)\)`$", page("docs/api.md"), re.M)
    assert len(titles) == len(public_names())
    for name, arguments in titles:
        namespace: dict[str, Any] = {"torch": torch}
        exec(f"def written({arguments}): ...", namespace)
        written = inspect.signature(namespace["written"]).parameters
        found = inspect.signature(public_names()[name]).parameters
        assert list(written) == list(found), name
        for one, other in zip(written.values(), found.values(), strict=True):
            assert one.kind == other.kind, f"{name}: {one.name}"
            assert one.default in (..., other.default), f"{name}: {one.name}"


def test_api_page_names_every_op() -> None:
    """As torch ops, the first with its namespace; and no op that is not there."""
    (sentence,) = re.findall(r"Each is also a torch op: (.*?), which", page("docs/api.md"), re.S)
    named = re.findall(r"`(?:torch\.ops\.gristmill)?\.(\w+)`", sentence)
    registered = {
        name.removeprefix("gristmill::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("gristmill::")
    }
    # The way in which runners refuse a gradient, and what a MultiKernel with a gradient writes to:
    # nobody calls them. And what vLLM's plugin registers, if a test has imported that: only vLLM's
    # graphs call it.
    plugin = {name for name in registered if name.startswith("vllm_")}
    assert sorted(named) == sorted(registered - plugin - {"copy_to_write", "runner_gradient"})
    assert set(OPS) < registered


def test_api_page_has_every_error() -> None:
    errors = {name for name, value in vars(gristmill.errors).items() if isinstance(value, type)}
    listed = set(re.findall(r"^\| `(\w+)` \|", page("docs/api.md"), re.M))
    assert errors - {"GristmillError"} <= listed


WITH_EXAMPLES = [path for path in PAGES if blocks(path.read_text(encoding="utf-8"), "python")]
# What changes a process, or takes long, or is what most will try first.
ALONE = ("README", "start", "transformers", "dtensor", "export", "multikernel", "observability")
TOGETHER = [path for path in WITH_EXAMPLES if path.stem not in ALONE]


@pytest.mark.parametrize(
    "paths",
    [TOGETHER, *([path] for path in WITH_EXAMPLES if path not in TOGETHER)],
    ids=lambda paths: name_of(paths[0]),
)
def test_python_examples_run(paths: list[Path], tmp_path: Path) -> None:
    """All examples of a page, in order, as one program on the CPU.

    In a fresh process; those that only call ops share one.
    """
    run_examples(paths, tmp_path, CUDA_VISIBLE_DEVICES="")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["README.md", "docs/start.md"])
def test_python_examples_run_on_a_gpu(name: str, tmp_path: Path) -> None:
    """Those that ask for a GPU where there is one, a captured graph among them."""
    run_examples([ROOT / name], tmp_path)


def run_examples(paths: Sequence[Path], folder: Path, **settings: str) -> None:
    programs = {
        name_of(path): "\n".join(blocks(path.read_text(encoding="utf-8"), "python"))
        for path in paths
    }
    script = f"for name, text in {programs!r}.items():\n"
    script += "    exec(compile(text, name, 'exec'), {'__name__': '__main__'})\n"
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **settings},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr


def test_explain_output_is_what_it_prints() -> None:
    """Variants, their status and the verdict; configs and reasons change with every tuning.

    Of a variant whose compiler is an extra the status depends on who looks.
    """
    (shown,) = (block for block in blocks(page("docs/choosing.md"), "console") if "->" in block)
    command, *lines = shown.splitlines()
    printed = CliRunner().invoke(app, command.split()[2:]).output

    def gist(text: list[str]) -> list[str]:
        lines = [re.sub(r"^(.{2}  \w+ +\w+)  .*", r"\1", line) for line in text]
        return [re.sub(r"^(    cutedsl) .*", r"\1", line) for line in lines]

    assert gist(lines) == gist(printed.splitlines())


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_commands_in_examples_exist(path: Path) -> None:
    """Of console examples, and of Dockerfiles: the command, what it is asked to do, its options."""
    text = path.read_text(encoding="utf-8")
    lines = "".join(blocks(text, "console"))
    lines += re.sub(r"^RUN ", "$ ", "".join(blocks(text, "dockerfile")), flags=re.M)
    for words in COMMAND.findall(lines):
        found, rest = get_command(app), words.split()
        while hasattr(found, "commands"):
            known = rest and rest[0] in found.commands
            # `gristmill bench rms_norm` is its command `run`, by default.
            found = found.commands.get(rest.pop(0) if known else "run")
            assert found is not None, f"gristmill {words}: there is no such command"
        options = {name for parameter in found.params for name in parameter.opts}
        used = {word.partition("=")[0] for word in rest if word.startswith("-")}
        assert used <= options | {"-h", "--help"}, f"gristmill {words}"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_make_targets_named_exist(path: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", page("Makefile"), re.M))
    text = path.read_text(encoding="utf-8")
    # In code only: prose may well say "make sure".
    named = re.findall(r"(?:`|^\$ )make ([a-z-]+)", text, re.M)
    assert set(named) <= targets


@pytest.mark.parametrize("path", LINKING, ids=name_of)
def test_relative_links_resolve(path: Path) -> None:
    text = CODE.sub("", path.read_text(encoding="utf-8"))
    for target in re.findall(r"(?:\]\(|\bsrc=\"|\bsrcset=\")([^)\"\s]+)", text):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = (path.parent / file).resolve() if file else path
        assert linked.exists(), f"{path.name} links to {target}"
        if anchor:
            assert anchor in anchors(linked.read_text(encoding="utf-8")), f"{path.name}: {target}"


@pytest.mark.parametrize("path", sorted((ROOT / "docs").glob("**/*.md")), ids=name_of)
def test_no_page_is_a_dead_end(path: Path) -> None:
    """The last paragraph, or the list or table there, leads on to another page."""
    last = path.read_text(encoding="utf-8").strip().rpartition("\n\n")[2]
    assert re.search(r"\]\((?!#)[^)\s]+\.md", last), last


def test_pages_for_readers_stay_short() -> None:
    """The README is read before anybody decides to read on."""
    lines = page("README.md").splitlines()
    start, end = (lines.index(f"<!-- measured: {word} -->") for word in ("begin", "end"))
    assert len(lines) - (end - start) <= 110
    assert lines.index("<picture>") < 6  # the picture first


def test_dependencies_page_has_every_package() -> None:
    """What pyproject.toml names has a line that says why, and no line is of something else."""
    tomllib = pytest.importorskip("tomllib")  # Python 3.11
    project = tomllib.loads(page("pyproject.toml"))["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *(one for some in extras.values() for one in some)]
    names = {re.match(r"[\w-]+", one)[0] for one in wanted} - {"gristmill"}
    listed = re.findall(r"^\| (`[\w-]+`(?:, `[\w-]+`)*)", page("docs/dependencies.md"), re.M)
    assert {name.strip("`") for cell in listed for name in cell.split(", ")} == names
    titles = set(re.findall(r"^## Extra `(\w+)`$", page("docs/dependencies.md"), re.M))
    assert titles == set(extras)


def test_files_named_in_the_design_exist() -> None:
    package = ROOT / "src" / "gristmill"
    for name in re.findall(
        r"`((?:jit|select|ops|nn|distributed|integrations|bench|cli)/[\w./]*)`",
        page("docs/design.md"),
    ):
        assert (package / name).exists(), name
