"""What the variant `cuda_wgmma` of nvfp4_moe would launch: compiled for Hopper, the only one that
has its instructions, and within its limits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from nvfp4_moe_cases import CUTS, PLAIN, WAYS
from sampled import sampled

from gristmill.errors import CompilerUnavailable, DriverError
from gristmill.jit import Program
from gristmill.jit.nvrtc import compile_program, compiler_version
from gristmill.jit.resources import resource_usage
from gristmill.ops.nvfp4_moe.cases import forward_example
from gristmill.ops.nvfp4_moe.problem import forward_problem
from gristmill.ops.nvfp4_moe.wgmma import Wgmma
from gristmill.ops.nvfp4_moe.wgmma_configs import TILES, MoeConfig, Product, products
from gristmill.select.configs import config_from_json, config_to_json
from gristmill.select.device import KNOWN
from gristmill.select.problem import CANONICAL_ROWS, Problem

ARCH = "sm_90a"
SOURCE = Path(str(resources.files("gristmill"))) / "kernels" / "cuda" / "nvfp4_moe.cu"
REGISTERS_PER_SM, THREADS_PER_SM, SHARED_PER_SM = 65536, 2048, 228 << 10
REGISTER_GRANULE = 8
TOKENS = (1, 8, 32, 64, 128, 200, 1024, 4096)
# Experts, topk, hidden, inner.
MODELS = {
    "Qwen3-30B-A3B": (128, 8, 2048, 768),
    "Qwen3-235B": (128, 8, 4096, 1536),
    "DeepSeek-V3": (256, 8, 7168, 2048),
    "gpt-oss-120b": (128, 4, 2880, 2880),
}
# Few experts, one, many; rows and columns of less than a piece, and of a few.
ODD = ((4, 2, 64, 32), (1, 1, 16, 16), (8, 3, 208, 272), (512, 10, 2048, 512), (2, 64, 80, 48))

Sizes = tuple[int, int, int, int]


def _problem(tokens: int, sizes: Sizes, dtype: torch.dtype = torch.bfloat16) -> Problem:
    example = forward_example((2, 4, 2, 64, 64), dtype, "cpu", ARCH)
    problem = forward_problem(KNOWN[ARCH], *example)
    details = problem.layout
    ids = replace(details.ids, tokens=tokens, topk=sizes[1], strides=(sizes[1], 1))
    return replace(
        problem,
        rows=tokens,
        dims=tuple(zip(("E", "k", "H", "I"), sizes, strict=True)),
        layout=replace(details, ids=ids, x_stride=sizes[2]),
    )


def _products(problem: Problem, config: MoeConfig) -> tuple[Product, Product]:
    dims = (problem.dim(name) for name in ("k", "H", "I"))
    return products(config, problem.rows, *dims, problem.device)


def _launches(most: int | None, dtype: torch.dtype) -> Iterator[tuple[Program, Product]]:
    """Different kernels among the first `most` configs of each problem."""
    seen = set()
    for sizes in MODELS.values():
        for tokens in TOKENS:
            problem = _problem(tokens, sizes, dtype)
            assert Wgmma().supports(problem) is None
            for config in Wgmma().configs(problem)[:most]:
                both = Wgmma().programs(problem, config)[:2]
                for program, product in zip(both, _products(problem, config), strict=True):
                    if program not in seen:
                        seen.add(program)
                        yield program, product


@pytest.fixture(scope="module")
def compiler() -> None:
    try:
        compiler_version()
    except CompilerUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


def _registers_after(groups: int) -> int:
    """What the threads hold together once the producer has given and the others have taken."""
    text = SOURCE.read_text()
    (given,) = re.findall(r"lower_registers<(\d+)>", text)
    (choice,) = re.findall(r"raise_registers<(.*)>\(\)", text)
    found = re.fullmatch(r"GROUPS <= 2 \? (\d+) : GROUPS == 3 \? (\d+) : (\d+)", choice)
    assert found is not None
    return 128 * int(given) + 128 * groups * int(found[min(max(groups - 1, 1), 3)])


def _excess(program: Program, product: Product) -> str | None:
    binary = compile_program(program, ARCH, verbose=True)
    used = resource_usage(binary)[binary.lowered[program.names[0]]]
    assert used.spill_bytes is not None, "the assembler's report does not name the kernel"
    if used.spill_bytes or used.stack_bytes:
        return f"{used.spill_bytes} bytes spilled, {used.stack_bytes} of stack"
    granted = -(-used.registers // REGISTER_GRANULE) * REGISTER_GRANULE * product.threads
    if granted * product.blocks > REGISTERS_PER_SM:
        return f"{used.registers} registers in each of {product.threads} times {product.blocks}"
    if product.raised and _registers_after(product.groups) > granted:
        return "takes registers that nobody gives: it would wait for ever"
    # C7510, C7512, C7520: matrix instructions behind each other, or registers moved for them.
    told = [word for word in ("serialized", "C7510", "C7512", "C7520") if word in binary.log]
    return ", ".join(told) or None


def _excesses(most: int | None, dtype: torch.dtype) -> list[str]:
    found = []
    for program, product in _launches(most, dtype):
        assert product.blocks * product.threads <= THREADS_PER_SM
        assert product.blocks * (product.shared + 1024) <= SHARED_PER_SM
        reason = _excess(program, product)
        if reason is not None:
            found.append(f"{program.names[0]}: {reason}")
    return found


@pytest.mark.usefixtures("compiler")
def test_what_runs_untuned_is_within_limits() -> None:
    """No spills, and matrix instructions that overlap."""
    assert not _excesses(1, torch.bfloat16)


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_timed_is_within_limits(dtype: torch.dtype) -> None:
    assert not _excesses(None, dtype)


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("routing", "added"), WAYS)
@pytest.mark.parametrize("name", CUTS)
def test_every_kind_is_within_limits(name: str, routing: Any, added: bool) -> None:
    problem = _problem(9, (4, 2, 4096, 4096))
    config = replace(CUTS[name], routing=routing, added=added)
    programs = Wgmma().programs(problem, config)
    for program, product in zip(programs[:2], _products(problem, config), strict=True):
        assert _excess(program, product) is None


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("cut", "tile"),
    [
        *(((1, 1, 2, 2, 1, 1), 192), ((2, 1, 2, 2, 1, 1), 192), ((3, 1, 2, 2, 1, 1), 128)),
        *(((4, 1, 2, 2, 1, 1), 64), ((2, 2, 4, 2, 1, 1), 64)),
    ],
    ids=str,
)
def test_producers_that_give_registers_away(cut: Any, tile: int) -> None:
    problem = _problem(100, MODELS["Qwen3-30B-A3B"])
    config = replace(PLAIN, up=cut, down=cut, tile=tile)
    programs = Wgmma().programs(problem, config)
    for program, product in zip(programs[:2], _products(problem, config), strict=True):
        assert product.reason is None
        assert product.raised
        assert _excess(program, product) is None


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("routing", "added"), WAYS)
@pytest.mark.parametrize("groups", [(1, 1), (2, 1), (1, 2), (3, 1), (4, 1), (1, 4)], ids=str)
def test_as_many_blocks_as_are_said_to_have_registers(
    groups: tuple[int, int], routing: Any, added: bool
) -> None:
    """Of the smallest ring, so that it is registers that limit them."""
    cut = (*groups, 2 * groups[1], 2, 1, 16)
    found = []
    for tile in (8, 16, 32, 64) if routing == "scan" else TILES:
        problem = _problem(tile if routing == "scan" else 50, (8, 1, 2048, 768))
        config = replace(PLAIN, up=cut, down=cut, tile=tile, routing=routing, added=added)
        both = _products(problem, config)
        for program, product in zip(Wgmma().programs(problem, config)[:2], both, strict=True):
            reason = None if product.reason is not None else _excess(program, product)
            if reason is not None:
                found.append(f"{program.names[0]}: {reason}")
    assert not found


@pytest.mark.long
@pytest.mark.usefixtures("compiler")
def test_producers_that_give_registers_away_where_slots_are_scanned() -> None:
    cut = (2, 2, 4, 2, 1, 1)
    problem, config = _problem(64, (8, 1, 2048, 768)), replace(PLAIN, up=cut, down=cut, tile=8)
    programs = Wgmma().programs(problem, config)
    for program, product in zip(programs[:2], _products(problem, config), strict=True):
        assert product.raised
        assert _excess(program, product) is None


@pytest.mark.parametrize("sizes", [*MODELS.values(), *ODD], ids=str)
def test_every_problem_has_a_config(sizes: Sizes) -> None:
    for tokens in (*TOKENS, 70000):
        problem = _problem(tokens, sizes)
        configs = Wgmma().configs(problem)
        assert Wgmma().config(problem) == configs[0]
        assert len(set(configs)) == len(configs)
        for config in configs:
            for product in _products(problem, config):
                assert product.reason is None
                assert product.shared <= problem.device.shared_per_block
            programs = Wgmma().programs(problem, config)
            assert 2 <= len(programs) <= 4
            assert Wgmma().source_hash(problem, config)


@pytest.mark.parametrize("sizes", sampled([(one,) for one in (*MODELS.values(), *ODD)], 3), ids=str)
def test_a_config_for_other_rows_has_a_launch(sizes: Sizes) -> None:
    """Where results must not depend on the batch, one config serves any number of tokens."""
    for config in Wgmma().configs(_problem(CANONICAL_ROWS, sizes)):
        assert not config.added  # experts would be added in an order that depends on the others
        for tokens in (1, 9, 21, 64, 65, 200, 5000):
            both = _products(_problem(tokens, sizes), config)
            assert [one.reason for one in both] == [None, None], (tokens, config)
            for product, cut in zip(both, (config.up, config.down), strict=True):
                # What the order of sums follows from.
                assert (product.k_groups, product.split) == (cut[1], cut[4])
                assert product.depth % (2 * product.k_groups) == 0
                assert product.stages >= 2
            assert both[0].tile == both[1].tile
            assert both[0].routing == both[1].routing


def test_a_config_survives_a_table() -> None:
    for config in (PLAIN, *CUTS.values(), *(replace(PLAIN, tile=tile) for tile in TILES)):
        values = config_to_json(config)
        assert values is not None
        as_read = {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
        assert config_from_json(MoeConfig, as_read) == config


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (MoeConfig((3, 1, 2, 2, 1, 1), PLAIN.down, 192), "tiles of 192 need more registers than 3"),
        (
            MoeConfig(PLAIN.up, (1, 1, 2, 2, 8, 1), 16, added=False),
            "2 chunks of columns cannot be split in 8",
        ),
        (MoeConfig(PLAIN.up, (2, 1, 2, 2, 1, 1), 128), "shared memory, and a block has 49152"),
    ],
)
def test_a_config_without_a_launch_is_an_error_of_bind_alone(
    config: MoeConfig, reason: str
) -> None:
    """Which lets another variant stand in."""
    problem = _problem(3000, (4, 2, 208, 80))
    small = replace(problem.device, shared_per_block=49152)
    problem = replace(problem, device=small) if "49152" in reason else problem
    assert Wgmma().source_hash(problem, config)
    with pytest.raises(DriverError, match=f"cuda_wgmma: no launch by .*{reason}"):
        Wgmma().bind(problem, config)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"flags": ()}, "layout 'fragments'"),
        ({"dtypes": (("x", "float32"),)}, "x of bf16 or fp16"),
        ({"rows": 0}, "nothing to compute"),
        ({"dims": (("E", 0), ("k", 2), ("H", 64), ("I", 64))}, "nothing to compute"),
        ({"rows": 2**30}, "2**31"),
        ({"dims": (("E", 2**16), ("k", 2), ("H", 64), ("I", 2**15))}, "2**31"),
        ({"dims": (("E", 30000), ("k", 2), ("H", 64), ("I", 64))}, "counts at most"),
        ({"device": KNOWN["sm_80"]}, "sm_90a alone"),
        ({"device": KNOWN["sm_100a"]}, "sm_90a alone"),
    ],
    ids=str,
)
def test_what_it_does_not_do(change: dict[str, Any], reason: str) -> None:
    problem = _problem(8, (4, 2, 64, 64))
    assert Wgmma().supports(problem) is None
    assert reason in (Wgmma().supports(replace(problem, **change)) or "")


def test_what_it_does_not_do_with_other_tensors() -> None:
    problem = _problem(8, (4, 2, 64, 64))
    details = problem.layout
    for change, reason in (
        ({"w13": replace(details.w13, packed=False)}, "dense and aligned"),
        ({"w2": replace(details.w2, packed=False)}, "dense and aligned"),
        ({"w13_bias": torch.float64}, "fp32, bf16 or fp16"),
        ({"w2_bias": torch.float64}, "fp32, bf16 or fp16"),
        ({"weights": torch.float64}, "fp32, bf16 or fp16"),
    ):
        other = replace(problem, layout=replace(details, **change))
        assert reason in (Wgmma().supports(other) or "")
