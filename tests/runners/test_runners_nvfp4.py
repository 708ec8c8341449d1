"""The runners of NVFP4 layers: the values of the functional ops, behind an id."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from runners_helpers import linear_gemm, moe_gemm

from gristmill import Nvfp4LinearRunner, Nvfp4MoeRunner, nvfp4, register_runner
from gristmill.errors import ArgumentError, DtypeError
from gristmill.formats.nvfp4 import tensor as formats
from gristmill.runners import nvfp4 as runners

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
N, K, E, H, INNER = 48, 64, 4, 32, 16


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def linear_parts(device: str = "cpu") -> tuple[nvfp4.NVFP4Tensor, torch.Tensor]:
    return nvfp4.quantize(normal(N, K).to(device)), normal(N, seed=1).to(device)


def moe_parts(device: str = "cpu") -> tuple[tuple[nvfp4.NVFP4Tensor, ...], dict[str, Any]]:
    w13 = nvfp4.quantize(normal(E, 2 * INNER, H).to(device))
    w2 = nvfp4.quantize(normal(E, H, INNER, seed=1).to(device))
    options = {
        "w13_bias": normal(E, 2 * INNER, seed=2).to(device),
        "w2_bias": normal(E, H, seed=3).to(device),
        "activation": "swiglu_oai",
        "alpha": 1.5,
        "limit": 1.5,
        "expert_map": torch.tensor([2, -1, 0, 3, 1, -1], dtype=torch.int32, device=device),
    }
    return (w13, w2), options


def routed(rows: int, experts: int, device: str = "cpu") -> tuple[torch.Tensor, ...]:
    scores = normal(rows, experts, seed=rows).softmax(-1)
    weights, ids = scores.topk(2)
    ids[::3, 0] = -1
    return normal(rows, H, seed=4).to(device), weights.to(device), ids.int().to(device)


# --- linear


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("with_bias", [True, False], ids=["bias", "no bias"])
def test_linear_is_nvfp4_linear(with_bias: bool, dtype: torch.dtype, device: str) -> None:
    w4, bias = linear_parts(device)
    runner = Nvfp4LinearRunner(w4, bias if with_bias else None)
    runner_id = register_runner(runner)
    for shape in [(5, K), (K,), (2, 3, K), (0, K)]:
        x = normal(*shape).to(device, dtype)
        result = linear_gemm(x, runner_id, runner.out_features)
        # In one layout: another one may be for another kernel.
        assert torch.equal(result, nvfp4.linear(x, runner.weight, bias if with_bias else None))
        weight = nvfp4.dequantize(w4, torch.float64).t()
        exact, terms = x.double() @ weight, x.double().abs() @ weight.abs()
        if with_bias:
            exact += bias
        assert result.dtype == dtype
        # One rounding of the result, and those of a sum in fp32.
        bound = torch.finfo(dtype).eps * exact.abs() + 4 * torch.finfo(torch.float32).eps * terms
        assert ((result - exact).abs() <= bound).all()


LAYOUTS = {"cpu": "rows", "sm_90a": "fragments", "sm_100a": "tiles"}


@pytest.mark.parametrize("arch", LAYOUTS)
def test_linear_takes_weights_in_every_layout(arch: str) -> None:
    w4, bias = linear_parts()
    x = normal(3, K)
    runner = Nvfp4LinearRunner(w4.prepare(arch), bias)
    assert runner.weight.layout == LAYOUTS[arch]
    assert f"layout={LAYOUTS[arch]!r}" in repr(runner)
    result = linear_gemm(x, register_runner(runner), N)
    torch.testing.assert_close(result, nvfp4.linear(x, w4, bias))
    again = pickled(runner)
    assert repr(again) == repr(runner)
    assert torch.equal(again._run_impl(x), result)
    with pytest.raises(ArgumentError, match=r"x must end in K = 64"):
        runner._run_impl(normal(3, K - 16))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_nvfp4_tensor_is_overwritten_only_when_asked(
    in_place: bool, arch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "arch_of", lambda device: arch)
    w4 = nvfp4.quantize(normal(128, 128))
    kept = w4.codes.clone(), w4.scales.clone()
    x = normal(3, 128)
    expected = x @ nvfp4.dequantize(w4).t()
    runner = Nvfp4LinearRunner(w4, in_place=in_place)
    assert runner.weight.layout == LAYOUTS[arch]
    torch.testing.assert_close(runner._run_impl(x), expected)
    shared = runner.weight.scales.data_ptr() == w4.scales.data_ptr()
    assert shared == in_place
    same = torch.equal(w4.scales.view(torch.uint8), kept[1].view(torch.uint8))
    assert same != in_place
    if arch == "sm_90a":
        assert (runner.weight.codes.data_ptr() == w4.codes.data_ptr()) == in_place
        assert torch.equal(w4.codes, kept[0]) != in_place


def test_a_wrong_bias_leaves_the_weight_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "arch_of", lambda device: "sm_90a")
    w4 = nvfp4.quantize(normal(128, 128))
    kept = w4.codes.clone()
    with pytest.raises(ArgumentError, match="bias must have shape"):
        Nvfp4LinearRunner(w4, normal(3), in_place=True)
    assert torch.equal(w4.codes, kept)


def test_what_may_be_rounded_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    w4, bias = linear_parts()
    seen: list[Any] = []
    monkeypatch.setattr(runners, "linear", lambda *args, **options: seen.append((args, options)))
    runner = Nvfp4LinearRunner(w4, bias, act="fp8")
    runner._run_impl(x := normal(3, K))
    assert seen == [((x, runner.weight, bias), {"act": "fp8"})]
    assert "act='fp8'" in repr(runner)
    with pytest.raises(ArgumentError, match=r"act must be .*got 'int8'"):
        Nvfp4LinearRunner(w4, bias, act="int8")


def test_nothing_of_a_runner_is_trained() -> None:
    """Eager or compiled: also where it holds a parameter."""
    w4, bias = linear_parts()
    runner = Nvfp4LinearRunner(w4, torch.nn.Parameter(bias))
    result = linear_gemm(normal(3, K), register_runner(runner), N)
    assert torch.equal(result, nvfp4.linear(normal(3, K), w4, bias))
    assert not result.requires_grad


def test_a_runner_holds_its_weights_without_copies() -> None:
    w4, bias = linear_parts()
    packed = w4.prepare()
    assert Nvfp4LinearRunner(packed, bias).weight is packed
    runner = Nvfp4LinearRunner(w4, bias)
    assert runner.weight.codes is w4.codes
    assert runner.weight.scales is w4.scales
    assert runner.bias is bias
    (w13, w2), options = moe_parts()
    experts = Nvfp4MoeRunner(w13, w2, **options)
    assert experts.w13.codes is w13.codes
    assert experts.w2.scales is w2.scales
    assert experts.options["w2_bias"] is options["w2_bias"]


# --- experts


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "every option"])
def test_moe_is_nvfp4_moe(plain: bool, dtype: torch.dtype, device: str) -> None:
    stacks, options = moe_parts(device)
    options = {} if plain else options
    runner = Nvfp4MoeRunner(*stacks, **options)
    runner_id = register_runner(runner)
    for rows in (0, 1, 7):
        hidden, *routing = routed(rows, E if plain else 6, device)
        args = (hidden.to(dtype), *routing)
        result = moe_gemm(*args, runner_id, runner.hidden_size)
        assert torch.equal(result, nvfp4.moe(*args, runner.w13, runner.w2, **options))
        close = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(result, nvfp4.moe(*args, *stacks, **options), **close)
        assert result.dtype == dtype


@pytest.mark.parametrize(
    ("arch", "layouts"), [("sm_90a", ("pairs", "fragments")), ("sm_100a", ("tiles", "tiles"))]
)
def test_experts_are_laid_out_for_their_device(
    arch: str, layouts: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here a CPU that passes for another; weights that are packed already stay as they are."""
    stacks, options = moe_parts()
    args = routed(7, 6)
    expected = nvfp4.moe(*args, *stacks, **options)
    monkeypatch.setattr(formats, "arch_of", lambda device: arch)
    runner = Nvfp4MoeRunner(*stacks, **options)
    assert (runner.w13.layout, runner.w2.layout) == layouts
    assert f"layout={layouts[1]!r}" in repr(runner)
    again = Nvfp4MoeRunner(runner.w13, runner.w2, **options)
    assert again.w13 is runner.w13
    for one in (runner, again, pickled(runner)):
        torch.testing.assert_close(one._run_impl(*args), expected)


def test_every_option_of_moe_reaches_it() -> None:
    stacks, options = moe_parts()
    args = routed(7, 6)

    def run(**options: Any) -> torch.Tensor:
        runner = Nvfp4MoeRunner(*stacks, **options)
        return moe_gemm(*args, register_runner(runner), H)

    whole = run(**options)
    for name in options:
        # Without its activation, alpha has no meaning.
        gone = (name, "alpha") if name == "activation" else (name,)
        less = {key: value for key, value in options.items() if key not in gone}
        assert not torch.equal(run(**less), whole), name


# --- compiled


@pytest.mark.parametrize("device", DEVICES)
def test_a_network_of_runners_compiles(device: str) -> None:
    w4, bias = nvfp4.quantize(normal(H, H).to(device)), normal(H).to(device)
    stacks, options = moe_parts(device)
    linear, experts = Nvfp4LinearRunner(w4, bias), Nvfp4MoeRunner(*stacks, **options)
    linear_id, experts_id = register_runner(linear), register_runner(experts)
    _, weights, ids = routed(7, 6, device)

    def network(x: torch.Tensor) -> torch.Tensor:
        return moe_gemm(linear_gemm(x, linear_id, H).relu(), weights, ids, experts_id, H) + x

    torch._dynamo.reset()
    x = normal(7, H).to(device)
    compiled = torch.compile(network, backend="aot_eager", fullgraph=True)
    hidden = nvfp4.linear(x, linear.weight, bias).relu()
    expected = nvfp4.moe(hidden, weights, ids, experts.w13, experts.w2, **options) + x
    torch.testing.assert_close(compiled(x), expected)


@pytest.mark.gpu
def test_captured_and_replayed() -> None:
    w4, bias = nvfp4.quantize(normal(H, H).cuda()), normal(H).cuda()
    stacks, options = moe_parts("cuda")
    linear, experts = Nvfp4LinearRunner(w4, bias), Nvfp4MoeRunner(*stacks, **options)
    linear_id, experts_id = register_runner(linear), register_runner(experts)
    x, weights, ids = routed(7, 6, "cuda")
    x = x.bfloat16()

    def network() -> torch.Tensor:
        return moe_gemm(linear_gemm(x, linear_id, H), weights, ids, experts_id, H)

    with torch.inference_mode():
        network()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = network()
        for seed in range(3):
            x.copy_(normal(7, H, seed=seed))
            graph.replay()
            torch.testing.assert_close(result, network())


# --- what a runner is


def saved_and_loaded(runner: Any) -> Any:
    file = io.BytesIO()
    torch.save(runner, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def pickled(runner: Any) -> Any:
    return pickle.loads(pickle.dumps(runner))


@pytest.mark.parametrize("make", [copy.deepcopy, saved_and_loaded, pickled])
def test_copies_compute_the_same(make: Callable[[Any], Any]) -> None:
    stacks, options = moe_parts()
    for runner in (Nvfp4LinearRunner(*linear_parts()), Nvfp4MoeRunner(*stacks, **options)):
        again = make(runner)
        args = (normal(3, K),) if isinstance(runner, Nvfp4LinearRunner) else routed(3, 6)
        assert torch.equal(again._run_impl(*args), runner._run_impl(*args))
        assert repr(again) == repr(runner)


def test_repr() -> None:
    stacks, options = moe_parts()
    assert repr(Nvfp4LinearRunner(*linear_parts())) == (
        "Nvfp4LinearRunner(in_features=64, out_features=48, bias=True, layout='rows', device='cpu')"
    )
    assert repr(Nvfp4MoeRunner(*stacks, **options)) == (
        "Nvfp4MoeRunner(num_experts=4, hidden_size=32, intermediate_size=16, "
        "activation='swiglu_oai', layout='rows', device='cpu')"
    )


def test_the_wrong_width_is_an_error() -> None:
    runner = Nvfp4LinearRunner(*linear_parts())
    runner_id = register_runner(runner)
    with pytest.raises(
        ArgumentError, match=r"returned shape \(3, 48\); the call promises \(3, 9\)"
    ):
        linear_gemm(normal(3, K), runner_id, 9)
    with pytest.raises(ArgumentError, match=r"nvfp4_linear: x must end in K = 64"):
        linear_gemm(normal(3, K + 16), runner_id, N)


# --- wrong arguments are refused when the runner is made


def bad_linear(**changes: Any) -> Callable[[], Any]:
    w4, bias = linear_parts()
    return lambda: Nvfp4LinearRunner(**{"weight": w4, "bias": bias, **changes})


def bad_moe(**changes: Any) -> Callable[[], Any]:
    (w13, w2), options = moe_parts()
    return lambda: Nvfp4MoeRunner(**{"w13": w13, "w2": w2, **options, **changes})


STACK = nvfp4.quantize(normal(E, 2 * INNER, H))
MATRIX = nvfp4.quantize(normal(N, K))
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "a plain weight": (
        bad_linear(weight=normal(N, K)),
        DtypeError,
        "Nvfp4LinearRunner: weight must be an NVFP4Tensor or a PackedNVFP4, got Tensor",
    ),
    "a stack": (bad_linear(weight=STACK), ArgumentError, "codes must have shape.*got \\(4, 32, 16"),
    "a weight in pairs": (
        bad_linear(weight=MATRIX.prepare("sm_90a", pairs=True)),
        ArgumentError,
        "nvfp4_linear: layout must be .* got 'pairs', which is for w13 of nvfp4.moe",
    ),
    "bias shape": (bad_linear(bias=normal(N + 1)), ArgumentError, "bias must have shape \\(48,\\)"),
    "bias dtype": (bad_linear(bias=torch.ones(N).int()), DtypeError, "bias must have dtype"),
    "bias device": (
        bad_linear(bias=torch.ones(N, device="meta")),
        ArgumentError,
        "bias is on meta",
    ),
    "plain experts": (
        bad_moe(w2=normal(E, H, INNER)),
        DtypeError,
        "Nvfp4MoeRunner: w2 must be an NVFP4Tensor or a PackedNVFP4, got Tensor",
    ),
    "a matrix": (bad_moe(w2=MATRIX), ArgumentError, "w2_codes must have shape"),
    "not two halves": (bad_moe(w13=moe_parts()[0][1]), ArgumentError, "w2 must have shape"),
    "layouts": (
        bad_moe(w13=STACK.prepare("sm_100a")),
        ArgumentError,
        "w13 and w2 must have one layout, got 'tiles' and 'rows'",
    ),
    "fragments": (
        bad_moe(w13=STACK.prepare("sm_90a"), w2=moe_parts()[0][1].prepare("sm_90a")),
        ArgumentError,
        "w13 must have layout 'pairs' beside w2 in layout 'fragments', got 'fragments' and "
        r"'fragments'; call prepare\(pairs=True\) on w13",
    ),
    "pairs": (
        bad_moe(w13=STACK.prepare("sm_90a", pairs=True)),
        ArgumentError,
        "w13 and w2 must have one layout, got 'pairs' and 'rows'",
    ),
    "alpha": (
        bad_moe(activation="silu", alpha=1.0),
        ArgumentError,
        "alpha is the slope in 'swiglu_oai'",
    ),
    "w13_bias": (bad_moe(w13_bias=normal(E, H + 1)), ArgumentError, "w13_bias must have shape"),
    "w2_bias": (bad_moe(w2_bias=normal(E, H + 1)), ArgumentError, "w2_bias must have shape"),
    "activation": (bad_moe(activation="relu"), ArgumentError, "activation must be .*got 'relu'"),
    "limit": (bad_moe(limit=-1.0), ArgumentError, "limit must be finite .*at least 0, got -1"),
    "map": (bad_moe(expert_map=torch.ones(6)), DtypeError, "expert_map must be a tensor of int32"),
}


@pytest.mark.parametrize(("make", "error", "message"), BAD.values(), ids=BAD.keys())
def test_bad_arguments(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
