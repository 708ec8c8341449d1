"""How another Python is started, and what it may import: nothing from the current folder.

Others may be able to write to the folder that a program runs in, and `python -c`, `python -m` and
an empty or relative entry of PYTHONPATH all import from it. So a child is started isolated
(`python -I`), which also ignores every variable of Python's own, and is given its import path: of
the entries of this process, in their order,

- what an isolated Python has anyway: the standard library, site-packages, the lines of .pth files;
- what PYTHONPATH names with an absolute path, and the user's own site-packages;
- what else is in `sys.path`, where only the user and root can write to it, and it is not the
  current folder, now or when this module was imported.

gristmill itself is the one of this process, wherever it was found.
"""

from __future__ import annotations

import json
import os
import site
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from gristmill.jit.folder import why_untrusted
from gristmill.settings import path_variables

_BEGIN = """
import json, os, sys
from importlib.util import module_from_spec, spec_from_file_location
told = json.loads(sys.argv.pop(1))
os.environ.update(told["environment"])
path = [entry for entry, taken in told["path"] if taken or entry in sys.path]
sys.path[:] = path + [entry for entry in sys.path if entry not in path]
class Gristmill:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return spec_from_file_location(name, told["package"]) if name == "gristmill" else None
sys.meta_path.insert(0, Gristmill)
"""
# To begin a script with: an empty stand-in for the package, whose modules can be imported. All of
# it takes 2 s, for it imports torch.
MODULES_ONLY = 'sys.modules["gristmill"] = module_from_spec(Gristmill.find_spec("gristmill"))'
_PACKAGE = Path(__file__).absolute().parent.parent


def command(script: str, *words: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """The command of a Python that runs `script`, a constant, with `words` as `sys.argv[1:]`.

    `environment` is added to what the child inherits, as are the settings that are paths: they mean
    the same in any folder. OSError if this process does not know its Python.
    """
    if not sys.executable:
        raise FileNotFoundError("sys.executable is empty: no other Python can be started")
    told = {
        "environment": {**path_variables(), **(environment or {})},
        "path": list(_entries()),
        "package": str(_PACKAGE / "__init__.py"),
    }
    flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    return [sys.executable, *flags, "-c", _BEGIN + script, json.dumps(told), *words]


def _entries() -> Iterator[tuple[str, bool]]:
    """The entries of `sys.path` that a child takes; False: only if it has them anyway."""
    searched = "" if sys.flags.ignore_environment else os.environ.get("PYTHONPATH", "")
    named = {entry for entry in searched.split(os.pathsep) if os.path.isabs(entry)}
    # Python has made these absolute when it started.
    relative = {"", *searched.split(os.pathsep)} - named
    current = {Path(place, entry) for place in (_STARTED_IN, _folder()) for entry in relative}
    if site.ENABLE_USER_SITE and site.USER_SITE:
        named.add(site.USER_SITE)
    for entry in sys.path:
        if not isinstance(entry, str) or not os.path.isabs(entry):
            continue
        place = Path(entry)
        if entry in named:
            yield entry, True
        elif not any(_is_same(place, one) for one in current):
            yield entry, place.is_dir() and why_untrusted(place, place) is None


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them is not there
        return False


def _folder() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been deleted: nothing can be in it
        return ""


# The program may go elsewhere later.
_STARTED_IN = _folder()
