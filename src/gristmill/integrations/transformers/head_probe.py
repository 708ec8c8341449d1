"""What a model does between its layers and its loss, found by letting it do it.

The model's own forward is run once, with three stand-ins: its base model gives random hidden states
of a few tokens, its head gives chosen numbers instead of logits, and its loss writes down what it
is called with. Comparing the two shows what the model does to logits on the way: nothing, a scale,
a softcap, both, or something that has no place in `linear_cross_entropy`. Neither the layers nor
the head's product are run, so it takes a moment for models of any size, on any device.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from gristmill.integrations.transformers.forwards import original_forward

# fp32 arithmetic of a few steps (a division, a tanh, a product), in relative terms.
_CLOSE = 2e-6
_SMALL, _LARGE = 2.0**-20, 2.0**100
_TOKENS = 16


@dataclass(frozen=True)
class Between:
    """logits -> softcap * tanh(scale * logits / softcap), or scale * logits."""

    scale: float = 1.0
    softcap: float | None = None


def linear_head(head: torch.nn.Module) -> str | None:
    """None where the module is a linear layer over plain weights, by its results; or why not."""
    weight, bias = getattr(head, "weight", None), getattr(head, "bias", None)
    if type(weight) is not torch.nn.Parameter or weight.dim() != 2:
        return f"its weight is a {type(weight).__name__}, not a matrix of plain numbers"
    if not weight.is_floating_point() or weight.dtype.itemsize < 2:
        return f"its weight is of {str(weight.dtype).removeprefix('torch.')}"
    names = {name for name, _ in head.named_parameters()} | {
        name for name, _ in head.named_buffers()
    }
    if names != {"weight"} | ({"bias"} if bias is not None else set()):
        return f"it has other weights than weight and bias: {', '.join(sorted(names))}"
    generator = torch.Generator().manual_seed(3)
    x, rows, offsets = (
        torch.randn(*shape, generator=generator, dtype=torch.float32)
        for shape in ((4, weight.shape[1]), (4, weight.shape[1]), (4,))
    )
    small = copy.copy(head)
    small.__dict__ = dict(head.__dict__)
    small._parameters = {
        "weight": torch.nn.Parameter(rows),
        "bias": None if bias is None else torch.nn.Parameter(offsets),
    }
    for name in ("forward", "_old_forward"):
        small.__dict__.pop(name, None)
    try:
        with torch.no_grad():
            found = type(head).forward(small, x)
        expected = torch.nn.functional.linear(x, rows, None if bias is None else offsets)
        if torch.allclose(found, expected, rtol=1e-5, atol=1e-5):
            return None
    except Exception as error:  # whatever somebody else's layer raises
        return f"it does not run as a linear layer: {_said(error)}"
    return "its results are not those of a linear layer"


def probe_forward(
    model: torch.nn.Module, base: torch.nn.Module, head: torch.nn.Module
) -> Between | str:
    """What the model's forward does to the head's results before its loss, or why it is unclear."""
    found: Between | str = ""
    for width in _widths(model, head):
        found = _probe_with(model, base, head, width)
        if isinstance(found, Between):
            break
    return found


def _widths(model: torch.nn.Module, head: torch.nn.Module) -> list[int]:
    """How wide hidden states may be: as the head's rows, or other before a last layer."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    columns: int = head.weight.shape[1]  # type: ignore[index, assignment]
    other = getattr(text, "hidden_size", columns)
    return [columns, other] if isinstance(other, int) and other != columns else [columns]


def _probe_with(
    model: torch.nn.Module, base: torch.nn.Module, head: torch.nn.Module, width: int
) -> Between | str:
    record = _Record()
    weight: Any = head.weight
    device, (rows, columns) = weight.device, weight.shape
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(2, _TOKENS, width, generator=generator, dtype=torch.float32)
    hidden = hidden.to(device, weight.dtype)
    raw = _chosen_numbers().expand(-1, -1, rows)
    labels = torch.arange(2 * _TOKENS).reshape(2, _TOKENS) % rows
    labels[0, 3] = -100

    def stand_in_of_head(*args: Any, **kwargs: Any) -> torch.Tensor:
        record.head.append((args, kwargs))
        return raw.clone()

    def stand_in_of_loss(*args: Any, **kwargs: Any) -> torch.Tensor:
        record.loss.append((args, kwargs))
        return torch.tensor(1.5)

    call: dict[str, Any] = {
        "input_ids": torch.zeros(2, _TOKENS, dtype=torch.int64, device=device),
        "labels": labels.clone(),
    }
    forward = original_forward(model)
    if "output_router_logits" in inspect.signature(forward).parameters:
        call["output_router_logits"] = False  # nothing has been routed
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=_cuda(device)))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(_standing_in(base, lambda *_, **__: _BaseOutput(hidden)))
        stack.enter_context(_standing_in(head, stand_in_of_head))
        stack.enter_context(_attribute(model, "_loss_function", stand_in_of_loss))
        try:
            output = forward(**call)
        except Exception as error:  # a forward that needs more than tokens and labels
            return f"its forward does not run with a stand-in for its layers: {_said(error)}"
    rows_of_head = torch.Size((2, _TOKENS, columns))
    return record.problem(rows_of_head, raw, labels, rows, output) or _found(record.logits(), raw)


class _Record:
    """Of one run: how the head and the loss were called."""

    def __init__(self) -> None:
        self.head: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        self.loss: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def logits(self) -> Any:
        return self._of_loss("logits", 0)

    def problem(
        self,
        rows: torch.Size,
        raw: torch.Tensor,
        labels: torch.Tensor,
        classes: int,
        output: Any,
    ) -> str | None:
        """Why this is no head that is followed by a loss, or None."""
        if len(self.head) != 1 or len(self.loss) != 1:
            return (
                f"its forward calls its head {len(self.head)} times and its loss function "
                f"{len(self.loss)} times, not once each"
            )
        args, kwargs = self.head[0]
        if kwargs or len(args) != 1 or getattr(args[0], "shape", None) != rows:
            return "its head is called with something else than a row for each token"
        logits, given = self.logits(), self._of_loss("labels", 1)
        if not isinstance(logits, torch.Tensor) or logits.shape != raw.shape:
            return "its loss is of other rows than those its head makes"
        if not isinstance(given, torch.Tensor) or not torch.equal(given.cpu(), labels):
            return "its loss is called with other labels than the model"
        if self._of_loss("vocab_size", 2) != classes:
            return f"its loss is not called with its head's {classes} classes as vocab_size"
        if logits.requires_grad:
            return "what it does to logits has weights of its own"
        fields = output.keys() if isinstance(output, dict) else ()
        if "logits" not in fields or "loss" not in fields:
            return "its output has no fields called loss and logits"
        return None

    def _of_loss(self, name: str, place: int) -> Any:
        args, kwargs = self.loss[0]
        return args[place] if len(args) > place else kwargs.get(name)


class _BaseOutput:
    """What a base model returns, with None for everything but its hidden states."""

    def __init__(self, hidden: torch.Tensor):
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)

    def __getitem__(self, key: Any) -> Any:
        return getattr(self, key) if isinstance(key, str) else (self.last_hidden_state,)[key]

    def get(self, key: str, default: Any = None) -> Any:
        return getattr(self, key) if getattr(self, key) is not None else default


def _chosen_numbers() -> torch.Tensor:
    """One for each token: zero, tiny, ordinary and huge ones, of both signs."""
    ordinary = [1.0, 0.3, 2.0, 5.7, 11.0, 19.0, 27.3, 37.0, 52.0, 77.7, 130.0, 400.0]
    positive = [_SMALL, *ordinary, 3e4, _LARGE]
    numbers = [0.0, *positive, 0.0, *(-number for number in positive)]
    return torch.tensor(numbers, dtype=torch.float32).view(2, _TOKENS, 1)


def _found(logits: torch.Tensor, raw: torch.Tensor) -> Between | str:
    """The scale and softcap that make `logits` of `raw`."""
    unclear = "what it does to logits is neither a scale nor a softcap"
    logits = logits.detach().cpu()
    # A model may mask some columns, or shift them: all must have come to the same.
    if not bool((logits == logits[..., :1]).all()):
        return "it does not treat all logits of a token alike"
    results = logits[..., 0].double().flatten()
    numbers = raw[..., 0].double().flatten()
    if not bool(torch.isfinite(results).all()) or results[0] != 0:
        return unclear

    def at(number: float) -> float:
        return float(results[int((numbers == number).nonzero()[0])])

    scale = _rounded(at(_SMALL) / _SMALL)
    if scale <= 0:
        return unclear
    softcap: float | None = None
    expected = numbers * scale
    if not math.isclose(at(_LARGE), scale * _LARGE, rel_tol=_CLOSE):
        softcap = at(_LARGE)
        expected = softcap * torch.tanh(expected / softcap)
    if not torch.allclose(results, expected, rtol=_CLOSE, atol=0.0):
        return unclear
    return Between(scale, softcap)


def _rounded(scale: float) -> float:
    """A scale that was measured in fp32, or the power of two that it was meant to be."""
    if scale <= 0:
        return scale
    power = 2.0 ** round(math.log2(scale))
    return power if math.isclose(scale, power, rel_tol=_CLOSE) else scale


@contextmanager
def _standing_in(module: torch.nn.Module, function: Callable[..., Any]) -> Iterator[None]:
    """Let a module run `function`, past accelerate's hooks and its own compiled code."""
    with _attribute(module, "forward", function), _attribute(module, "_compiled_call_impl", None):
        yield


@contextmanager
def _attribute(module: torch.nn.Module, name: str, value: Any) -> Iterator[None]:
    """An entry in a module's `__dict__`, as long as it is needed."""
    absent = object()
    before = module.__dict__.get(name, absent)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if before is absent:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before


def _cuda(device: torch.device) -> list[torch.device]:
    return [device] if device.type == "cuda" else []


def _said(error: Exception) -> str:
    """The first line of an error, in short."""
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:120]}" if text else type(error).__name__
