"""Wrong arguments of the router ops: the error names the argument, what came and what is right."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gristmill
from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops.registry import OPS
from gristmill.ops.topk_router import topk_router_backward

LOGITS = torch.zeros(3, 16)
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"logits": [1.0]}, DtypeError, "logits must be a torch.Tensor, got list"),
    (
        {"logits": torch.zeros(3, 16, dtype=torch.int32)},
        DtypeError,
        "logits must have dtype .*int32",
    ),
    ({"logits": torch.zeros(16)}, ArgumentError, r"shape \(M, experts\), got \(16,\); flatten"),
    ({"logits": torch.zeros(2, 3, 16)}, ArgumentError, r"got \(2, 3, 16\); flatten"),
    ({"logits": torch.zeros(3, 0)}, ArgumentError, r"at least one expert, got \(3, 0\)"),
    ({"logits": LOGITS.to_sparse()}, ArgumentError, "logits must be a dense tensor"),
    ({"topk": 0}, ArgumentError, "topk must be from 1 to the 16 experts that logits have, got 0"),
    ({"topk": 17}, ArgumentError, "from 1 to the 16 experts that logits have, got 17"),
    ({"topk": -1}, ArgumentError, "got -1"),
    ({"topk": 2.0}, DtypeError, "topk must be an int, got float"),
    ({"topk": True}, DtypeError, "topk must be an int, got bool"),
    ({"scoring": "relu"}, ArgumentError, "scoring must be 'softmax' or 'sigmoid', got 'relu'"),
    ({"scoring": None}, ArgumentError, "scoring must be 'softmax' or 'sigmoid', got None"),
    ({"renormalize": 1}, DtypeError, "renormalize must be True or False, got int"),
    ({"bias": 0.5}, DtypeError, "bias must be a torch.Tensor, got float"),
    ({"bias": torch.zeros(16, dtype=torch.int64)}, DtypeError, "bias must have dtype .*int64"),
    ({"bias": torch.zeros(15)}, ArgumentError, r"bias must have shape \(16,\), .* got \(15,\)"),
    ({"bias": torch.zeros(1, 16)}, ArgumentError, r"one value for each expert, got \(1, 16\)"),
    ({"bias": torch.zeros(16, device="meta")}, ArgumentError, "bias is on meta, logits on cpu"),
    ({"groups": 3}, ArgumentError, "groups must .* divide the 16 experts .*, got 3"),
    ({"groups": 0}, ArgumentError, "groups must be at least 1 and divide the 16 .*, got 0"),
    ({"groups": "4"}, DtypeError, "groups must be an int, got str"),
    (
        {"groups": 4, "topk_groups": 5},
        ArgumentError,
        "topk_groups must be from 1 to groups, 4, got 5",
    ),
    (
        {"groups": 4, "topk_groups": 0},
        ArgumentError,
        "topk_groups must be from 1 to groups, 4, got 0",
    ),
    ({"topk_groups": 2}, ArgumentError, "topk_groups must be from 1 to groups, 1, got 2"),
    ({"topk_groups": None}, DtypeError, "topk_groups must be an int, got NoneType"),
    (
        {"topk": 9, "groups": 4, "topk_groups": 2},
        ArgumentError,
        "topk must be at most 8, the experts in 2 of 4 groups of 16, got 9",
    ),
    ({"scale": float("nan")}, ArgumentError, "scale must be finite in fp32, got nan"),
    ({"scale": 1e39}, ArgumentError, "scale must be finite in fp32, got 1e"),
    ({"scale": "2"}, DtypeError, "scale must be a number, got str"),
    (
        {"ids_dtype": torch.int16},
        DtypeError,
        "ids_dtype must be torch.int32 or torch.int64, got .*16",
    ),
    (
        {"ids_dtype": "int32"},
        DtypeError,
        "ids_dtype must be torch.int32 or torch.int64, got 'int32'",
    ),
]


@pytest.mark.parametrize(("change", "kind", "words"), WRONG)
def test_router(change: dict[str, Any], kind: type[Exception], words: str) -> None:
    values = {"logits": LOGITS, "topk": 4, **change}
    before = len(OPS["topk_router"]._plans)
    with pytest.raises(kind, match=f"^topk_router: .*{words}"):
        gristmill.topk_router(values.pop("logits"), values.pop("topk"), **values)
    assert len(OPS["topk_router"]._plans) == before


WEIGHTS, IDS = torch.zeros(3, 4), torch.zeros(3, 4, dtype=torch.int32)
WRONG_BACKWARD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"logits": torch.zeros(16)}, ArgumentError, r"logits must have shape \(M, experts\)"),
    ({"dweights": None}, DtypeError, "dweights must be a torch.Tensor, got NoneType"),
    ({"dweights": IDS}, DtypeError, "dweights must have dtype .*, got int32"),
    (
        {"dweights": torch.zeros(2, 4)},
        ArgumentError,
        r"dweights must have shape \(M, topk\), .*\(2, 4\)",
    ),
    ({"dweights": torch.zeros(12)}, ArgumentError, r"each of the 3 rows of logits, .* got \(12,\)"),
    ({"dweights": torch.zeros(3, 17)}, ArgumentError, r"topk from 1 to 16, got \(3, 17\)"),
    ({"dweights": torch.zeros(3, 0)}, ArgumentError, r"topk from 1 to 16, got \(3, 0\)"),
    ({"dweights": torch.zeros(3, 4, device="meta")}, ArgumentError, "dweights is on meta"),
    (
        {"topk_ids": WEIGHTS},
        DtypeError,
        "topk_ids must be a tensor of int32 or int64, got torch.float32",
    ),
    ({"topk_ids": [1]}, DtypeError, "topk_ids must be a tensor of int32 or int64, got list"),
    (
        {"topk_ids": IDS[:, :3]},
        ArgumentError,
        r"topk_ids must have the shape of dweights, \(3, 4\)",
    ),
    ({"topk_ids": IDS[:2]}, ArgumentError, r"topk_ids must have shape \(M, topk\)"),
    ({"topk_ids": IDS.to("meta")}, ArgumentError, "topk_ids is on meta, logits on cpu"),
    ({"scoring": "tanh"}, ArgumentError, "scoring must be 'softmax' or 'sigmoid', got 'tanh'"),
    ({"renormalize": None}, DtypeError, "renormalize must be True or False, got NoneType"),
    ({"scale": float("inf")}, ArgumentError, "scale must be finite in fp32, got inf"),
]


@pytest.mark.parametrize(("change", "kind", "words"), WRONG_BACKWARD)
def test_backward(change: dict[str, Any], kind: type[Exception], words: str) -> None:
    values = {"dweights": WEIGHTS, "logits": LOGITS, "topk_ids": IDS, **change}
    with pytest.raises(kind, match=f"^topk_router_backward: .*{words}"):
        topk_router_backward(**values)


def test_under_the_compiler_too() -> None:
    """The fake checks what the op does."""
    compiled = torch.compile(lambda x: gristmill.topk_router(x, 17), backend="eager")
    with pytest.raises(Exception, match="topk must be from 1 to the 16 experts"):
        compiled(LOGITS)
    torch._dynamo.reset()
