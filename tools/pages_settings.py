"""docs/settings.md: a row for every variable of gristmill.settings."""

from __future__ import annotations

import re

from pages_text import Page
from pages_text import table as written

from gristmill.settings import VARIABLES, Variable

# Where a reader finds what a line cannot say. A variable without a page is an error.
MORE = {
    "GRISTMILL_CACHE_DIR": ("the cache", "cache.md"),
    "GRISTMILL_CACHE_LAYERS": ("layers", "cache.md#layers-and-bundles"),
    "GRISTMILL_JIT": ("containers", "container.md"),
    "GRISTMILL_USE": ("choosing", "choosing.md#saying-otherwise"),
    "GRISTMILL_TABLE": ("tables", "tuning.md#tables"),
    "GRISTMILL_TUNE": ("tuning", "tuning.md#from-inside-a-program"),
    "GRISTMILL_RECORD": ("recordings", "tuning.md#recordings"),
    "GRISTMILL_BATCH_INVARIANT": ("the promise", "batch_invariance.md#the-promise"),
    "GRISTMILL_LOG": ("the log", "observability.md#the-log"),
    "GRISTMILL_NVTX": ("profilers", "observability.md#ranges-for-profilers"),
    "GRISTMILL_VLLM": ("vLLM", "vllm.md#turning-it-on"),
    "GRISTMILL_DEBUG": ("cross entropy", "ops/cross_entropy.md"),
}


def table(page: Page) -> str:
    head = ("variable", "values", "default", "what it does", "more")
    return written(head, [_row(variable, page) for variable in VARIABLES])


def _row(variable: Variable, page: Page) -> tuple[str, ...]:
    words, target = MORE[variable.name]
    more = f"[{words}]({page.link(f'docs/{target}')})"
    default = _paths(variable.default) if variable.default else "nothing"
    return f"`{variable.name}`", _values(variable), default, _help(variable), more


def _values(variable: Variable) -> str:
    if "|" in variable.values:
        return ", ".join(f"`{word}`" for word in variable.values.split("|"))
    return f"`{variable.values}`" if ":variant" in variable.values else variable.values


def _help(variable: Variable) -> str:
    """The line of settings.py with code marked: errors, functions, commands, its own values."""
    text = re.sub(
        r"gristmill\.\w+\(\)|gristmill \w+ --\w+|\b[A-Z][a-z]+(?:[A-Z][a-z]+)+",
        r"`\g<0>`",
        variable.help,
    )
    for word in variable.values.split("|"):
        text = re.sub(rf"(^|; ){re.escape(word)} ", rf"\1`{word}` ", text)
    return text


def _paths(default: str) -> str:
    """Code for words and paths; `else` between two paths stays a word."""
    return re.sub(
        r"[^\s,]+", lambda word: word[0] if word[0] == "else" else f"`{word[0]}`", default
    )
