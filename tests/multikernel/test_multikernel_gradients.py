"""Gradients of MultiKernels as torch ops, also of those that write, against autograd through them.

Each is called as an object and as the torch op, in eager mode, in compiled graphs and from exported
programs: it has the right gradient, or where none was registered it says so.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from multikernel_gradient_cases import FORMULAS, Formula, exp_, like_first, multiply_, nothing
from torch.autograd import forward_ad

from gristmill.errors import ArgumentError, NoGradientError
from gristmill.multikernel import MultiKernel
from gristmill.ops import autograd

BY_NAME = {one.name: one for one in FORMULAS}


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


def made(formula: Formula, tag: str, gradient: bool = True) -> MultiKernel:
    one = MultiKernel(
        f"{tag}_{formula.name}", formula.kernels, schema=formula.schema, fake=formula.fake
    )
    if gradient:
        one.register_autograd(**formula.gradient)
    return one


class Program(torch.nn.Module):
    def __init__(self, formula: Formula, call: Callable[..., Any]) -> None:
        super().__init__()
        self.program, self.call = formula.program, call

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.program(self.call, *tensors)


def gradients(
    run: Callable[..., Sequence[torch.Tensor]], formula: Formula, device: str = "cpu"
) -> list[torch.Tensor | None]:
    """What the program gives, what its arguments hold then, and their gradients."""
    tensors = [one.detach().to(device).requires_grad_(one.requires_grad) for one in formula.make()]
    results = run(*tensors)
    loss = sum((one * (2 + at)).cos().sum() for at, one in enumerate(results))
    loss.backward()
    values = [one.detach() for one in (*results, *tensors)]
    return [*values, *(one.grad for one in tensors)]


def check(
    run: Callable[..., Sequence[torch.Tensor]], formula: Formula, device: str = "cpu"
) -> None:
    expected = gradients(Program(formula, formula.kernel), formula, device)
    found = gradients(run, formula, device)
    for at, (want, got) in enumerate(zip(expected, found, strict=True)):
        assert (want is None) == (got is None), at
        if want is not None and got is not None:
            torch.testing.assert_close(got, want, msg=lambda text, at=at: f"{at}: {text}")


def way_to_run(way: str, formula: Formula, call: Callable[..., Any]) -> Callable[..., Any]:
    program = Program(formula, call)
    if way == "eager":
        return program
    if not way.startswith("export"):
        return torch.compile(program, fullgraph=True, backend=way)
    # Traced as for inference, of tensors that need no gradient.
    tensors = tuple(one.detach() for one in formula.make())
    exported = torch.export.export(program, tensors, strict="strict" in way)
    if "functional" in way:
        exported = exported.run_decompositions()
    return exported.module()


CALLS = {"object": lambda one: one, "op": lambda one: one.op}
EAGER = ["eager", "aot_eager"]
EXPORTED = ["export", "export strict", "export functional"]
QUICK = ("multiply", "batch_norm", "lists", "norm_views")
LONG = pytest.mark.long
MARKED = [
    pytest.param(
        formula,
        way,
        marks=()
        if way in EAGER or (formula.name in QUICK and way != "inductor")
        else pytest.mark.long,
        id=f"{formula.name}-{way}".replace(" ", "_"),
    )
    for formula in FORMULAS
    for way in (*EAGER, *EXPORTED, "inductor")
    # Inductor cannot compile an operator that writes to nothing but an argument that is None.
    if (formula.name, way) != ("left_out", "inductor")
]


@pytest.mark.parametrize("called", CALLS)
@pytest.mark.parametrize(("formula", "way"), MARKED)
def test_gradients_are_those_of_the_functions(formula: Formula, way: str, called: str) -> None:
    one = made(formula, "formula")
    with torch._inductor.config.patch(force_disable_caches=True):
        check(way_to_run(way, formula, CALLS[called](one)), formula)


@pytest.mark.gpu
@pytest.mark.parametrize("called", CALLS)
@pytest.mark.parametrize("formula", FORMULAS, ids=lambda one: one.name)
def test_gradients_on_a_gpu(formula: Formula, called: str) -> None:
    one = made(formula, "gpu")  # a torch op keeps no reference to it
    check(way_to_run("eager", formula, CALLS[called](one)), formula, "cuda")


@pytest.mark.parametrize("called", CALLS)
@pytest.mark.parametrize("formula", FORMULAS, ids=lambda one: one.name)
def test_second_gradients_are_those_of_the_formula(formula: Formula, called: str) -> None:
    one = made(formula, "second")

    def both(call: Callable[..., Any]) -> list[torch.Tensor]:
        tensors = formula.make()
        needed = [one for one in tensors if one.requires_grad]
        loss = sum((one * 2).cos().sum() for one in formula.program(call, *tensors))
        first = torch.autograd.grad(loss, needed, create_graph=True)
        return [*first, *torch.autograd.grad(sum(one.sin().sum() for one in first), needed)]

    for want, got in zip(both(formula.kernel), both(CALLS[called](one)), strict=True):
        torch.testing.assert_close(got, want)


# --- what is overwritten belongs to the caller of a graph


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("way", [*EAGER, pytest.param("inductor", marks=pytest.mark.long)])
def test_history_of_what_a_graph_overwrites_for_its_caller(
    way: str, constant: bool, view: bool
) -> None:
    one = made(BY_NAME["add"], "outside")

    def inside(call: Callable[..., Any], x: torch.Tensor, y: torch.Tensor) -> None:
        call(x * 2, y)
        call((x + 1).sin(), y)

    def gradients(run: Callable[..., None]) -> list[Any]:
        torch.manual_seed(0)
        x = torch.rand(3, 4, requires_grad=True)
        p = torch.rand(5, 4, requires_grad=not constant)
        y = p.sin() if view else p[1:4].sin()
        run(x, y[1:4] if view else y)
        y.square().sum().backward()
        assert y.requires_grad
        return [y.detach(), x.grad, p.grad]

    run = functools.partial(inside, one)
    if way != "eager":
        run = torch.compile(run, fullgraph=True, backend=way)
    expected = gradients(functools.partial(inside, one.kernels["a"]))
    with torch._inductor.config.patch(force_disable_caches=True):
        found = gradients(run)
    for want, got in zip(expected, found, strict=True):
        assert (want is None) == (got is None)
        if want is not None:
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("holder", ["argument", "buffer"])
@pytest.mark.parametrize("way", [*EAGER, "inductor"])
def test_an_old_statistic_that_a_formula_saves(way: str, holder: str) -> None:
    """Of an input that the graph overwrites, although it needs no gradient itself."""

    def normalise(x: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
        y = x * mean
        mean.mul_(0.5).add_(x.detach().mean(0))
        return y

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[1])
        ctx.mark_non_differentiable(output[1])

    one = MultiKernel(
        f"statistic_{holder}_{way}",
        {"a": normalise},
        schema="(Tensor x, Tensor(a!) mean) -> Tensor",
        fake=like_first,
    )
    one.register_autograd(
        lambda ctx, dy, dmean: (dy * ctx.saved_tensors[0], None), setup_context=setup_context
    )
    module = torch.nn.Module()
    module.register_buffer("mean", torch.rand(3))
    mean, x = module.mean, torch.rand(4, 3, requires_grad=True)
    old = mean.clone()
    call: Any = (lambda x, mean: one(x, mean)) if holder == "argument" else lambda x: one(x, mean)
    if way != "eager":
        call = torch.compile(call, backend=way, fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        call(x, *([mean] if holder == "argument" else [])).sum().backward()
    torch.testing.assert_close(x.grad, old.expand(4, 3))
    torch.testing.assert_close(mean, old * 0.5 + x.detach().mean(0))


# --- old values that another op has saved


def add_by_address(x: torch.Tensor, y: torch.Tensor) -> None:
    """As a launcher does: torch knows nothing of what it writes."""
    y.detach().numpy()[...] += x.detach().numpy()


@pytest.mark.parametrize("context", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("called", ["object", "keyword", "op", "no schema"])
@pytest.mark.parametrize("way", [*EAGER, pytest.param("inductor", marks=pytest.mark.long)])
def test_a_backward_pass_that_needs_overwritten_values_raises(
    way: str, called: str, context: Any
) -> None:
    if called == "no schema":
        if way != "eager":
            return
        one = MultiKernel("launcher", {"a": add_by_address}, mutates=["y"])
    else:
        one = MultiKernel(
            "launched",
            {"a": add_by_address},
            schema="(Tensor x, Tensor(a!) y) -> ()",
            fake=lambda x, y: None,
        )

    def step(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        product = (w * y).sum()
        with context():
            if called == "keyword":
                one(x, y=y)
            else:
                (one.op if called == "op" else one)(x, y)
        return product

    run = step if way == "eager" else torch.compile(step, backend=way, fullgraph=True)
    for _ in range(2):  # the first call of a kernel, and one with a plan
        w, x, y = torch.ones(4, requires_grad=True), torch.ones(4), torch.ones(4)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            run(w, x, y).backward()


@pytest.mark.parametrize("called", ["object", "keyword", "op"])
def test_a_schema_may_name_arguments_otherwise_than_the_functions(called: str) -> None:
    one = MultiKernel(
        "renamed",
        {"a": lambda x, out: add_by_address(out, x)},
        schema="(Tensor(a!) out, Tensor x) -> ()",
        fake=lambda out, x: None,
    )
    for _ in range(2):
        written, read = torch.ones(4), torch.ones(4)
        if called == "keyword":
            one(out=read, x=written)  # by the functions' names
        else:
            (one.op if called == "op" else one)(written, read)
        assert (written._version > 0, read._version) == (True, 0)


def test_versions_of_what_is_written_without_a_schema() -> None:
    def collect(x: torch.Tensor, *more: torch.Tensor, out: Any) -> None: ...

    x, more, out = (torch.ones(4) for _ in range(3))
    MultiKernel("collects", {"a": collect}, mutates=[1])(x, more, out=out)
    assert (x._version, more._version > 0, out._version) == (0, True, 0)
    MultiKernel("collected", {"a": collect}, mutates=["out"])(x, more, out={"all": [out]})
    assert (x._version, out._version > 0) == (0, True)
    with pytest.raises(ArgumentError, match=r"names 'more', which collects any number of arg"):
        MultiKernel("collecting", {"a": collect}, mutates=["more"])


def test_a_function_may_differentiate_for_itself() -> None:
    def slope(x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            leaf = x.detach().requires_grad_()
            return torch.autograd.grad(leaf.sin().sum(), leaf)[0]

    one = MultiKernel("slope", {"a": slope}, schema="(Tensor x) -> Tensor", fake=like_first)
    x = torch.rand(4)
    for call in (one, one.op):
        torch.testing.assert_close(call(x), x.cos())


def test_versions_of_tensors_in_lists() -> None:
    one = made(BY_NAME["lists"], "versions", gradient=False)
    for call in (one, one.op):
        x, ys = torch.rand(3), [torch.rand(3), torch.rand(3)]
        before = [y._version for y in ys]
        call([x, x], ys, 2.0)
        assert all(y._version > old for y, old in zip(ys, before, strict=True))


# --- where there is no gradient

WRAPPED = (NoGradientError, torch._dynamo.exc.TorchDynamoException)


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda one: one.name)
@pytest.mark.parametrize("way", ["eager", "aot_eager", "inductor", "export"])
def test_without_a_formula_it_says_so(way: str, formula: Formula) -> None:
    one = made(formula, "without", gradient=False)
    run = way_to_run(way, formula, one.op)
    with pytest.raises(WRAPPED, match=f"'without_{formula.name}'.*no gradient.*register_autograd"):
        gradients(run, formula)
    leaves = formula.make()
    constants = [tensor.detach() for tensor in leaves]
    expected = formula.program(formula.kernel, *(one.clone() for one in constants))
    if way == "inductor":
        return
    for needed in (False, True):
        args = [one.detach().clone() for one in leaves]
        for arg, leaf in zip(args, leaves, strict=True):
            arg.requires_grad_(needed and leaf.requires_grad)
        with torch.set_grad_enabled(not needed):
            found = run(*args)
        for want, got in zip(expected, found, strict=True):
            torch.testing.assert_close(got, want)
            assert not got.requires_grad
    with torch.inference_mode():
        torch.testing.assert_close(run(*(one.clone() for one in constants)), expected)


@pytest.mark.parametrize("formula", FORMULAS, ids=lambda one: one.name)
def test_without_a_formula_functions_are_differentiated_in_eager_mode(formula: Formula) -> None:
    check(Program(formula, made(formula, "plain", gradient=False)), formula)


def test_a_region_without_gradients_inside_a_graph() -> None:
    one = made(BY_NAME["multiply"], "region", gradient=False)

    def region(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            y = x * 2
            one(x, y)
        return y * x

    x = torch.rand(4, requires_grad=True)
    torch.compile(region, fullgraph=True, backend="aot_eager")(x).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach().square())


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=LONG)])
def test_a_decomposed_program_is_not_compiled_with_gradients(backend: str) -> None:
    """torch runs the op below autograd there, and would lose the gradient without an error."""
    one = made(BY_NAME["multiply"], "decomposed")

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.full((4,), 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x * 3
            one(self.weight, y)
            return y.sum() + self.weight.sum()

    x = torch.ones(4)
    program = torch.export.export(Model(), (x,))
    module = program.run_decompositions().module()
    module(x).backward()
    torch.testing.assert_close(module.weight.grad, torch.full((4,), 4.0))
    compiled = torch.compile(module, backend=backend)
    with pytest.raises(WRAPPED, match=r"'decomposed_multiply': in a decomposed exported pro"):
        compiled(x).backward()
    torch._dynamo.reset()
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), module(x).detach())
    again = torch.export.export(module, (x,)).module()
    again.weight.grad = None
    again(x).backward()
    torch.testing.assert_close(again.weight.grad, torch.full((4,), 4.0))
    module = program.module()
    module.weight.grad = None
    torch.compile(module, backend=backend)(x).backward()
    torch.testing.assert_close(module.weight.grad, torch.full((4,), 4.0))


# --- arguments


def test_a_keyword_alone_may_require_a_gradient() -> None:
    one = made(BY_NAME["parts"], "keyword")
    x, factor = torch.rand(3, 4), torch.rand(3, 4, requires_grad=True)
    sine, _ = one.op(x, factor=factor)
    assert sine.requires_grad
    without = made(BY_NAME["parts"], "keyword_without", gradient=False)
    with pytest.raises(NoGradientError, match="'keyword_without_parts'"):
        without.op(x, factor=factor)[0].sum().backward()


def test_defaults_that_torch_leaves_out() -> None:
    """It strips arguments that equal their defaults, and a schema has numbers for dtypes."""
    seen: list[Any] = []

    def kernel(x: torch.Tensor, dtype: Any, *, bits: int, other: Any) -> torch.Tensor:
        seen.append((dtype, bits, other))
        return x.to(dtype)

    def fake(x: torch.Tensor, dtype: Any, *, bits: int, other: Any) -> torch.Tensor:
        return torch.empty_like(x, dtype=dtype)

    one = MultiKernel(
        "dtype_defaults",
        {"a": kernel},
        schema="(Tensor x, ScalarType dtype=double, *, int bits=3, ScalarType? other=half) "
        "-> Tensor",
        fake=fake,
    )
    expected = (torch.float64, 3, torch.float16)
    x = torch.rand(3)
    for run in (one.op, torch.compile(one.op, fullgraph=True, backend="aot_eager")):
        seen.clear()
        assert run(x).dtype == torch.float64
        assert run(x, torch.float64, bits=3, other=torch.float16).dtype == torch.float64
        assert run(x, torch.bfloat16, bits=4).dtype == torch.bfloat16
        assert seen == [expected, expected, (torch.bfloat16, 4, torch.float16)]


@pytest.mark.parametrize("default", ["Layout a=strided", "MemoryFormat a=contiguous_format"])
def test_defaults_that_torch_passes_as_numbers_are_rejected(default: str) -> None:
    with pytest.raises(ArgumentError, match=r"'numbered': a must have no default, as torch would"):
        MultiKernel(
            "numbered",
            {"a": lambda x, a: x},
            schema=f"(Tensor x, {default}) -> Tensor",
            fake=like_first,
        )


def test_lists_without_tensors() -> None:
    def kernel(x: torch.Tensor, more: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([x, *more]).sum(0)

    seen: list[Any] = []

    def backward(ctx: Any, dy: torch.Tensor) -> tuple[Any, ...]:
        seen.append(ctx.needs_input_grad)
        return dy, [dy] * ctx.count

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count = len(inputs[1])

    one = MultiKernel(
        "no_tensors", {"a": kernel}, schema="(Tensor x, Tensor[] more) -> Tensor", fake=like_first
    )
    one.register_autograd(backward, setup_context=setup_context)
    for count in (0, 2):
        x = torch.rand(3, requires_grad=True)
        one.op(x, [torch.rand(3)] * count).sum().backward()
        assert bool((x.grad == 1).all())
    assert seen == [(True, []), (True, [False, False])]


# --- mistakes


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_leaves_are_not_overwritten(backend: str | None) -> None:
    one = made(BY_NAME["multiply"], "leaves")
    run = one if backend is None else torch.compile(one.op, backend=backend)
    x = torch.rand(4, 4, requires_grad=True)
    before = x.detach().clone()
    with pytest.raises((RuntimeError, *WRAPPED), match=r"a leaf Variable that requires grad is"):
        run(before, x)
    with pytest.raises((RuntimeError, *WRAPPED), match=r"a view of a leaf Variable that requires"):
        run(before[0], x[1])
    assert torch.equal(x, before)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_memory_that_is_also_written_has_no_gradient(backend: str | None) -> None:
    one = made(BY_NAME["multiply"], "shared")

    def call(x: torch.Tensor, at: slice, to: slice) -> torch.Tensor:
        y = x * 2
        one.op(y[at], y[to])
        return y

    run = call if backend is None else torch.compile(call, fullgraph=True, backend=backend)
    x = torch.rand(5, requires_grad=True)
    for at, to in ((slice(0, 4), slice(1, 5)), (slice(2), slice(2))):
        with pytest.raises(WRAPPED, match=r"'shared_multiply': x and y share memory that is writ"):
            run(x, at, to)
    one.register_autograd(**BY_NAME["add"].gradient)
    if backend is not None:
        torch._dynamo.reset()
    run(x, slice(0, 2), slice(2, 4)).sum().backward()  # beside each other
    torch.testing.assert_close(x.grad, torch.tensor([4.0, 4.0, 2.0, 2.0, 2.0]))


def test_results_are_tensors_of_their_own() -> None:
    for schema in ("(Tensor(a!) x) -> Tensor(a!)", "(Tensor(a) x) -> Tensor(a)"):
        with pytest.raises(ArgumentError, match=r"'aliased': a result must not alias an argument"):
            MultiKernel("aliased", {"a": torch.sin}, schema=schema, fake=like_first)


def test_gradients_must_fit_the_arguments() -> None:
    x, y = (torch.rand(3, requires_grad=True) for _ in range(2))
    one = made(BY_NAME["multiply"], "fitting", gradient=False)
    one.register_autograd(lambda ctx, dy: dy)
    z = y * 1
    one(x, z)
    with pytest.raises(ArgumentError, match=r"return one gradient .* of x, y: 2 values, got 1"):
        z.sum().backward()
    lists = made(BY_NAME["lists"], "fitting", gradient=False)
    lists.register_autograd(lambda ctx, dresult, dys: (dresult, dys, None))
    z = y * 1
    lists([x], [z], 1.0)
    with pytest.raises(ArgumentError, match=r"return a list of 1 gradients or None for xs, got"):
        z.sum().backward()
    parts = made(BY_NAME["parts"], "fitting", gradient=False)
    parts.register_autograd(lambda ctx, dsine, dparts: dsine)
    sine, _ = parts(x, factor=y)
    with pytest.raises(NoGradientError, match=r"no gradient for the keyword-only arguments factor"):
        sine.sum().backward()


def test_transforms_differentiate_the_functions_and_not_the_op() -> None:
    """In a compiled graph as well, where the functions are traced."""
    one = made(BY_NAME["multiply"], "transformed")

    def run(call: Callable[..., Any]) -> Callable[..., Any]:
        def loss(x: torch.Tensor) -> torch.Tensor:
            y = x.sin()
            call(x * 2, y)
            return y.sum()

        return loss

    x, t = torch.rand(4), torch.rand(4)
    for transform in (
        torch.func.grad,
        lambda loss: lambda x: torch.func.jvp(loss, (x,), (t,))[1],
    ):
        expected = transform(run(multiply_))(x)
        torch.testing.assert_close(transform(run(one))(x), expected)
        compiled = torch.compile(transform(run(one)), fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x), expected)
        with pytest.raises(ArgumentError, match=r"call the MultiKernel itself"):
            transform(run(one.op))(x)
    with forward_ad.dual_level(), pytest.raises(ArgumentError, match=r"call the MultiKernel its"):
        one.op(forward_ad.make_dual(x, t), t.clone())


def test_a_formula_is_found_when_the_op_runs() -> None:
    """Given later, and changed: graphs that are made afterwards have it."""
    one = MultiKernel("later", {"a": exp_}, schema="(Tensor(a!) y) -> Tensor", fake=nothing)
    x = torch.rand(3, 4, requires_grad=True)
    with pytest.raises(NoGradientError, match="'later'"):
        one.op(x * 1)
    one.register_autograd(lambda ctx, dtotal, dy: dtotal.unsqueeze(-1).expand_as(dy) * 5)
    one.op(x * 1).sum().backward()
    assert bool((x.grad == 5).all())


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_parameter_that_a_function_closes_over_gives_the_op_no_history(
    backend: str | None,
) -> None:
    scale = torch.rand(4, requires_grad=True)
    kernels = {"left": lambda x: x * scale, "right": lambda x: scale * x}
    one = MultiKernel(f"closes_{backend}", kernels, schema="(Tensor x) -> Tensor", fake=like_first)
    run = one.op if backend is None else torch.compile(one.op, fullgraph=True, backend=backend)
    assert not run(torch.rand(4)).requires_grad


def test_a_plain_call_takes_one_pass_through_the_dispatcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Fails where torch gives plain tensors dispatch keys that ops/autograd.py does not know."""
    one = made(BY_NAME["multiply"], "passes", gradient=False)
    monkeypatch.setattr(autograd, "below_autograd", None)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            y = torch.ones(3, 4)
            one.op(torch.full((3, 4), 2.0), y)
            assert bool((y == 2).all())
