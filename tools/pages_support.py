"""What runs where: asked of the variants themselves, by example calls on every architecture."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from pages_text import Page, joined
from pages_text import table as written

from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.select.device import KNOWN, Device

ROOT = Path(__file__).resolve().parents[1]
TABLES = ROOT / "src" / "gristmill" / "tables"
DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
}

# Column of the matrix -> the device that is asked.
DEVICES: dict[str, Device] = {
    **KNOWN,
    "older": Device("cuda", "a GPU before Ampere", "sm_75", (7, 5), 72, 6 << 20, 64 << 10),
    "CPU": Device("cpu", "cpu"),
}
GENERATIONS = {
    "sm_80": "Ampere (A100)",
    "sm_89": "Ada (L40S, RTX 40)",
    "sm_90a": "Hopper (H100, H200)",
    "sm_100a": "Blackwell (B200)",
    "sm_103a": "Blackwell Ultra (B300)",
    "sm_120a": "Blackwell (RTX PRO 6000, RTX 50)",
}
# Sizes at which each variant of an op has something to run: short, usual and long rows; few and
# many tokens.
ROWS = ((256, 64), (256, 4096), (256, 131072))
PRODUCTS = ((16, 4096, 4096), (4096, 4096, 4096))
EXPERTS = ((16, 128, 8, 2048, 768), (1024, 128, 8, 2048, 768))
SHAPES: dict[str, tuple[tuple[int, ...], ...]] = {
    "linear": PRODUCTS,
    "linear_with_pre": PRODUCTS,
    "matmul": PRODUCTS,
    "linear_cross_entropy": ((64, 4096, 32000),),
    "linear_cross_entropy_backward": ((64, 4096, 32000),),
    "nvfp4_linear": PRODUCTS,
    "nvfp4_linear_backward": PRODUCTS,
    "moe": EXPERTS,
    "moe_backward": EXPERTS,
    "nvfp4_moe": EXPERTS,
    "nvfp4_moe_backward": EXPERTS,
    "topk_router": ((64, 128, 8),),
    "topk_router_backward": ((64, 128, 8),),
}
# Arguments other than the example's, for variants that run with these only; of a function, what it
# makes of the others.
OPTIONS: dict[str, tuple[Mapping[str, Any], ...]] = {
    "linear": (
        {"activation": "silu"},
        {"activation": "relu", "bias": lambda call: call["weight"].new_empty(len(call["weight"]))},
    ),
    "linear_with_pre": ({"activation": "silu"},),
    "nvfp4_linear": ({"act": "fp8"}, {"act": "nvfp4"}),
}


def variants(page: Page) -> str:
    """The variants of the op that a block names: what each is, and where it runs."""
    op = OPS[page.subject]
    rows = []
    for variant in op.variants:
        places = places_of(op.name)[variant.name]
        rows.append((f"`{variant.name}`", variant.summary, _where(places)))
    return written(("variant", "what it is", "runs on"), rows)


def gpus(page: Page) -> str:
    """What was done on each generation of GPUs, and what runs elsewhere."""
    timed = {_arch_of_table(path) for path in TABLES.glob("*.json")}
    tuned = {arch: KNOWN[arch].name.removeprefix("NVIDIA ") for arch in KNOWN if arch in timed}
    rows = [
        (
            name,
            f"`{arch}`",
            "compiled and emulated, run on a device" if arch in tuned else "compiled and emulated",
            f"yes, {tuned[arch]}" if arch in tuned else "no",
            f"yes, {tuned[arch]}" if arch in tuned else "no",
        )
        for arch, name in GENERATIONS.items()
    ]
    plain = "torch's own ops and the references"
    rows.append(("Turing and older, other makers' GPUs", "", f"{plain}; not tested", "no", "no"))
    rows.append(("CPU", "", f"{plain}, in every test", "ratios only", "no"))
    return written(("device", "compiled as", "how it is tested", "timed", "tuned table"), rows)


def kernels(page: Page) -> str:
    """Ops by variants, architectures and dtypes; ops that are alike share a table."""
    alike: dict[tuple[tuple[str, ...], ...], list[str]] = {}
    for op in OPS.values():
        alike.setdefault(tuple(_matrix(op)), []).append(op.name)
    head = (
        "variant",
        "dtypes",
        *(f"`{name}`" if name.startswith("sm_") else name for name in DEVICES),
    )
    parts = []
    for rows, names in alike.items():
        parts.append(f"**{joined([f'`{name}`' for name in names])}**")
        parts.append(written(head, rows))
    return "\n\n".join(parts)


def versions(page: Page) -> str:
    """What the package asks for (pyproject.toml, the plugin), and what it is tested with."""
    make = dict(
        re.findall(r"^(\w+) \?= (.+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    )
    adapter = (ROOT / "src/gristmill/integrations/vllm/adapter.py").read_text(encoding="utf-8")
    (oldest,) = re.findall(r"^OLDEST = \((\d+), (\d+)\)$", adapter, re.M)
    rows = (
        ("Python", _range("requires-python"), "3.11 and 3.12"),
        ("torch", _range("torch"), f"{_pinned(make['TORCH'])} and 2.11.0"),
        ("CUDA", "13, of torch or by the extra `nvrtc`", "NVRTC 13.0; on the H200 CUDA 13.0"),
        ("Triton", _range("triton"), "3.6 and 3.7"),
        (
            "vLLM",
            f"{'.'.join(oldest)} or newer",
            f"{_pinned(make['VLLM'])} (CPU); see [vLLM](vllm.md)",
        ),
        ("transformers", _range("transformers"), "the newest in that range"),
        ("operating system", "Linux", "Linux on x86-64"),
    )
    return written(("", "takes", "tested with"), rows)


@cache
def places_of(name: str) -> dict[str, dict[str, tuple[str, ...]]]:
    """variant -> device -> the dtypes in which it takes one of the example calls."""
    op = OPS[name]
    # What a variant can do, whether or not its compiler is installed here.
    with mock.patch("gristmill.ops.rms_norm.cutedsl.why_missing", return_value=None):
        return _places(op)


def _places(op: Op) -> dict[str, dict[str, tuple[str, ...]]]:
    found = {variant.name: {place: set[str]() for place in DEVICES} for variant in op.variants}
    for place, device in DEVICES.items():
        for word, dtype in DTYPES.items():
            for arguments in calls(op, device, dtype):
                problem = op.problem_on(device, *arguments)
                for variant in op.variants:
                    if variant.supports(problem) is None:
                        found[variant.name][place].add(word)
    return {
        variant: {
            place: tuple(word for word in DTYPES if word in words)
            for place, words in places.items()
        }
        for variant, places in found.items()
    }


def calls(op: Op, device: Device, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Calls of an op, as meta tensors: its sizes, its options, weights prepared and not."""
    names = [argument.name for argument in op.overload._schema.arguments]
    for shape in SHAPES.get(op.name, ROWS):
        for target in (device, DEVICES["CPU"]) if op.laid_out else (device,):
            try:
                arguments = op.example_for(target, shape, dtype)
            except (ValueError, TypeError, RuntimeError):
                continue  # not in this dtype
            for options in ({}, *OPTIONS.get(op.name, ())):
                call = dict(zip(names, arguments, strict=True))
                made = {name: new(call) if callable(new) else new for name, new in options.items()}
                yield tuple((call | made)[name] for name in names)


def _matrix(op: Op) -> Iterator[tuple[str, ...]]:
    """A line for each variant: its dtypes, and where it takes all of them, some or none."""
    for variant, places in places_of(op.name).items():
        every = tuple(word for word in DTYPES if any(word in words for words in places.values()))
        cells = ("yes" if words == every else " ".join(words) or "–" for words in places.values())
        yield (f"`{variant}`", " ".join(every), *cells)


def _where(places: dict[str, tuple[str, ...]]) -> str:
    """A few words for the places in which a variant runs."""
    on = [place for place, words in places.items() if words]
    if on == list(DEVICES):
        return "GPUs and CPUs"
    archs = [arch for arch in KNOWN if arch in on]
    if "older" in on:
        words = "GPUs"
    elif archs == list(KNOWN)[list(KNOWN).index(archs[0]) :]:
        least = KNOWN[archs[0]].capability
        words = f"compute capability {least[0]}.{least[1]} and up"
    else:
        words = joined([f"`{arch}`" for arch in archs])
    return words + (", CPUs" if "CPU" in on else "")


def _arch_of_table(path: Path) -> str | None:
    """The architecture of the GPU that a shipped table is named after."""
    words = path.stem.replace("-", " ")
    return next((arch for arch, one in KNOWN.items() if one.name.lower() == words), None)


def _range(name: str) -> str:
    """Of pyproject.toml: `"torch>=2.11,<3"` as "2.11 or newer, below 3"."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found = re.search(rf'^[^#]*\b{name}(?: = ")?((?:[><=]+[\d.]+,?)+)"', text, re.MULTILINE)
    bounds = dict(re.findall(r"(>=|<)([\d.]+)", found[1] if found else ""))
    return bounds[">="] + " or newer" + (f", below {bounds['<']}" if "<" in bounds else "")


def _pinned(requirement: str) -> str:
    return requirement.rpartition("==")[2]
