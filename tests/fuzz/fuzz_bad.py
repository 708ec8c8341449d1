"""Calls with one argument that no op can take: what each kind of argument must never be."""

from __future__ import annotations

import math
from typing import Any

import torch
from conformance_helpers import copied
from fuzz_families import FAMILIES
from fuzz_plan import Arguments, Maker, Plan
from hypothesis import strategies as st

from gristmill.ops.registry import OPS

NO_TENSORS = ("a list", "a number", "text", "nothing")
TENSORS = ("complex", "meta", "sparse", "another shape", "more dims")
WORDS: dict[str, tuple[Any, ...]] = {
    "float": (math.nan, math.inf, -math.inf, 1e39, -1e300, "text", [1.0]),
    "int": (1.5, "text", 1 << 70, [3]),
    "SymInt": ("text", 1 << 70, [3]),
    "str": ("nonsense", "", 3),
    "bool": ("yes", [True]),
    "ScalarType": (torch.int8, torch.complex64, "float32"),
}
# Of these any shape is one that fits, as far as it is changed here.
ANY_SHAPE = {
    ("matmul", "b"),
    ("softmax", "mask"),
    ("log_softmax", "mask"),
    ("topk_router_backward", "logits"),
}
ANY_LENGTH = {"expert_map"}
ANY_SIZE = {"chunk_rows"}


def kind_of(argument: Any) -> tuple[str, bool]:
    """The type of an argument in the schema, and whether it may be None."""
    name = str(argument.real_type)
    optional = name.startswith("Optional[")
    return name.removeprefix("Optional[").removesuffix("]"), optional


def spoiled(op: str, place: int) -> st.SearchStrategy[Any]:
    """What may take the place of an argument: words for a tensor, a value for anything else."""
    argument = OPS[op].overload._schema.arguments[place]
    kind, optional = kind_of(argument)
    if kind == "Tensor":
        kinds = [one for one in (*NO_TENSORS, *TENSORS) if not (optional and one == "nothing")]
        return st.sampled_from(kinds)
    values = [one for one in WORDS[kind] if one != 1 << 70 or argument.name not in ANY_SIZE]
    if not optional and kind != "bool":  # which torch's schema takes for False
        values.append(None)
    return st.sampled_from(values)


@st.composite
def bad_calls(draw: Any, op: str) -> tuple[Plan, int, Any]:
    given = draw(FAMILIES[op].plans(op))
    place = draw(st.integers(0, len(OPS[op].overload._schema.arguments) - 1))
    return given, place, draw(spoiled(op, place))


def made_bad(given: Plan, place: int, wrong: Any, device: str) -> Arguments | None:
    """The arguments; None if this one is not there, or would be all right."""
    args = list(copied(FAMILIES[given.op].make(Maker(given, device))))
    argument = OPS[given.op].overload._schema.arguments[place]
    if kind_of(argument)[0] != "Tensor":
        args[place] = wrong
        return tuple(args)
    tensor = args[place]
    if wrong in NO_TENSORS:
        args[place] = {"a list": [1.0], "a number": 3.0, "text": "text", "nothing": None}[wrong]
        return tuple(args)
    if tensor is None:
        return None
    others = [one for at, one in enumerate(args) if at != place and isinstance(one, torch.Tensor)]
    fits = (given.op, argument.name) in ANY_SHAPE or argument.name in ANY_LENGTH
    if wrong in ("another shape", "more dims") and (fits or place == 0 or tensor.dim() == 0):
        return None
    if wrong == "meta" and not others:
        return None
    if wrong == "complex":
        args[place] = torch.zeros(tensor.shape, dtype=torch.complex64, device=device)
    elif wrong == "meta":
        args[place] = tensor.to("meta")
    elif wrong == "sparse":
        if tensor.dim() == 0 or tensor.dtype == torch.float8_e4m3fn:
            return None
        args[place] = tensor.to_sparse()
    elif wrong == "another shape":
        shape = (*tensor.shape[:-1], tensor.shape[-1] + 3)
        args[place] = torch.zeros(shape, device=device).to(tensor.dtype)
    else:
        args[place] = tensor.unsqueeze(0)
    return tuple(args)
