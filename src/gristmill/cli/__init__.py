"""The `gristmill` command.

Each command's work is imported when it runs, so that `--help` answers at once.
"""

from __future__ import annotations


def main() -> None:
    """The entry point of the `gristmill` script and of `python -m gristmill`."""
    from gristmill.cli.app import app

    app(prog_name="gristmill")
