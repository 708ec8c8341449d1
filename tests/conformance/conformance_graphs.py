"""The graphs that compilers get to see, by the names of what they call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.backends.common import aot_autograd


class Recorder:
    """A backend that keeps the graphs: Dynamo's, and those of forward and backward after AOT."""

    def __init__(self) -> None:
        self.traced: list[str] = []
        self.forward: list[str] = []
        self.backward: list[str] = []
        self._backend = aot_autograd(
            fw_compiler=self._keep(self.forward), bw_compiler=self._keep(self.backward)
        )

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.traced += ops_of(graph)
        return self._backend(graph, inputs)

    def _keep(self, names: list[str]) -> Callable[..., Any]:
        def compiler(graph: torch.fx.GraphModule, inputs: Any) -> Any:
            names.extend(ops_of(graph))
            return graph

        return compiler


def ops_of(graph: torch.fx.GraphModule) -> list[str]:
    """The calls in a graph by name; a functionalised in-place op counts under its own name."""
    names = []
    for node in graph.graph.nodes:
        if node.op != "call_function":
            continue
        target = node.target
        if "auto_functionalized" in str(target):
            target = node.args[0]
        names.append(str(target).removesuffix(".default"))
    return names


def ours(names: list[str]) -> list[str]:
    return [name for name in names if name.startswith("gristmill.")]
