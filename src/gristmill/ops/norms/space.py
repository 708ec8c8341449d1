"""Kinds of calls of the norms, for ops/rows/space.py: one option at a time differs from the usual.

Mixtures are those that training meets: fp32 weights with an fp32 result (autocast), an fp32 sum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from gristmill.ops.op import Arguments
from gristmill.ops.rows.space import NESTED, OTHERS, Kind, Lay, Maker, RowSpace

FP32 = torch.float32
Dtype = torch.dtype | None
Make = Callable[..., Arguments]


def _kinds(
    make: Make, dtype: torch.dtype, *others: dict[str, Any], lays: tuple[Lay, ...] = OTHERS
) -> Iterator[Kind]:
    """The usual call, that without weights, and `others`; keyword arguments are those of `make`."""

    def kind(options: dict[str, Any], **ways: Any) -> Kind:
        return Kind(lambda maker: make(maker, **options), **ways)

    yield kind({"weight": dtype}, odd=lays is OTHERS, lays=lays)
    yield kind({"weight": None})
    seen: list[dict[str, Any]] = []
    for options in others:
        if options not in seen and options != {"weight": dtype}:
            seen.append(options)
            yield kind(options)


def rms_forward(dtype: torch.dtype) -> Iterator[Kind]:
    def make(maker: Maker, weight: Dtype, casting: str = "once", out: Dtype = None) -> Arguments:
        return maker.rows(), maker.vector(weight), 1e-6, 0.0, casting, out

    yield from _kinds(make, dtype, *_options(dtype), {"weight": dtype, "casting": "llama"})


def rms_add(dtype: torch.dtype) -> Iterator[Kind]:
    def make(
        maker: Maker,
        weight: Dtype,
        residual: Dtype = None,
        casting: str = "once",
        out: Dtype = None,
    ) -> Arguments:
        tensors = maker.rows(), maker.rows(residual), maker.vector(weight)
        return *tensors, 1e-6, 0.0, casting, out

    llama = {"weight": dtype, "casting": "llama"}
    yield from _kinds(make, dtype, *_options(dtype), llama, *_residuals(dtype))


def rms_fused_add(dtype: torch.dtype) -> Iterator[Kind]:
    def make(maker: Maker, weight: Dtype, residual: Dtype = None) -> Arguments:
        return maker.rows(), maker.rows(residual), maker.vector(weight), 1e-6

    yield from _kinds(make, dtype, {"weight": FP32}, *_residuals(dtype))


def rms_backward(dtype: torch.dtype) -> Iterator[Kind]:
    def make(
        maker: Maker,
        weight: Dtype,
        x: Dtype = None,
        dy: Dtype = None,
        dsum: bool = False,
        frozen: bool = False,
    ) -> Arguments:
        rows, gradient = maker.rows(x), maker.rows(dy)
        beside, wanted = maker.rows(x) if dsum else None, weight is not None and not frozen
        return gradient, rows, maker.vector(weight), beside, 1e-6, 0.0, wanted

    yield from _kinds(make, dtype, *_gradients(dtype))


def layer_forward(dtype: torch.dtype) -> Iterator[Kind]:
    def make(maker: Maker, weight: Dtype, bias: bool = True, out: Dtype = None) -> Arguments:
        affine = maker.vector(weight), maker.vector(weight if bias else None)
        return maker.rows(), *affine, 1e-5, 0.0, out

    yield from _kinds(make, dtype, *_options(dtype), {"weight": dtype, "bias": False})


def layer_add(dtype: torch.dtype) -> Iterator[Kind]:
    def make(
        maker: Maker, weight: Dtype, residual: Dtype = None, bias: bool = True, out: Dtype = None
    ) -> Arguments:
        affine = maker.vector(weight), maker.vector(weight if bias else None)
        return maker.rows(), maker.rows(residual), *affine, 1e-5, 0.0, out

    alone = {"weight": dtype, "bias": False}
    yield from _kinds(make, dtype, *_options(dtype), alone, *_residuals(dtype))


def layer_backward(dtype: torch.dtype) -> Iterator[Kind]:
    def make(
        maker: Maker,
        weight: Dtype,
        x: Dtype = None,
        dy: Dtype = None,
        bias: bool = True,
        dsum: bool = False,
        frozen: bool = False,
    ) -> Arguments:
        rows, gradient = maker.rows(x), maker.rows(dy)
        beside, wanted = maker.rows(x) if dsum else None, weight is not None and not frozen
        tensors = gradient, rows, maker.vector(weight), beside
        return *tensors, 1e-5, 0.0, wanted, weight if wanted and bias else None

    yield from _kinds(make, dtype, *_gradients(dtype), {"weight": dtype, "bias": False})


def rms_fp8(dtype: torch.dtype) -> Iterator[Kind]:
    def make(maker: Maker, weight: Dtype, **options: Any) -> Arguments:
        scale, amax, casting = _scaling(**options)
        return maker.rows(), maker.vector(weight), scale, 1e-6, 0.0, casting, amax

    llama = {"weight": dtype, "casting": "llama"}
    yield from _kinds(make, dtype, *_scalings(dtype), llama, lays=(NESTED,))


def rms_add_fp8(dtype: torch.dtype) -> Iterator[Kind]:
    def make(maker: Maker, weight: Dtype, residual: Dtype = None, **options: Any) -> Arguments:
        scale, amax, casting = _scaling(**options)
        tensors = maker.rows(), maker.rows(residual), maker.vector(weight)
        return *tensors, scale, 1e-6, 0.0, casting, amax

    llama = {"weight": dtype, "casting": "llama"}
    yield from _kinds(make, dtype, *_scalings(dtype), llama, *_residuals(dtype), lays=(NESTED,))


def layer_fp8(dtype: torch.dtype) -> Iterator[Kind]:
    def make(maker: Maker, weight: Dtype, bias: bool = True, **options: Any) -> Arguments:
        scale, amax, _ = _scaling(**options)
        affine = maker.vector(weight), maker.vector(weight if bias else None)
        return maker.rows(), *affine, scale, 1e-5, 0.0, amax

    alone = {"weight": dtype, "bias": False}
    yield from _kinds(make, dtype, *_scalings(dtype), alone, lays=(NESTED,))


def layer_add_fp8(dtype: torch.dtype) -> Iterator[Kind]:
    def make(
        maker: Maker, weight: Dtype, residual: Dtype = None, bias: bool = True, **options: Any
    ) -> Arguments:
        scale, amax, _ = _scaling(**options)
        affine = maker.vector(weight), maker.vector(weight if bias else None)
        return maker.rows(), maker.rows(residual), *affine, scale, 1e-5, 0.0, amax

    alone = {"weight": dtype, "bias": False}
    yield from _kinds(make, dtype, *_scalings(dtype), alone, *_residuals(dtype), lays=(NESTED,))


def _options(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    yield {"weight": FP32}
    yield {"weight": dtype, "out": FP32}
    yield {"weight": FP32, "out": FP32}
    yield {"weight": None, "out": FP32}


def _residuals(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    yield {"weight": dtype, "residual": FP32}
    yield {"weight": FP32, "residual": FP32}


def _gradients(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    yield {"weight": dtype, "frozen": True}
    yield {"weight": dtype, "dsum": True}
    yield {"weight": dtype, "dsum": True, "frozen": True}
    yield {"weight": None, "dsum": True}
    yield {"weight": FP32}
    yield {"weight": FP32, "dsum": True}
    yield {"weight": FP32, "dy": FP32}
    yield {"weight": FP32, "dy": FP32, "dsum": True}
    if dtype != FP32:
        for weight in (dtype, FP32):
            for dsum in (False, True):
                yield {"weight": weight, "x": FP32, "dy": dtype, "dsum": dsum}


def _scaling(
    given: bool = False, amax: bool = False, casting: str = "once"
) -> tuple[torch.Tensor | None, bool, str]:
    return torch.empty((), device="meta") if given else None, amax, casting


def _scalings(dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    yield {"weight": FP32}
    yield {"weight": dtype, "given": True}
    yield {"weight": dtype, "amax": True}
    yield {"weight": dtype, "given": True, "amax": True}
    yield {"weight": FP32, "given": True}


RMS_FORWARD: RowSpace = RowSpace(rms_forward)
RMS_ADD: RowSpace = RowSpace(rms_add)
RMS_FUSED_ADD: RowSpace = RowSpace(rms_fused_add)
RMS_BACKWARD: RowSpace = RowSpace(rms_backward)
RMS_FP8: RowSpace = RowSpace(rms_fp8)
RMS_ADD_FP8: RowSpace = RowSpace(rms_add_fp8)
LAYER_FORWARD: RowSpace = RowSpace(layer_forward)
LAYER_ADD: RowSpace = RowSpace(layer_add)
LAYER_BACKWARD: RowSpace = RowSpace(layer_backward)
LAYER_FP8: RowSpace = RowSpace(layer_fp8)
LAYER_ADD_FP8: RowSpace = RowSpace(layer_add_fp8)
