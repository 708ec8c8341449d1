"""A MultiKernel with a schema is a torch op: registered, checked, differentiated, replaced."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from multikernel_cases import CASES, Case, like_first, softmax_looped, softmax_persistent
from multikernel_helpers import fake_timing, forget_choices, same_bits
from torch.fx.experimental.proxy_tensor import make_fx

from gristmill.errors import ArgumentError, NoGradientError, VariantUnavailable
from gristmill.multikernel import MultiKernel

SOFTMAX = {"a": softmax_persistent, "b": softmax_looped}


def make(name: str, case: Case) -> MultiKernel:
    return MultiKernel(name, case.kernels, schema=case.schema, fake=case.fake)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_opcheck(case: Case) -> None:
    one = make(f"checked_{case.name}", case)
    for winner in case.possible:
        with one.use(winner):
            args = case.make(6)
            if case.name == "same_argument":
                args = tuple(torch.randn(6, 40) for _ in range(3))  # opcheck copies them one by one
            if case.name == "dropout":
                # Two runs of it differ, which is what the other tests take for a mistake.
                torch.library.opcheck(one.op, args, test_utils=("test_schema", "test_faketensor"))
            else:
                torch.library.opcheck(one.op, args)


def test_called_as_a_torch_op_it_chooses_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    one = MultiKernel("as_op", SOFTMAX, schema="(Tensor x) -> Tensor", fake=like_first)
    assert one.op is torch.ops.gristmill_user.as_op.default
    x = torch.randn(64, 100)
    assert same_bits(one.op(x), softmax_persistent(x))
    fake_timing(monkeypatch, {"a": 9.0, "b": 1.0})
    one.tune(x)
    assert same_bits(one.op(x), softmax_looped(x))
    assert same_bits(one(x), softmax_looped(x))
    with one.use("a"):
        assert same_bits(torch.ops.gristmill_user.as_op(x), softmax_persistent(x))


def test_defaults_and_keywords_of_the_schema() -> None:
    def kernel(x: Any, scale: float, power: int, *, shift: float) -> torch.Tensor:
        return x * scale**power + shift

    one = MultiKernel(
        "defaults",
        {"a": kernel, "b": lambda *args, **kwargs: kernel(*args, **kwargs)},
        schema="(Tensor x, float scale=2.0, int power=3, *, float shift=1.0) -> Tensor",
        fake=lambda x, scale, power, *, shift: torch.empty_like(x),
    )
    x = torch.ones(4)
    assert float(one.op(x)[0]) == 9.0
    assert float(one.op(x, 2.0, 3)[0]) == 9.0
    assert float(one.op(x, 3.0)[0]) == 28.0
    assert float(one.op(x, power=2, shift=0.0)[0]) == 4.0
    whole = torch.compile(lambda x: one.op(x, 3.0, shift=0.0), fullgraph=True, backend="aot_eager")
    assert float(whole(x)[0]) == 27.0


def test_somebody_who_listens_sees_the_op() -> None:
    one = MultiKernel("listened", SOFTMAX, schema="(Tensor x) -> Tensor", fake=like_first)
    x = torch.randn(4, 100)
    one(x)  # a plan is there, and is not taken
    graph = make_fx(one)(x)
    assert one.op in [node.target for node in graph.graph.nodes]
    program = torch.export.export(_Module(one), (x,))
    assert one.op in [node.target for node in program.graph.nodes]
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        assert one(mode.from_tensor(x)).shape == x.shape


class _Module(torch.nn.Module):
    def __init__(self, one: MultiKernel) -> None:
        super().__init__()
        self.one = one

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) * 2


def test_transforms_go_through_the_functions() -> None:
    one = MultiKernel("transformed", SOFTMAX, schema="(Tensor x) -> Tensor", fake=like_first)
    x = torch.randn(3, 4, 100)
    torch.testing.assert_close(torch.func.vmap(one)(x), torch.softmax(x, -1))
    gradient = torch.func.grad(lambda x: one(x).square().sum())(x)
    expected = torch.func.grad(lambda x: torch.softmax(x, -1).square().sum())(x)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("winner", ["a", "b"])
@pytest.mark.parametrize("schema", [None, "(Tensor x) -> Tensor"])
def test_without_a_formula_kernels_are_differentiated_as_they_are(
    schema: str | None, winner: str
) -> None:
    fake = None if schema is None else like_first
    name = "plainly" if schema is None else "plainly_registered"
    one = MultiKernel(name, SOFTMAX, schema=schema, fake=fake)
    x = torch.randn(4, 100, dtype=torch.float64, requires_grad=True)
    with one.use(winner):
        assert torch.autograd.gradcheck(one, (x,))


def test_without_a_formula_a_graph_has_no_gradient_and_says_so() -> None:
    one = MultiKernel("no_formula", SOFTMAX, schema="(Tensor x) -> Tensor", fake=like_first)
    x = torch.randn(4, 100, requires_grad=True)
    compile_fails = torch._dynamo.exc.BackendCompilerFailed  # it traces the gradient at once
    with pytest.raises(compile_fails, match=r"'no_formula'.* register_autograd.*torch.no_grad"):
        torch.compile(lambda x: one(x).sum(), fullgraph=True, backend="aot_eager")(x).backward()
    with pytest.raises(NoGradientError, match="no_formula"):
        one.op(x).sum().backward()


def test_formula_holds_in_graphs_and_in_eager() -> None:
    calls = []

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(output)

    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        (y,) = ctx.saved_tensors
        return y * (dy - (dy * y).sum(-1, keepdim=True))

    one = MultiKernel("formula", SOFTMAX, schema="(Tensor x) -> Tensor", fake=like_first)
    one.register_autograd(backward, setup_context=setup_context)
    x = torch.randn(4, 100, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(4, 100, dtype=torch.float64)
    (expected,) = torch.autograd.grad((torch.softmax(x, -1) * weights).sum(), x)
    whole = torch.compile(lambda x: one(x), fullgraph=True, backend="aot_eager")
    for winner in "ab":
        for call in (one, one.op, whole):
            with one.use(winner):
                (gradient,) = torch.autograd.grad((call(x) * weights).sum(), x)
            torch.testing.assert_close(gradient, expected)
    assert len(calls) >= 5  # in a graph it is traced, once
    torch.library.opcheck(one.op, (x,))
    assert torch.autograd.gradcheck(one, (x,))
    traced = len(calls)
    with torch.no_grad():
        assert same_bits(one(x), softmax_persistent(x))
    assert len(calls) == traced


def test_formula_needs_an_op() -> None:
    def backward(ctx: Any, dy: Any) -> Any:
        return dy

    with pytest.raises(ArgumentError, match="needs a torch op; give MultiKernel a schema"):
        MultiKernel("formless", SOFTMAX).register_autograd(backward)
    functional = MultiKernel("formed", SOFTMAX, schema="(Tensor x) -> Tensor", fake=like_first)
    with pytest.raises(TypeError, match="backward must be callable, got int"):
        functional.register_autograd(5)  # type: ignore[arg-type]


def test_a_later_one_takes_over_the_op_in_graphs_too() -> None:
    """The same schema: the op stays, what runs is new. Another schema: an error."""
    schema = "(Tensor x) -> Tensor"
    first = MultiKernel("taken", {"a": lambda x: x + 1}, schema=schema, fake=like_first)
    whole = torch.compile(
        lambda x: torch.ops.gristmill_user.taken(x), fullgraph=True, backend="eager"
    )
    x = torch.zeros(3)
    assert float(whole(x)[0]) == 1.0
    second = MultiKernel("taken", {"a": lambda x: x + 2}, schema=schema, fake=like_first)
    assert float(whole(x)[0]) == 2.0
    assert second.op is first.op
    with pytest.raises(ArgumentError, match=r"schema .*Tensor y.* differs .*take another name"):
        MultiKernel(
            "taken", {"a": torch.add}, schema="(Tensor x, Tensor y) -> Tensor", fake=like_first
        )
    assert float(whole(x)[0]) == 2.0


def test_an_op_whose_kernels_are_gone_says_so() -> None:
    one = MultiKernel("leaving", SOFTMAX, schema="(Tensor x) -> Tensor", fake=like_first)
    op, gone = one.op, weakref.ref(one)
    x = torch.randn(4, 100)
    op(x)
    torch.compile(lambda x: op(x), fullgraph=True, backend="aot_eager")(x)
    del one
    torch._dynamo.reset()
    gc.collect()
    assert gone() is None
    with pytest.raises(
        VariantUnavailable, match=r"gristmill_user.leaving: its MultiKernel is gone"
    ):
        op(x)
    again = MultiKernel("leaving", SOFTMAX, schema="(Tensor x) -> Tensor", fake=like_first)
    assert same_bits(op(x), softmax_persistent(x))
    del again


def test_tuning_by_the_first_call_of_an_op(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a graph, too, and never twice."""
    from multikernel_helpers import set_tuning

    set_tuning(monkeypatch)
    clock = fake_timing(monkeypatch, {"a": 9.0, "b": 1.0})
    one = MultiKernel("tuned_op", SOFTMAX, schema="(Tensor x) -> Tensor", fake=like_first)
    whole = torch.compile(lambda x: one(x), fullgraph=True, backend="aot_eager")
    x = torch.randn(64, 100)
    for _ in range(2):
        assert same_bits(whole(x), softmax_looped(x))
    assert sorted(clock.runs) == ["a", "b"]
    forget_choices()
    assert same_bits(one(x), softmax_looped(x))
    assert len(clock.runs) == 2
