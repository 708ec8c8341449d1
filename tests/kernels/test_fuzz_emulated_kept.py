"""Calls at which a fuzz test of the emulated kernels once stopped, each with what it has shown.

Some were mistakes of a kernel, most of what was expected of one: they are kept alike.
"""

from __future__ import annotations

import fuzz_emulated as fuzz  # first: it skips all of this without hypothesis
import pytest
import rms_norm_cases
import test_fuzz_emulated_cross_entropy as entropy
import test_fuzz_emulated_norms as norms
import test_fuzz_emulated_nvfp4 as weights
import test_fuzz_emulated_softmax as softmax
import torch
from cross_entropy_cases import Case as EntropyCase
from emulated_host import EmulatedHost
from fuzz_emulated import Numbers, Place
from layer_norm_cases import Case as LayerNormCase
from softmax_cases import Case as SoftmaxCase

from gristmill.ops.nvfp4_linear.dequantized import Piece
from gristmill.ops.rows.config import AHEAD, ASYNC, TWICE, RowConfig

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
INF_WEIGHT = Numbers(specials=((0, None, "inf"),))
WIDE_WEIGHT = (BF16, BF16, F32, None)

NORMS = {
    "an infinite weight makes y infinite, not NaN": norms.Call(
        rms_norm_cases.Case("rms_norm", "cuda_warp", (3, 5, 1)), (1,), weight=INF_WEIGHT
    ),
    "products of the largest weights leave fp32": norms.Call(
        rms_norm_cases.Case(
            "rms_norm_backward",
            "cuda_warp",
            (3, 5, 3),
            (BF16, F32, BF16, F32),
            ("dense", "expanded"),
            dsum=True,
        ),
        (1,),
        weight=Numbers(specials=((0, None, "largest"),)),
        offset=1.0,
    ),
    "lanes without a row have no eps, either": norms.Call(
        rms_norm_cases.Case(
            "rms_norm_backward",
            "cuda_warp",
            (203, 64),
            (F32, F32, BF16, None),
            dsum=True,
            config=RowConfig(64, 4, lanes=4),
        ),
        (3, 64),
        eps=0.0,
    ),
    "sums over rows of many sizes": norms.Call(
        rms_norm_cases.Case(
            "rms_norm_backward",
            "cuda_cluster",
            (13, 1536),
            WIDE_WEIGHT,
            dsum=True,
            config=RowConfig(64, 1, cluster=4, feed=ASYNC, hold=False),
        ),
        (3, 9, 40),
        Numbers(111055, 12, 0, ((32, 411, "-zero"), (20, None, "zero"))),
        Numbers(373, 0, 12),
        Numbers(645, 0, 3),
        x_place=Place(24, 32),
        other_place=Place(72, 24),
    ),
    "a gradient of subnormal numbers": norms.Call(
        rms_norm_cases.Case(
            "rms_norm_backward",
            "cuda_block",
            (13, 1536),
            WIDE_WEIGHT,
            dsum=True,
            config=RowConfig(64, 3, feed=AHEAD),
        ),
        (8,),
        other=Numbers(specials=((0, None, "least"),)),
    ),
    "the weight is NaN, and its gradient is not": norms.Call(
        LayerNormCase(
            "layer_norm_backward",
            "cuda_block",
            (13, 1536),
            WIDE_WEIGHT,
            dsum=True,
            config=RowConfig(64, 3),
        ),
        (2, 8),
        weight=Numbers(specials=((0, None, "nan"),)),
    ),
    "zero times an infinite weight": norms.Call(
        LayerNormCase(
            "add_layer_norm",
            "cuda_cluster",
            (5, 4104),
            WIDE_WEIGHT,
            config=RowConfig(64, 1, cluster=4, feed=TWICE, hold=False),
        ),
        (28, 80),
        Numbers(4289, -14, 12),
        Numbers(54717, -6),
        INF_WEIGHT,
    ),
}
SOFTMAX = {
    "zeros beyond the causal limit of a row of NaN": softmax.Call(
        SoftmaxCase(
            "softmax_backward",
            "cuda_cluster",
            (3, 5, 2048),
            (BF16, F32),
            ("heads", "dense"),
            causal="top_left",
        ),
        (2, 2, 8),
        other=Numbers(specials=((0, None, "nan"),)),
        x_place=Place(outer=8),
        other_place=Place(outer=4),
    ),
    "a difference that leaves fp32": softmax.Call(
        SoftmaxCase(
            "softmax_backward",
            "cuda_warp",
            (203, 61),
            (F32, F32),
            config=RowConfig(64, 2, lanes=16),
        ),
        (2, 1),
        x=Numbers(spread=12),
        other=Numbers(specials=((1, None, "largest"),)),
    ),
}
ENTROPY = {
    "a target that is no class beside weights": entropy.Call(
        EntropyCase(
            "cross_entropy_one_pass",
            "cuda_block",
            (3, 5, 4096),
            F32,
            weight=F32,
            z_loss=0.01,
            softcap=9.0,
            arch="sm_80",
        ),
        (2, 1, 4),
        wide=False,
        wrong=((0, -1),),
        ignored=0.0,
        mean=False,
    ),
    "a probability below fp32 times a large slope": entropy.Call(
        EntropyCase(
            "cross_entropy_one_pass_",
            "cuda_block",
            (13, 1536),
            config=RowConfig(64, 3),
        ),
        (1032,),
        Numbers(1, 0, 12),
        wide=False,
        ignored=0.0,
        z_loss=0.01,
        mean=False,
    ),
    "a long sum of equal terms": entropy.Call(
        EntropyCase("cross_entropy_shard", "cuda_warp", (3, 5, 40), layout="sliced", softcap=9.0),
        (3, 1, 1888),
        Numbers(1482, 10),
    ),
    "a NaN in a shard is in its sum": entropy.Call(
        EntropyCase(
            "cross_entropy_shard",
            "cuda_block",
            (3, 5, 1),
            F16,
            "unaligned",
            softcap=3.0,
            reduction="none",
        ),
        (3,),
        Numbers(specials=((0, 0, "nan"),)),
        wide=False,
        ignored=0.0,
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms(host: EmulatedHost, name: str) -> None:
    norms.check(host, NORMS[name])


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(host: EmulatedHost, name: str) -> None:
    softmax.check(host, SOFTMAX[name])


@pytest.mark.parametrize("name", ENTROPY)
def test_cross_entropy(host: EmulatedHost, name: str) -> None:
    entropy.check(host, ENTROPY[name])


def test_a_large_factor_of_decoded_rows(host: EmulatedHost) -> None:
    """As large as it may be: it is multiplied by a power of two first."""
    factor = fuzz.placed(torch.tensor([2.0**115]), Place())
    piece = Piece(range(1), range(16))
    for dtype in (BF16, F32):
        weights.check_decoding(host, 0, (1, 16), piece, dtype, factor, 0)
