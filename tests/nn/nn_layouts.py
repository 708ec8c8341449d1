"""What the tests of NVFP4 modules in the layouts of GPUs share."""

from __future__ import annotations

import torch

from gristmill import nvfp4

LAYOUTS = {"cpu": "rows", "sm_90a": "fragments", "sm_100a": "tiles"}
PACKED = [arch for arch, layout in LAYOUTS.items() if layout != "rows"]
NAMES = ("weight", "weight_scale", "weight_scale_2")
# N and K: whole pieces of 64 (and of 128), and parts of them.
SHAPES = [(128, 128), (40, 48)]

State = dict[str, torch.Tensor]


def dense(shape: tuple[int, int] = (40, 48)) -> torch.nn.Linear:
    return torch.nn.Linear(shape[1], shape[0])


def state(weight: nvfp4.NVFP4Tensor, bias: torch.Tensor) -> State:
    row_scale = weight.row_scale.contiguous()
    return dict(zip((*NAMES, "bias"), (weight.codes, weight.scales, row_scale, bias), strict=True))


def fresh_state(rows: int = 40, columns: int = 48) -> State:
    """Of a layer whose rows have global scales of their own."""
    weight = nvfp4.quantize(torch.randn(rows, columns))
    each = weight.global_scale * torch.arange(1, rows + 1)
    return state(nvfp4.NVFP4Tensor(weight.codes, weight.scales, each), torch.randn(rows))


def copied(stored: State) -> State:
    return {name: value.clone() for name, value in stored.items()}


def assert_same(found: State, wanted: State) -> None:
    """By names, dtypes, shapes and bytes."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert found[name].dtype == value.dtype, name
        assert found[name].shape == value.shape, name
        left, right = (one.detach().cpu().contiguous() for one in (found[name], value))
        assert torch.equal(left.view(torch.uint8), right.view(torch.uint8)), name


def assert_state(module: torch.nn.Module, wanted: State) -> None:
    assert_same(module.state_dict(), wanted)


def addresses(module: torch.nn.Module) -> dict[str, int]:
    return {name: buffer.data_ptr() for name, buffer in module.named_buffers()}
