"""Count the kernels of `nvfp4_linear` that a model needs at every size vLLM captures.

    PYTHONPATH=src python benchmarks/capture_kernels.py
    GRISTMILL_TABLE=none PYTHONPATH=src python benchmarks/capture_kernels.py

vLLM captures a CUDA graph for 1, 2 and 4 tokens, for 8 to 256 tokens in steps of 8 and for 272 to
512 tokens in steps of 16. Every kernel that one of these sizes needs is compiled before the first
capture: their number decides how long a first start takes. Nothing is compiled here and no GPU is
needed. A program is one compilation; two problems that need equal programs share it.

The default weights are those of a Llama of 8B shape in bf16, prepared for Hopper, without a bias:
qkv_proj, o_proj, gate_up_proj and down_proj. With GRISTMILL_TABLE=none the choice is made without
the shipped tuning table.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence

import torch

from gristmill.errors import VariantUnavailable
from gristmill.jit.compilers import Compilable
from gristmill.ops.registry import OPS
from gristmill.select.chooser import choices
from gristmill.select.device import KNOWN, Device
from gristmill.tune.jobs import CAPTURE_SIZES

OP = OPS["nvfp4_linear"]
DTYPE = torch.bfloat16
ARCH = "sm_90a"
# N x K of a Llama of 8B shape.
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


def programs(
    weight: tuple[int, int], sizes: Iterable[int], device: Device
) -> dict[int, tuple[str, str, tuple[Compilable, ...]]]:
    """For every number of tokens: the variant, where its choice comes from, and its programs."""
    found = {}
    for tokens in sizes:
        arguments = OP.example_for(device, (tokens, *weight), DTYPE)
        problem = OP.problem(*arguments, device=device)
        try:
            choice = next(choices(OP.name, OP.variants, problem))
        except VariantUnavailable as error:
            sys.exit(f"M = {tokens}, N x K = {weight[0]}x{weight[1]}: {error}")
        made = tuple(choice.variant.programs(problem, choice.config))
        found[tokens] = (choice.variant.name, choice.source, made)
    return found


def report(weights: Sequence[tuple[int, int]], sizes: Sequence[int], device: Device) -> list[str]:
    """A row for each weight, and the number of different programs of all of them."""
    header = ("weight (N x K)", "sizes", "distinct programs", "variants", "chosen by")
    rows = []
    total: set[Compilable] = set()
    for weight in weights:
        found = programs(weight, sizes, device)
        distinct = {program for _, _, made in found.values() for program in made}
        total |= distinct
        variants = Counter(variant for variant, _, _ in found.values())
        sources = Counter(source for _, source, _ in found.values())
        counts = (str(len(sizes)), str(len(distinct)))
        rows.append((f"{weight[0]} x {weight[1]}", *counts, _counted(variants), _counted(sources)))
    rows.append(("all", str(len(sizes)), str(len(total)), "", ""))
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    return [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    ]


def _counted(found: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in found.most_common())


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog="GRISTMILL_TABLE=none chooses without the shipped tuning table.",
    )
    parser.add_argument("--arch", default=ARCH, choices=list(KNOWN), help=f"default: {ARCH}")
    parser.add_argument(
        "--weights",
        type=_weights,
        default=WEIGHTS,
        metavar="NxK,...",
        help="default: " + ",".join(f"{rows}x{columns}" for rows, columns in WEIGHTS),
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        default=CAPTURE_SIZES["vllm"],
        metavar="M,...",
        help="numbers of tokens; default: the sizes that vLLM captures",
    )
    options = parser.parse_args(words)
    device = KNOWN[options.arch]
    lines = report(options.weights, options.sizes, device)
    sys.stdout.write("\n".join((f"{OP.name}, {device.name} ({device.arch}), bf16", *lines, "")))


def _weights(text: str) -> tuple[tuple[int, int], ...]:
    found = []
    for word in text.split(","):
        rows, columns = word.lower().split("x")
        found.append((int(rows), int(columns)))
    return tuple(found)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


if __name__ == "__main__":
    main()
