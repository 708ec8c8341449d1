"""Packages that need not be there: what a broken one raises is a reason, as a missing one is."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

from gristmill.log import one_line

_RELEASE = re.compile(r"(\d+)\.(\d+)")
# Module -> why it cannot be imported. A second attempt would meet what the first has left in
# sys.modules, and fail with another error, or not at all.
_broken: dict[str, str] = {}


class NotImportableError(Exception):
    """A module cannot be imported; the message is the reason."""


def imported(name: str) -> Any:
    """The module of this name; NotImportableError, always with the same reason, if it fails.

    One that is not there is looked for again at the next call: it may have been installed.
    """
    if name in _broken:
        raise NotImportableError(_broken[name])
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        reason = why(error)
        absent = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        if not absent:
            _broken[name] = reason
        raise NotImportableError(reason) from error


def why(error: BaseException) -> str:
    """What an import has raised, in one line: the message of an ImportError says all."""
    message = one_line(error)
    if message and isinstance(error, ImportError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def forget_broken() -> None:
    """Try every import again (tests)."""
    _broken.clear()


def release(module: Any) -> tuple[int, int] | None:
    """Major and minor version as a package tells it; None where it does not."""
    match = _RELEASE.match(str(getattr(module, "__version__", "")))
    return None if match is None else (int(match[1]), int(match[2]))


def installed_version(distribution: str) -> str:
    """The version that is said to be installed; "" if none is, or it is not said."""
    try:
        found: object = importlib.metadata.version(distribution)
    except Exception:  # not there; what describes it may also be damaged in any way
        return ""
    return found if isinstance(found, str) else ""
