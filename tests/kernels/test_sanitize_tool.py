"""What tools/sanitize.py would launch, and whether it sees a wrong result. No GPU is needed."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from gristmill.ops.registry import OPS
from gristmill.ops.rows.variant import RowVariant
from gristmill.select.device import KNOWN

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "src" / "gristmill" / "kernels" / "cuda"
H200 = KNOWN["sm_90a"]


@pytest.fixture(scope="module")
def sanitize() -> ModuleType:
    spec = importlib.util.spec_from_file_location("sanitize", ROOT / "tools" / "sanitize.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_it_walks_every_variant_of_every_op_over_rows(sanitize: ModuleType) -> None:
    walked = {(op.name, variant.name) for op, variant in sanitize.kernels([])}
    assert walked == {
        (op.name, variant.name)
        for op in OPS.values()
        for variant in op.variants
        if isinstance(variant, RowVariant)
    }
    assert {"softmax", "cross_entropy_one_pass_", "layer_norm_fp8"} <= {name for name, _ in walked}
    (only,) = sanitize.kernels(["softmax", "cuda_block"])
    assert (only[0].name, only[1].name) == ("softmax", "cuda_block")


def test_every_source_with_feeds_has_its_feeds_tried(sanitize: ModuleType) -> None:
    fed = {path.name for path in SOURCES.glob("*.cu") if "Feed<" in path.read_text()}
    assert set(sanitize.FEEDS) == fed


@pytest.mark.parametrize("name", ["softmax", "cross_entropy_backward", "rms_norm_fp8"])
def test_cases_bring_what_examples_do_not_have(sanitize: ModuleType, name: str) -> None:
    op, wanted = OPS[name], {"softmax": 2, "cross_entropy_backward": 6, "rms_norm_fp8": 2}[name]
    present = set()  # of an optional argument: a mask, weights of classes, a given scale
    for variant in op.variants:
        if isinstance(variant, RowVariant) and variant.name == "cuda_warp":
            for args, problem, config in sanitize.runs(op, variant, H200, place="cpu"):
                present.add(args[wanted] is not None)
                assert variant.shared_bytes(problem.layout, config) <= H200.shared_per_block
    assert present == {True, False}


def test_all_brings_every_variant_to_the_cases(sanitize: ModuleType) -> None:
    op = OPS["softmax"]
    variant = next(one for one in op.variants if one.name == "cuda_cluster")
    few = list(sanitize.runs(op, variant, H200, place="cpu"))
    many = list(sanitize.runs(op, variant, H200, place="cpu", everyone=True))
    assert len(few) + 20 < len(many)
    assert not any(args[2] is not None for args, *_ in few)
    assert any(args[2] is not None for args, *_ in many)


class Fake:
    """A variant that runs a function of the test."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def bind(self, problem: Any, config: Any) -> Any:
        return self.function


def test_a_wrong_result_is_seen(sanitize: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    op = OPS["softmax"]
    args = op.example((4, 4096), torch.bfloat16, "cpu")
    assert sanitize.run(op, Fake(op.reference), None, None, args)

    def wrong(*values: Any) -> torch.Tensor:
        y = op.reference(*values)
        y[2, y[2].argmax()] *= 2  # not one that is nearly zero twice
        return y

    assert not sanitize.run(op, Fake(wrong), None, None, args)
    assert "output 0 is off by" in capsys.readouterr().out


def test_what_is_written_in_place_is_compared(sanitize: ModuleType) -> None:
    op = OPS["fused_add_rms_norm_"]
    args = op.example((4, 64), torch.bfloat16, "cpu")
    before = args[0].clone()
    assert sanitize.run(op, Fake(op.reference), None, None, args)
    assert torch.equal(args[0], before)  # it works on copies
    assert not sanitize.run(op, Fake(lambda *_: None), None, None, args)
