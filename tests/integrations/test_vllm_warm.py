"""What the vLLM plugin compiles before a model's first call, without vLLM and without a GPU."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.errors import CompileError
from gristmill.integrations.vllm import warm
from gristmill.integrations.vllm.layer_runner import LayerRunner
from gristmill.jit.compilers import Compilable
from gristmill.jit.parallel import Compiled
from gristmill.nvfp4 import NVFP4Tensor, quantize
from gristmill.ops.nvfp4_linear import NVFP4_LINEAR
from gristmill.ops.space import chosen
from gristmill.runners import Nvfp4LinearRunner, Nvfp4MoeRunner
from gristmill.select.chooser import choices
from gristmill.select.device import KNOWN
from gristmill.select.overrides import is_batch_invariant
from gristmill.settings import reload_settings

HOPPER = KNOWN["sm_90a"]
CAPTURED = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
SERVING = warm.Serving(CAPTURED, 2048, 256, (8, 2, 128))
SMALL = warm.Serving((1, 8), 8, 256, (8, 2, 128))


@pytest.fixture(autouse=True)
def nothing_before() -> Iterator[None]:
    def clear() -> None:
        warm.WAITING.clear()
        warm._SETTLED.clear()

    clear()
    yield
    clear()


def matrix(*shape: int) -> NVFP4Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    if len(shape) == 2:
        return quantize(torch.randn(shape, generator=generator))
    parts = [quantize(torch.randn(shape[1:], generator=generator)) for _ in range(shape[0])]
    columns = ([getattr(one, name) for one in parts] for name in ("codes", "scales", "row_scale"))
    return NVFP4Tensor(*(torch.stack(column) for column in columns))


def linear(rows: int = 320, columns: int = 256, arch: str | None = "sm_90a") -> Nvfp4LinearRunner:
    return Nvfp4LinearRunner(matrix(rows, columns).prepare(arch))


def experts(expert_map: torch.Tensor | None = None) -> Nvfp4MoeRunner:
    w13 = matrix(8, 256, 128).prepare("sm_90a", pairs=True)
    return Nvfp4MoeRunner(w13, matrix(8, 128, 128).prepare("sm_90a"), expert_map=expert_map)


def expect(invariant: bool = False, serving: warm.Serving = SMALL) -> list[Any]:
    """A model of two kinds of linear layers and two of experts; what must be kept alive."""
    layers: list[Any] = [linear(), linear(256, 320), linear()]
    for layer in layers:
        warm.expect_linear(layer, serving, invariant=invariant)
    mixtures = [experts(), experts(torch.arange(8, dtype=torch.int32))]
    for mixture in mixtures:
        warm.expect_experts(mixture, 2, serving, invariant=invariant)
    return layers + mixtures


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Takes the place of compiling: what was asked for."""
    asked: list[Any] = []

    def compile_all(programs: Iterable[Any], arch: str, *, workers: int) -> list[Compiled]:
        assert arch == "sm_90a"
        asked.extend(programs)
        return [Compiled(program, "compiled", 0.1) for program in asked]

    monkeypatch.setattr(warm, "compile_all", compile_all)
    return asked


@pytest.mark.parametrize("invariant", [False, True])
def test_every_number_of_tokens_finds_its_kernels(invariant: bool, compiled: list[Any]) -> None:
    """Not only those of graphs: prompts and pieces of them have any length."""
    dtype = torch.bfloat16
    kept = expect(invariant, SERVING)
    assert len(warm.WAITING) == 5  # equal layers are one; norms
    expected = tuple(warm.WAITING.values())
    done = warm.warm(expected, HOPPER, dtype, load=False)
    assert done == (len(compiled), len(compiled), ())
    assert len(compiled) == len(set(compiled)) > 10
    ops = set()
    for one in expected:
        with warm._mode(one.invariant):
            for op, arguments in one.calls:
                for tokens in (*range(1, 100), *range(100, 2049, 31), 2048):
                    problem = op.problem(*arguments(tokens, dtype), device=HOPPER)
                    assert problem.batch_invariant == invariant
                    for needed in chosen(op, problem):
                        choice = needed.choice
                        programs = choice.variant.programs(problem, choice.config)
                        assert set(programs) <= set(compiled), f"{op.name} at {tokens} tokens"
                        ops.update([op.name] if programs else [])
    assert ops == {"nvfp4_linear", "nvfp4_moe", "rms_norm", "fused_add_rms_norm_"}
    del kept


def test_graphs_that_are_captured_are_among_the_numbers() -> None:
    serving = warm.Serving((1, 3, 77, 1001, 9999), 5000)
    for counts in (warm.token_counts(serving), warm.row_counts(serving)):
        assert set(counts) >= {1, 3, 77, 1001, 5000}
        assert max(counts) == 5000  # what no batch reaches is of no use
        assert list(counts) == sorted(set(counts))
    assert warm.token_counts(warm.Serving((), 1)) == (1,)
    assert len(warm.token_counts(warm.Serving((), 1 << 20))) < 400  # planning takes time, too


def test_norms_are_left_out_where_they_are_not_ours() -> None:
    layer = linear()
    warm.expect_linear(layer, warm.Serving(CAPTURED, 512), invariant=False)
    (only,) = warm.WAITING.values()
    assert [op.name for op, _ in only.calls] == ["nvfp4_linear"]


def test_a_layer_that_is_gone_asks_for_nothing(compiled: list[Any]) -> None:
    expect(serving=warm.Serving(CAPTURED, 512))
    done = warm.warm(tuple(warm.WAITING.values()), HOPPER, torch.bfloat16, load=False)
    assert done == (0, 0, ())


def test_on_a_cpu_nothing_is_done_or_said(caplog: pytest.LogCaptureFixture) -> None:
    runner = linear(arch=None)
    warm.expect_linear(runner, SERVING, invariant=False)
    with caplog.at_level(logging.DEBUG, "gristmill"):
        entry = LayerRunner(runner, invariant=False)
        x = torch.randn(3, 256)
        assert torch.equal(entry._run_impl(x), runner._run_impl(x))
    assert not [line for line in caplog.messages if "vLLM" in line]
    assert not warm.WAITING
    warm.expect_linear(runner, SERVING, invariant=False)  # as a reload does
    assert not warm.WAITING


def test_a_layer_that_is_loaded_again_is_not_waited_for() -> None:
    """vLLM 0.26 shows no config while it loads weights again: what is expected looks different."""
    runner, mixture = linear(), experts()
    for serving in (SERVING, warm.Serving()):
        warm.expect_linear(runner, serving, invariant=False)
        warm.expect_experts(mixture, 2, serving, invariant=False)
        assert bool(warm.WAITING) == (serving is SERVING)
        warm.WAITING.clear()
    warm.expect_linear(linear(640), warm.Serving(), invariant=False)
    assert warm.WAITING


def on_a_gpu(monkeypatch: pytest.MonkeyPatch, capturing: bool = False) -> Any:
    """What stands for a call's tensor."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    monkeypatch.setattr(warm, "device_of", lambda device: HOPPER)
    return SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.bfloat16)


def test_the_first_call_makes_all_ready_and_says_so_once(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = expect(invariant=True)
    bound: list[bool] = []
    for op in {op for one in warm.WAITING.values() for op, _ in one.calls}:
        for variant in op.variants:
            monkeypatch.setattr(
                type(variant),
                "bind",
                lambda self, problem, config: bound.append(is_batch_invariant()),
            )
    x = on_a_gpu(monkeypatch)
    with caplog.at_level(logging.INFO, "gristmill"):
        for _ in range(2):
            warm.settle(x)
    (line,) = caplog.messages
    assert line.startswith(f"vLLM: {len(compiled)} kernels ready in ")
    assert line.endswith(f"{len(compiled)} compiled")
    assert bound
    assert all(bound)
    del kept


def test_inside_a_capture_it_waits_for_a_better_moment(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = expect()
    warm.settle(on_a_gpu(monkeypatch, capturing=True))
    assert warm.WAITING
    assert not compiled
    del kept


@pytest.mark.parametrize("whole", [True, False], ids=["all of it", "one kernel"])
def test_what_goes_wrong_is_told_and_stops_nothing(
    whole: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = expect()
    monkeypatch.setattr(warm, "_load", lambda jobs, failed: None)

    def compile_all(programs: Iterable[Any], arch: str, *, workers: int) -> list[Compiled]:
        if whole:
            raise CompileError("no compiler\nat all")
        first, *others = programs
        failed = Compiled(first, "failed", 0.1, "CompileError: line 3: no such type")
        return [failed, *(Compiled(one, "cached", 0.0) for one in others)]

    monkeypatch.setattr(warm, "compile_all", compile_all)
    with caplog.at_level(logging.WARNING, "gristmill"):
        warm.settle(on_a_gpu(monkeypatch))
    (line,) = caplog.messages
    words = "no compiler" if whole else "1 kernels could not be made ready: CompileError: line 3"
    assert words in line
    assert "\n" not in line
    assert not warm.WAITING
    del kept


def test_a_layer_without_kernels_leaves_the_others_theirs(
    compiled: list[Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither one that none can be chosen for, nor a kernel that the GPU does not take."""

    def unknown(tokens: int, dtype: torch.dtype) -> tuple[Any, ...]:
        raise LookupError("nothing for this layer")

    kept = expect()
    call = (NVFP4_LINEAR, unknown)
    warm.WAITING.update({"odd": warm.Expected((call,), (1,), False, 1), **warm.WAITING})
    tried: list[Any] = []

    def bind(self: Any, problem: Any, config: Any) -> None:
        tried.append(problem)
        if len(tried) == 1:
            raise RuntimeError("no room for the module")

    for op in {op for one in warm.WAITING.values() for op, _ in one.calls}:
        for variant in op.variants:
            monkeypatch.setattr(type(variant), "bind", bind)
    with caplog.at_level(logging.INFO, "gristmill"):
        warm.settle(on_a_gpu(monkeypatch))
    ready, failed = caplog.messages
    assert len(tried) > 3
    assert ready.startswith(f"vLLM: {len(compiled) - 1} kernels ready in ")
    assert failed == "vLLM: 2 kernels could not be made ready: LookupError: nothing for this layer"
    del kept


@pytest.mark.parametrize("invariant", [False, True])
def test_a_layer_runs_in_its_mode_after_all_are_ready(
    invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    class Inner:
        def _run_impl(self, *tensors: torch.Tensor) -> torch.Tensor:
            seen.append(is_batch_invariant())
            return tensors[0]

    monkeypatch.setattr(warm, "settle", lambda x: (seen.append("ready"), warm.WAITING.clear()))
    warm.WAITING["something"] = warm.Expected((), (), False, 1)
    entry = LayerRunner(Inner(), invariant=invariant)
    for _ in range(2):
        entry._run_impl(torch.ones(2, 2))
    assert seen == ["ready", invariant, invariant]
    assert not is_batch_invariant()


@pytest.mark.long
def test_kernels_are_compiled_once_into_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRISTMILL_CACHE_DIR", str(tmp_path))
    reload_settings()
    try:
        kept = expect(serving=dataclasses.replace(SMALL, ranks=2))
        expected = tuple(warm.WAITING.values())
        first = warm.warm(expected, HOPPER, torch.bfloat16, load=False)
        again = warm.warm(expected, HOPPER, torch.bfloat16, load=False)
    finally:
        monkeypatch.undo()
        reload_settings()
    assert first.failed == again.failed == ()
    assert first.compiled == first.ready == again.ready > 3
    assert again.compiled == 0
    del kept


@pytest.mark.parametrize("layer", [(28672, 4096), (4096, 14336)])
def test_no_number_of_tokens_needs_a_kernel_of_its_own(layer: tuple[int, int]) -> None:
    """A kernel is other just above a tile: the numbers have both sides of each."""
    op = NVFP4_LINEAR

    def programs(tokens: int) -> set[Compilable]:
        args = op.example_for(HOPPER, (tokens, *layer), torch.bfloat16)
        problem = op.problem(*args, device=HOPPER)
        choice = next(choices(op.name, op.variants, problem))
        return set(choice.variant.programs(problem, choice.config))

    looked_at = warm.token_counts(warm.Serving((), 1024))
    ahead = set().union(*map(programs, looked_at))
    for tokens in sorted(set(range(1, 1025)) - set(looked_at)):
        assert programs(tokens) <= ahead, tokens
