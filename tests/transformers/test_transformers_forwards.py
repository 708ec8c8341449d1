"""A forward exchanged on an instance, among others who exchange forwards, classes and copies."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from types import MethodType
from typing import Any

import pytest
import torch
from tf_models import labels_of, relative_error, tiny, tokens
from torch import nn

import gristmill
from gristmill.integrations.transformers.forwards import (
    exchange_forward,
    options_of,
    original_forward,
    own_forward,
    restore_forward,
)

hooks = pytest.importorskip("accelerate.hooks")


@dataclass(frozen=True)
class Times:
    factor: float


def times(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The module's own result, times a number: calls of an exchanged forward show."""
    result: torch.Tensor = original_forward(module)(x) * options_of(module).factor
    return result


def again(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return times(module, x) + 1.0


class Doubling(hooks.ModelHook):
    def post_forward(self, module: nn.Module, output: Any) -> Any:
        return 2 * output


def own(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return x - self.weight  # type: ignore[operator]


X = torch.arange(4.0)


def weighted(value: float = 3.0) -> nn.LayerNorm:
    """Of X a known result: weight and bias are the same number."""
    module = nn.LayerNorm(4)
    module.weight.data.fill_(value)
    module.bias.data.fill_(value)
    return module


def test_exchanged_and_given_back() -> None:
    module = weighted()
    wanted = module(X)
    before = dict(vars(module))
    exchange_forward(module, times, Times(10.0))
    assert torch.equal(module(X), 10 * wanted)
    assert inspect.signature(module.forward) == inspect.signature(weighted().forward)
    exchange_forward(module, again, Times(2.0))
    assert torch.equal(module(X), 2 * wanted + 1)
    assert restore_forward(module)
    assert vars(module) == before
    assert torch.equal(module(X), wanted)
    assert not restore_forward(module)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_have_forwards_of_their_own(how: Any) -> None:
    module = weighted()
    module.forward = MethodType(own, module)  # type: ignore[method-assign]
    exchange_forward(module, times, Times(10.0))
    if how is not copy.deepcopy:  # pickle cannot keep a bound function that is no method
        del module.forward
        restore_forward(module)
        exchange_forward(module, times, Times(10.0))
    copied = how(module)
    result = copied(X)
    copied.weight.data.zero_()
    copied.bias.data.zero_()
    assert not torch.equal(copied(X), result)
    assert not torch.equal(module(X), copied(X))
    assert restore_forward(copied)
    assert options_of(module) == Times(10.0)


def test_replicas_of_data_parallel_run_their_own_weights() -> None:
    """As `torch.nn.DataParallel` makes them, and fills them on each device."""
    module = weighted()
    exchange_forward(module, times, Times(10.0))
    replica = module._replicate_for_data_parallel()
    replica.weight, replica.bias = torch.zeros(4), torch.ones(4)
    assert torch.equal(replica(X), torch.full((4,), 10.0))


def test_over_the_forward_of_an_instance() -> None:
    module = weighted()
    module.forward = MethodType(own, module)  # type: ignore[method-assign]
    assert own_forward(module) is not None
    exchange_forward(module, times, Times(10.0))
    assert torch.equal(module(X), 10 * (X - 3))
    restore_forward(module)
    assert torch.equal(module(X), X - 3)


def test_patch_leaves_an_instance_with_a_forward_of_its_own() -> None:
    module = nn.Sequential(weighted())
    module[0].forward = MethodType(own, module[0])  # type: ignore[method-assign]
    report = gristmill.patch(module, loss=None)
    assert not report.replaced
    assert "a forward of its own" in report.left[0].reason
    assert torch.equal(module(X), X - 3)


def test_under_hooks_of_accelerate() -> None:
    """Patched, hooked, unhooked and unpatched, in every order."""
    module = weighted()
    wanted = module(X)
    for order in (
        "hook patch unhook unpatch",
        "hook patch unpatch unhook",
        "patch hook unpatch unhook",
    ):
        hooked, patched = 1, 1
        for step in order.split():
            if step == "hook":
                hooks.add_hook_to_module(module, Doubling())
                hooked = 2
            elif step == "unhook":
                hooks.remove_hook_from_module(module)
                hooked = 1
            elif step == "patch":
                assert own_forward(module) is None
                exchange_forward(module, times, Times(10.0))
                patched = 10
            else:
                assert restore_forward(module)
                patched = 1
            torch.testing.assert_close(module(X), hooked * patched * wanted)
        assert own_forward(module) is None
    hooks.add_hook_to_module(module, Doubling())
    assert gristmill.patch(module, loss=None).replaced
    torch.testing.assert_close(module(X), 2 * wanted)
    copied = copy.deepcopy(module)
    torch.testing.assert_close(copied(X), 2 * wanted)


def test_wrapped_by_another_since() -> None:
    """accelerate's mixed precision wraps a forward; the wrapper then runs the original."""
    module = weighted()
    wanted = module(X)
    exchange_forward(module, times, Times(10.0))
    inner = module.forward
    module.forward = lambda x: inner(x) + 1.0  # type: ignore[method-assign]
    assert torch.equal(module(X), 10 * wanted + 1)
    assert restore_forward(module)
    assert torch.equal(module(X), wanted + 1)
    exchange_forward(module, times, Times(10.0))
    assert torch.equal(module(X), 10 * (wanted + 1))
    restore_forward(module)
    assert torch.equal(module(X), wanted + 1)


@pytest.fixture
def one_process() -> Iterator[None]:
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("first", ["patch", "shard"])
def test_fully_sharded(first: str) -> None:
    """FSDP2 swaps classes and makes parameters DTensors; one process is enough to see both."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, ids = tiny("llama"), tokens()
    true_loss = model(input_ids=ids, labels=labels_of(ids)).loss
    true_loss.backward()
    truth = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    sharded = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (1,))
    if first == "patch":
        assert len(gristmill.patch(sharded).replaced) >= 6
    for layer in sharded.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded.model.norm, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    if first == "shard":
        assert len(gristmill.patch(sharded).replaced) >= 6
    loss = sharded(input_ids=ids, labels=labels_of(ids)).loss
    torch.testing.assert_close(loss, true_loss)
    loss.backward()
    for name, parameter in sharded.named_parameters():
        assert relative_error(parameter.grad.full_tensor(), truth[name]) < 1e-5, name


@pytest.mark.parametrize("first", ["patch", "adapters"])
def test_with_lora(first: str) -> None:
    """Adapters around linears, and a norm that is trained whole, of which peft keeps two copies."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    options = peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["norm"], init_lora_weights=False, r=4
    )
    model, ids = tiny("llama"), tokens()
    theirs = peft.get_peft_model(copy.deepcopy(model), options)
    state = theirs.state_dict()
    ours = copy.deepcopy(model)
    if first == "patch":
        gristmill.patch(ours)
    ours = peft.get_peft_model(ours, options)
    if first == "adapters":
        gristmill.patch(ours)
    assert list(ours.state_dict()) == list(state)
    ours.load_state_dict(state)
    losses = []
    for one in (theirs, ours):
        one.base_model.model.model.norm.modules_to_save["default"].weight.data.fill_(0.7)
        loss = one(input_ids=ids, labels=labels_of(ids)).loss
        loss.backward()
        losses.append(loss.detach())
    torch.testing.assert_close(losses[1], losses[0])
    wanted = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        assert parameter.requires_grad == wanted[name].requires_grad
        if parameter.requires_grad:
            assert relative_error(parameter.grad, wanted[name].grad) < 1e-5, name
