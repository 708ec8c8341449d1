"""Every op has the right gradient in every argument, or an error that names it: never a silent one.

The walk goes over all ops of the registry and all their tensors, each called past the dispatcher
and as the torch op, in eager mode, in compiled graphs and from exported programs. The truth is
autograd through the op's reference, which is functional for ops that write as well.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import gristmill
from gristmill.errors import GristmillError, NoGradientError
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WRITING = [name for name, op in OPS.items() if op.written]
# Results that are constants by the op's definition, whatever its arguments are.
CONSTANT = {"cross_entropy_one_pass": (1, 2)}  # lse and the gradient that waits

# What a compiler makes of an error that is raised while it traces.
WRAPPED = (GristmillError, torch._dynamo.exc.TorchDynamoException)


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def differentiable(value: Any) -> bool:
    """Not FP8 or FP4, which have no arithmetic."""
    return (
        isinstance(value, torch.Tensor) and value.is_floating_point() and value.element_size() > 1
    )


@functools.cache
def arguments(op: Op, device: str = "cpu") -> dict[str, tuple[Any, ...]]:
    """For each tensor of an op that can require a gradient, small arguments which have it."""
    names = [one.name for one in op.overload._schema.arguments]
    wanted = {one.name for one in op.overload._schema.arguments if "Tensor" in str(one.type)}
    exact: dict[str, tuple[Any, ...]] = {}
    others: dict[str, tuple[Any, ...]] = {}
    for case in op.cases():
        args = case.make(device, 0)
        if sum(one.numel() for one in args if isinstance(one, torch.Tensor)) > 40_000:
            continue
        floats = [one for one in args if differentiable(one)]
        is_exact = all(one.dtype in (torch.float32, torch.float64) for one in floats)
        for name, value in zip(names, args, strict=True):
            if differentiable(value) and value.numel():
                (exact if is_exact else others).setdefault(name, args)
            elif isinstance(value, torch.Tensor) and not differentiable(value):
                wanted.discard(name)
        if wanted <= set(exact):
            break
    return {**others, **exact}


def step(
    op: Op, call: Callable[..., Any], args: tuple[Any, ...], needed: set[str], device: str
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor | None]]:
    """What depends on the arguments that need a gradient, and that gradient."""
    values = list(args)
    leaves: dict[str, torch.Tensor] = {}
    for at, argument in enumerate(op.overload._schema.arguments):
        if isinstance(values[at], torch.Tensor):
            values[at] = values[at].detach().to(device, copy=True)
        if argument.name in needed:
            leaves[argument.name] = values[at].requires_grad_()
            values[at] = values[at] * 1  # what is written to must not be a leaf
    result = call(*values)
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    results += [values[at] for at in op.written]
    loss = torch.zeros((), dtype=torch.float64, device=device)
    generator = torch.Generator().manual_seed(1)
    for at, one in enumerate(results):
        if one is not None and one.is_floating_point() and at not in CONSTANT.get(op.name, ()):
            weights = torch.randn(one.shape, generator=generator, dtype=torch.float64).to(device)
            loss = loss + (one.double() * weights).sum()
    if not loss.requires_grad:
        return results, dict.fromkeys(leaves)
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return results, dict(zip(leaves, found, strict=True))


def check(
    op: Op, call: Callable[..., Any], args: tuple[Any, ...], needed: set[str], device: str = "cpu"
) -> bool:
    """Whether it has a gradient; if so it is the right one, else the error names the op."""
    text = ""
    try:
        _, found = step(op, call, args, needed, device)
    except WRAPPED as error:
        text = str(error)
    if text:
        assert op.name.partition("_one_pass")[0] in text
        assert "grad" in text
        return False
    _, truth = step(op, op.reference, args, needed, device)
    for name, want in truth.items():
        got = found[name]
        if want is None or got is None:  # nothing depends on it
            assert want is None or not want.any(), f"{name} has no gradient and should have"
            assert got is None or not got.any(), f"{name} has a gradient and should have none"
            continue
        rough = torch.finfo(want.dtype).eps * 500
        torch.testing.assert_close(got, want, rtol=rough, atol=rough * float(want.abs().max()))
    return True


def direct(op: Op) -> Callable[..., Any]:
    """As the public functions call it."""

    def call(*args: Any) -> Any:
        tensors = tuple(one for one in args if isinstance(one, torch.Tensor))
        return op.traced(*args) if torch.compiler.is_compiling() else op.call(tensors, args)

    return call


CALLS: dict[str, Callable[[Op], Callable[..., Any]]] = {
    "function": direct,
    "torch.ops": lambda op: op.overload,
}
# A gradient in none of them, by design: parts of others, and what works in place.
WITHOUT = {
    name for name in OPS if name.endswith(("_backward", "_fp8", "_shard")) or name in WRITING
}

# With every change those that write and some that do not; the others with the long tests.
QUICK = {*WRITING, "add_rms_norm", "cross_entropy_one_pass", "topk_router", "rms_norm_fp8"}
COMPILED = [
    pytest.param(
        name, backend, marks=() if name in quick else pytest.mark.long, id=f"{name}-{backend}"
    )
    for backend, quick in (("aot_eager", QUICK), ("inductor", WRITING))
    for name in OPS
]


# The cases of these take seconds to make.
SLOW = ("nvfp4_moe", "nvfp4_moe_backward", "linear_cross_entropy_backward")
EACH = [pytest.param(name, marks=pytest.mark.long if name in SLOW else (), id=name) for name in OPS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", EACH)
def test_each_argument_of_each_op_in_eager_mode(name: str, device: str) -> None:
    op = OPS[name]
    given = arguments(op, device)
    assert given
    for called in CALLS.values():
        found = [check(op, called(op), args, {one}, device) for one, args in given.items()]
        assert any(found) == (name not in WITHOUT)


@pytest.mark.parametrize("called", CALLS)
@pytest.mark.parametrize(("name", "backend"), COMPILED)
def test_each_op_in_a_compiled_graph(name: str, backend: str, called: str) -> None:
    """The first argument alone, and where that is refused, each of the others."""
    op = OPS[name]
    given = arguments(op)
    call = torch.compile(CALLS[called](op), fullgraph=True, backend=backend)
    with torch._inductor.config.patch(force_disable_caches=True):
        for one, args in given.items():
            if check(op, call, args, {one}):
                assert name not in WITHOUT
                return
    assert name in WITHOUT


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("name", WRITING)
def test_an_exported_op_that_writes(name: str, strict: bool) -> None:
    """Exported without gradients, as it is and functionalised, and called with them."""
    op = OPS[name]

    class Module(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return op.overload(*args)

    for one, args in arguments(op).items():
        program = torch.export.export(Module(), args, strict=strict)
        for exported in (program, program.run_decompositions()):
            assert not check(op, exported.module(), args, {one})


# --- the functions whose ops write


def fused(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x, residual = x * 2, residual * 2
    gristmill.fused_add_rms_norm_(x, residual, weight)
    return x.sum() + residual.sum()


def tensors(*needed: int) -> list[torch.Tensor]:
    found = [torch.randn(2, 8), torch.randn(2, 8), torch.randn(8)]
    return [one.requires_grad_(at in needed) for at, one in enumerate(found)]


@pytest.mark.parametrize("needed", [(0,), (1,), (2,), (0, 1, 2)])
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager", "inductor"])
def test_the_function_in_place_says_what_to_do(
    backend: str | None, needed: tuple[int, ...]
) -> None:
    run = fused if backend is None else torch.compile(fused, backend=backend)
    words = r"fused_add_rms_norm_: this op has no gradient.*torch\.no_grad\(\).*add_rms_norm"
    with pytest.raises(WRAPPED, match=words):
        run(*tensors(*needed))


@pytest.mark.parametrize(
    "backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.long)]
)
def test_without_gradients_ops_that_write_run(backend: str | None) -> None:
    args = tensors()
    expected = fused(*args)

    def within(*args: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            total = fused(*args)
        return total * args[2].sum()

    run, partly = fused, within
    if backend is not None:
        run, partly = (torch.compile(one, backend=backend, fullgraph=True) for one in (run, partly))
    torch.testing.assert_close(run(*args), expected)
    needing = [one.clone().requires_grad_() for one in args]
    with torch.no_grad():
        torch.testing.assert_close(run(*needing), expected)
    with torch.inference_mode():
        torch.testing.assert_close(run(*needing), expected)
    total = partly(*needing)
    total.backward()
    torch.testing.assert_close(needing[2].grad, expected.expand(8))
    assert needing[0].grad is None


def test_transforms_of_the_function_in_place_go_through_its_reference() -> None:
    def functional(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        y, total = gristmill.add_rms_norm(x * 2, residual * 2, weight)
        return y.sum() + total.sum()

    args = tensors()
    expected = torch.func.grad(functional, argnums=(0, 1, 2))(*args)
    torch.testing.assert_close(torch.func.grad(fused, argnums=(0, 1, 2))(*args), expected)
    compiled = torch.compile(torch.func.grad(fused, argnums=(0, 1, 2)), backend="aot_eager")
    torch.testing.assert_close(compiled(*args), expected)
    op = torch.ops.gristmill.fused_add_rms_norm_

    def registered(x: torch.Tensor) -> torch.Tensor:
        x = x * 2
        op(x, args[1] * 2, args[2], 1e-6)
        return x.sum()

    with pytest.raises(NoGradientError, match=r"^fused_add_rms_norm_: this op has no gradient"):
        torch.func.grad(registered)(args[0])
    with pytest.raises(GristmillError, match=r"^fused_add_rms_norm_: .*forward-mode tangent"):
        torch.func.jvp(registered, (args[0],), (args[0],))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
@pytest.mark.parametrize("called", CALLS)
@pytest.mark.parametrize("name", WRITING)
def test_a_backward_pass_that_needs_overwritten_values_raises(
    name: str, called: str, backend: str | None, device: str
) -> None:
    """As after torch's own in-place ops, whether or not the op runs under no_grad."""
    op = OPS[name]
    call = CALLS[called](op)
    args = next(iter(arguments(op, device).values()))
    for at, context in itertools.product(op.written, (torch.no_grad, torch.enable_grad)):

        def run(
            scale: torch.Tensor, *values: Any, at: int = at, context: Any = context
        ) -> torch.Tensor:
            product = (scale * values[at]).sum()  # saves what is overwritten
            with context():
                call(*values)
            return product

        step = run if backend is None else torch.compile(run, backend=backend, fullgraph=True)
        values = [one.clone() if isinstance(one, torch.Tensor) else one for one in args]
        scale = torch.ones_like(values[at], requires_grad=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            step(scale, *values).backward()


@pytest.mark.parametrize("device", DEVICES)
def test_versions_are_incremented_whatever_kernel_runs(device: str) -> None:
    """A kernel that is launched by address does not do so itself."""
    for name in WRITING:
        op = OPS[name]
        args = next(iter(arguments(op, device).values()))
        for variant in op.variants:
            if variant.supports(op.problem(*args)) is not None:
                continue
            values = [one.clone() if isinstance(one, torch.Tensor) else one for one in args]
            before = [values[at]._version for at in op.written]
            with gristmill.use(op.name, variant.name):
                op.run(*values)
            after = [values[at]._version for at in op.written]
            assert all(new > old for old, new in zip(before, after, strict=True)), variant.name


def test_logits_in_place_have_their_gradient_in_eager_mode_only() -> None:
    target = torch.arange(4)
    logits = torch.randn(4, 6, dtype=torch.float64, requires_grad=True)

    def loss(logits: torch.Tensor) -> torch.Tensor:
        return gristmill.cross_entropy(logits * 2, target, one_pass=True, inplace=True)

    (expected,) = torch.autograd.grad(torch.nn.functional.cross_entropy(logits * 2, target), logits)
    (found,) = torch.autograd.grad(loss(logits), logits)
    torch.testing.assert_close(found, expected)
    with pytest.raises(WRAPPED, match="cross_entropy: inplace works in plain eager mode alone"):
        torch.compile(loss, backend="aot_eager")(logits)


# Raises whatever it is called with: it stands in backward passes that must not run.
WITHOUT_KERNEL = {"gristmill::runner_gradient"}


def test_no_torch_op_of_ours_is_left_to_the_fallback_of_autograd() -> None:
    names = {
        schema.name
        for schema in torch._C._jit_get_all_schemas()
        if schema.name.startswith(("gristmill::", "gristmill_user::"))
    }
    assert len(names) > len(OPS)
    for name in names - WITHOUT_KERNEL:
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "Autograd"), name


def test_tensors_that_only_describe_reach_the_fake() -> None:
    """The short way below autograd is for real tensors alone."""
    for device in ("meta", "fake"):
        with FakeTensorMode() if device == "fake" else contextlib.nullcontext():
            where = "cpu" if device == "fake" else device
            logits = torch.empty(2, 8, device=where)
            target = torch.empty(2, device=where, dtype=torch.int64)
            loss, lse = torch.ops.gristmill.cross_entropy_one_pass_(logits, target)
            assert (loss.shape, lse.shape) == ((), (2,))
            assert loss.is_meta or isinstance(loss, FakeTensor)
