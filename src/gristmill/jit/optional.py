"""Optional packages: a broken one is reported with a reason, like a missing one."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
from typing import Any

from gristmill.errors import CompilerUnavailable
from gristmill.log import one_line

_RELEASE = re.compile(r"(\d{1,9})\.(\d{1,9})")
# Module -> why its import failed. Imports are not retried: what a failed attempt leaves in
# sys.modules could make the next one fail differently or seem to succeed.
_broken: dict[str, str] = {}


class NotImportableError(Exception):
    """A module cannot be imported; the message is the reason, in one line."""


def imported(name: str) -> Any:
    """The module `name`. Raises NotImportableError, always with the same reason, if it fails.

    A module that is not installed is looked for again at the next call.
    """
    if name in _broken:
        raise NotImportableError(_broken[name])
    try:
        return importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # SystemExit, or a panic of an extension in Rust
        reason = _reason(error)
        missing = isinstance(error, ModuleNotFoundError) and f"{name}.".startswith(f"{error.name}.")
        if not missing:
            _broken[name] = reason
        raise NotImportableError(reason) from error


def required(name: str, package: str, install: str) -> Any:
    """The module `name` of a compiler's package. Raises CompilerUnavailable if its import fails."""
    try:
        return imported(name)
    except NotImportableError as error:
        raise CompilerUnavailable(f"{package} cannot be imported ({error}); {install}") from error


def check_release(module: Any, package: str, least: tuple[int, int], install: str) -> None:
    """Raise CompilerUnavailable if a compiler is older than `least` or does not say its version."""
    found = release(module)
    if found is None:
        raise CompilerUnavailable(f"{package} does not say its version; {install}")
    if found < least:
        raise CompilerUnavailable(
            f"{package} {module.__version__} is older than {'.'.join(map(str, least))}, the first "
            f"that gristmill's kernels are compiled with; {install}"
        )


def _reason(error: BaseException) -> str:
    try:
        message = one_line(error)
    except Exception:  # of its __str__
        message = ""
    if message and isinstance(error, ImportError):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def forget_broken() -> None:
    """Try every import again (tests)."""
    _broken.clear()


def release(module: Any) -> tuple[int, int] | None:
    """Major and minor version of a module; None if its `__version__` does not say."""
    try:
        told = str(module.__version__)
    except Exception:  # not there, or computed by something that is broken
        return None
    match = _RELEASE.match(told)
    return None if match is None else (int(match[1]), int(match[2]))


def installed_version(distribution: str) -> str:
    """The version in the metadata of an installed distribution; "" if there is none."""
    try:
        found: object = importlib.metadata.version(distribution)
    except Exception:  # not installed, or damaged metadata
        return ""
    return found if isinstance(found, str) else ""
