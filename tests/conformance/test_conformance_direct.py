"""The direct route: taken when nobody listens, never when somebody does, with the same results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from conformance_helpers import DEVICES, same_bits
from conformance_truth import results_of
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import gristmill
from gristmill.errors import ArgumentError
from gristmill.ops.direct import is_direct, needs_grad
from gristmill.ops.registry import OPS
from gristmill.ops.rms_norm import rms_norm_backward


def pair(device: str = "cpu", dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator) for shape in ((4, 32), (32,)))
    return x.to(device, dtype), weight.to(device, dtype)


class Seen:
    """The torch ops of gristmill that went through the dispatcher, by a dispatch mode."""

    def __init__(self) -> None:
        self.names: list[str] = []

    @contextlib.contextmanager
    def watching(self) -> Iterator[Seen]:
        seen = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                if func.namespace == "gristmill":
                    seen.names.append(func.__name__)
                return func(*args, **(kwargs or {}))

        with Watch():
            yield self


@pytest.fixture
def dispatched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the ops that calls hand to torch's dispatcher, in order."""
    names: list[str] = []
    for op in OPS.values():

        def recorded(*args: Any, op: Any = op) -> Any:
            names.append(op.name)
            return op.overload(*args)

        monkeypatch.setattr(op, "dispatch", recorded)
    return names


def test_plain_tensors_and_parameters_are_direct(dispatched: list[str]) -> None:
    x, weight = pair()
    parameter = torch.nn.Parameter(weight)
    assert is_direct(x, None)
    assert is_direct(x, parameter)
    assert is_direct(x, torch.nn.Buffer(weight))
    assert is_direct()
    y = gristmill.rms_norm(x, parameter)
    gristmill.add_rms_norm(x, x, parameter)[0].sum().backward()
    y.sum().backward()
    with torch.no_grad():
        gristmill.fused_add_rms_norm_(x, x.clone(), weight)
    with torch.inference_mode():
        gristmill.rms_norm(x, weight)
    assert dispatched == []


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", list(OPS))
def test_both_routes_give_the_same_bits(name: str, device: str) -> None:
    op = OPS[name]
    for case in op.cases():
        one, other = case.make(device, 0), case.make(device, 0)
        if device == "cpu" and one[0].numel() > 300_000:
            continue  # one variant serves all sizes there
        direct = results_of(name, one, op.run(*one))
        registered = results_of(name, other, op.overload(*other))
        for left, right in zip(direct, registered, strict=True):
            assert same_bits(left, right), case.name


def test_needs_grad() -> None:
    x = torch.ones(2, requires_grad=True)
    assert needs_grad(None, x)
    assert not needs_grad(None, x.detach())
    with torch.no_grad():
        assert not needs_grad(x)
    with torch.inference_mode():
        assert not needs_grad(x)


def test_not_while_compiling() -> None:
    found = []

    @torch.compile(backend="eager", fullgraph=True)
    def function(x: torch.Tensor) -> torch.Tensor:
        if is_direct(x):
            return x + 1
        return x + 2

    found.append(function(torch.zeros(3)))
    assert bool((found[0] == 2).all())


def test_not_while_exporting() -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + (1 if is_direct(x) else 2)

    program = torch.export.export(Model(), (torch.zeros(3),))
    assert bool((program.module()(torch.zeros(3)) == 2).all())


class Subclass(torch.Tensor):
    pass


def test_not_with_a_tensor_subclass(dispatched: list[str]) -> None:
    x, weight = pair()
    expected = gristmill.rms_norm(x, weight)
    assert not is_direct(x.as_subclass(Subclass), weight)
    assert not is_direct(x, weight.as_subclass(Subclass))
    result = gristmill.rms_norm(x.as_subclass(Subclass), weight)
    assert dispatched == ["rms_norm"]
    assert same_bits(result.as_subclass(torch.Tensor), expected)


class Wrapper(torch.Tensor):
    """A subclass without memory of its own: only the dispatcher can open it."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        wrapper = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        opened = torch.utils._pytree.tree_map_only(cls, lambda one: one.inner, args)
        result = func(*opened, **(kwargs or {}))
        return torch.utils._pytree.tree_map_only(torch.Tensor, cls, result)


@pytest.mark.parametrize("wrapped", [0, 1])
def test_a_wrapper_subclass_is_seen_by_its_dispatch(wrapped: int) -> None:
    args = list(pair())
    expected = gristmill.rms_norm(*args)
    args[wrapped] = Wrapper(args[wrapped])
    result = gristmill.rms_norm(*args)
    assert type(result) is Wrapper
    assert same_bits(result.inner, expected)


def test_not_with_fake_tensors(dispatched: list[str]) -> None:
    x, weight = pair()
    with FakeTensorMode() as mode:
        fake_x, fake_weight = mode.from_tensor(x), mode.from_tensor(weight)
        assert not is_direct(fake_x, fake_weight)
        y, total = gristmill.add_rms_norm(fake_x, fake_x, fake_weight, out_dtype=torch.float16)
    assert dispatched == ["add_rms_norm"]
    assert isinstance(y, FakeTensor)
    assert (y.shape, y.dtype, total.dtype) == (x.shape, torch.float16, torch.float32)
    # Outside the mode, fake tensors are still no plain ones.
    assert not is_direct(fake_x)


def test_not_under_a_function_mode(dispatched: list[str]) -> None:
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x, weight = pair()
    expected = gristmill.rms_norm(x, weight)
    with Mode():
        assert not is_direct(x)
        result = gristmill.rms_norm(x, weight)
    assert OPS["rms_norm"].overload in seen
    assert dispatched == ["rms_norm"]
    assert same_bits(result, expected)


def test_not_under_a_default_device(dispatched: list[str]) -> None:
    x, weight = pair()
    expected = gristmill.rms_norm(x, weight)
    with torch.device("meta"):
        # The op makes its result beside x, whatever the default is.
        assert not is_direct(x)
        result = gristmill.rms_norm(x, weight)
        dx, dweight = rms_norm_backward(x, x, weight, None, 1e-6, 0.0, True)
    assert dispatched == ["rms_norm", "rms_norm_backward"]
    assert same_bits(result, expected)
    assert dx.device.type == dweight.device.type == "cpu"


def test_not_under_a_dispatch_mode(dispatched: list[str]) -> None:
    x, weight = pair()
    expected = gristmill.rms_norm(x, weight)
    with Seen().watching() as seen:
        assert not is_direct(x)
        result = gristmill.rms_norm(x, weight)
    assert seen.names == ["rms_norm.default"]
    assert dispatched == ["rms_norm"]
    assert same_bits(result, expected)


def test_a_dispatch_mode_sees_the_backward_as_well() -> None:
    x, weight = (value.requires_grad_() for value in pair())
    with Seen().watching() as seen:
        y, total = gristmill.add_rms_norm(x, x, weight)
        (y.sum() + total.sum()).backward()
    assert seen.names == ["add_rms_norm.default", "rms_norm_backward.default"]


@pytest.mark.parametrize("device", DEVICES)
def test_vmap(device: str) -> None:
    x, weight = pair(device)
    many = torch.stack([x, 2 * x, x + 1])
    directs = []

    def function(one: torch.Tensor) -> torch.Tensor:
        directs.append(is_direct(one))
        return gristmill.rms_norm(one, weight)

    result = torch.func.vmap(function)(many)
    assert directs == [False]
    torch.testing.assert_close(result, gristmill.rms_norm(many, weight))


@pytest.mark.parametrize("device", DEVICES)
def test_functorch_grad(device: str) -> None:
    x, weight = pair(device)
    directs = []

    def loss(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        directs.append(is_direct(x))
        y, total = gristmill.add_rms_norm(x, x, weight)
        return (y * total).sum()

    dx, dweight = torch.func.grad(loss, argnums=(0, 1))(x, weight)
    assert directs == [False]
    leaf, leaf_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss(leaf, leaf_weight).backward()
    torch.testing.assert_close(dx, leaf.grad)
    torch.testing.assert_close(dweight, leaf_weight.grad)


def test_functionalize() -> None:
    x, residual, weight = *pair(), pair()[0] + 1
    residual, weight = weight, residual
    directs = []

    def function(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, residual = x.clone(), residual.clone()
        directs.append(is_direct(x))
        gristmill.fused_add_rms_norm_(x, residual, weight)
        return x, residual

    results = torch.func.functionalize(function)(x, residual)
    expected = function(x, residual)
    assert directs == [False, True]
    for result, want in zip(results, expected, strict=True):
        assert same_bits(result, want)


def _norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, (32,), weight, 1e-6)


def test_forward_mode_tangents_are_passed_on() -> None:
    x, weight = pair()
    tangent = torch.randn(4, 32)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, tangent)
        assert type(dual) is torch.Tensor
        assert not is_direct(dual)
        found = [
            forward_ad.unpack_dual(gristmill.rms_norm(dual, weight)).tangent,
            *(
                forward_ad.unpack_dual(result).tangent
                for result in gristmill.add_rms_norm(dual, torch.ones_like(x), weight)
            ),
        ]
    _, expected = torch.func.jvp(lambda x: _norm(x, weight), (x,), (tangent,))
    _, added = torch.func.jvp(lambda x: _norm(x + 1, weight), (x,), (tangent,))
    torch.testing.assert_close(found, [expected, added, tangent])


def test_forward_mode_through_the_in_place_op() -> None:
    x, weight = pair()
    tangent = torch.randn(4, 32)
    with forward_ad.dual_level(), torch.no_grad():
        # Tangents are overwritten with the tensors they belong to.
        dual, residual = forward_ad.make_dual(x.clone(), tangent.clone()), torch.ones(4, 32)
        gristmill.fused_add_rms_norm_(dual, residual, weight)
        found = [forward_ad.unpack_dual(result).tangent for result in (dual, residual)]
    _, expected = torch.func.jvp(lambda x: _norm(x + 1, weight), (x,), (tangent,))
    torch.testing.assert_close(found, [expected, tangent])


@pytest.mark.parametrize("name", list(OPS))
def test_registered_ops_refuse_tangents_rather_than_lose_them(name: str) -> None:
    args = list(OPS[name].example((3, 16), torch.float32, "cpu"))
    with forward_ad.dual_level():
        # Without a tangent nothing can be lost.
        OPS[name].overload(*args)
        args[0] = forward_ad.make_dual(args[0], torch.ones_like(args[0]))
        with pytest.raises(ArgumentError, match=f"^{name}: an argument has a .* tangent"):
            OPS[name].overload(*args)


def test_transforms_compose() -> None:
    x, weight = pair()

    def ours(x: torch.Tensor) -> torch.Tensor:
        return gristmill.rms_norm(x, weight).pow(3).sum()

    def theirs(x: torch.Tensor) -> torch.Tensor:
        return _norm(x, weight).pow(3).sum()

    for transform in (
        torch.func.jacrev,
        torch.func.jacfwd,
        torch.func.hessian,
        lambda function: torch.func.vmap(torch.func.grad(function)),
    ):
        torch.testing.assert_close(transform(ours)(x), transform(theirs)(x), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_jit_trace_records_the_op() -> None:
    x, weight = pair()
    directs = []

    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        directs.append(is_direct(x))
        return gristmill.rms_norm(x, weight, 1e-5)

    traced = torch.jit.trace(function, (x, weight), check_trace=False)
    assert directs == [False]
    assert "gristmill::rms_norm" in str(traced.graph)
    other = x * 3 + 1
    assert same_bits(traced(other, weight), gristmill.rms_norm(other, weight, 1e-5))


def test_not_under_autocast(dispatched: list[str]) -> None:
    x, weight = pair(dtype=torch.bfloat16)
    expected = gristmill.rms_norm(x, weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_direct(x)
        result = gristmill.rms_norm(x, weight)
        theirs = torch.nn.functional.rms_norm(x, (32,), weight, 1e-6)
    # torch's own op does nothing special under CPU autocast.
    assert result.dtype == theirs.dtype == torch.bfloat16
    assert dispatched == ["rms_norm"]
    assert same_bits(result, expected)


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_cuda_autocast_makes_of_a_call(
    dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    """As torch: everything in fp32, but fp64 stays what it is; an explicit out_dtype wins."""
    x = torch.randn(4, 32).to(dtype)
    weight = None if weight_dtype is None else torch.randn(32).to(weight_dtype)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    op = OPS["rms_norm"]
    if op.autocast is None:
        pytest.skip("this torch leaves rms_norm alone under autocast, and so do we")
    args = op.autocast(x, weight, 1e-6, 0.0, "llama", None)
    result = op.run(*args)
    assert result.dtype == wanted
    widened = None if weight is None else weight.to(wanted)
    expected = torch.nn.functional.rms_norm(x.to(wanted), (32,), widened, 1e-6)
    torch.testing.assert_close(result, expected, rtol=1e-6, atol=1e-6)
    args = op.autocast(x, weight, 1e-6, 0.0, "once", torch.float16)
    assert op.run(*args).dtype == torch.float16
    y, total = OPS["add_rms_norm"].run(
        *OPS["add_rms_norm"].autocast(x, x, weight, 1e-6, 0.0, "once", None)
    )
    assert (y.dtype, total.dtype) == (wanted, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("weight_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cuda_autocast_is_torchs(dtype: torch.dtype, weight_dtype: torch.dtype | None) -> None:
    x = torch.randn(4, 256, device="cuda").to(dtype).requires_grad_()
    weight = None if weight_dtype is None else torch.randn(256, device="cuda").to(weight_dtype)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert not is_direct(x, weight)
        # Rounding on the way is another function, unless everything is computed in fp32 anyhow.
        autocasts = OPS["rms_norm"].autocast is not None
        casting = "llama" if autocasts else "once"
        ours = gristmill.rms_norm(x, weight, 1e-6, casting=casting)
        if weight is None or weight_dtype == dtype or (autocasts and dtype != torch.float64):
            theirs = torch.nn.functional.rms_norm(x, (256,), weight, 1e-6)
            assert ours.dtype == theirs.dtype
            eps = 2 * torch.finfo(ours.dtype).eps if ours.dtype.itemsize == 2 else 1e-5
            torch.testing.assert_close(ours, theirs, rtol=eps, atol=eps)
        explicit = gristmill.rms_norm(x, weight, 1e-6, out_dtype=torch.float16)
        assert explicit.dtype == torch.float16
    ours.sum().backward()
    assert x.grad.dtype == dtype


@pytest.mark.gpu
def test_an_autocast_step_trains() -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(256, 256, device="cuda")
    norm = gristmill.nn.RMSNorm(256, device="cuda")
    x = torch.randn(8, 256, device="cuda")
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = norm(linear(x))
        theirs = torch.nn.functional.rms_norm(linear(x), (256,), norm.weight.bfloat16())
        loss = y.square().mean()
    loss.backward()
    # fp32 where this torch autocasts rms_norm; else bf16, that of what linear gives.
    assert y.dtype == theirs.dtype
    assert norm.weight.grad is not None
    assert bool(norm.weight.grad.isfinite().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("policy", ["save", "recompute"])
def test_a_checkpoint_policy_can_name_the_op(policy: str, device: str) -> None:
    x, weight = (value.requires_grad_() for value in pair(device))
    decision = {
        "save": CheckpointPolicy.MUST_SAVE,
        "recompute": CheckpointPolicy.MUST_RECOMPUTE,
    }[policy]
    asked = []

    def decide(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is OPS["rms_norm"].overload:
            asked.append(context.is_recompute)
            return decision
        return CheckpointPolicy.PREFER_RECOMPUTE

    runs = []
    run = OPS["rms_norm"].run

    def counted(*args: Any) -> Any:
        runs.append(args)
        return run(*args)

    def block(x: torch.Tensor) -> torch.Tensor:
        return torch.sin(gristmill.rms_norm(torch.cos(x), weight))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(OPS["rms_norm"], "run", counted)
        y = checkpoint(
            block,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(decide),
        )
        y.sum().backward()
    assert asked[0] is False
    assert len(runs) == (1 if policy == "save" else 2)
    gradient, weight_gradient = x.grad, weight.grad
    x.grad = weight.grad = None
    block(x).sum().backward()
    torch.testing.assert_close(gradient, x.grad)
    torch.testing.assert_close(weight_gradient, weight.grad)
