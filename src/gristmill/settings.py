"""Every environment variable gristmill reads: its name, its values, its default, what it does.

Nothing else in the library reads the environment. It is parsed once, at the first use of
`settings()`, never at import, so a value that is not allowed is an error of the first call that
needs it and not of `import gristmill`. An unknown name is a warning and not an error, because
others may set it, as a cluster does.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from gristmill.errors import SettingsError
from gristmill.log import shown, warn_once
from gristmill.names import meant

PREFIX = "GRISTMILL_"
# Kubernetes sets these in every container of a namespace with a service called gristmill, or
# gristmill-something.
_OF_A_SERVICE = re.compile(
    PREFIX + r"([A-Z0-9_]+_)?"
    r"(SERVICE_HOST|SERVICE_PORT(_[A-Z0-9_]+)?"
    r"|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(ADDR|PORT|PROTO))?)?)"
)


@dataclass(frozen=True)
class Variable:
    """One environment variable, as documentation and `gristmill doctor` list it."""

    name: str
    values: str
    default: str
    help: str


CACHE_DIR = Variable(
    "GRISTMILL_CACHE_DIR",
    "a path",
    "$XDG_CACHE_HOME/gristmill, else ~/.cache/gristmill",
    "the folder that holds compiled kernels and tuned tables",
)
CACHE_LAYERS = Variable(
    "GRISTMILL_CACHE_LAYERS",
    f"paths, with {os.pathsep!r} between them",
    "",
    "bundles, or folders like that of the cache, that are asked next and never written to",
)
JIT = Variable(
    "GRISTMILL_JIT",
    "on|off",
    "on",
    "off forbids compiling: a kernel that is in no cache raises KernelNotCached",
)
USE = Variable(
    "GRISTMILL_USE",
    "op:variant,op:variant,...",
    "",
    "the variant to run for each op named, as gristmill.use() does for a block of code",
)
TABLE = Variable(
    "GRISTMILL_TABLE",
    "on|off|none",
    "on",
    "off neither reads nor writes the user's own tuned table; none ignores the shipped ones too",
)
TUNE = Variable(
    "GRISTMILL_TUNE",
    "off|first-call",
    "off",
    "first-call times the variants of a problem the first time it is met, and keeps the winner",
)
RECORD = Variable(
    "GRISTMILL_RECORD",
    "a path",
    "",
    "a file that every kind of problem met is written to, for gristmill tune --recorded",
)
BATCH_INVARIANT = Variable(
    "GRISTMILL_BATCH_INVARIANT",
    "0|1",
    "0",
    "1 runs only variants whose rows do not depend on the batch, as gristmill.batch_invariant()",
)
LOG = Variable(
    "GRISTMILL_LOG",
    "debug|info|warning|error",
    "warning",
    "the level of the logger named gristmill",
)
NVTX = Variable(
    "GRISTMILL_NVTX",
    "0|1",
    "0",
    "1 puts an NVTX range, named by op, variant and shape, around each op, for profilers",
)
VLLM = Variable(
    "GRISTMILL_VLLM",
    "a comma list of norms and nvfp4",
    "",
    "what vLLM takes from gristmill without being asked: its RMSNorm, its NVFP4 layers",
)
DEBUG = Variable(
    "GRISTMILL_DEBUG",
    "0|1",
    "0",
    "1 stops at a target that is no class, where loss and gradient would be NaN",
)
VARIABLES = (
    CACHE_DIR,
    CACHE_LAYERS,
    JIT,
    USE,
    TABLE,
    TUNE,
    RECORD,
    BATCH_INVARIANT,
    LOG,
    NVTX,
    VLLM,
    DEBUG,
)

VLLM_PARTS = ("norms", "nvfp4")


@dataclass(frozen=True)
class Settings:
    """The parsed environment. `cache_dir` is None where nobody has set it and there is no home."""

    cache_dir: Path | None
    jit: bool
    use: Mapping[str, str]
    table: str
    tune: str
    record: Path | None
    batch_invariant: bool
    log: str
    vllm: frozenset[str]
    debug: bool = False
    cache_layers: tuple[Path, ...] = ()
    nvtx: bool = False


_current: Settings | None = None


def settings() -> Settings:
    """The settings of this process, parsed from the environment at the first call."""
    return _current if _current is not None else reload_settings()


def reload_settings() -> Settings:
    """Parse the environment again. Programs never need this; tests that change it do."""
    global _current
    parsed = _parse(os.environ)
    if _text(os.environ, LOG):  # unset, the level is the program's own business
        logging.getLogger("gristmill").setLevel(parsed.log.upper())
    _current = parsed
    for message in unknown_variables():
        warn_once(message, message, kind="unknown variable")
    return parsed


def unknown_variables() -> list[str]:
    """A warning, in one line, for each unknown variable with the prefix."""
    known = [variable.name for variable in VARIABLES]
    # repr escapes what would change what a terminal shows.
    return [
        f"{shown(name)} is not a setting of gristmill, and is ignored{meant(name, known)}"
        for name in sorted(os.environ)
        if name.startswith(PREFIX) and name not in known and not _OF_A_SERVICE.fullmatch(name)
    ]


def path_variables() -> dict[str, str]:
    """The settings that are paths, as variables with absolute paths."""
    now = settings()
    layers = os.pathsep.join(map(str, now.cache_layers))
    values = {CACHE_DIR: now.cache_dir, CACHE_LAYERS: layers, RECORD: now.record}
    return {variable.name: str(value) for variable, value in values.items() if value}


def _parse(environment: Mapping[str, str]) -> Settings:
    return Settings(
        cache_dir=_cache_dir(environment),
        jit=_word(environment, JIT) == "on",
        use=_use(_text(environment, USE)),
        table=_word(environment, TABLE),
        tune=_word(environment, TUNE),
        record=_record(_text(environment, RECORD)),
        batch_invariant=_word(environment, BATCH_INVARIANT) == "1",
        log=_word(environment, LOG),
        vllm=_vllm(_text(environment, VLLM)),
        debug=_word(environment, DEBUG) == "1",
        cache_layers=_cache_layers(_text(environment, CACHE_LAYERS)),
        nvtx=_word(environment, NVTX) == "1",
    )


def _text(environment: Mapping[str, str], variable: Variable) -> str:
    # An empty variable is an unset one, as in a shell: `GRISTMILL_JIT= python ...`.
    return environment.get(variable.name, "").strip()


def _word(environment: Mapping[str, str], variable: Variable) -> str:
    text = _text(environment, variable) or variable.default
    allowed = variable.values.split("|")
    if text.lower() not in allowed:
        raise SettingsError(
            f"{variable.name}={text!r} is not allowed{meant(text.lower(), allowed)}; "
            f"it takes one of: {', '.join(allowed)}"
        )
    return text.lower()


def _use(text: str) -> Mapping[str, str]:
    forced: dict[str, str] = {}
    for part in filter(None, (piece.strip() for piece in text.split(","))):
        op, colon, variant = (piece.strip() for piece in part.partition(":"))
        if not (op and colon and variant) or ":" in variant:
            raise SettingsError(f"{USE.name}: {part!r} is not of the form op:variant")
        if forced.setdefault(op, variant) != variant:
            raise SettingsError(f"{USE.name} names {op} twice: {forced[op]} and {variant}")
    return MappingProxyType(forced)


def _vllm(text: str) -> frozenset[str]:
    parts = frozenset(filter(None, (piece.strip().lower() for piece in text.split(","))))
    for part in sorted(parts - set(VLLM_PARTS)):
        raise SettingsError(
            f"{VLLM.name}: {part!r} is not allowed{meant(part, list(VLLM_PARTS))}; "
            f"it takes any of: {', '.join(VLLM_PARTS)}"
        )
    return parts


def _record(text: str) -> Path | None:
    # Absolute now: the program may change its folder before it meets its first problem.
    return _path(RECORD, text) if text else None


def _cache_layers(text: str) -> tuple[Path, ...]:
    parts = (piece.strip() for piece in text.split(os.pathsep))
    layers = tuple(dict.fromkeys(_path(CACHE_LAYERS, part) for part in parts if part))
    for layer in layers:
        if os.pathsep in str(layer):  # of the current folder: processes would get two paths
            raise SettingsError(f"{CACHE_LAYERS.name}: {str(layer)!r} has {os.pathsep!r} in it")
    return layers


def _cache_dir(environment: Mapping[str, str]) -> Path | None:
    if given := _text(environment, CACHE_DIR):
        return _path(CACHE_DIR, given)
    # The XDG specification says to ignore a relative path there.
    shared = Path(environment.get("XDG_CACHE_HOME", ""))
    if shared.is_absolute():
        return shared / "gristmill"
    try:
        home = Path.home()
    except RuntimeError:  # HOME is not set, and this user is in no list of users
        return None
    return home / ".cache" / "gristmill" if home.is_absolute() else None


def _path(variable: Variable, text: str) -> Path:
    try:
        return Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # no home folder, or the current folder was deleted
        raise SettingsError(f"{variable.name}={text!r}: {error}") from error
