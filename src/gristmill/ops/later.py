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
        return _Function(self._module, name)


class _Function:
    """A function of a module that is not imported yet."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self.__name__ = module, name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.found()(*args, **kwargs)

    def found(self) -> Callable[..., Any]:
        """The function itself."""
        function: Callable[..., Any] = getattr(import_module(self._module), self.__name__)
        return function
