"""Ids and graphs that go from one process to another."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from runners_helpers import Times, linear_gemm, run_python, weight

from gristmill.errors import UnknownRunner
from gristmill.runners import register_runner
from gristmill.runners.registry import id_of

REGISTER = """
import sys
from runners_helpers import Times, weight
from gristmill.runners import register_runner

runner = Times(weight())
print(register_runner(runner, sys.argv[1]), register_runner(runner))
"""


def test_names_have_the_same_id_everywhere() -> None:
    """Whatever the seed of Python's own hashes; unnamed ids are valid at home only."""
    one = run_python(REGISTER, "model.norm ü", env={"PYTHONHASHSEED": "1"}).split()
    two = run_python(REGISTER, "model.norm ü", env={"PYTHONHASHSEED": "2"}).split()
    assert one[0] == two[0] == str(id_of("model.norm ü"))
    assert one[1] != two[1]
    runner = Times(weight())
    register_runner(runner)
    with pytest.raises(UnknownRunner, match="valid only in the process that registered them"):
        linear_gemm(torch.ones(1, 8), int(one[1]), 6)


LOAD = """
import sys, torch
from runners_helpers import Times, weight
from gristmill.errors import UnknownRunner
from gristmill.runners import register_runner

x = torch.arange(24.0).view(3, 8)
program = torch.export.load(sys.argv[1]).module()
try:
    program(x)
except UnknownRunner as error:
    print(error)
runner = Times(weight(seed=int(sys.argv[2])))
register_runner(runner, "saved layer")
for _ in range(20):  # ids of this process, which a saved one might be taken for
    register_runner(runner)
try:
    torch.testing.assert_close(program(x), (x * 2) @ runner.weight)
    print("as expected")
except UnknownRunner as error:
    print(error)
"""


class Layer(torch.nn.Module):
    def __init__(self, runner_id: int) -> None:
        super().__init__()
        self.runner_id = runner_id

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear_gemm(x * 2, self.runner_id, 6)


@pytest.mark.parametrize("name", ["saved layer", None], ids=["named", "unnamed"])
def test_a_saved_graph_in_another_process(name: str | None, tmp_path: Path) -> None:
    """By name it finds the runner of that process, with weights of its own; by number, none."""
    runner = Times(weight(seed=1))
    path = tmp_path / "layer.pt2"
    program = torch.export.export(Layer(register_runner(runner, name)), (torch.ones(3, 8),))
    torch.export.save(program, path)
    first, last = run_python(LOAD, str(path), "2").splitlines()
    if name is None:
        assert "ids of unnamed runners are valid only in the process" in first
        assert last == first
    else:
        assert "no runner has that name here" in first
        assert last == "as expected"


COMPILE = """
import torch
from runners_helpers import Times, linear_gemm, weight
from gristmill.runners import register_runner
from torch._dynamo.utils import counters

runner = Times(weight(seed=1))
runner_id = register_runner(runner, "cached layer")

@torch.compile(fullgraph=True)
def function(x):
    return linear_gemm(x.sin() * 2, runner_id, 6).cos()

x = torch.arange(24.0).view(3, 8)
with torch.inference_mode():
    torch.testing.assert_close(function(x), ((x.sin() * 2) @ runner.weight).cos())
print(counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ here")
def test_a_graph_from_inductors_cache_finds_its_runner(tmp_path: Path) -> None:
    """The id is in the compiled code, so it had better be the same in the next process."""
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    assert [run_python(COMPILE, env=env) for _ in range(2)] == ["0", "1"]
