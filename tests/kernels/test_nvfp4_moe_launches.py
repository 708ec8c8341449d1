"""How many kernels a call of `nvfp4_moe` launches on a GPU that has a table, and on one without."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from pathlib import Path

import pytest
import torch

from gristmill.ops.nvfp4_moe import cases
from gristmill.ops.nvfp4_moe.op import NVFP4_MOE
from gristmill.ops.nvfp4_moe.problem import forward_problem
from gristmill.ops.nvfp4_moe.wgmma import Wgmma
from gristmill.ops.nvfp4_moe.wgmma_configs import ADD, LAUNCH, MOST_SCANNED
from gristmill.select.device import KNOWN
from gristmill.select.problem import Problem
from gristmill.select.table import Table

# Experts, topk, hidden, inner.
MODELS = {
    "qwen3-30b-a3b": (128, 8, 2048, 768),
    "qwen3-235b-a22b": (128, 8, 4096, 1536),
    "deepseek-v3": (256, 8, 7168, 2048),
    "gpt-oss-120b": (128, 4, 2880, 2880),
    "few experts": (8, 2, 4096, 14336),
    "one expert": (1, 1, 1024, 512),
    "many at once": (512, 10, 2048, 512),
}
SHIPPED = Path(str(resources.files("gristmill"))) / "tables" / "nvidia-h200.json"


def _problem(tokens: int, sizes: tuple[int, int, int, int]) -> Problem:
    experts, topk, hidden, inner = sizes
    example = cases.forward_example((2, 2, 1, 64, 64), torch.bfloat16, "cpu", "sm_90a")
    problem = forward_problem(KNOWN["sm_90a"], *example)
    dims = (("E", experts), ("k", topk), ("H", hidden), ("I", inner))
    ids = replace(problem.layout.ids, tokens=tokens, topk=topk)
    return replace(problem, rows=tokens, dims=dims, layout=replace(problem.layout, ids=ids))


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tuned", [True, False], ids=["shipped table", "no table"])
def test_few_slots_take_three_launches_and_more_take_four(model: str, tuned: bool) -> None:
    variant, table = Wgmma(), Table.load(SHIPPED)
    for tokens in (*range(1, 65), 65, 90, 128, 500, 5000):
        problem = _problem(tokens, MODELS[model])
        found = table.lookup(problem, NVFP4_MOE.variants) if tuned else None
        config = variant.config(problem) if found is None else found[1]
        programs = variant.programs(problem, config)
        products = [one for one in programs if one.source == "nvfp4_moe.cu"]
        assert len(products) == 2
        few = tokens * problem.dim("k") <= MOST_SCANNED
        assert len(programs) <= (3 if few else 4), (tokens, config)
        up, down = variant._products(problem, config)
        assert up.reason is None
        assert down.reason is None
        # Few slots are not put in order at all.
        assert (up.routing == LAUNCH) == (tokens * problem.dim("k") > MOST_SCANNED)
        assert (down.step == ADD) == (len(programs) - 2 - (up.routing == LAUNCH) == 0)
