"""Modules that few processes need: imported when one of their functions is first called."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any


class Later:
    """Stands for a module. Its attributes are functions, which import it and call its own."""

    def __init__(self, module: str) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            return getattr(import_module(self._module), name)(*args, **kwargs)

        call.__name__ = call.__qualname__ = name
        return call
