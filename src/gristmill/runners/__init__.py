"""Runners: holders of opaque state, reached from torch ops by an id.

A graph that takes a layer's weights as tensors has to know how they are laid out. Where that is the
layer's own business, the graph takes an integer instead: `register_runner` gives one for any object
with a `_run_impl`, and the ops look the object up when they run. A compiler sees shape, dtype and
device of the result and nothing more, so a graph can be made, saved and loaded where no such runner
exists.
"""

from gristmill.runners import ops
from gristmill.runners.nvfp4 import Nvfp4LinearRunner, Nvfp4MoeRunner
from gristmill.runners.registry import Runner, register_runner

__all__ = ["Nvfp4LinearRunner", "Nvfp4MoeRunner", "Runner", "ops", "register_runner"]
