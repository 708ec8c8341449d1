"""One rank of a group: runs every scenario and leaves its results in a folder.

Arguments: rank, ranks, the folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from vocab_parallel_cases import SCENARIOS, Scenario

import gristmill
from gristmill.distributed import vocab_parallel
from gristmill.errors import GristmillError


def run(scenario: Scenario, rank: int, ranks: int, function: Any) -> dict[str, torch.Tensor]:
    logits, target, dloss, dlse = scenario.whole()
    shares = scenario.shares(ranks)
    first = sum(shares[:rank])
    own = logits[..., first : first + shares[rank]].clone().requires_grad_()
    place = {} if scenario.sizes is None else {"first_class": first, "classes": scenario.classes}
    found = function(own, target, **place, **scenario.options)
    results = {"loss": found}
    if scenario.options.get("return_lse"):
        results = dict(zip(("loss", "lse"), found, strict=True))
    gradients = [dloss, dlse][: len(results)]
    results["gradient"] = torch.autograd.grad(list(results.values()), own, gradients)[0]
    return {name: result.detach() for name, result in results.items()}


class Counted:
    """How often the group was made to talk, and what each rank sent."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        name = vocab_parallel._ALL_GATHER
        self._gather = getattr(dist, name)
        setattr(dist, name, self)

    def __call__(self, out: torch.Tensor, own: torch.Tensor, **options: Any) -> Any:
        self.sent.append(own.numel())
        return self._gather(out, own, **options)


def extras(rank: int, ranks: int, counted: Counted) -> dict[str, Any]:
    """What is no scenario: shards that do not fit, groups within the group, compilers."""
    function = gristmill.vocab_parallel_cross_entropy
    results: dict[str, Any] = {}
    logits, target, *_ = SCENARIOS["plain"].whole()
    local = logits.shape[-1] // ranks
    own = logits[..., rank * local : (rank + 1) * local].clone()

    counted.sent.clear()
    leaf = own.clone().requires_grad_()
    function(leaf, target).backward()
    results["sent"] = list(counted.sent)
    counted.sent.clear()
    function(own, target, label_smoothing=0.1)
    results["sent with smoothing"] = list(counted.sent)

    # One rank is mistaken about where its classes are.
    first = rank * local - (rank == ranks - 1)
    results["overlap"] = function(own, target, first_class=first, classes=ranks * local)
    # Shards of different sizes, of which nobody was told.
    results["untold"] = function(logits[..., : local + rank].clone(), target)
    # One rank counts more classes than the others.
    results["miscounted"] = function(
        own, target, first_class=rank * local, classes=ranks * local + (rank == 0)
    )

    groups = [dist.new_group([one]) for one in range(ranks)]
    counted.sent.clear()
    leaf = logits.clone().requires_grad_()
    alone = function(leaf, target, group=groups[rank], z_loss=0.1)
    alone.backward()
    results["alone"], results["alone gradient"] = alone.detach(), leaf.grad
    results["sent alone"] = list(counted.sent)
    half = dist.new_group(list(range(ranks // 2)))
    if rank < ranks // 2:
        share = logits.shape[-1] // (ranks // 2)
        part = logits[..., rank * share : (rank + 1) * share].clone()
        results["half"] = function(part, target, group=half)
    else:
        results["outside"] = _message(lambda: function(own, target, group=half))
    results["alone, not all"] = _message(
        lambda: function(own, target, group=groups[rank], first_class=0, classes=local + 1)
    )
    results["mesh"] = _message(lambda: function(own, target, group="tp"))

    def step(part: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return function(part, target, label_smoothing=0.1, z_loss=0.1) * 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for name, one in {"eager": step, "compiled": compiled}.items():
        if ranks > 2:
            break  # two will do: it takes a while
        leaf = own.clone().requires_grad_()
        loss = one(leaf, target)
        loss.backward()
        results[name] = [loss.detach(), leaf.grad]
    leaf = own.clone().requires_grad_()
    (slope,) = torch.autograd.grad(function(leaf, target), leaf, create_graph=True)
    results["second"] = _message(lambda: slope.sum().backward())
    return results


def _message(call: Any) -> str:
    try:
        call()
    except GristmillError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def main() -> None:
    rank, ranks, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=ranks
    )
    counted = Counted()
    function = gristmill.vocab_parallel_cross_entropy
    results = {name: run(one, rank, ranks, function) for name, one in SCENARIOS.items()}
    torch.save({"scenarios": results, **extras(rank, ranks, counted)}, folder / f"{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
