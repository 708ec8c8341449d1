"""Commands that start another Python, which imports nothing from the current folder.

Others may be able to write to the current folder, and `python -c`, `python -m` and an empty entry
of `sys.path` or PYTHONPATH import from it. A child is therefore started isolated (`python -I`),
which also ignores Python's own environment variables. Its `sys.path` is that of this process,
without relative entries and without the current folder, followed by the entries that an isolated
Python has by default. `gristmill` is always the package of this process, wherever it was found.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path

from gristmill.settings import path_variables

_BEGIN = """
import json, os, sys
from importlib.util import module_from_spec, spec_from_file_location
given = json.loads(sys.argv.pop(1))
os.environ.update(given["environment"])
sys.path[:] = given["path"] + [entry for entry in sys.path if entry not in given["path"]]
class Gristmill:
    @staticmethod
    def find_spec(name, path=None, target=None):
        return spec_from_file_location(name, given["package"]) if name == "gristmill" else None
sys.meta_path.insert(0, Gristmill)
"""
# Put at the start of a script, it makes `gristmill` an empty package. Its modules can be imported
# without importing torch, which takes 2 s.
MODULES_ONLY = 'sys.modules["gristmill"] = module_from_spec(Gristmill.find_spec("gristmill"))'
_PACKAGE = Path(__file__).absolute().parent.parent


def command(script: str, *words: str, environment: Mapping[str, str] | None = None) -> list[str]:
    """The command that runs `script`, a constant, in a new Python with `words` as `sys.argv[1:]`.

    The child inherits the environment of this process. The settings that are paths are added as
    absolute paths, then `environment`. Start it in another folder: what it starts itself may import
    from the current one. Raises FileNotFoundError if `sys.executable` is empty.
    """
    if not sys.executable:
        raise FileNotFoundError("sys.executable is empty: no other Python can be started")
    given = {
        "environment": {**path_variables(), **(environment or {})},
        "path": [entry for entry in sys.path if _is_importable(entry)],
        "package": str(_PACKAGE / "__init__.py"),
    }
    flags = ["-I", "-B"] if sys.dont_write_bytecode else ["-I"]
    return [sys.executable, *flags, "-c", _BEGIN + script, json.dumps(given), *words]


def _is_importable(entry: object) -> bool:
    """Whether a child may import from this entry of `sys.path`."""
    if not isinstance(entry, str) or "\0" in entry or not Path(entry).is_absolute():
        return False
    for folder in (_STARTED_IN, Path()):
        with contextlib.suppress(OSError):  # one of them was deleted
            if Path(entry).samefile(folder):
                return False
    return True


try:
    # The program may change its folder later, but `python -m` keeps this one in `sys.path`.
    _STARTED_IN = Path.cwd()
except OSError:  # deleted: nothing can be imported from it
    _STARTED_IN = Path()
