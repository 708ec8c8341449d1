"""torch.compile and torch.export: one op is one node, M stays symbolic, results are the same."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from conformance_graphs import Recorder, ops_of, ours
from conformance_helpers import DEVICES, case_of, copied, same_bits
from torch._dynamo.testing import CompileCounterWithBackend

import gristmill
from gristmill.errors import ArgumentError
from gristmill.ops.registry import OPS

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs g++ here")


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def block(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    y, total = gristmill.add_rms_norm(x * 2, residual, weight)
    z = gristmill.rms_norm(y.relu() + total, weight, 1e-5, weight_offset=1.0)
    return z.square().mean()


def tensors(rows: int, device: str, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(rows)
    shapes = ((rows, 64), (rows, 64), (64,))
    return [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]


def gradients(function: Callable[..., torch.Tensor], args: list[torch.Tensor]) -> list[Any]:
    leaves = [arg.detach().clone().requires_grad_() for arg in args]
    loss = function(*leaves)
    loss.backward()
    return [loss.detach(), *(leaf.grad for leaf in leaves)]


def test_one_op_is_one_node() -> None:
    recorder = Recorder()
    compiled = torch.compile(block, backend=recorder, fullgraph=True)
    gradients(compiled, tensors(6, "cpu"))
    assert ours(recorder.traced) == ["gristmill.add_rms_norm", "gristmill.rms_norm"]
    assert ours(recorder.forward) == ["gristmill.add_rms_norm", "gristmill.rms_norm"]
    assert ours(recorder.backward) == ["gristmill.rms_norm_backward"] * 2
    # Nothing of the formula is left beside them: the loss alone has a mean.
    assert sum("mean" in name for name in recorder.forward) == 1
    assert not any("rsqrt" in name for name in recorder.forward + recorder.backward)


def test_the_in_place_op_is_one_node_and_writes_its_arguments() -> None:
    recorder = Recorder()

    @torch.compile(backend=recorder, fullgraph=True)
    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gristmill.fused_add_rms_norm_(x, residual, weight)
        return x + residual

    args = tensors(5, "cpu", torch.bfloat16)
    expected = copied(tuple(args))
    gristmill.fused_add_rms_norm_(*expected)
    result = function(*args)
    assert ours(recorder.forward) == ["gristmill.fused_add_rms_norm_"]
    for one, other in zip(args, expected, strict=True):
        assert same_bits(one, other)
    assert same_bits(result, expected[0] + expected[1])


COMPILED = (
    "7",
    "0x64",
    "x float32 weight None",
    "x bfloat16 weight float32 llama",
    "out float32",
    "offset",
    "eps none",
    "unaligned",
    "transposed rows",
    "three levels",
    "columns strided",
    "expanded rows",
)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ["rms_norm", "add_rms_norm"])
def test_compiled_results_have_the_same_bits_and_strides(name: str, device: str) -> None:
    function = getattr(gristmill, name)
    positional = 3 if name == "rms_norm" else 4
    for case in (case_of(OPS[name], one) for one in COMPILED):
        torch._dynamo.reset()
        args = case.make(device, 0)
        options = dict(
            zip(("weight_offset", "casting", "out_dtype"), args[positional:], strict=True)
        )
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        results = compiled(*args[:positional], **options)
        expected = function(*args[:positional], **options)
        if isinstance(results, torch.Tensor):
            results, expected = (results,), (expected,)
        for result, want in zip(results, expected, strict=True):
            assert result.stride() == want.stride(), case.name
            assert same_bits(result, want), case.name


@pytest.mark.parametrize("device", DEVICES)
def test_a_compiled_training_step_is_the_eager_one(device: str) -> None:
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    args = tensors(9, device)
    torch.testing.assert_close(gradients(compiled, args), gradients(block, args))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("training", [False, True], ids=["forward", "training"])
def test_rows_are_symbolic(training: bool, device: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(block, backend=counter, fullgraph=True, dynamic=True)

    def check(rows: int) -> None:
        args = tensors(rows, device)
        if training:
            torch.testing.assert_close(gradients(compiled, args), gradients(block, args))
        else:
            torch.testing.assert_close(compiled(*args), block(*args))

    check(8)
    first = counter.frame_count
    for rows in (2, 3, 17, 64, 255, 1000):
        check(rows)
        assert counter.frame_count == first, rows
    # One row is a case of its own to Dynamo, whatever the op; it is compiled once.
    check(1)
    check(1)
    check(129)
    assert counter.frame_count <= first + 1


def test_marked_rows_are_symbolic() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    norm = gristmill.nn.RMSNorm(64)
    compiled = torch.compile(norm, backend=counter, fullgraph=True)
    for rows in (5, 7, 400):
        x = torch.randn(rows, 64)
        torch._dynamo.mark_dynamic(x, 0)
        torch.testing.assert_close(compiled(x), norm(x))
    assert counter.frame_count == 1


def test_unbacked_rows_compile() -> None:
    """A size that nobody knows, as after a selection by a mask."""

    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor, mask: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gristmill.rms_norm(x[mask], weight)

    x, weight = torch.randn(10, 64), torch.randn(64)
    mask = torch.arange(10) % 3 == 0
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        result = function(x, mask, weight)
    assert same_bits(result, gristmill.rms_norm(x[mask], weight))


def test_equal_layers_share_one_graph() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    layers = torch.nn.ModuleList(gristmill.nn.RMSNorm(32) for _ in range(6))
    for layer in layers:
        torch.nn.init.normal_(layer.weight)
        layer.compile(backend=counter, fullgraph=True)
    x = torch.randn(3, 32)
    for layer in layers:
        torch.testing.assert_close(layer(x), torch.nn.functional.rms_norm(x, (32,), layer.weight))
    assert counter.frame_count == 1


def test_a_wrong_argument_is_named_while_compiling() -> None:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gristmill.rms_norm(x, weight)

    with pytest.raises(Exception, match=r"rms_norm: weight must have shape \(64,\)"):
        function(torch.randn(2, 64), torch.randn(63))


def test_a_forced_variant_holds_at_run_time() -> None:
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    args = tensors(4, "cpu")
    compiled(*args)
    before = gristmill.counters()["choices"].get("rms_norm:reference", 0)
    with gristmill.use("rms_norm", "reference"):
        compiled(*args)
    assert gristmill.counters()["choices"]["rms_norm:reference"] > before


# --- inline


@pytest.fixture
def nothing_inlined() -> Iterator[None]:
    from gristmill.ops import inline

    names, opened = inline.NAMES, list(inline._ACTIVE)
    yield
    inline.NAMES, inline._ACTIVE[:] = names, opened


@pytest.mark.usefixtures("nothing_inlined")
def test_inline_shows_the_compiler_the_formula_while_it_lasts() -> None:
    recorder = Recorder()
    compiled = torch.compile(block, backend=recorder, fullgraph=True)
    args = tensors(6, "cpu")
    expected = gradients(block, args)
    torch.testing.assert_close(gradients(compiled, args), expected)
    assert len(ours(recorder.forward)) == 2

    recorder.forward.clear()
    with gristmill.inline("rms_norm", "add_rms_norm"):
        torch.testing.assert_close(gradients(compiled, args), expected)
        assert ours(recorder.forward) == []
        assert sum("rsqrt" in name for name in recorder.forward) == 2
        # Eager calls run our kernels all the same.
        assert same_bits(
            gristmill.rms_norm(args[0]), OPS["rms_norm"].run(args[0], None, 1e-6, 0.0, "once", None)
        )


@pytest.mark.usefixtures("nothing_inlined")
@pytest.mark.parametrize("name", ["rms_norm", "layer_norm"])
def test_an_inlined_norm_reads_a_row_for_its_squares_alone(name: str) -> None:
    """The scaling of rows that fp32 has no squares of is left out: it needs the largest value."""
    graphs: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph.code)
        return graph.forward

    with gristmill.inline(name):
        torch.compile(getattr(gristmill, name), backend=backend, fullgraph=True)(torch.rand(4, 64))
    (code,) = graphs
    assert "square" in code
    assert "vector_norm" not in code


@pytest.mark.usefixtures("nothing_inlined")
def test_inline_of_one_op_leaves_the_others() -> None:
    recorder = Recorder()
    with gristmill.inline("rms_norm"):
        torch.compile(block, backend=recorder, fullgraph=True)(*tensors(6, "cpu"))
    assert ours(recorder.forward) == ["gristmill.add_rms_norm"]


@pytest.mark.usefixtures("nothing_inlined")
def test_the_end_of_the_block_brings_the_op_back_without_a_reset() -> None:
    recorder = Recorder()
    compiled = torch.compile(block, backend=recorder, fullgraph=True)
    args = tensors(6, "cpu")
    with gristmill.inline("rms_norm", "add_rms_norm"):
        compiled(*args)
    assert ours(recorder.forward) == []
    compiled(*args)
    assert ours(recorder.forward) == ["gristmill.add_rms_norm", "gristmill.rms_norm"]


@pytest.mark.usefixtures("nothing_inlined")
def test_inline_nests_and_holds_without_a_block() -> None:
    from gristmill.ops import inline

    gristmill.inline("rms_norm")
    with gristmill.inline("add_rms_norm"):
        assert {"add_rms_norm", "rms_norm"} == inline.NAMES
    assert {"rms_norm"} == inline.NAMES


@pytest.mark.usefixtures("nothing_inlined")
@pytest.mark.parametrize("order", list(itertools.permutations(range(4))), ids=str)
def test_inline_blocks_may_end_in_any_order(order: tuple[int, ...]) -> None:
    """Of threads, or of generators; one name opened twice lasts until both blocks have ended."""
    from gristmill.ops import inline

    opened = [
        gristmill.inline(*names)
        for names in (
            ["rms_norm"],
            ["add_rms_norm"],
            ["rms_norm"],
            ["rms_norm", "add_rms_norm"],
        )
    ]
    left = list(opened)
    for index in order:
        with opened[index]:
            assert {"rms_norm", "add_rms_norm"} >= inline.NAMES >= opened[index].names
        left.remove(opened[index])
        assert {name for one in left for name in one.names} == inline.NAMES
    assert not inline.NAMES
    with opened[0]:
        pass  # ended before: nothing of anyone else's ends with it
    assert not inline.NAMES


@pytest.mark.usefixtures("nothing_inlined")
def test_inlined_calls_are_checked() -> None:
    with (
        gristmill.inline("rms_norm"),
        pytest.raises(Exception, match=r"rms_norm: weight must have shape \(64,\)"),
    ):
        torch.compile(gristmill.rms_norm, backend="aot_eager", fullgraph=True)(
            torch.randn(2, 64), torch.randn(63)
        )


def test_inline_names_what_there_is() -> None:
    with pytest.raises(
        ArgumentError, match=r"'rms_nrm'.*can be inlined: .*add_rms_norm.* rms_norm"
    ):
        gristmill.inline("rms_norm", "rms_nrm")
    with pytest.raises(ArgumentError, match="no op named"):
        gristmill.inline()


# --- Inductor: the real thing, for a few


INDUCTOR: dict[str, dict[str, Any]] = {
    "default": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "dynamic": {"dynamic": True},
}


@needs_compiler
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("options", INDUCTOR.values(), ids=INDUCTOR.keys())
def test_inductor(options: dict[str, Any], device: str) -> None:
    compiled = torch.compile(block, fullgraph=True, **options)
    for rows in (16, 24):
        args = tensors(rows, device)
        expected = gradients(block, args)
        for _ in range(3):  # reduce-overhead captures on the second call, replays on the third
            torch.compiler.cudagraph_mark_step_begin()
            found = [value.clone() for value in gradients(compiled, args)]
            torch.testing.assert_close(found, expected)


@needs_compiler
@pytest.mark.parametrize("device", DEVICES)
def test_inductor_with_the_in_place_op(device: str) -> None:
    def function(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        gristmill.fused_add_rms_norm_(x, residual, weight)
        return x * 2

    args = tuple(tensors(16, device, torch.bfloat16))
    expected = copied(args)
    wanted = function(*expected)
    result = torch.compile(function, fullgraph=True)(*args)
    assert same_bits(result, wanted)
    for one, other in zip(args, expected, strict=True):
        assert same_bits(one, other)


@needs_compiler
@pytest.mark.parametrize("device", [pytest.param("cpu", marks=pytest.mark.long), DEVICES[1]])
def test_inductor_with_cpp_wrapper(device: str) -> None:
    compiled = torch.compile(block, fullgraph=True, options={"cpp_wrapper": True})
    args = tensors(16, device)
    if device == "cuda" and not _wraps_backward():
        with torch.no_grad():
            torch.testing.assert_close(compiled(*args), block(*args))
        return
    torch.testing.assert_close(gradients(compiled, args), gradients(block, args))


def _wraps_backward() -> bool:
    """Whether Inductor's C++ wrapper manages a backward pass on this GPU with torch's ops alone.

    In torch 2.11 it does not: "CudaKernelParamCache not populated".
    """
    x = torch.randn(16, 64, device="cuda", requires_grad=True)
    function = torch.compile(lambda x: x.square().mean(), options={"cpp_wrapper": True})
    try:
        torch.autograd.grad(function(x), x)
    except torch._inductor.exc.InductorError:
        return False
    return True


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cuda_warp", "cuda_block", "cuda_cluster", "cuda_cooperative"])
def test_reduce_overhead_captures_every_kernel(name: str) -> None:
    def function(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gristmill.rms_norm(x + 1, weight)

    compiled = torch.compile(function, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad(), gristmill.use("rms_norm", name):
        for seed in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            x, _, weight = tensors(seed + 1, "cuda", torch.bfloat16)
            x = x[:1].repeat(16, 1)
            torch.testing.assert_close(compiled(x, weight).clone(), function(x, weight))


# --- torch.export


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = gristmill.nn.RMSNorm(64)
        self.weight = torch.nn.Parameter(torch.randn(64))

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, total = gristmill.add_rms_norm(self.norm(x), residual, self.weight)
        return y, total


@pytest.mark.parametrize("dynamic", [False, True])
def test_export(dynamic: bool) -> None:
    model = Model()
    rows = torch.export.Dim("rows", min=2, max=4096)
    shapes = {"x": {0: rows}, "residual": {0: rows}} if dynamic else None
    args = (torch.randn(6, 64), torch.randn(6, 64))
    program = torch.export.export(model, args, dynamic_shapes=shapes)
    assert ours(ops_of(program.graph_module)) == ["gristmill.rms_norm", "gristmill.add_rms_norm"]
    if dynamic:
        args = (torch.randn(90, 64), torch.randn(90, 64))
    torch.testing.assert_close(program.module()(*args), model(*args))
    # Decomposition for another backend leaves the ops whole.
    assert len(ours(ops_of(program.run_decompositions().graph_module))) == 2


def test_the_op_is_tagged_for_compilers() -> None:
    for op in OPS.values():
        assert torch.Tag.pt2_compliant_tag in op.overload.tags


def test_make_fx_keeps_the_op_whole() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    args = case_of(OPS["rms_norm"], "5x7").make("cpu", 0)
    graph = make_fx(lambda x, weight: gristmill.rms_norm(x, weight))(args[0], args[1])
    assert ops_of(graph) == ["gristmill.rms_norm"]
    x, weight = torch.randn(5, 7), torch.randn(7)
    assert same_bits(graph(x, weight), gristmill.rms_norm(x, weight))
