"""Negative and conjugate views as written arguments.

torch's fallback resolves lazy views before an op reads them, but writes back only if the op returns
the one tensor that it wrote. These kernels work for any op: resolve, run, write through the view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from gristmill.ops.autograd import written_in

_BITS: tuple[tuple[str, Callable[[torch.Tensor], torch.Tensor]], ...] = (
    ("Negative", torch.Tensor.resolve_neg),
    ("Conjugate", torch.Tensor.resolve_conj),
)


def define(library: torch.library.Library, name: str, overload: Any) -> None:
    """Register the kernels for an op that writes to arguments."""
    arguments = overload._schema.arguments
    written = [arguments[at].name for at in written_in(overload._schema)]
    if not written:
        return
    names = [one.name for one in arguments]
    for key, resolve in _BITS:
        library.impl(name, _kernel(overload, names, written, key, resolve), key, with_keyset=True)


def _kernel(
    overload: Any,
    names: list[str],
    written: list[str],
    key: str,
    resolve: Callable[[torch.Tensor], torch.Tensor],
) -> Callable[..., Any]:
    here = getattr(torch._C.DispatchKey, key)

    def resolved(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [resolved(item) for item in value]
        return resolve(value) if isinstance(value, torch.Tensor) else value

    def kernel(keys: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            values = {**dict(zip(names, args, strict=False)), **kwargs}
            found = {name: resolved(value) for name, value in values.items()}
            result = overload.redispatch(
                keys.remove(here),
                *list(found.values())[: len(args)],
                **{n: found[n] for n in kwargs},
            )
            for name in written:
                if name in values:
                    _write_back(values[name], found[name])
        return result

    return kernel


def _write_back(value: Any, found: Any) -> None:
    if isinstance(value, (list, tuple)):
        for one, other in zip(value, found, strict=True):
            _write_back(one, other)
    elif value is not None and found is not value:
        value.copy_(found)
