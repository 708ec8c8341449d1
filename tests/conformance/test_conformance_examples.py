"""The examples that every op has: what such a call must cost, and that it is a right one."""

from __future__ import annotations

import pytest
import torch
from conformance_helpers import ALL_OPS, ENTROPY_NAMES, FP8_NAMES, ROW_NAMES, SOFTMAX_NAMES
from conformance_truth import truth_of

from gristmill.ops.op import Op
from gristmill.ops.registry import OPS


@pytest.mark.parametrize("op", ALL_OPS)
def test_cost_counts_what_must_move(op: Op) -> None:
    args = op.example((16, 64), torch.bfloat16, "cpu")
    rows, weight = 16 * 64 * 2, 64 * 2

    def packed(columns: int) -> int:
        """Bytes of a row: half a byte for an element, a scale for 16, and one for the row."""
        return columns // 2 + columns // 16 + 4

    expected = {
        "rms_norm": 2 * rows + weight,
        "add_rms_norm": 4 * rows + weight,
        "fused_add_rms_norm_": 4 * rows + weight,
        "rms_norm_backward": 3 * rows + 2 * weight,
        # Half of the bytes, and a scale for each row.
        "rms_norm_fp8": rows + rows // 2 + weight + 16 * 4,
        "add_rms_norm_fp8": 3 * rows + rows // 2 + weight + 16 * 4,
        "layer_norm_fp8": rows + rows // 2 + 2 * weight + 16 * 4,
        "add_layer_norm_fp8": 3 * rows + rows // 2 + 2 * weight + 16 * 4,
        "layer_norm": 2 * rows + 2 * weight,
        "add_layer_norm": 4 * rows + 2 * weight,
        "layer_norm_backward": 3 * rows + 3 * weight,
        # A target of 8 bytes for each row, 4 of lse and 8 of stats, which are read in the backward
        # pass; of a shard three numbers.
        "cross_entropy": rows + 16 * (8 + 4 + 8),
        "cross_entropy_one_pass": 2 * rows + 16 * (8 + 4),
        "cross_entropy_one_pass_": 2 * rows + 16 * (8 + 4),
        "cross_entropy_backward": 2 * rows + 16 * (8 + 8),
        "cross_entropy_shard": rows + 16 * (8 + 12),
        "scale_gradient_": 2 * rows,
        # As many classes as columns; three numbers for all rows, in the backward pass as well.
        "linear_cross_entropy": rows + 64 * weight + 16 * (8 + 4 + 8) + 12,
        "linear_cross_entropy_backward": 2 * (rows + 64 * weight) + 16 * (8 + 8) + 12,
        "softmax": 2 * rows,
        "log_softmax": 2 * rows,
        "softmax_backward": 3 * rows,
        "log_softmax_backward": 3 * rows,
        # The sums are kept beside the result.
        "linear": 2 * rows + 64 * weight,
        "linear_with_pre": 3 * rows + 64 * weight,
        "matmul": 2 * rows + 64 * weight,
        "nvfp4_linear": 2 * rows + 64 * packed(64),
        "nvfp4_linear_backward": 2 * rows + 64 * packed(64),
        # Eight experts, half as wide as a row, all of them used.
        "nvfp4_moe": 2 * rows + 8 * (64 * packed(64) + 64 * packed(32)),
        "nvfp4_moe_backward": 3 * rows + 8 * (64 * packed(64) + 64 * packed(32)),
        # Gradients of all weights, too.
        "moe": 2 * rows + 8 * 3 * 32 * weight,
        "moe_backward": 3 * rows + 2 * 8 * 3 * 32 * weight,
        # Eight weights and ids of 4 bytes each for a row; of these the gradient reads the logits.
        "topk_router": rows + 16 * 8 * (4 + 4),
        "topk_router_backward": rows + 16 * 8 * (4 + 4 + 2),
    }
    assert op.cost(*args).bytes == expected[op.name]
    assert op.cost(*args).operations >= 16 * 64


def test_examples_are_right_as_they_are() -> None:
    results = {"rms_norm": 1, "nvfp4_linear": 1, "nvfp4_linear_backward": 1, "nvfp4_moe": 1}
    results |= {"moe": 1, "moe_backward": 6}
    results |= {"linear": 1, "matmul": 1, "topk_router_backward": 1}
    results |= {name: 4 if name.startswith("add_") else 3 for name in FP8_NAMES}
    results |= {"layer_norm": 1, "layer_norm_backward": 3}
    results |= dict.fromkeys(SOFTMAX_NAMES, 1)
    results |= {"cross_entropy": 4, "linear_cross_entropy": 4, "linear_cross_entropy_backward": 3}
    results |= {"cross_entropy_backward": 1, "cross_entropy_shard": 1, "scale_gradient_": 1}
    results |= {name: 3 for name in ENTROPY_NAMES if name not in results}
    for op in OPS.values():
        shape = (3, 4, 16) if op.name in ROW_NAMES else (3, 32)
        args = op.example(shape, torch.float32, "cpu")
        assert op.bind_arguments(*args) == args
        assert len(truth_of(op.name, args)) == results.get(op.name, 2)
