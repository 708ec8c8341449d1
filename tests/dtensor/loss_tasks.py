"""What a rank does with losses over DTensors."""

from __future__ import annotations

from typing import Any

import torch
from loss_cases import LINEAR_SCENARIOS, SCENARIOS, LinearScenario, Scenario, ignored
from mesh_pool import device_mesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.debug import CommDebugMode

import gristmill
from gristmill.errors import GristmillError


def placement_of(word: str) -> Placement:
    if word[0] == "S":
        return Shard(int(word[1:]))
    return {"R": Replicate, "P": Partial}[word]()


def spread(tensor: torch.Tensor, mesh: Any, words: tuple[str, ...]) -> DTensor:
    """The part of this rank; of something partial, a summand."""
    placements = [placement_of(word) for word in words]
    whole = [Replicate() if one.is_partial() else one for one in placements]
    found = distribute_tensor(tensor, mesh, whole, src_data_rank=None)
    local = found.to_local()
    for at, one in enumerate(placements):
        if one.is_partial():
            ranks, rank = mesh.size(at), mesh.get_local_rank(at)
            # Summands whose sum is exact: all but the last have small integers.
            local = local + (ranks - 1) * 8 if rank == ranks - 1 else torch.full_like(local, -8.0)
    return DTensor.from_local(
        local, mesh, placements, shape=tensor.shape, stride=tensor.stride(), run_check=False
    )


def run_scenario(scenario: Scenario) -> dict[str, Any]:
    mesh, numbers = device_mesh(*scenario.mesh), scenario.whole()
    logits = spread(numbers["logits"], mesh, scenario.placements).requires_grad_()
    target = numbers["target"]
    if scenario.target is not None:
        target = spread(target, mesh, scenario.target)
    weight = numbers["weight"] if scenario.weighted else None
    found = gristmill.cross_entropy(logits, target, weight=weight, **scenario.options)
    results = [found] if isinstance(found, torch.Tensor) else list(found)
    assert all(isinstance(one, DTensor) for one in results)
    names = ("dloss", "dlse")[: len(results)]
    gradients = [numbers[name] for name in names]
    spread_gradients = [
        distribute_tensor(gradient, mesh, one.placements, src_data_rank=None)
        for gradient, one in zip(gradients, results, strict=True)
    ]
    (gradient,) = torch.autograd.grad(results, logits, spread_gradients)
    return {
        "results": [one.full_tensor().detach() for one in results],
        "loss placements": [str(one) for one in results[0].placements],
        "gradient": gradient.full_tensor(),
        "gradient placements": [str(one) for one in gradient.placements],
        "logits placements": [str(one) for one in logits.placements],
    }


def run_scenarios(names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: run_scenario(SCENARIOS[name]) for name in names}


def run_linear_scenario(scenario: LinearScenario) -> dict[str, Any]:
    mesh, numbers = device_mesh(*scenario.mesh), scenario.whole()
    x = spread(numbers["x"], mesh, scenario.x).requires_grad_()
    weight = spread(numbers["weight"], mesh, scenario.weight).requires_grad_()
    leaves, bias = [x, weight], None
    if scenario.bias:
        words = tuple("R" if word == "S1" else word for word in scenario.weight)
        bias = spread(numbers["bias"], mesh, words).requires_grad_()
        leaves.append(bias)
    loss = gristmill.linear_cross_entropy(
        x,
        weight,
        numbers["target"],
        bias=bias,
        class_weight=numbers["class_weight"] if scenario.weighted else None,
        **scenario.options,
    )
    dloss = distribute_tensor(numbers["dloss"], mesh, loss.placements, src_data_rank=None)
    gradients = torch.autograd.grad(loss, leaves, dloss)
    return {
        "loss": loss.full_tensor().detach(),
        "is replicated": all(one.is_replicate() for one in loss.placements),
        "gradients": [one.full_tensor() for one in gradients],
    }


def run_linear_scenarios(names: list[str]) -> dict[str, dict[str, Any]]:
    return {name: run_linear_scenario(LINEAR_SCENARIOS[name]) for name in names}


def what_is_sent() -> dict[str, Any]:
    """The collectives of a step, forward and backward, by kind."""
    mesh, sent = device_mesh(2, 2), {}
    numbers = Scenario((2, 2), ()).whole()
    for words in (("S0", "S-1"), ("S0", "R"), ("R", "S-1"), ("R", "R")):
        logits = spread(numbers["logits"], mesh, words).requires_grad_()
        with CommDebugMode() as seen:
            gristmill.cross_entropy(logits, numbers["target"], z_loss=0.1).backward()
        sent[words] = {str(kind).split(".")[-1]: n for kind, n in seen.get_comm_counts().items()}
    return sent


def modes() -> dict[str, Any]:
    """One pass, in place, the module, autocast and no gradients."""
    mesh, numbers = device_mesh(2, 2), Scenario((2, 2), ()).whole()
    target = numbers["target"]

    def logits() -> DTensor:
        return spread(numbers["logits"], mesh, ("S0", "S-1")).requires_grad_()

    leaf = logits()
    loss, lse = gristmill.cross_entropy(leaf, target, one_pass=True, return_lse=True)
    loss.backward()
    found = {"one pass": [loss.full_tensor().detach(), leaf.grad.full_tensor()]}
    found["lse of one pass"] = [lse.requires_grad, lse.full_tensor()]
    module = gristmill.nn.CrossEntropyLoss(weight=numbers["weight"], label_smoothing=0.1)
    leaf = logits()
    loss = module(leaf.movedim(-1, 1), target)
    loss.backward()
    found["module"] = [loss.full_tensor().detach(), leaf.grad.full_tensor()]
    with torch.no_grad():
        found["no gradient"] = gristmill.cross_entropy(logits(), target).full_tensor()
    with torch.autocast("cpu", torch.bfloat16):
        found["autocast"] = gristmill.cross_entropy(logits(), target).full_tensor().detach()
        x = spread(torch.randn(4, 8, generator=torch.manual_seed(3)), mesh, ("S0", "R"))
        weight = spread(torch.randn(6, 8, generator=torch.manual_seed(4)), mesh, ("R", "S0"))
        loss = gristmill.linear_cross_entropy(x, weight, torch.arange(4))
        found["linear autocast"] = loss.full_tensor()
    found["item"] = loss.item()
    return found


def refusals() -> dict[str, str]:
    """What is said to calls that cannot be."""
    mesh, other = device_mesh(4), device_mesh(2, 2)
    numbers = Scenario((4,), ()).whole()
    whole, target = numbers["logits"], numbers["target"]
    logits = spread(whole, mesh, ("S-1",)).requires_grad_()
    function, linear = gristmill.cross_entropy, gristmill.linear_cross_entropy
    weight = torch.randn(36, 36, dtype=torch.float64)
    heavy = numbers["weight"].requires_grad_()

    everywhere = spread(whole, mesh, ("R",)).requires_grad_()

    def second(call: Any, leaf: Any = logits) -> Any:
        def run() -> None:
            loss = call()
            (slope,) = torch.autograd.grad(loss, leaf, create_graph=True)
            slope.sum().backward()

        return run

    sharded_weight = spread(weight, mesh, ("S0",))
    calls = {
        "plain logits": lambda: function(whole, spread(target, mesh, ("S0",))),
        "local target": lambda: function(spread(whole, mesh, ("S0",)), target[:2]),
        "meshes": lambda: function(logits, spread(target, other, ("R", "R"))),
        "in place": lambda: function(logits * 1, target, one_pass=True, inplace=True),
        "weight": lambda: function(logits, target, weight=heavy),
        "reduction": lambda: function(logits, target, reduction="avg"),
        "second": second(lambda: function(logits, target)),
        "second, replicated": second(lambda: function(everywhere, target), everywhere),
        "vocab parallel": lambda: gristmill.vocab_parallel_cross_entropy(logits, target),
        "linear plain x": lambda: linear(whole, sharded_weight, target),
        "linear plain weight": lambda: linear(logits, weight, target),
        "linear class weight": lambda: linear(logits, sharded_weight, target, class_weight=heavy),
        "linear second": second(lambda: linear(logits, sharded_weight, target)),
    }
    said = {}
    for name, call in calls.items():
        try:
            call()
            said[name] = "nothing was raised"
        except GristmillError as error:
            said[name] = f"{type(error).__name__}: {error}"
    return said


def compiled(name: str, backend: str) -> list[list[torch.Tensor]]:
    """Eager and compiled whole, beside each other: loss and gradients."""
    mesh, numbers = device_mesh(2, 2), Scenario((2, 2), ()).whole()
    target, dlse = numbers["target"], numbers["dlse"]
    weight = torch.randn(37, 36, generator=torch.manual_seed(5), dtype=torch.float64)
    classes = numbers["weight"]

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return gristmill.cross_entropy(logits, target, z_loss=0.1, label_smoothing=0.1) * 2

    def loss_and_lse(logits: torch.Tensor) -> torch.Tensor:
        loss, lse = gristmill.cross_entropy(
            logits, target, weight=classes, z_loss=0.1, return_lse=True
        )
        each = gristmill.cross_entropy(logits, target, z_loss=0.1, reduction="none")
        slopes = DTensor.from_local(dlse, mesh, [Replicate()] * 2, run_check=False)
        slopes = slopes.redistribute(placements=lse.placements)
        return loss * 2 + (lse * slopes).sum() + (each * slopes).sum()

    def linear_of(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gristmill.linear_cross_entropy(x, weight, target, z_loss=0.1, chunk_rows=4) * 2

    function, words = {
        "classes": (loss_of, [("S0", "S-1")]),
        "rows": (loss_of, [("S0", "R")]),
        "lse": (loss_and_lse, [("S0", "R")]),
        "linear": (linear_of, [("S0", "R"), ("R", "S0")]),
    }[name]
    found = []
    for one in (function, torch.compile(function, fullgraph=True, backend=backend)):
        wholes = (numbers["logits"], weight)[: len(words)]
        leaves = [
            spread(whole, mesh, word).requires_grad_()
            for whole, word in zip(wholes, words, strict=True)
        ]
        loss = one(*leaves)
        loss.backward()
        found.append([loss.full_tensor().detach(), *[leaf.grad.full_tensor() for leaf in leaves]])
    return found


def flattened(mesh_shape: tuple[int, ...], words: tuple[str, ...]) -> list[torch.Tensor] | str:
    """Rows of two dims made one, as most models do: of a sharded sequence every so many rows.

    What torch says where it cannot do that itself.
    """
    mesh, numbers = (
        device_mesh(*mesh_shape),
        Scenario((4,), (), rows=(4, 8), change=ignored).whole(),
    )
    logits = spread(numbers["logits"], mesh, words).requires_grad_()
    try:
        rows = logits.flatten(0, 1)
    except RuntimeError as error:
        return str(error)
    target = numbers["target"].flatten()
    each = gristmill.cross_entropy(rows.detach(), target, reduction="none").full_tensor()
    loss = gristmill.cross_entropy(rows, target, z_loss=0.1)
    loss.backward()
    return [each, loss.full_tensor().detach(), logits.grad.full_tensor()]
