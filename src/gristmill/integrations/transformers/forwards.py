"""A module's own `forward`: exchanged on the instance, and given back.

An `ExchangedForward` stands in the module's `__dict__`, before the method of its class: the module
stays what it is (class, parameters, hooks, place in the model). It is an object of ours and no
bound method, because a pickle keeps a bound method by its name alone and would come back with the
class's. What the function needs to know stands beside it in the module's attribute `gristmill`, a
frozen dataclass. The forward is remembered once more under a name of ours: others may wrap the one
that they find (accelerate's mixed precision does), and it must still be known what is behind it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch

OPTIONS = "gristmill"

_OURS = "gristmill_forward"
# Where accelerate keeps the forward that its hooks run (device maps, offloading).
_HOOKED = "_old_forward"
_REPLICATE = "_replicate_for_data_parallel"


class ExchangedForward:
    """`function(module, *args, **kwargs)` in the place of a module's forward.

    `previous` is a forward of the instance's own that it stands in front of; None where the class's
    did the work. `inspect.signature` gives that of the original: trainers drop the columns of a
    dataset, and `generate` refuses arguments, that a model's forward does not name.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        function: Callable[..., Any],
        previous: Callable[..., Any] | None,
    ):
        self.module = module
        self.function = function
        self.previous = previous

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if exchanged_forward(self.module) is not self:  # restored; only a wrapper knows it still
            return self.original(*args, **kwargs)
        return self.function(self.module, *args, **kwargs)

    @property
    def original(self) -> Callable[..., Any]:
        """What the module ran before, for arguments without the module."""
        if self.previous is not None:
            return self.previous
        return _class_forward(self.module)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(self.original)


class _Replicate:
    """`torch.nn.DataParallel` copies a module's `__dict__`: the copy's forward must be its own."""

    def __init__(self, module: torch.nn.Module):
        self.module = module

    def __call__(self) -> Any:
        replica = type(self.module)._replicate_for_data_parallel(self.module)
        exchanged = exchanged_forward(self.module)
        if exchanged is not None:
            forward = ExchangedForward(replica, exchanged.function, None)
            vars(replica)[_place(replica)] = vars(replica)[_OURS] = forward
        return replica


def exchange_forward(
    module: torch.nn.Module, function: Callable[..., Any], options: object
) -> None:
    """Let the module run `function(module, *args, **kwargs)`, found by its name in its file.

    `options` (not None, picklable) becomes `module.gristmill`. Under accelerate's hooks the
    function comes where these look for it. A module that is exchanged already gets the new
    function and options, and keeps its memory of what was before.
    """
    own = vars(module)
    own[OPTIONS] = options
    present = exchanged_forward(module)
    if present is not None:
        present.function = function
        return
    forward = ExchangedForward(module, function, own_forward(module))
    own[_place(module)] = own[_OURS] = forward
    own[_REPLICATE] = _Replicate(module)


def restore_forward(module: torch.nn.Module) -> bool:
    """Give the module back the forward that it had; False where it was never exchanged.

    Where somebody has wrapped the exchanged forward since, the wrapping stays, and runs the
    original.
    """
    forward = exchanged_forward(module)
    if forward is None:
        return False
    own: dict[str, Any] = vars(module)
    place = _place(module)
    if place in own and own[place] is forward:
        if forward.previous is not None:
            own[place] = forward.previous
        elif place == _HOOKED:
            own[place] = MethodType(type(module).forward, module)
        else:
            del own[place]
    for name in (OPTIONS, _OURS, _REPLICATE):
        own.pop(name, None)
    return True


def options_of(module: torch.nn.Module) -> Any:
    """The options a module was exchanged with; None where it was not."""
    return getattr(module, OPTIONS, None)


def exchanged_forward(module: torch.nn.Module) -> ExchangedForward | None:
    """Ours, wherever it stands: in this module, behind accelerate's hooks, in a wrapper."""
    forward: ExchangedForward | None = getattr(module, _OURS, None)
    return forward


def own_forward(module: torch.nn.Module) -> Callable[..., Any] | None:
    """A forward that somebody else gave this instance; None where it runs that of its class.

    accelerate's hooks are none: they run another forward, which is the one that is looked at.
    """
    forward: Any = vars(module).get(_place(module))
    if forward is None or isinstance(forward, ExchangedForward):
        return None
    if getattr(forward, "__func__", None) is getattr(type(module), "forward", None):
        return None  # what accelerate remembers of a class's forward, and leaves when it is removed
    bound: Callable[..., Any] = forward
    return bound


def original_forward(module: torch.nn.Module) -> Callable[..., Any]:
    """What the module runs when it is not exchanged, for arguments without the module."""
    exchanged = exchanged_forward(module)
    if exchanged is not None:
        return exchanged.original
    return own_forward(module) or _class_forward(module)


def _class_forward(module: torch.nn.Module) -> Callable[..., Any]:
    # No bound method: Dynamo traces the making of a partial, in torch 2.11 not `__get__`, and in
    # neither 2.11 nor 2.13 a `MethodType`.
    return partial(type(module).forward, module)


def _place(module: torch.nn.Module) -> str:
    return _HOOKED if _HOOKED in vars(module) and hasattr(module, "_hf_hook") else "forward"
