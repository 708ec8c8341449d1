"""How weights travel through torch: as pytrees, and in pickles."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, TypeVar

import torch
from torch.utils import _pytree as pytree

E4M3 = torch.float8_e4m3fn

T = TypeVar("T")


class ByBytes:
    """For pickles, in which torch writes fp8 but does not read it: such parts go as bytes."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: _seen_as(part, E4M3, torch.uint8) for name, part in vars(self).items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if self._has_fp8_scales(state):
            state = {**state, "scales": _seen_as(state["scales"], torch.uint8, E4M3)}
        for name, part in state.items():
            object.__setattr__(self, name, part)

    @staticmethod
    def _has_fp8_scales(state: dict[str, Any]) -> bool:
        """Whether the scales that went as bytes were numbers."""
        return True


def _seen_as(part: Any, old: torch.dtype, new: torch.dtype) -> Any:
    """A tensor of one dtype as another of the same size; anything else as it is."""
    is_old = isinstance(part, torch.Tensor) and part.dtype == old
    return part.view(new) if is_old else part


def parts(value: Any) -> list[torch.Tensor]:
    """The tensors of a dataclass, in order."""
    found = (getattr(value, field.name) for field in fields(value))
    return [part for part in found if isinstance(part, torch.Tensor)]


def register(cls: type[T], constants: tuple[str, ...] = ()) -> None:
    """Make a dataclass a pytree: its fields are the leaves, but `constants`, the last ones."""
    names = [
        field.name
        for field in fields(cls)  # type: ignore[arg-type]
        if field.name not in constants
    ]

    def flatten(value: T) -> tuple[list[Any], tuple[Any, ...]]:
        return [getattr(value, name) for name in names], tuple(
            getattr(value, name) for name in constants
        )

    def flatten_with_keys(value: T) -> tuple[list[tuple[Any, Any]], tuple[Any, ...]]:
        leaves, context = flatten(value)
        return [
            (pytree.GetAttrKey(name), leaf) for name, leaf in zip(names, leaves, strict=True)
        ], context

    def unflatten(leaves: Any, context: tuple[Any, ...]) -> T:
        # Past the checks: a map over the leaves may put anything in their places.
        value = object.__new__(cls)
        for name, leaf in zip((*names, *constants), (*leaves, *context), strict=True):
            object.__setattr__(value, name, leaf)
        return value

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"gristmill.nvfp4.{cls.__name__}",
        flatten_with_keys_fn=flatten_with_keys,
        to_dumpable_context=list,
        from_dumpable_context=tuple,
    )
