"""The key of a plan: everything in a call that the plan, or the check of its arguments, depends on.

A tensor contributes its metadata and its alignment, a value also its class, because True, 1 and 1.0
are equal as keys of a dict. Unusual addresses and negative views add what the memory holds: no
memory at all, or values that torch negates when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from gristmill.errors import ArgumentError
from gristmill.select.overrides import token

# Part of every plan key: what is asked of torch.use_deterministic_algorithms.
are_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms

# Addresses below this are offsets of tensors without memory, or the heap of a Python that is not
# position-independent. `_memory_of` distinguishes them.
_LOWEST = 2**32

_OPTIONAL = "Optional[Tensor]"

# Takes the place of an address where the tensor is None: aligned, and all other bits are set.
_NONE = 2**62 - 16

_is_batched: Callable[[torch.Tensor], bool] = torch._C._functorch.is_legacy_batchedtensor
_is_wrapped: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor


def key_function(schema: Any) -> Callable[..., Hashable]:
    """The key as a function of the op's arguments.

    Written out from the schema: a loop over the arguments costs 0.9 us more at every call.
    """
    parts = ["token()", "deterministic()"]
    tensors: list[str] = []
    addresses, negated = [], []
    # Flat, the metadata of a tensor costs 0.03 us less than as a nested tuple. Of several optional
    # tensors most are None, where a nested tuple costs less.
    several = sum(str(argument.type) == _OPTIONAL for argument in schema.arguments) > 1
    for argument in schema.arguments:
        name, kind = argument.name, str(argument.type)
        if kind in ("Tensor", _OPTIONAL):
            given = f"{name} is not None and " if kind == _OPTIONAL else ""
            none = f"NONE if {name} is None else " if kind == _OPTIONAL else ""
            # A process has one kind of accelerator, so the index identifies the device at half the
            # cost. The shape of a contiguous tensor determines its strides, except in dims of one
            # element, where plans must not depend on them; hashing a bool is cheaper than a tuple.
            fields = [f"{name}.{one}" for one in ("dtype", "shape", "get_device()")]
            fields.append(f"({name}.is_contiguous() or {name}.stride())")
            if given and several:
                fields = [f"({', '.join(fields)})"]
            parts += [f"{given}{one}" for one in fields]
            addresses.append(f"(at_{len(tensors)}_ := {none}{name}.data_ptr())")
            negated.append(f"{given}{name}.is_neg()")
            tensors.append(name)
        else:
            parts.append(f"{name}.__class__, {name}")
    unusual = [
        f"({' | '.join(addresses)}) & 15",
        f"{' & '.join(f'at_{at}_' for at in range(len(tensors)))} < LOWEST",
        *negated,
    ]
    parts.append(f"({' or '.join(unusual)}) and places({', '.join(tensors)})")
    names = ", ".join(argument.name for argument in schema.arguments)
    names_here = {
        "token": token,
        "deterministic": are_deterministic,
        "places": _places,
        "NONE": _NONE,
        "LOWEST": _LOWEST,
    }
    key: Callable[..., Hashable] = eval(f"lambda {names}: ({', '.join(parts)},)", names_here)
    return key


def _places(*tensors: torch.Tensor | None) -> Hashable:
    """Alignment, negative bit and kind of memory of each tensor."""
    return tuple([None if tensor is None else _place(tensor) for tensor in tensors])


def _place(tensor: torch.Tensor) -> Hashable:
    address = tensor.data_ptr()
    memory = None if address >= _LOWEST else _memory_of(tensor)
    return address & 15, tensor.is_neg(), memory


def _memory_of(tensor: torch.Tensor) -> str | None:
    """Why a tensor has no memory; None if it has. Wrappers have no address and raise."""
    if tensor._is_zerotensor():
        return "zeros"
    if tensor.is_meta:
        return "meta"
    return None if tensor.untyped_storage().data_ptr() else "nothing"


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether the memory of a tensor does not hold its values.

    torch's dispatcher materializes these before an op runs: negative views (`z.conj().imag`), zero
    tensors without memory (autograd creates them), wrappers of torch.func that are functionalized
    or have outlived their transform, and batched gradients (`is_grads_batched=True`).
    """
    return (
        tensor.is_neg()
        or tensor.is_conj()
        or tensor._is_zerotensor()
        or torch._is_functional_tensor(tensor)
        or _is_batched(tensor)
        or _is_wrapped(tensor)
    )


def may_be_lazy(tensor: torch.Tensor) -> bool:
    """`is_lazy` at a lower cost: exact, except that it is True for all wrappers."""
    try:
        if tensor.data_ptr() >= _LOWEST:
            return tensor.is_neg() or tensor.is_conj()
    except RuntimeError:
        return True
    return is_lazy(tensor)


def _is_nowhere(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements but its storage was freed."""
    if not tensor.numel() or tensor.is_meta or is_lazy(tensor):
        return False
    return tensor.untyped_storage().data_ptr() == 0


def check_memory(op: str, names: tuple[str, ...], args: tuple[Any, ...]) -> None:
    """Check that every tensor with elements has memory."""
    for name, value in zip(names, args, strict=True):
        if isinstance(value, torch.Tensor) and _is_nowhere(value):
            raise ArgumentError(
                f"{op}: {name} has no memory: its storage of {value.untyped_storage().nbytes()} "
                f"bytes was freed or resized; got shape {tuple(value.shape)}"
            )
