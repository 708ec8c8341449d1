"""The provider's norms are vLLM's own, rounding for rounding, and what they are not is declined."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from vllm import ir
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm_counting import CALLS

import gristmill
from gristmill.integrations.vllm.plugin import register_norms

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
EPS = 1e-5
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

# What vLLM's models bring: equal dtypes, Gemma's fp32 weight, no weight.
RMS_NORM_DTYPES = [
    *[(dtype, dtype) for dtype in (BF16, FP16, FP32)],
    *[(dtype, FP32) for dtype in (BF16, FP16)],
    *[(dtype, None) for dtype in (BF16, FP16, FP32)],
]
# In place the value is rounded to the weight's dtype whatever that is, as in vLLM.
FUSED_ADD_DTYPES = [*RMS_NORM_DTYPES, (FP32, BF16), (FP32, FP16), (BF16, FP16), (FP16, BF16)]

Make = Callable[[torch.dtype, str], torch.Tensor]


def rows(*shape: int) -> Make:
    def make(dtype: torch.dtype, device: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(shape))
        # A few large values, so that rounding early and rounding late differ often.
        values = torch.randn(shape, generator=generator) * 3
        return values.to(dtype).to(device)

    return make


def view(make: Make, change: Callable[[torch.Tensor], torch.Tensor]) -> Make:
    return lambda dtype, device: change(make(dtype, device))


LAYOUTS: dict[str, Make] = {
    "many": rows(300, 128),
    "one_token": rows(1, 128),
    "no_token": rows(0, 128),
    "odd": rows(7, 33),
    "one_dim": rows(64),
    "wide": rows(3, 8192),
    "heads": rows(5, 4, 64),
    # Heads of q within the output of the fused q/k/v projection.
    "heads_of_qkv": view(rows(6, 512), lambda t: t[:, :256].view(6, 4, 64)),
    "one_token_of_qkv": view(rows(1, 512), lambda t: t[:, 128:384].view(1, 4, 64)),
    "no_token_of_qkv": view(rows(0, 512), lambda t: t[:, :256].view(0, 4, 64)),
    "heads_first": view(rows(4, 6, 64), lambda t: t.transpose(0, 1)),
    "slice": view(rows(9, 200), lambda t: t[:, 3:131]),
    "every_other": view(rows(12, 128), lambda t: t[::2]),
    "columns_apart": view(rows(6, 256), lambda t: t[:, ::2]),
    "transposed": view(rows(64, 10), lambda t: t.t()),
}
# Rows that share memory can be read, not overwritten.
EXPANDED = view(rows(1, 128), lambda t: t.expand(6, 128))


@pytest.fixture(scope="module", autouse=True)
def registered() -> None:
    register_norms()


@pytest.fixture
def by_the_reference() -> Iterator[None]:
    """The variant that adds in torch's order, so that results can be held against vLLM's bits."""
    names = ("rms_norm", "fused_add_rms_norm_")
    with gristmill.use(names[0], "reference"), gristmill.use(names[1], "reference"):
        yield


def impl(op: Any, provider: str) -> Callable[..., Any]:
    function: Callable[..., Any] = op.impls[provider].impl_fn
    return function


def weight_for(x: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor | None:
    if dtype is None:
        return None
    return torch.linspace(0.3, 1.7, x.shape[-1], device=x.device).to(dtype)


def residual_for(x: torch.Tensor) -> torch.Tensor:
    """Another tensor of the same layout."""
    other = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    return other.copy_(torch.linspace(-2, 2, x.numel(), device=x.device).view(x.shape))


def copy_of(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)


def assert_as_good(
    ours: torch.Tensor, native: torch.Tensor, truth: torch.Tensor, tolerance: dict[str, float]
) -> None:
    """Within vLLM's own tolerance of its own result, and no farther from the truth than that."""
    torch.testing.assert_close(ours, native, check_stride=True, **tolerance)
    if truth.numel():
        error, allowed = ((one.double() - truth).abs().max().item() for one in (ours, native))
        assert error <= 1.5 * allowed + torch.finfo(FP32).eps * truth.abs().max().item()


def truth_of(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    h = x.double()
    h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + EPS)
    return h if weight is None else h * weight.double()


@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
@pytest.mark.parametrize(("dtype", "weight_dtype"), RMS_NORM_DTYPES, ids=str)
def test_rms_norm_is_native_to_the_bit(
    by_the_reference: None, layout: str, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    x = {**LAYOUTS, "expanded": EXPANDED}[layout](dtype, "cpu")
    weight = weight_for(x, weight_dtype)
    op = ir.ops.rms_norm
    assert op.impls["gristmill"].supports_args(x, weight, EPS)
    kept = x.clone()
    ours = impl(op, "gristmill")(x, weight, EPS)
    native = impl(op, "native")(x, weight, EPS)
    assert torch.equal(ours, native)
    assert (ours.dtype, ours.stride()) == (native.dtype, native.stride())
    assert torch.equal(x, kept)
    assert ours.untyped_storage().data_ptr() != x.untyped_storage().data_ptr() or not x.numel()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", [*LAYOUTS, "expanded"])
@pytest.mark.parametrize(("dtype", "weight_dtype"), RMS_NORM_DTYPES, ids=str)
def test_rms_norm_by_whatever_runs_here(
    device: str, layout: str, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    x = {**LAYOUTS, "expanded": EXPANDED}[layout](dtype, device)
    weight = weight_for(x, weight_dtype)
    ours = impl(ir.ops.rms_norm, "gristmill")(x, weight, EPS)
    native = impl(ir.ops.rms_norm, "native")(x, weight, EPS)
    assert_as_good(ours, native, truth_of(x, weight), ir.ops.rms_norm.get_tolerance(dtype))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), FUSED_ADD_DTYPES, ids=str)
def test_fused_add_rms_norm_is_native_to_the_bit_and_in_place(
    by_the_reference: None, layout: str, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    x = LAYOUTS[layout](dtype, "cpu")
    residual, weight = residual_for(x), weight_for(x, weight_dtype)
    op = ir.ops.fused_add_rms_norm
    assert op.impls["gristmill"].supports_args(x, residual, weight, EPS)
    native = impl(op, "native")(x, residual, weight, EPS)
    given = copy_of(x), copy_of(residual)
    ours = impl(op, "gristmill")(*given, weight, EPS)
    assert ours[0] is given[0]
    assert ours[1] is given[1]
    for one, other in zip(ours, native, strict=True):
        assert torch.equal(one, other)
        assert one.dtype == other.dtype


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "weight_dtype"), FUSED_ADD_DTYPES, ids=str)
def test_fused_add_rms_norm_by_whatever_runs_here(
    device: str, layout: str, dtype: torch.dtype, weight_dtype: torch.dtype | None
) -> None:
    x = LAYOUTS[layout](dtype, device)
    residual, weight = residual_for(x), weight_for(x, weight_dtype)
    op = ir.ops.fused_add_rms_norm
    native, native_sum = impl(op, "native")(x, residual, weight, EPS)
    ours, ours_sum = impl(op, "gristmill")(copy_of(x), copy_of(residual), weight, EPS)
    assert torch.equal(ours_sum, native_sum)  # one addition and one rounding: nothing to differ in
    truth = truth_of(x.double() + residual.double(), weight)
    narrowest = dtype if weight_dtype is None else min(dtype, weight_dtype, key=precision)
    torch.testing.assert_close(ours, native, **op.get_tolerance(narrowest))
    if truth.numel():
        error, allowed = ((one.double() - truth).abs().max().item() for one in (ours, native))
        assert error <= 1.5 * allowed + torch.finfo(FP32).eps * truth.abs().max().item()


def precision(dtype: torch.dtype) -> float:
    return -torch.finfo(dtype).eps


def test_functional_overload_leaves_its_inputs_alone() -> None:
    x, weight = LAYOUTS["many"](BF16, "cpu"), torch.ones(128, dtype=BF16)
    residual = residual_for(x)
    kept = x.clone(), residual.clone()
    ours = ir.ops.fused_add_rms_norm.impls["gristmill"].func_impl_fn(x, residual, weight, EPS)
    assert torch.equal(x, kept[0])
    assert torch.equal(residual, kept[1])
    native = impl(ir.ops.fused_add_rms_norm, "native")(x, residual, weight, EPS)
    torch.testing.assert_close(ours, native, atol=1e-3, rtol=1.6e-2)


W, X = torch.ones(64, dtype=BF16), torch.ones(4, 64, dtype=BF16)
R = X.clone()
DECLINED_RMS_NORM = {
    "variance_size": (X, W, EPS, 32),
    "variance_size_of_all": (X, W, EPS, 64),
    "fp64": (X.double(), W.double(), EPS),
    "narrower_weight": (X.float(), W, EPS),
    "other_16_bits": (X, W.half(), EPS),
    "fp64_weight": (X, W.double(), EPS),
    "fp8": (X.to(torch.float8_e4m3fn), W, EPS),
    "integers": (X.int(), W, EPS),
    "weight_of_other_length": (X, W[:1], EPS),
    "weight_per_head": (X.view(4, 2, 32), W.view(2, 32), EPS),
    "scalar": (X[0, 0], None, EPS),
}
DECLINED_FUSED_ADD = {
    "variance_size": (X, R, W, EPS, 32),
    "fp64": (X.double(), R.double(), W, EPS),
    "other_residual": (X, R.float(), W, EPS),
    "fp64_weight": (X, R, W.double(), EPS),
    "broadcast_residual": (X.view(4, 2, 32), R.view(4, 2, 32)[:, :1], W[:32], EPS),
    "fewer_dims": (X.view(4, 1, 64), R, W, EPS),
    "itself": (X, X, W, EPS),
    "expanded": (X[:1].expand(4, 64), R, W, EPS),
    "expanded_residual": (X, R[:1].expand(4, 64), W, EPS),
    "weight_of_other_length": (X, R, W[:1], EPS),
    "scalar": (X[0, 0], R[0, 0], None, EPS),
}


@pytest.mark.parametrize("case", DECLINED_RMS_NORM)
def test_rms_norm_declines(case: str) -> None:
    assert not ir.ops.rms_norm.impls["gristmill"].supports_args(*DECLINED_RMS_NORM[case])


@pytest.mark.parametrize("case", DECLINED_FUSED_ADD)
def test_fused_add_rms_norm_declines(case: str) -> None:
    assert not ir.ops.fused_add_rms_norm.impls["gristmill"].supports_args(*DECLINED_FUSED_ADD[case])


def test_in_place_declines_what_needs_a_gradient() -> None:
    supports = ir.ops.fused_add_rms_norm.impls["gristmill"].supports_args
    weight = torch.nn.Parameter(W.clone())
    assert not supports(X, R, weight, EPS)
    with torch.inference_mode():
        assert supports(X, R, weight, EPS)


@pytest.mark.parametrize(
    ("dtype", "weight_dtype"), [(FP32, BF16), (BF16, FP16), (FP16, BF16), (FP64, FP64)], ids=str
)
def test_what_is_declined_for_its_dtypes_would_be_rounded_otherwise(
    dtype: torch.dtype, weight_dtype: torch.dtype
) -> None:
    x = LAYOUTS["many"](dtype, "cpu")
    weight = weight_for(x, weight_dtype)
    ours = impl(ir.ops.rms_norm, "gristmill")(x, weight, EPS)
    assert not torch.equal(ours, impl(ir.ops.rms_norm, "native")(x, weight, EPS))


@pytest.mark.parametrize("heads", [False, True])
def test_the_number_of_tokens_is_never_asked(heads: bool) -> None:
    """With a number of tokens that nobody knows: to ask for it would raise."""
    environment = ShapeEnv()
    tokens = environment.create_unbacked_symint()
    with FakeTensorMode(shape_env=environment):
        weight = torch.empty(64 if heads else 512, dtype=BF16)
        x, residual = (torch.empty(tokens, 512, dtype=BF16) for _ in range(2))
        if heads:
            x, residual = (one.view(tokens, 8, 64)[:, :4] for one in (x, residual))
        # Of heads the norm is left to Inductor.
        assert ir.ops.rms_norm.impls["gristmill"].supports_args(x, weight, EPS) is not heads
        assert ir.ops.fused_add_rms_norm.impls["gristmill"].supports_args(x, residual, weight, EPS)
        with pytest.raises(GuardOnDataDependentSymNode):
            bool(x.shape[0] == 3)


@pytest.fixture
def our_priority() -> Iterator[None]:
    order = ["gristmill", "native"]
    with (
        set_current_vllm_config(VllmConfig()),
        ir.ops.rms_norm.set_priority(order),
        ir.ops.fused_add_rms_norm.set_priority(order),
        torch.inference_mode(),
    ):
        CALLS.clear()
        yield


@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "torch_op"])
def test_layers_of_vllm_call_us(our_priority: None, wrapped: bool) -> None:
    x, residual = LAYOUTS["many"](BF16, "cpu"), LAYOUTS["many"](BF16, "cpu").flip(0)
    with ir.enable_torch_wrap(wrapped):
        norm = RMSNorm(128, eps=EPS).bfloat16()
        norm.forward_native(x)
        assert CALLS == {"rms_norm": 1}
        given = x.clone(), residual.clone()
        y, total = norm.forward_native(*given)
        assert CALLS == {"rms_norm": 1, "fused_add_rms_norm_": 1}
        assert y.data_ptr() == given[0].data_ptr()
        assert total.data_ptr() == given[1].data_ptr()
        gemma = GemmaRMSNorm(128, eps=EPS).bfloat16()
        gemma.forward_native(x)
        assert CALLS["rms_norm"] == 2
        gemma.forward_native(x, residual)
        assert CALLS.total() == 4  # vLLM 0.22 adds the residual of Gemma by itself
        CALLS.clear()
        partial = RMSNorm(128, eps=EPS, var_hidden_size=64).bfloat16()
        partial.forward_native(x)
        partial.forward_native(x, residual)
        assert not CALLS
