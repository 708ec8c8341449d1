"""What a plan is found by: all of a call that a plan, or the check of its arguments, depends on.

Tensors count by their metadata and their alignment; values by their class, too, as True, 1 and 1.0
are one key to a dict. Addresses are looked at only where they are out of the ordinary, together
with what lies there: a tensor that torch negates when it is read, one without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from gristmill.errors import ArgumentError
from gristmill.select.overrides import token

# Part of every plan key: what is asked of torch.use_deterministic_algorithms.
are_deterministic: Callable[[], bool] = torch._C._get_deterministic_algorithms

# Below this lie offsets into memory that is not there, and tensors on the heap of a Python that is
# not position-independent: the difference is looked up.
_LOWEST = 2**32

_OPTIONAL = "Optional[Tensor]"

# Instead of the address of a tensor that is None: aligned, and with all the other bits set.
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
    # Side by side, a tensor's metadata costs 0.03 us less than as a tuple of its own. Of several
    # optional tensors most are None, for whom a tuple costs less.
    several = sum(str(argument.type) == _OPTIONAL for argument in schema.arguments) > 1
    for argument in schema.arguments:
        name, kind = argument.name, str(argument.type)
        if kind in ("Tensor", _OPTIONAL):
            given = f"{name} is not None and " if kind == _OPTIONAL else ""
            none = f"NONE if {name} is None else " if kind == _OPTIONAL else ""
            # One process has no two kinds of accelerators: the index costs half of the device. Of a
            # contiguous tensor the shape tells the strides, but for dims of one element, whose
            # strides nothing depends on; a tuple of numbers costs more to hash than one word.
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
    """Alignments and signs, and what lies at an unusual address."""
    return tuple([None if tensor is None else _place(tensor) for tensor in tensors])


def _place(tensor: torch.Tensor) -> Hashable:
    address = tensor.data_ptr()
    memory = None if address >= _LOWEST else _memory_of(tensor)
    return address & 15, tensor.is_neg(), memory


def _memory_of(tensor: torch.Tensor) -> str | None:
    """What is in the place of memory, if there is none. Wrappers have no address and raise."""
    if tensor._is_zerotensor():
        return "zeros"
    if tensor.is_meta:
        return "meta"
    return None if tensor.untyped_storage().data_ptr() else "nothing"


def is_lazy(tensor: torch.Tensor) -> bool:
    """Whether its memory does not hold its values: torch's dispatcher makes these where needed.

    It does before an op of ours runs: a negated view (`z.conj().imag`), a tensor of zeros without
    memory (which autograd makes), a wrapper of torch.func that is functionalized or has outlived
    its transform, a gradient of many at once (`is_grads_batched=True`).
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
    """The same at the price of a call: exact but for wrappers, for which it says so."""
    try:
        nowhere = tensor.data_ptr() < _LOWEST
    except RuntimeError:
        return True
    if nowhere or tensor.is_neg() or tensor.is_complex():
        return is_lazy(tensor)
    return False


def _is_nowhere(tensor: torch.Tensor) -> bool:
    """Whether it has elements but no memory: its storage was freed."""
    if not tensor.numel() or tensor.is_meta or is_lazy(tensor):
        return False
    return tensor.untyped_storage().data_ptr() == 0


def check_memory(op: str, names: tuple[str, ...], args: tuple[Any, ...]) -> None:
    """Every tensor with elements has memory."""
    for name, value in zip(names, args, strict=True):
        if isinstance(value, torch.Tensor) and _is_nowhere(value):
            raise ArgumentError(
                f"{op}: {name} has no memory: its storage of {value.untyped_storage().nbytes()} "
                f"bytes was freed or resized; got shape {tuple(value.shape)}"
            )
