"""What tools/sanitize.py launches: small problems that reach every kernel and every kind of launch.

A run is one variant of an op on one problem by one config, or one of the `PARTS`, which are kernels
that no variant launches here. There are thousands of them. Only such are kept as show something
new of a source and a scope: a value of a template's argument or of a Triton constant, a field of a
config, a dtype or a flag of a problem; and some more of each variant that need no other kernels.
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch
from sanitize_parts import PARTS, moved

from gristmill.bench.check import WrongResultError, check, check_lines
from gristmill.jit import Program, TritonProgram
from gristmill.jit.compilers import Compilable
from gristmill.ops.linear.configs import MatmulConfig
from gristmill.ops.nvfp4_linear.mma_configs import MmaConfig
from gristmill.ops.nvfp4_linear.triton_configs import RowsConfig
from gristmill.ops.nvfp4_linear.wgmma_configs import WgmmaConfig
from gristmill.ops.nvfp4_linear.wgmma_configs import cut as wgmma_cut
from gristmill.ops.nvfp4_moe.wgmma_configs import MoeConfig, products
from gristmill.ops.op import Arguments, Case, Op
from gristmill.ops.registry import OPS
from gristmill.ops.rows.config import AHEAD, ASYNC, STRAIGHT, TWICE, RowConfig
from gristmill.ops.rows.variant import RowVariant
from gristmill.select.device import Device, device_of
from gristmill.select.problem import Problem
from gristmill.select.variant import Variant

KERNELS = Path(__file__).resolve().parents[1] / "src" / "gristmill" / "kernels"

# Rows and columns: short and odd rows, then the lengths at which the preferences change.
SHAPES = (
    (9, 1),
    (33, 24),
    (21, 130),
    (13, 1000),
    (9, 2048),
    (9, 5120),
    (9, 8192),
    (7, 16384),
    (5, 20001),
    (5, 32768),
    (3, 65536),
    (3, 131072),
)
# So few that a handful of rows, or of tiles, counts as many: rings and loops are used, and short.
MULTIPROCESSORS = (3, 24)
# Elements of the largest tensor: test cases beyond that are slow here, and show nothing new.
CASE_LIMIT = 100_000
# Runs of a variant that show nothing new, and are kept if they need no other kernels: inputs differ
# in what no kernel is compiled for, such as routings.
MORE = 6
# The feeds that the kernels of a source know; others only let rows pass by.
ALL_FEEDS = (STRAIGHT, AHEAD, ASYNC, TWICE, 2, 3)
FEEDS = {
    "norm.cu": ALL_FEEDS,
    "norm_backward.cu": (STRAIGHT, AHEAD, 2, 3),
    "softmax.cu": ALL_FEEDS,
    "softmax_backward.cu": (STRAIGHT, AHEAD, ASYNC, 2, 3),
    "cross_entropy_one_pass.cu": ALL_FEEDS,
}

_BF16, _FP16, _FP32 = FLOATS = (torch.bfloat16, torch.float16, torch.float32)
# Examples of ops that are not over rows: none of the sizes is a multiple of every tile, and numbers
# of tokens are those at which other configs are preferred. "arch" is whose layout a weight has.
Example = tuple[tuple[int, ...], torch.dtype, dict[str, Any]]
_PRODUCTS: tuple[Example, ...] = (
    ((5, 72, 520), _BF16, {}),
    ((9, 80, 2048), _BF16, {}),
    ((33, 264, 1024), _FP16, {}),
    ((70, 136, 192), _BF16, {}),
    ((130, 200, 136), _BF16, {}),
    ((300, 520, 512), _BF16, {}),
    ((33, 72, 136), _FP32, {}),
)
_NVFP4: tuple[Example, ...] = (
    ((1, 72, 80), _BF16, {}),
    ((7, 200, 2064), _BF16, {}),
    ((20, 130, 1040), _FP16, {"out_dtype": _FP32}),
    ((33, 264, 528), _BF16, {}),
    ((50, 192, 4112), _BF16, {}),
    ((70, 320, 272), _BF16, {}),
    ((120, 136, 1040), _BF16, {}),
    ((300, 328, 528), _BF16, {}),
    ((600, 200, 144), _BF16, {}),
)
_EXPERTS: tuple[Example, ...] = (
    ((1, 8, 2, 144, 80), _BF16, {}),
    ((6, 12, 4, 528, 272), _BF16, {}),
    ((30, 8, 2, 144, 80), _FP16, {}),
    ((40, 70, 2, 144, 80), _BF16, {}),
    ((60, 40, 3, 144, 272), _BF16, {}),
    ((63, 6, 3, 272, 144), _BF16, {}),
    ((90, 12, 2, 144, 80), _BF16, {}),
    ((70, 6, 2, 144, 80), _FP16, {}),
    ((150, 3, 2, 144, 80), _BF16, {}),
    ((400, 2, 2, 144, 80), _BF16, {}),
)


def _elsewhere(examples: tuple[Example, ...], *archs: str) -> tuple[Example, ...]:
    """The same with weights that lie as other architectures want them."""
    return tuple((*one[:2], {**one[2], "arch": arch}) for arch in archs for one in examples)


EXAMPLES: dict[str, tuple[Example, ...]] = {
    "linear": (*_PRODUCTS, ((70, 136, 192), _BF16, {"activation": "gelu"})),
    "linear_with_pre": _PRODUCTS,
    "matmul": _PRODUCTS,
    "moe": tuple((shape, _BF16, options) for shape, _, options in _EXPERTS),
    "nvfp4_linear": (
        *_NVFP4,
        ((40, 208, 528), _BF16, {"act": "fp8"}),
        *_elsewhere(_NVFP4, "cpu", "sm_100a"),
    ),
    "nvfp4_linear_backward": tuple((shape, dtype, {}) for shape, dtype, _ in _NVFP4),
    "nvfp4_moe": (*_EXPERTS, *_elsewhere(_EXPERTS, "cpu", "sm_100a")),
    "topk_router": (((70, 128), _BF16, {}), ((5, 256), _FP32, {})),
    "topk_router_backward": (((70, 128), _BF16, {}), ((5, 256), _FP32, {})),
}
# Variants without programs of their own, whose kernels are those of other ops.
INDIRECT = {("linear_cross_entropy", "chunked"), ("linear_cross_entropy_backward", "chunked")}
NOTHING = 1e-6  # beside numbers of size one
# Roundings on the way, as a share of the norm of a row or column; as in the benchmarks.
LOOSE = {("nvfp4_linear", "scaled_mm_fp8"): 0.08}


@dataclass(frozen=True)
class Run:
    """One launch, or the few that belong together. `start(place)` gives what is wrong, or None."""

    op: str
    variant: str
    number: int  # among all of this variant, kept or not
    words: str
    programs: tuple[Compilable, ...]
    features: frozenset[Any]
    start: Callable[[str], str | None]

    @property
    def name(self) -> str:
        return f"{self.op}/{self.variant}/{self.number}"


def every_run(device: Device, words: list[str], *, everything: bool = False) -> list[Run]:
    """What is run on `device` of the ops and variants that `words` name, those of a kind together.

    `everything`: also what shows nothing new. Nothing touches a GPU before a run is started.
    """
    found: list[Run] = []
    seen: set[Any] = set()
    for op, variant in variants(words):
        mine = list(runs(op, variant, device))
        found += mine if everything else thinned(mine, seen)
    for name, parts in PARTS.items():
        if wanted(words, name, "parts"):
            for number, part in enumerate(parts()):
                programs = (part.program,)
                shows = frozenset({(name, *programs)})
                found.append(Run(name, "parts", number, f"{part}", programs, shows, part.start))
    return found


def variants(words: list[str]) -> Iterator[tuple[Op, Variant]]:
    """The ops and variants that `words` name and that launch kernels of ours."""
    for op in OPS.values():
        for variant in op.variants:
            ours = type(variant).programs is not Variant.programs
            ours = ours or (op.name, variant.name) in INDIRECT
            if ours and wanted(words, op.name, variant.name):
                yield op, variant


def wanted(words: list[str], op: str, variant: str) -> bool:
    """Where no op, or no variant, is named: all."""
    ops = [word for word in words if word in OPS or word in PARTS]
    others = [word for word in words if word not in ops]
    return (not ops or op in ops) and (not others or variant in others)


def runs(op: Op, variant: Variant, device: Device) -> Iterator[Run]:
    """Everything that one variant of an op could be run on."""
    feeding = feeds(op, variant, device) if isinstance(variant, RowVariant) else ()
    number = itertools.count()
    for words, make, problem, way in itertools.chain(_inputs(op, device), feeding):
        if variant.supports(problem) is not None:
            continue
        for config in configs(variant, problem) if way is None else (way,):
            programs = variant.programs(problem, config)
            yield Run(
                *(op.name, variant.name, next(number)),
                f"{words}: {problem.key(problem.rows)} {config}",
                programs,
                features(variant.name, problem, config, programs),
                _starting(op, variant, make, config, problem.device.multiprocessors),
            )


Make = Callable[[str], Arguments]  # on this device, or on the CPU where addresses matter
Input = tuple[str, Make, Problem, Any]


@functools.lru_cache(maxsize=2)
def _inputs(op: Op, device: Device) -> list[Input]:
    """Words, arguments, their problem, and None: the config is the variant's to choose."""
    examples: list[tuple[Example, bool]] = []
    if any(isinstance(variant, RowVariant) for variant in op.variants):
        examples += (((shape, _BF16, {}), False) for shape in SHAPES)
        examples += (((shape, _BF16, {}), True) for shape in SHAPES if shape[-1] <= 8192)
    examples += ((example, False) for example in EXAMPLES.get(op.name, ()))
    found: list[Input] = []
    for (shape, dtype, options), unaligned in examples:
        make = _example(op, device, (shape, dtype, options), unaligned)
        words = " ".join([f"{shape}", *map(str, options.values()), *["unaligned"] * unaligned])
        # Without numbers, where nothing depends on addresses: packing them takes time.
        args = make("meta")
        found += ((words, make, _problem(op, device, args, few), None) for few in MULTIPROCESSORS)
    for case in op.cases():
        args = tuple(case.make("cpu", 1))
        if largest(args) <= CASE_LIMIT:
            problem = _problem(op, device, args, MULTIPROCESSORS[0])
            found.append((case.name, _case(case), problem, None))
    return found


def _problem(op: Op, device: Device, args: Arguments, few: int) -> Problem:
    return op.problem(*args, device=replace(device, multiprocessors=few))


def _case(case: Case) -> Make:
    return lambda place: tuple(case.make("cpu", 1))


def feeds(op: Op, variant: RowVariant, device: Device) -> Iterator[Input]:
    """Each way that rows of 1536 columns can come, whatever the preference is."""
    bases = {
        "BLOCK": RowConfig(threads=64, items=3),
        "CLUSTER": RowConfig(threads=32, items=3, cluster=4),
    }
    base = bases.get(variant.scope)
    make = _example(op, device, ((13, 1536), _BF16, {}), False)
    problem = _problem(op, device, make("meta"), MULTIPROCESSORS[0])
    if base is None or variant.supports(problem) is not None:
        return
    source = variant.program(problem, variant.config(problem)).source
    for feed, hold in itertools.product(FEEDS.get(source, ()), (True, False)):
        if feed == TWICE and (hold or not getattr(problem.layout, "rereadable", True)):
            continue  # what is read twice does not wait, and must not be written over meanwhile
        yield f"feed {feed}", make, problem, replace(base, feed=feed, hold=hold)


def configs(variant: Variant, problem: Problem) -> list[Any]:
    """Those that tuning would time, and their neighbours that no preference ever takes here."""
    if isinstance(variant, RowVariant):
        return [variant.config(problem)]
    found = list(variant.configs(problem))
    for config in found[:4]:
        found += (one for one in beside(config, problem) if one not in found)
    return found


def beside(config: Any, problem: Problem) -> Iterator[Any]:
    if isinstance(config, MmaConfig) and config.shares > 1:
        yield replace(config, partial=not config.partial)
    elif isinstance(config, WgmmaConfig):
        sizes = (problem.rows, problem.dim("N"), problem.dim("K"), problem.device)
        others = (
            replace(config, persistent=not config.persistent),
            replace(config, group=1),
            *(replace(config, split=split, persistent=False) for split in (1, 2, 4, 8)),
        )
        yield from (one for one in others if wgmma_cut(one, *sizes).reason is None)
    elif isinstance(config, MoeConfig):
        hidden, inner = problem.dim("H"), problem.dim("I")
        shape = (problem.rows, problem.dim("k"), hidden, inner, problem.device)
        launches = (
            replace(config, routing="launch"),
            replace(config, wide=not config.wide, added=False),
            replace(config, persistent=not config.persistent),
            *(replace(config, up=(*config.up[:4], split, config.up[5])) for split in (2, 4)),
        )
        for one in launches:
            if all(product.reason is None for product in products(one, *shape)):
                yield one
    elif isinstance(config, RowsConfig | MatmulConfig):
        yield replace(config, early=not config.early)


def features(
    variant: str, problem: Problem, config: Any, programs: tuple[Compilable, ...]
) -> frozenset[Any]:
    """What a run shows, of its kernels by this variant: ops that have the same share them."""
    found: set[Any] = {("dtype", *one) for one in problem.dtypes}
    found |= {("flag", one) for one in problem.flags}
    if is_dataclass(config):
        found |= {(one.name, getattr(config, one.name)) for one in fields(config)}
    first = programs[0].source if programs else problem.op
    found = {(first, *one) for one in found}
    for program in programs:
        if isinstance(program, Program):
            for name in program.names:
                kernel, *arguments = re.split(r"[<>,]+", name)
                found |= {(kernel, *one) for one in enumerate(arguments)}
        elif isinstance(program, TritonProgram):
            kernel = program.function
            found |= {(kernel, *one) for one in (*program.signature, *program.constants)}
            found |= {(kernel, "divisible", *one) for one in program.divisible}
            found |= {(kernel, "warps", program.warps), (kernel, "stages", program.stages)}
    return frozenset((variant, *one) for one in found)


def thinned(all_runs: list[Run], seen: set[Any]) -> list[Run]:
    """Those that show what was not `seen` yet, in their order; up to `MORE` that cost no kernel.

    Of a variant that shows nothing new, the first.
    """
    kept: list[Run] = []
    for run in all_runs:
        if not run.features <= seen:
            seen |= run.features
            kept.append(run)
    kept = kept or all_runs[:1]
    programs = {program for run in kept for program in run.programs}
    numbers = {run.number for run in kept}
    cheap = [
        run for run in all_runs if run.number not in numbers and programs.issuperset(run.programs)
    ]
    # From all over the list: neighbours are much alike.
    step = max(1, len(cheap) // MORE)
    return sorted([*kept, *cheap[::step][:MORE]], key=lambda run: run.number)


# ---- arguments ----


def _example(op: Op, device: Device, example: Example, unaligned: bool) -> Make:
    shape, dtype, options = example
    options = dict(options)
    arch = options.pop("arch", None)
    target = device if arch is None else replace(device, arch=arch)

    def make(place: str) -> Arguments:
        torch.manual_seed(0)
        args = op.example_with(options, shape, dtype, "cpu" if unaligned else place, target)
        if not unaligned:
            return args
        return tuple(shifted(arg) if isinstance(arg, torch.Tensor) else arg for arg in args)

    return make


def shifted(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, between the boundaries of wide accesses."""
    flat = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return flat[1:].view(tensor.shape).copy_(tensor)


def largest(args: Arguments) -> int:
    return max(arg.numel() for arg in args if isinstance(arg, torch.Tensor))


# ---- starting, and whether the result is right ----


def _starting(
    op: Op, variant: Variant, make: Make, config: Any, few: int
) -> Callable[[str], str | None]:
    def start(place: str) -> str | None:
        here = replace(device_of(place), multiprocessors=few)
        args, expected = _known(op, make)
        problem = op.problem(*(moved(arg, place) for arg in args), device=here)
        return outcome(op, variant, problem, config, args, expected, place)

    return start


@functools.lru_cache(maxsize=1)  # neighbours are configs of one problem
def _known(op: Op, make: Make) -> tuple[Arguments, list[torch.Tensor]]:
    args = make("cpu")
    return args, right(op, args)


def right(op: Op, args: Arguments) -> list[torch.Tensor]:
    """What the reference gives, and what it makes of the arguments.

    On the CPU: no kernel of torch is in the way of a sanitizer, or slowed down by it.
    """
    own = [moved(arg, "cpu") for arg in args]
    return tensors(op.reference(*own)) + tensors(own)


def outcome(
    op: Op,
    variant: Variant,
    problem: Problem,
    config: Any,
    args: Arguments,
    expected: list[torch.Tensor],
    place: str,
) -> str | None:
    """What is wrong with what a run gives and writes, give or take a rounding; None if nothing."""
    own = [moved(arg, place) for arg in args]
    returned = tensors(variant.bind(problem, config)(*own))
    got = [one.cpu() for one in (*returned, *tensors(own))]
    limit = LOOSE.get((op.name, variant.name))
    try:
        if limit is not None:
            check_lines(got[0], expected[0], limit=limit)
            got, expected = got[1:], expected[1:]
        # Coarse: inputs of the test cases are such that a rounding more can show.
        check([*map(settled, got, expected)], expected, coarse=True)
    except WrongResultError as error:
        return str(error)
    return None


def settled(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Zeros for next to nothing where there should be nothing at all, as with a single class.

    An error is measured by the size of what is expected, and there is none.
    """
    if got.shape != expected.shape or got.dtype not in FLOATS or expected.float().any():
        return got
    return torch.where(got.float().abs() <= NOTHING, torch.zeros_like(got), got)


def tensors(values: Any) -> list[torch.Tensor]:
    values = [values] if isinstance(values, torch.Tensor) else values or ()
    return [value for value in values if isinstance(value, torch.Tensor)]


# ---- which kernels there are ----


def cuda_kernels() -> set[str]:
    """Every `__global__` function of the sources: each takes one struct."""
    texts = (path.read_text(encoding="utf-8") for path in KERNELS.glob("cuda/*.cu*"))
    return {
        name for text in texts for name in re.findall(r"__global__[^;{]*?\b(\w+)\(const\b", text)
    }


def triton_kernels() -> set[str]:
    """Every function for Triton's compiler that no other of them calls."""
    made: set[str] = set()
    called: set[str] = set()
    for path in KERNELS.glob("triton/*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and node.decorator_list:
                made.add(node.name)
                inside = (one.func for one in ast.walk(node) if isinstance(one, ast.Call))
                called |= {one.id for one in inside if isinstance(one, ast.Name)}
    return made - called


def kernel_of(name: str) -> str:
    """The function that a name expression instantiates."""
    return name.split("<")[0]


def reached(some: list[Run]) -> set[str]:
    """The kernels that these runs launch, as their programs tell."""
    return {kernel_of(name) for run in some for one in run.programs for name in one.names}
