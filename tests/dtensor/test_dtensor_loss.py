"""Cross entropy of DTensors, beside one process that has all of the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from loss_cases import LINEAR_SCENARIOS, SCENARIOS, Scenario, ignored
from mesh_pool import MeshPool

import gristmill

OLD_TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 13)


@pytest.fixture(scope="module")
def found(mesh_pool: MeshPool) -> list[dict[str, Any]]:
    """What every rank has found, in all scenarios."""
    return mesh_pool.run("loss_tasks:run_scenarios", list(SCENARIOS))


def alone(scenario: Scenario) -> tuple[list[torch.Tensor], torch.Tensor]:
    numbers = scenario.whole()
    logits = numbers["logits"].clone().requires_grad_()
    weight = numbers["weight"] if scenario.weighted else None
    results: Any = gristmill.cross_entropy(
        logits, numbers["target"], weight=weight, **scenario.options
    )
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    gradients = [numbers[name] for name in ("dloss", "dlse")[: len(results)]]
    (gradient,) = torch.autograd.grad(results, logits, gradients)
    return [one.detach() for one in results], gradient


@pytest.mark.parametrize("name", SCENARIOS)
def test_as_one_process(name: str, found: list[dict[str, Any]]) -> None:
    scenario = SCENARIOS[name]
    results, gradient = alone(scenario)
    precise = results[0].dtype
    off = 16 * torch.finfo(precise).eps
    for rank in found:
        one = rank[name]
        for mine, want in zip(one["results"], results, strict=True):
            assert mine.dtype == want.dtype
            torch.testing.assert_close(mine, want, rtol=off, atol=8 * off, equal_nan=True)
        assert one["gradient"].dtype == gradient.dtype
        least = off * float(gradient.nan_to_num().abs().max()) if gradient.numel() else 0.0
        torch.testing.assert_close(
            one["gradient"],
            gradient,
            rtol=2 * off + torch.finfo(gradient.dtype).eps * (gradient.dtype != precise),
            atol=8 * least,
            equal_nan=True,
        )
        # The gradient lies where the logits do; that of something partial is whole everywhere.
        wanted = [word.replace("Partial(sum)", "Replicate()") for word in one["logits placements"]]
        wanted = ["R" if word == "P(sum)" else word for word in wanted]
        assert one["gradient placements"] == wanted
        if scenario.options.get("reduction") != "none":
            assert set(one["loss placements"]) <= {"R", "Replicate()"}
            assert torch.equal(one["results"][0].isnan(), found[0][name]["results"][0].isnan())


@pytest.fixture(scope="module")
def found_linear(mesh_pool: MeshPool) -> list[dict[str, Any]]:
    return mesh_pool.run("loss_tasks:run_linear_scenarios", list(LINEAR_SCENARIOS))


@pytest.mark.parametrize("name", LINEAR_SCENARIOS)
def test_linear_as_one_process(name: str, found_linear: list[dict[str, Any]]) -> None:
    scenario = LINEAR_SCENARIOS[name]
    numbers = scenario.whole()
    names = ("x", "weight", "bias") if scenario.bias else ("x", "weight")
    leaves = {one: numbers[one].clone().requires_grad_() for one in names}
    loss = gristmill.linear_cross_entropy(
        leaves["x"],
        leaves["weight"],
        numbers["target"],
        bias=leaves.get("bias"),
        class_weight=numbers["class_weight"] if scenario.weighted else None,
        **scenario.options,
    )
    gradients = torch.autograd.grad(loss, list(leaves.values()), numbers["dloss"])
    off = 32 * torch.finfo(loss.dtype).eps
    for rank in found_linear:
        one = rank[name]
        torch.testing.assert_close(one["loss"], loss.detach(), rtol=off, atol=off)
        assert one["is replicated"] or scenario.options.get("reduction") == "none"
        for mine, want in zip(one["gradients"], gradients, strict=True):
            assert mine.dtype == want.dtype
            most = float(want.abs().max()) if want.numel() else 0.0
            # Summands of several ranks are each rounded to the dtype of the gradient.
            rough = 0.0 if want.dtype == loss.dtype else 2 * torch.finfo(want.dtype).eps
            torch.testing.assert_close(mine, want, rtol=2 * off, atol=most * (2 * off + rough))


def test_no_logits_are_sent(mesh_pool: MeshPool) -> None:
    """Three numbers a row where classes are sharded, four in all where rows are; no more."""
    for sent in mesh_pool.run("loss_tasks:what_is_sent"):
        counts = {
            words: {kind: count for kind, count in kinds.items() if count}
            for words, kinds in sent.items()
        }
        assert sorted(counts["S0", "S-1"].values()) == [1, 1]
        assert list(counts["S0", "R"].values()) == [1]
        assert list(counts["R", "S-1"].values()) == [1]
        assert counts["R", "R"] == {}
        assert "all_reduce" in next(iter(counts["S0", "R"])).replace("allreduce", "all_reduce")


def test_modes(mesh_pool: MeshPool) -> None:
    numbers = Scenario((2, 2), ()).whole()
    logits, target = numbers["logits"].requires_grad_(), numbers["target"]
    loss, lse = gristmill.cross_entropy(logits, target, return_lse=True)
    (gradient,) = torch.autograd.grad(loss, logits)
    module = gristmill.nn.CrossEntropyLoss(weight=numbers["weight"], label_smoothing=0.1)
    weighted = module(logits.movedim(-1, 1), target)
    (weighted_gradient,) = torch.autograd.grad(weighted, logits)
    with torch.autocast("cpu", torch.bfloat16):
        x = torch.randn(4, 8, generator=torch.manual_seed(3))
        weight = torch.randn(6, 8, generator=torch.manual_seed(4))
        linear = gristmill.linear_cross_entropy(x, weight, torch.arange(4))
    for found in mesh_pool.run("loss_tasks:modes"):
        torch.testing.assert_close(found["one pass"], [loss.detach(), gradient])
        requires, own = found["lse of one pass"]
        assert not requires
        torch.testing.assert_close(own, lse.detach())
        torch.testing.assert_close(found["module"], [weighted.detach(), weighted_gradient])
        torch.testing.assert_close(found["no gradient"], loss.detach())
        torch.testing.assert_close(found["autocast"], loss.detach())
        torch.testing.assert_close(found["linear autocast"], linear, rtol=1e-5, atol=1e-5)
        assert found["item"] == float(found["linear autocast"])


SAID = {
    "plain logits": "DtypeError: cross_entropy: logits must be a DTensor where target is one",
    "local target": "ArgumentError: cross_entropy: target must have the shape of logits",
    "meshes": "ArgumentError: cross_entropy: target must be on the mesh of logits",
    "in place": "ArgumentError: cross_entropy: inplace must be False where logits are a DTensor",
    "weight": "ArgumentError: cross_entropy: weight must not require grad",
    "reduction": "ArgumentError: cross_entropy: reduction must be",
    "second": "DoubleBackwardError: cross_entropy: the gradient of DTensors",
    "second, replicated": "DoubleBackwardError: cross_entropy: the gradient of DTensors",
    "vocab parallel": "DtypeError: vocab_parallel_cross_entropy: logits must be this rank's shard",
    "linear plain x": "DtypeError: linear_cross_entropy: x must be a DTensor where weight is one",
    "linear plain weight": "DtypeError: linear_cross_entropy: weight must be a DTensor",
    "linear class weight": "ArgumentError: linear_cross_entropy: class_weight requires grad",
    "linear second": "DoubleBackwardError: linear_cross_entropy: the gradient of DTensors",
}


def test_what_cannot_be_is_said(mesh_pool: MeshPool) -> None:
    for said in mesh_pool.run("loss_tasks:refusals"):
        for name, words in SAID.items():
            assert said[name].startswith(words), (name, said[name])


@pytest.mark.parametrize(
    "name",
    ["classes", *[pytest.param(one, marks=pytest.mark.long) for one in ("rows", "linear", "lse")]],
)
def test_compiled_whole(name: str, mesh_pool: MeshPool) -> None:
    for eager, compiled in mesh_pool.run("loss_tasks:compiled", name, "aot_eager"):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.long
def test_compiled_by_inductor(mesh_pool: MeshPool) -> None:
    for eager, compiled in mesh_pool.run("loss_tasks:compiled", "classes", "inductor"):
        torch.testing.assert_close(compiled, eager)


@pytest.mark.parametrize(
    ("mesh", "words"), [((4,), ("S1",)), ((2, 2), ("S0", "S1")), ((2, 2), ("S1", "S-1"))]
)
def test_flattened_rows(mesh: tuple[int, ...], words: tuple[str, ...], mesh_pool: MeshPool) -> None:
    numbers = Scenario((4,), (), rows=(4, 8), change=ignored).whole()
    logits, target = numbers["logits"].requires_grad_(), numbers["target"]
    each = gristmill.cross_entropy(logits, target, reduction="none").flatten()
    loss = gristmill.cross_entropy(logits, target, z_loss=0.1)
    want = [each.detach(), loss.detach(), torch.autograd.grad(loss, logits)[0]]
    for found in mesh_pool.run("loss_tasks:flattened", mesh, words):
        if isinstance(found, str) and OLD_TORCH:
            # Its view rules: a DTensor is flattened only where the first of the dims is sharded.
            assert "Attempted to flatten multiple dimensions, with dimension 1" in found
            pytest.skip("this torch cannot flatten these logits itself; the loss takes three dims")
        torch.testing.assert_close(found, want, rtol=1e-12, atol=1e-12)
