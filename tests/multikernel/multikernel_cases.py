"""Pairs of kernels that compute the same in two ways, one case for each way to go wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

Function = Callable[..., Any]

BLOCK = 16


def softmax_persistent(x: torch.Tensor) -> torch.Tensor:
    return torch.softmax(x, -1)


def softmax_looped(x: torch.Tensor) -> torch.Tensor:
    """The largest and the sum are carried from block to block."""
    largest = torch.full_like(x[..., :1], -torch.inf)
    total = torch.zeros_like(largest)
    for block in x.split(BLOCK, -1):
        new = torch.maximum(largest, block.amax(-1, keepdim=True))
        total = total * (largest - new).exp() + (block - new).exp().sum(-1, keepdim=True)
        largest = new
    return (x - largest).exp() / total


def layer_norm_persistent(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], w, b)


def layer_norm_looped(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mean and squares about it are merged from block to block."""
    count, mean, squares = 0, torch.zeros_like(x[..., :1]), torch.zeros_like(x[..., :1])
    for block in x.split(BLOCK, -1):
        size, own = block.shape[-1], block.mean(-1, keepdim=True)
        delta, count = own - mean, count + size
        mean = mean + delta * (size / count)
        inside = (block - own).square().sum(-1, keepdim=True)
        squares = squares + inside + delta.square() * ((count - size) * size / count)
    return (x - mean) * torch.rsqrt(squares / count + 1e-5) * w + b


def add_in_place(x: torch.Tensor, y: torch.Tensor) -> None:
    y.add_(x)


def add_and_copy(x: torch.Tensor, y: torch.Tensor) -> None:
    y.copy_(x + y)


def product_fused(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return torch.addcmul(c, a, b)


def product_plain(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    return a * b + c


def batch_norm_library(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, w: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    return F.batch_norm(x, mean, var, w, b, training=True, momentum=0.1)


def batch_norm_by_hand(
    x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor, w: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    own, spread = x.mean(0), x.var(0, correction=0)
    mean.mul_(0.9).add_(own, alpha=0.1)
    var.mul_(0.9).add_(x.var(0), alpha=0.1)
    return (x - own) * torch.rsqrt(spread + 1e-5) * w + b


def sum_one_pass(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    return x.sum(-1)


def sum_two_pass(x: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    """Partial sums go into the scratch buffer, which the other kernel leaves alone."""
    parts = x.split(BLOCK, -1)
    for at, part in enumerate(parts):
        scratch[:, at] = part.sum(-1)
    return scratch[:, : len(parts)].sum(-1)


def scan_whole(x: torch.Tensor) -> torch.Tensor:
    return x.cumsum(-1)


def scan_by_blocks(x: torch.Tensor) -> torch.Tensor:
    pieces, carry = [], torch.zeros_like(x[..., :1])
    for block in x.split(BLOCK, -1):
        pieces.append(block.cumsum(-1) + carry)
        carry = pieces[-1][..., -1:]
    return torch.cat(pieces, -1)


def sort_by_network(x: torch.Tensor) -> torch.Tensor:
    raise NotImplementedError("a network sorts powers of two only")


def sort_library(x: torch.Tensor) -> torch.Tensor:
    return torch.sort(x, -1).values


def add_images(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x + y).contiguous()


def add_images_flat(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.contiguous().flatten() + y.contiguous().flatten()).view(x.shape)


def dropout_library(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.3)


def dropout_by_mask(x: torch.Tensor) -> torch.Tensor:
    return x * (torch.rand_like(x) > 0.3) / 0.7


def like_first(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def nothing(*args: Any) -> None:
    return None


def like_row(x: torch.Tensor, *others: Any) -> torch.Tensor:
    return x.new_empty(x.shape[:-1])


@dataclass(frozen=True)
class Case:
    """`possible`: the kernels that can run it. `make(rows)` gives arguments."""

    name: str
    kernels: Mapping[str, Function]
    schema: str
    fake: Function
    make: Callable[[int], tuple[torch.Tensor, ...]]
    possible: tuple[str, ...] = ("a", "b")
    tolerance: float = 1e-5


def _same_three_times(rows: int) -> tuple[torch.Tensor, ...]:
    x = torch.randn(rows, 40)
    return x, x, x


CASES = [
    Case(
        "softmax",
        {"a": softmax_persistent, "b": softmax_looped},
        "(Tensor x) -> Tensor",
        like_first,
        lambda rows: (torch.randn(rows, 100),),
    ),
    Case(
        "layer_norm",
        {"a": layer_norm_persistent, "b": layer_norm_looped},
        "(Tensor x, Tensor w, Tensor b) -> Tensor",
        like_first,
        lambda rows: (torch.randn(rows, 100), torch.randn(100), torch.randn(100)),
    ),
    Case(
        "in_place",
        {"a": add_in_place, "b": add_and_copy},
        "(Tensor x, Tensor(a!) y) -> ()",
        nothing,
        lambda rows: (torch.randn(rows, 40), torch.randn(rows, 40)),
    ),
    Case(
        "same_argument",
        {"a": product_fused, "b": product_plain},
        "(Tensor a, Tensor b, Tensor c) -> Tensor",
        like_first,
        _same_three_times,
    ),
    Case(
        "batch_norm",
        {"a": batch_norm_library, "b": batch_norm_by_hand},
        "(Tensor x, Tensor(a!) mean, Tensor(b!) var, Tensor w, Tensor b) -> Tensor",
        like_first,
        lambda rows: (
            torch.randn(rows, 24),
            torch.zeros(24),
            torch.ones(24),
            torch.randn(24),
            torch.randn(24),
        ),
    ),
    Case(
        "scratch",
        {"a": sum_one_pass, "b": sum_two_pass},
        "(Tensor x, Tensor(a!) scratch) -> Tensor",
        like_row,
        lambda rows: (torch.randn(rows, 100), torch.zeros(rows, 8)),
        tolerance=1e-4,
    ),
    Case(
        "scan",
        {"a": scan_whole, "b": scan_by_blocks},
        "(Tensor x) -> Tensor",
        like_first,
        lambda rows: (torch.randn(rows, 100),),
        tolerance=1e-4,
    ),
    Case(
        "sort",
        {"a": sort_by_network, "b": sort_library},
        "(Tensor x) -> Tensor",
        like_first,
        lambda rows: (torch.randn(rows, 100),),
        possible=("b",),
    ),
    Case(
        "mixed_layouts",
        {"a": add_images, "b": add_images_flat},
        "(Tensor x, Tensor y) -> Tensor",
        like_first,
        lambda rows: (
            torch.randn(rows, 3, 8, 8).to(memory_format=torch.channels_last),
            torch.randn(rows, 3, 8, 8),
        ),
    ),
    Case(
        "dropout",
        {"a": dropout_library, "b": dropout_by_mask},
        "(Tensor x) -> Tensor",
        like_first,
        lambda rows: (torch.randn(rows, 100),),
        tolerance=torch.inf,
    ),
]
BY_NAME = {case.name: case for case in CASES}
