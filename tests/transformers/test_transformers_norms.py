"""Norms are recognised by what they compute, and compute the same afterwards, in every dtype."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tf_norms import NORMS, NOT_NORMS, SIZE, GatedNorm, HalfNorm, LayerScale, with_weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import gristmill
from gristmill.integrations.transformers.norms import patch_norms, unpatch_norms

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Ops(TorchDispatchMode):
    """The ops of gristmill that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        if function.namespace == "gristmill":
            self.names.append(function._opname)
        return function(*args, **(kwargs or {}))


def pair(name: str) -> tuple[nn.Module, nn.Module]:
    """An untouched norm, and a patched one with the same weights."""
    module = with_weights(NORMS[name][0])
    patched = copy.deepcopy(module)
    (replaced,) = patch_norms(patched).replaced
    assert replaced.now == NORMS[name][1]
    return module, patched


def inputs(name: str, dtype: torch.dtype, scale: float = 1.0, device: str = "cpu") -> torch.Tensor:
    generator = torch.Generator().manual_seed(3)
    end = (4, SIZE // 4) if name.endswith("_dims") else (SIZE,)
    x = (torch.randn((3, 50, *end), generator=generator) - 0.4) * scale
    return x.to(dtype).to(device).transpose(0, 1)  # rows that do not lie one after the other


def assert_same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal but for roundings: of 16 bits, but for one element in a hundred by one or two."""
    assert got.dtype == wanted.dtype
    assert got.shape == wanted.shape
    if wanted.dtype in (torch.float32, torch.float64):
        torch.testing.assert_close(got, wanted, rtol=2e-6, atol=4e-6, equal_nan=True)
        return
    limits = torch.finfo(wanted.dtype)
    torch.testing.assert_close(got, wanted, rtol=2 * limits.eps, atol=1e-6, equal_nan=True)
    assert int((got != wanted).sum()) <= 0.01 * wanted.numel()


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_is_recognised_and_runs_on_gristmill(name: str) -> None:
    _, patched = pair(name)
    with Ops() as ops:
        patched(inputs(name, torch.float32))
    assert ops.names == [NORMS[name][1].partition("(")[0]]


@pytest.mark.parametrize("name", NORMS)
def test_results_are_the_modules_own_in_every_dtype(name: str) -> None:
    """Also where eps is all there is to see; mixes that the module itself refuses are left out."""
    module, patched = pair(name)
    for weight_dtype in (*DTYPES, torch.float64):
        module.to(weight_dtype)
        patched.to(weight_dtype)
        for x_dtype in (*DTYPES, torch.float64):
            for scale in (1.0, 1e-3):
                x = inputs(name, x_dtype, scale)
                try:
                    wanted = module(x)
                except RuntimeError:
                    continue
                assert_same(patched(x), wanted)


@pytest.mark.parametrize("name", NORMS)
def test_gradients(name: str) -> None:
    """Of x and of all parameters; in bf16 no further from the truth than the module's own."""
    module, patched = pair(name)
    truth = _gradients(copy.deepcopy(module), inputs(name, torch.float32))
    for one, other in zip(_gradients(patched, inputs(name, torch.float32)), truth, strict=True):
        scale = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * scale)
    x = inputs(name, torch.bfloat16)
    module, patched = module.bfloat16(), patched.bfloat16()
    exact = _gradients(copy.deepcopy(module).float(), x.float())
    theirs, ours = _gradients(module, x), _gradients(patched, x)
    for one, other, true in zip(ours, theirs, exact, strict=True):
        assert one.dtype == other.dtype
        allowed = max(1.5 * float((other - true).norm()), 2.0**-8 * float(true.norm()))
        assert float((one - true).norm()) <= allowed


def _gradients(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    module.zero_grad()
    x = x.clone().requires_grad_()
    y = module(x)
    generator = torch.Generator().manual_seed(5)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    return [x.grad, *(parameter.grad for parameter in module.parameters())]  # type: ignore


@pytest.mark.parametrize("name", NORMS)
def test_under_autocast_on_a_cpu(name: str) -> None:
    module, patched = pair(name)
    for x_dtype in (torch.float32, torch.bfloat16):
        x = inputs(name, x_dtype)
        with torch.autocast("cpu", torch.bfloat16):
            assert_same(patched(x), module(x))


@pytest.mark.gpu
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_on_a_gpu(name: str, autocast: torch.dtype | None) -> None:
    """Recognised on the CPU, run on the GPU: dtypes and values as the module's there."""
    module, patched = pair(name)
    module, patched = module.cuda(), patched.cuda()
    for weight_dtype in DTYPES:
        module.to(weight_dtype)
        patched.to(weight_dtype)
        for x_dtype in DTYPES:
            x = inputs(name, x_dtype, device="cuda")
            with torch.autocast("cuda", autocast, enabled=autocast is not None):
                try:
                    wanted = module(x)
                except RuntimeError:
                    continue
                got = patched(x)
            try:
                assert_same(got, wanted)
            except AssertionError as error:
                off = int((got != wanted).sum()) if got.shape == wanted.shape else "all"
                raise AssertionError(
                    f"x {x_dtype}, weight {weight_dtype}, autocast {autocast}: {off} elements of "
                    f"{wanted.numel()} differ; {got.dtype} for {wanted.dtype}; {patched.gristmill}"
                ) from error


def test_cuda_autocast_is_foreseen_without_a_gpu() -> None:
    """torch's own norms give fp32 there where torch says so; those written by hand what they do."""
    from gristmill.ops.rms_norm.semantics import TORCH_AUTOCASTS

    bf16, fp32 = torch.bfloat16, torch.float32
    given = {
        name: pair(name)[1].gristmill.autocast_routes[bf16][bf16, fp32].out_dtype
        for name in ("layer", "rms", "llama", "gemma2", "t5", "cohere")
    }
    rms = fp32 if TORCH_AUTOCASTS else bf16
    assert given == {
        "layer": fp32,
        "rms": rms,
        "llama": fp32,
        "gemma2": bf16,
        "t5": fp32,
        "cohere": bf16,
    }


def test_a_norm_that_gives_the_dtype_of_autocast() -> None:
    """Nemotron's rounds input and weight to it: we may where nothing is lost, whatever is in x."""
    bf16, fp16 = torch.bfloat16, torch.float16
    for to, pairs in {bf16: {(bf16, bf16)}, fp16: {(fp16, fp16), (fp16, bf16)}}.items():
        routes = pair("nemotron")[1].gristmill.autocast_routes[to]
        assert set(routes) == pairs
        assert {route.out_dtype for route in routes.values()} == {to}


@pytest.mark.parametrize("name", NOT_NORMS)
def test_what_is_no_norm_is_left_with_the_reason(name: str) -> None:
    module = with_weights(NOT_NORMS[name][0])
    before = dict(vars(module))
    report = patch_norms(module)
    assert not report.replaced
    (left,) = report.left
    assert left.what == type(module).__name__
    assert NOT_NORMS[name][1] in left.reason
    assert vars(module) == before


@pytest.mark.parametrize(
    "module",
    [LayerScale(), nn.Dropout(), nn.GELU(), nn.Linear(4, 4), nn.PReLU(8), nn.Embedding(4, 4)],
)
def test_what_is_far_from_a_norm_is_not_mentioned(module: nn.Module) -> None:
    report = patch_norms(module)
    assert not report.replaced
    assert not report.left


def test_a_norm_that_rounds_otherwise_in_16_bits_is_left_there() -> None:
    (left,) = patch_norms(HalfNorm().bfloat16()).left
    assert "torch.bfloat16" in left.reason
    module = with_weights(HalfNorm)
    patched = copy.deepcopy(module)
    assert patch_norms(patched).replaced
    x = inputs("half", torch.bfloat16)
    assert torch.equal(patched.bfloat16()(x), module.bfloat16()(x))  # as it did, later too


def test_a_weight_and_a_bias_of_different_dtypes() -> None:
    module = nn.LayerNorm(SIZE)
    module.bias.data = module.bias.data.bfloat16()
    (left,) = patch_norms(module).left
    assert "differ in dtype" in left.reason
    module, patched = pair("hard_coded")
    for one in (module, patched):
        one.beta.data = one.beta.data.bfloat16()
    x = inputs("hard_coded", torch.bfloat16)
    assert torch.equal(patched(x), module(x))


def test_by_keyword_and_with_more_arguments() -> None:
    module, patched = pair("llama")
    x = inputs("llama", torch.float32)
    assert_same(patched(hidden_states=x), module(x))
    with pytest.raises(TypeError, match="unexpected keyword"):
        patched(x=x)
    with pytest.raises(TypeError, match="positional"):
        patched(x, x)
    module, patched = pair("hard_coded")
    assert_same(patched(x, 3, more=4), module(x))


def test_an_input_of_another_size_is_refused() -> None:
    _, patched = pair("llama")
    with pytest.raises(gristmill.errors.ArgumentError, match="weight"):
        patched(torch.randn(3, SIZE + 1))


def test_nothing_of_the_model_is_touched_while_looking() -> None:
    """Neither random numbers nor hooks, and no weight is read: they may be on the meta device."""
    module = LlamaRMSNorm(SIZE).to("meta")
    ran: list[str] = []
    module.register_forward_hook(lambda *_: ran.append("hook"))
    state = torch.get_rng_state()
    with torch.inference_mode(), torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert patch_norms(module).replaced
    assert torch.equal(torch.get_rng_state(), state)
    assert not ran
    filled = module.to_empty(device="cpu")
    filled.weight.data.fill_(2.0)
    x = inputs("llama", torch.float32)
    assert_same(filled(x), 2 * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())


def test_forced_kernels_do_not_matter_while_looking() -> None:
    with gristmill.use("rms_norm", "cuda_cluster"):
        assert patch_norms(LlamaRMSNorm(SIZE)).replaced


def test_weights_that_are_not_there() -> None:
    module = LlamaRMSNorm(SIZE)
    module.weight.data = torch.empty(0)
    (left,) = patch_norms(module).left
    assert "before it is sharded" in left.reason
    module = LlamaRMSNorm(SIZE)
    weight = module.weight.data
    del module.weight
    module.weight = weight  # as wrappers do that flatten parameters
    (left,) = patch_norms(module).left
    assert "weight is a plain tensor" in left.reason


def test_equal_modules_are_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import gristmill.integrations.transformers.norms as norms

    looked: list[nn.Module] = []
    recognise = norms.recognise
    monkeypatch.setattr(norms, "recognise", lambda m: looked.append(m) or recognise(m))
    layers = nn.ModuleList(LlamaRMSNorm(SIZE) for _ in range(20))
    layers.append(LlamaRMSNorm(SIZE, eps=1e-5))
    layers.append(LlamaRMSNorm(2 * SIZE))
    layers.extend(GatedNorm() for _ in range(5))
    report = patch_norms(layers)
    assert len(looked) == 4
    assert len(report.replaced) == 22
    assert layers[20].gristmill.eps == 1e-5
    assert str(report) == (
        "replaced (22):\n"
        "  {0-19,21}  LlamaRMSNorm -> rms_norm(eps=1e-06, casting='llama')\n"
        "  20         LlamaRMSNorm -> rms_norm(eps=1e-05, casting='llama')\n"
        "left (5):\n"
        "  {22-26}  GatedNorm: its forward takes a second argument (gate)"
    )


def test_unpatching_gives_back_the_bits() -> None:
    for name in ("llama", "layer", "t5"):
        module, patched = pair(name)
        (given_back,) = unpatch_norms(patched).replaced
        assert given_back.was == NORMS[name][1]
        assert vars(patched).keys() == vars(module).keys()
        x = inputs(name, torch.bfloat16)
        assert torch.equal(patched(x), module(x))
        assert not unpatch_norms(patched).replaced


@pytest.mark.parametrize("name", ["llama", "gemma2", "layer_dims", "rms", "nemotron"])
def test_compiled_whole(name: str) -> None:
    module, patched = pair(name)
    compiled = torch.compile(patched, fullgraph=True, backend="aot_eager")
    for dtype in (torch.float32, torch.bfloat16):
        module, patched = module.to(dtype), patched.to(dtype)
        x = inputs(name, dtype)
        assert_same(compiled(x), module(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(compiled(x), module(x))
