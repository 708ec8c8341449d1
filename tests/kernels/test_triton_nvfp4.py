"""The Triton variant of `nvfp4_linear`: interpreted, compiled for every architecture, and chosen.

No GPU is needed. The PTX that decodes weights, which Triton's interpreter leaves out, is run here
by a few lines of Python for all codes and all scales.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from architectures import EACH
from sampled import sampled

from gristmill.formats.nvfp4 import e2m1
from gristmill.formats.nvfp4.tiles import padded
from gristmill.jit import TritonProgram, resource_usage
from gristmill.jit.triton import compile_program
from gristmill.ops.nvfp4_linear.problem import forward_problem
from gristmill.ops.nvfp4_linear.triton import TritonLinear
from gristmill.ops.nvfp4_linear.triton_configs import CANDIDATES, RowsConfig, shared_bytes
from gristmill.select.device import KNOWN, Device
from gristmill.select.problem import Problem

pytest.importorskip("triton", reason="needs Triton")

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
VARIANT = TritonLinear()
CHILD = Path(__file__).parent / "triton_nvfp4_interpreted.py"
CHECKS = ("shapes", "dtypes", "split_k", "values", "every_case", "bounds", "rows_alone")
REGISTERS_PER_SM = 65536
SPILL_LIMIT = 16  # as in test_triton_compile.py


def test_the_interpreted_kernel_is_within_rounding_of_fp64() -> None:
    done = subprocess.run(
        [sys.executable, str(CHILD), *CHECKS],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": ":".join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(CHECKS)


# --- the PTX ---


def _halves(word: Any, dtype: str) -> tuple[Any, Any]:
    """The numbers of a packed pair, in fp64."""
    low, high = (word & 0xFFFF).astype(np.uint32), (word >> 16).astype(np.uint32)
    if dtype == "f16":
        both = [half.astype(np.uint16).view(np.float16).astype(np.float64) for half in (low, high)]
    else:
        both = [
            (half << 16).astype(np.uint32).view(np.float32).astype(np.float64)
            for half in (low, high)
        ]
    return both[0], both[1]


def _packed(low: Any, high: Any, dtype: str) -> Any:
    """The pair of two numbers; they must be numbers of the dtype already: nothing is rounded."""
    bits = []
    for number in (low, high):
        if dtype == "f16":
            half = number.astype(np.float16)
            assert (half.astype(np.float64) == number).all()
            bits.append(half.view(np.uint16).astype(np.uint32))
        else:
            single = number.astype(np.float32)
            whole = single.view(np.uint32)
            assert (single.astype(np.float64) == number).all()
            assert not (whole & 0xFFFF).any()
            bits.append(whole >> 16)
    return bits[0] | (bits[1] << 16)


def _permuted(a: Any, b: Any, selector: int) -> Any:
    taken = []
    for place in range(4):
        number = selector >> 4 * place & 15
        assert number < 8, "the sign of a byte is not among what is used"
        word = a if number < 4 else b
        taken.append((word >> 8 * (number % 4) & 0xFF) << 8 * place)
    return (taken[0] | taken[1] | taken[2] | taken[3]).astype(np.uint32)


def _run_ptx(text: str, inputs: list[Any], outputs: int) -> list[Any]:
    """The outputs $0, $1... of a text with these inputs after them."""
    registers: dict[str, Any] = {f"${outputs + at}": value for at, value in enumerate(inputs)}
    size = inputs[0].shape

    def value(name: str) -> Any:
        if name.startswith("0f"):
            bits = np.array([int(name[2:], 16)], np.uint32)
            return np.broadcast_to(bits.view(np.float32), size)
        if name[0].isdigit():
            return np.broadcast_to(np.uint32(int(name, 0)), size)
        return registers[name]

    body = text.strip().removeprefix("{").removesuffix("}")
    for line in filter(None, (part.strip() for part in body.split(";"))):
        operation, _, rest = line.partition(" ")
        if operation == ".reg":
            continue
        target, *names = [name.strip() for name in rest.split(",")]
        given = [value(name) for name in names]
        if operation == "mov.b32":
            result = given[0]
        elif operation == "shl.b32":
            result = (given[0].astype(np.uint64) << int(names[1])).astype(np.uint32)
        elif operation == "shr.b32":
            result = given[0] >> np.uint32(int(names[1]))
        elif operation == "and.b32":
            result = given[0] & given[1]
        elif operation == "lop3.b32":
            assert names[3] == "0xEA"
            result = (given[0] & given[1]) | given[2]
        elif operation == "prmt.b32":
            result = _permuted(given[0], given[1], int(names[2], 0))
        elif operation == "mul.lo.u32":
            result = (given[0].astype(np.uint64) * given[1] & 0xFFFFFFFF).astype(np.uint32)
        elif match := re.fullmatch(r"(fma|mul)\.rn\.(bf16|f16)x2", operation):
            dtype = match[2]
            a, b = _halves(given[0], dtype), _halves(given[1], dtype)
            if match[1] == "fma":
                assert (given[2] == 0x80008000).all()  # minus zero
            result = _packed(a[0] * b[0], a[1] * b[1], dtype)
        elif operation == "cvt.u16.u32":
            result = given[0].astype(np.uint16)
        elif operation == "cvt.f32.f16":
            result = given[0].view(np.float16).astype(np.float32)
        elif operation == "mul.rn.f32":
            product = given[0].astype(np.float64) * given[1].astype(np.float64)
            result = product.astype(np.float32)
            assert (result.astype(np.float64) == product).all()
        elif operation == "cvt.rn.bf16x2.f32":
            both = [one.astype(np.float64) for one in given]
            result = _packed(both[1], both[0], "bf16")
        else:
            raise AssertionError(f"{operation} is not known here")
        registers[target] = result
    return [registers[f"${at}"] for at in range(outputs)]


@pytest.mark.parametrize("dtype", ["bf16", "f16"])
@pytest.mark.parametrize("count", [1, 4])
def test_the_instructions_decode_every_code_times_every_scale(dtype: str, count: int) -> None:
    from gristmill.kernels.triton import nvfp4

    name = {"bf16": "BF16", "f16": "FP16"}[dtype]
    scale_text: str = getattr(nvfp4, f"_SCALE_{name}").value
    text: str = getattr(nvfp4, f"_{'FOUR' if count == 4 else 'ONE'}_{name}").value

    bytes_of_scales = np.array([byte for byte in range(256) if byte & 127 != 127], np.uint8)
    extended = bytes_of_scales.view(np.int8).astype(np.int32).view(np.uint32)
    (factors,) = _run_ptx(scale_text, [extended], 1)

    code, factor = np.meshgrid(np.arange(256, dtype=np.uint32), factors)
    scale = np.broadcast_to(_numbers(bytes_of_scales)[:, None], code.shape)
    code, factor, scale = code.ravel(), factor.ravel(), scale.ravel()
    values = e2m1.decode_packed(torch.arange(256).to(torch.uint8)[:, None], F64).numpy()
    shrunk = {"bf16": 2.0**-9, "f16": 2.0**-7}[dtype]
    for place in range(count):
        # The byte in question at each place, others beside it.
        words = [(code * 37 + 11 * at) & 0xFF for at in range(count)]
        words[place] = code
        word = sum(one << np.uint32(8 * at) for at, one in enumerate(words)).astype(np.uint32)
        pairs = _run_ptx(text, [word] + [np.roll(factor, at - place) for at in range(count)], count)
        low, high = _halves(pairs[place], dtype)
        assert (low == values[code, 0] * scale * shrunk).all()
        assert (high == values[code, 1] * scale * shrunk).all()
        assert (np.signbit(low) == np.signbit(values[code, 0] * scale)).all()


def _numbers(scales: Any) -> Any:
    return torch.from_numpy(scales).view(torch.float8_e4m3fn).double().numpy()


# --- what is compiled ---


def _empty(*size: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(*size, dtype=dtype, device="meta")


def _problem(
    device: Device | str,
    rows: int = 16,
    columns: int = 4096,
    depth: int = 4096,
    *,
    dtype: torch.dtype = BF16,
    layout: str = "rows",
    bias: torch.dtype | None = None,
    out: torch.dtype | None = None,
    gap: int = 0,
) -> Problem:
    """`gap`: bytes between the rows of codes and of scales."""
    blocks = depth // 16
    scales = _empty(columns, blocks + gap, dtype=torch.float8_e4m3fn)[:, :blocks]
    if layout == "tiles":
        scales = _empty(math.prod(padded(columns, blocks)), dtype=torch.float8_e4m3fn)
    return forward_problem(
        KNOWN[device] if isinstance(device, str) else device,
        _empty(rows, depth, dtype=dtype),
        _empty(columns, depth // 2 + gap, dtype=torch.uint8)[:, : depth // 2],
        scales,
        _empty(columns, dtype=F32),
        None if bias is None else _empty(columns, dtype=bias),
        layout,
        out,
        None,
    )


def _check(problem: Problem, config: RowsConfig) -> None:
    assert VARIANT.supports(problem) is None
    for program in VARIANT.programs(problem, config):
        binary = compile_program(program, problem.device.arch)
        (usage,) = resource_usage(binary).values()
        facts = binary.facts
        what = f"{program.function} {config} on {problem.device.arch}: {usage} {facts}"
        assert usage.stack_bytes <= SPILL_LIMIT, what
        assert usage.registers * facts["threads"] <= REGISTERS_PER_SM, what
        assert facts["profile_bytes"] == facts["scratch_bytes"] == 0, what
        assert usage.parameter_bytes == program.parameters().size, what
        if program.function == "nvfp4_linear":
            assert facts["shared"] <= shared_bytes(config) <= problem.device.shared_per_block, what


@pytest.mark.parametrize("layout", ["rows", "tiles"])
@pytest.mark.parametrize("arch", EACH)
def test_what_runs_by_default_on_each_architecture(arch: str, layout: str) -> None:
    for rows in (1, 256):
        problem = _problem(arch, rows, layout=layout)
        _check(problem, VARIANT.config(problem))


OPTIONS: dict[str, dict[str, Any]] = {
    "fp16": {"dtype": F16, "bias": F32},
    "fp32 out": {"out": F32, "bias": BF16},
    "one block": {"depth": 16, "columns": 5},
    "odd": {"depth": 4112, "columns": 1003},
    "odd tiles": {"depth": 4112, "columns": 1003, "layout": "tiles"},
    "2880": {"depth": 2880, "columns": 2880, "dtype": F16},
    "rows apart": {"gap": 16},
    "rows out of line": {"gap": 3},
}


@pytest.mark.parametrize("options", sampled(OPTIONS.values(), 2), ids=list(OPTIONS))
@pytest.mark.parametrize("arch", [pytest.param("sm_80", marks=pytest.mark.long), "sm_90a"])
def test_options(arch: str, options: dict[str, Any]) -> None:
    problem = _problem(arch, **options)
    _check(problem, VARIANT.config(problem))


def test_shares_of_k() -> None:
    problem = _problem("sm_90a", 4, columns=1024, bias=F16, out=F32)
    config = VARIANT.config(problem)
    assert config.split_k > 1
    assert config.early
    assert [program.function for program in VARIANT.programs(problem, config)] == [
        "nvfp4_linear",
        "add_partials",
    ]
    _check(problem, config)


@pytest.mark.long
@pytest.mark.parametrize("arch", list(KNOWN))
@pytest.mark.parametrize("rows", [1, 16, 64, 256, 1024])
def test_every_candidate(arch: str, rows: int) -> None:
    problem = _problem(arch, rows, layout="tiles" if KNOWN[arch].capability >= (10, 0) else "rows")
    for config in VARIANT.configs(problem):
        _check(problem, config)


# --- which configs, and when ---


@pytest.mark.parametrize("arch", list(KNOWN))
@pytest.mark.parametrize("rows", [1, 2, 9, 16, 64, 250, 1024, 100000])
def test_candidates_are_few_different_and_fit(arch: str, rows: int) -> None:
    for columns, depth in ((4096, 4096), (57344, 8192), (33, 16), (512, 2880)):
        problem = _problem(arch, rows, columns, depth)
        found = VARIANT.configs(problem)
        assert 2 <= len(found) <= CANDIDATES
        assert len(set(found)) == len(found)
        assert found[0] == VARIANT.config(problem)
        for config in found:
            assert shared_bytes(config) <= problem.device.shared_per_block
            assert config.block_k % 64 == 0  # whole tiles of scales
            assert not config.early or problem.device.capability >= (9, 0)


def test_a_program_does_not_depend_on_the_number_of_rows() -> None:
    problems = [_problem("sm_90a", rows) for rows in (1, 7, 1000, 123457)]
    config = VARIANT.config(problems[0])
    programs: set[tuple[TritonProgram, ...]] = {
        VARIANT.programs(problem, config) for problem in problems
    }
    assert len(programs) == 1


def test_many_rows_and_bytes_out_of_line_are_left_to_others() -> None:
    assert VARIANT.declines(_problem("sm_80", 1024)) is None
    assert "dequantise" in str(VARIANT.declines(_problem("sm_80", 1025)))
    assert VARIANT.declines(_problem("sm_80", gap=16)) is None
    assert "byte by byte" in str(VARIANT.declines(_problem("sm_80", gap=3)))
    unaligned = _problem("sm_80")
    unaligned = replace(unaligned, layout=replace(unaligned.layout, weight_aligned=False))
    assert "byte by byte" in str(VARIANT.declines(unaligned))
    assert VARIANT.supports(unaligned) is None


def _promised(problem: Problem) -> dict[str, int]:
    (program, *_) = VARIANT.programs(problem, VARIANT.config(problem))
    return dict(program.divisible)


def test_no_more_is_promised_of_a_weight_than_is_known() -> None:
    plain = _promised(_problem("sm_80"))
    assert [plain[name] for name in ("codes", "scales", "code_row", "scale_row")] == [16] * 4
    apart = _promised(_problem("sm_80", gap=4))
    assert apart["code_row"] == apart["scale_row"] == 4
    unaligned = _problem("sm_80")
    unaligned = replace(unaligned, layout=replace(unaligned.layout, weight_aligned=False))
    assert not {"codes", "scales", "code_row", "scale_row"} & set(_promised(unaligned))
    # Another stride of x is the same kernel: eight elements of 16 bits are always promised.
    assert _promised(unaligned)["x_row"] == plain["x_row"] == 8


def test_reasons() -> None:
    assert VARIANT.supports(_problem("sm_80")) is None
    old = Device("cuda", "an older one", arch="sm_75", capability=(7, 5))
    reasons = {
        "needs a CUDA device, not cpu": VARIANT.supports(_problem(Device("cpu", "cpu"))),
        "8.0 or later, not sm_75": VARIANT.supports(_problem(old)),
        "nothing to compute": VARIANT.supports(_problem("sm_80", 0)),
        "x is float32": VARIANT.supports(_problem("sm_80", dtype=F32)),
        "float64 needs more": VARIANT.supports(_problem("sm_80", out=F64)),
        "not torch.float64": VARIANT.supports(_problem("sm_80", bias=F64)),
        "2**31 elements": VARIANT.supports(_problem("sm_80", 2**31)),
        "tiles that are contiguous": VARIANT.supports(_problem("sm_80", layout="tiles", gap=16)),
    }
    for words, reason in reasons.items():
        assert words in str(reason)
    assert VARIANT.varies_with_batch(_problem("sm_80")) is None
    assert VARIANT.indeterminate(_problem("sm_80")) is None
