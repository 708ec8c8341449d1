"""The `gristmill` command.

Each command's work is imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations

import io
import sys


def main() -> None:
    """The entry point of the `gristmill` script and of `python -m gristmill`."""
    from gristmill.cli.app import app

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path need not be valid UTF-8
    app(prog_name="gristmill")
