"""A call that finds no memory says who it was, leaves nothing behind, and the next one works."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from process_memory import WORDS, Gpu, Memory, calls, launching

import gristmill
from gristmill.errors import DriverError
from gristmill.ops import launch, memory
from gristmill.ops.linear_cross_entropy import products
from gristmill.ops.op import Op
from gristmill.ops.registry import OPS
from gristmill.ops.rms_norm import RMS_NORM
from gristmill.select import Variant, register_variants, tuning
from gristmill.select.problem import Problem

LACK = DriverError(
    "loading a.cu: CUDA_ERROR_OUT_OF_MEMORY", code=2, name="CUDA_ERROR_OUT_OF_MEMORY"
)
OTHER = DriverError("launching f: CUDA_ERROR_INVALID_VALUE", code=1)


class Greedy(Variant):
    """Wants a workspace, which there is or is not."""

    name = "greedy"
    summary = "allocates"

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.failing_bind: Exception | None = None
        self.held: list[weakref.ref[torch.Tensor]] = []

    def supports(self, problem: Problem) -> str | None:
        return None

    def bind(self, problem: Problem, config: Any) -> Callable[..., Any]:
        if self.failing_bind is not None:
            raise self.failing_bind

        def plan(x: torch.Tensor, *rest: Any) -> torch.Tensor:
            workspace = torch.empty_like(x)
            self.held.append(weakref.ref(workspace))
            if self.error is not None:
                raise self.error
            return workspace.fill_(7.0)

        return plan


@pytest.fixture
def greedy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Greedy]:
    """RMSNorm by a variant that can be made to find no memory, and another behind it."""
    variant, names = Greedy(), [one.name for one in RMS_NORM.variants]
    monkeypatch.setattr(RMS_NORM, "variants", (variant, *RMS_NORM.variants))
    register_variants("rms_norm", ["greedy", *names])
    RMS_NORM.forget_plans()
    yield variant
    monkeypatch.undo()
    register_variants("rms_norm", names)
    RMS_NORM.forget_plans()


WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "direct": lambda x: gristmill.rms_norm(x),
    "dispatched": lambda x: torch.ops.gristmill.rms_norm(x, None, 1e-6, 0.0, "once", None),
    "with a gradient": lambda x: gristmill.rms_norm(x.clone().requires_grad_()),
}


@pytest.mark.parametrize("known", [False, True], ids=["first call", "later call"])
@pytest.mark.parametrize("way", WAYS)
def test_the_error_says_who_lacked_memory_and_is_still_torchs(
    greedy: Greedy, way: str, known: bool
) -> None:
    x = torch.ones(3, 64)
    if known:
        assert WAYS[way](x).eq(7).all()
    greedy.error = torch.OutOfMemoryError(WORDS)
    with pytest.raises(torch.OutOfMemoryError) as caught:
        WAYS[way](x)
    assert type(caught.value) is torch.OutOfMemoryError
    # Programs that try again with less look for torch's words in the only argument.
    (text,) = caught.value.args
    assert text.startswith("rms_norm: variant greedy for rms_norm")
    assert "N=64" in text
    assert text.endswith(WORDS)
    greedy.error = None
    assert WAYS[way](x).eq(7).all()


def test_what_a_call_had_is_free_once_its_error_is_handled(greedy: Greedy) -> None:
    x = torch.ones(3, 64)
    greedy.error = torch.OutOfMemoryError(WORDS)
    gc.disable()  # nobody collects cycles before the next attempt
    try:
        for _ in range(2):
            with suppress(torch.OutOfMemoryError):
                gristmill.rms_norm(x)
            # The mould of the error itself knows the frame.
            greedy.error = torch.OutOfMemoryError(WORDS)
        assert [held() for held in greedy.held] == [None, None]
    finally:
        gc.enable()


def test_a_lack_that_the_driver_tells_is_one(greedy: Greedy) -> None:
    """A launch may need memory for what threads spill, a kernel for its code."""
    x = torch.ones(3, 64)
    greedy.error = LACK
    with pytest.raises(torch.OutOfMemoryError, match=r"rms_norm: variant greedy .*CUDA out of mem"):
        gristmill.rms_norm(x)
    greedy.error = OTHER
    with pytest.raises(DriverError, match="INVALID_VALUE") as caught:
        gristmill.rms_norm(x)
    assert caught.value is OTHER


def test_a_kernel_that_cannot_be_loaded_for_lack_of_memory_is_not_given_up(greedy: Greedy) -> None:
    """Or a moment's lack would cost that shape its kernel for as long as the process lives."""
    x = torch.ones(3, 64)
    greedy.failing_bind = LACK
    with pytest.raises(torch.OutOfMemoryError, match="rms_norm: variant greedy"):
        gristmill.rms_norm(x)
    greedy.failing_bind = None
    assert gristmill.rms_norm(x).eq(7).all()
    greedy.failing_bind = OTHER  # as ever: the next one runs
    torch.testing.assert_close(gristmill.rms_norm(torch.ones(5, 64)), torch.ones(5, 64))


def test_memory_that_torch_keeps_is_given_back_before_a_kernel_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answers: list[Any] = [LACK, "kernel"]
    given: list[bool] = []

    def kernel(*args: Any) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given.append(True))
    program: Any = None
    assert launch.load(program, "f", 0) == "kernel"
    assert given == [True]
    answers[:] = [OTHER]
    with pytest.raises(DriverError, match="INVALID_VALUE"):
        launch.load(program, "f", 0)
    assert given == [True]
    # Not in a capture, which giving memory back would break.
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    answers[:] = [LACK]
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        launch.load(program, "f", 0)
    assert given == [True]
    assert not memory.give_back()


def test_a_lack_is_not_taken_for_what_this_torch_cannot_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def addmm(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError(WORDS)

    probe = products._adds_wide
    probe.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "addmm", addmm)
        with pytest.raises(torch.OutOfMemoryError):
            probe(torch.device("cpu"), torch.float32)
    assert probe.cache_info().currsize == 0


def test_no_row_is_made_where_what_runs_now_found_no_room_to_be_timed() -> None:
    """It may be the fastest: beside the copies that are timed there was no room for it."""

    def lacking(x: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError(WORDS)

    functions = {"usual": lacking, "other": lambda x: x + 1}
    with pytest.raises(torch.OutOfMemoryError):
        tuning.measure(functions, (torch.ones(8),), incumbent="usual")
    found = tuning.measure(functions, (torch.ones(8),), incumbent="other")
    assert found.winner == "other"
    assert "OutOfMemoryError" in found.failures["usual"]


# every allocation of every plan


def plans(most: int) -> list[Any]:
    return [
        pytest.param(op, variant, most, id=f"{op.name}-{variant.name}")
        for op, variant in launching()
    ]


def check(op: Op, variant: Variant, most: int, gpu: Gpu) -> None:
    found = calls(op, variant, most)
    assert found, "no case of the op is run by this variant: add one to process_memory.MORE"
    for call in found:
        args, plan = call.args, call.bind()
        written = [args[position] for position in op.written]
        gpu.launches.clear()
        with Memory() as room:
            plan(*args)
        usual = [name for name, _ in gpu.launches]
        assert usual
        for number in range(room.allocated):
            gpu.launches.clear()
            with pytest.raises(torch.OutOfMemoryError), Memory(refused=number):
                plan(*args)
            # What a call writes in place it has not touched, or nobody could call it again.
            assert not gpu.writes_to(written), (call, number)
        gpu.launches.clear()
        with Memory() as again:
            plan(*args)
        assert [name for name, _ in gpu.launches] == usual
        assert again.allocated == room.allocated


@pytest.mark.parametrize(("op", "variant", "most"), plans(3))
def test_a_plan_can_be_called_again_whatever_it_found_no_memory_for(
    op: Op, variant: Variant, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(op, variant, most, Gpu(monkeypatch))


@pytest.mark.long
@pytest.mark.parametrize(("op", "variant", "most"), plans(1000))
def test_whatever_it_found_no_memory_for_in_all_cases(
    op: Op, variant: Variant, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check(op, variant, most, Gpu(monkeypatch))


def test_an_op_that_writes_after_it_ran_out_would_be_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu(monkeypatch)
    start = launch.prepare(type("Call", (), {"name": "write"})(), 0)  # type: ignore[arg-type]
    x = torch.ones(8)

    def plan() -> None:
        start(0, x.data_ptr())
        torch.empty(4)

    with pytest.raises(torch.OutOfMemoryError), Memory(refused=0):
        plan()
    assert gpu.writes_to([x])
    assert not gpu.writes_to([torch.ones(8)])


# on a GPU


def _calls_on_a_gpu() -> Iterator[tuple[str, Callable[[], Any], Callable[[Any], None]]]:
    """Calls that want hundreds of megabytes, and what is right of their results."""
    x = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    weight = torch.ones(8192, device="cuda", dtype=torch.bfloat16)
    expected = torch.nn.functional.rms_norm(x.float(), (8192,)).bfloat16()

    def near(found: Any) -> None:
        torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)

    yield "rms_norm", lambda: gristmill.rms_norm(x, weight), near
    shares = torch.softmax(x.float(), -1).bfloat16()

    def near_shares(found: Any) -> None:
        torch.testing.assert_close(found, shares, rtol=2e-2, atol=1e-5)

    yield "softmax", lambda: gristmill.softmax(x), near_shares
    product = x @ x.T

    def near_product(found: Any) -> None:
        torch.testing.assert_close(found, product, rtol=2e-2, atol=4.0)

    yield "linear", lambda: gristmill.linear(x, x), near_product
    target = torch.randint(0, 8192, (8192,), device="cuda")
    loss = torch.nn.functional.cross_entropy(x.float(), target)

    def near_loss(found: Any) -> None:
        torch.testing.assert_close(found.float(), loss, rtol=1e-2, atol=1e-2)

    logits = x.clone().requires_grad_()

    def trained() -> torch.Tensor:
        found = gristmill.cross_entropy(logits, target)
        torch.autograd.grad(found, logits)
        return found.detach()

    yield "cross_entropy", trained, near_loss


@pytest.mark.alone
@pytest.mark.gpu
def test_on_a_gpu_that_is_full_a_call_raises_and_works_again_afterwards() -> None:
    for name, call, check_result in _calls_on_a_gpu():
        check_result(call())  # compiled, chosen, loaded
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        lack = pytest.raises(torch.OutOfMemoryError, match=rf"{name}.*: variant .*out of memory")
        with full_gpu(), lack:
            call()
        torch.cuda.synchronize()
        check_result(call())
        torch.cuda.synchronize()


@pytest.mark.alone
@pytest.mark.gpu
def test_on_a_gpu_that_is_full_at_a_first_call() -> None:
    """The plan is made in a full memory: a kernel may be loaded, its results find no room."""
    for name, call, check_result in _calls_on_a_gpu():
        for op in OPS.values():
            op.forget_plans()
        torch.cuda.empty_cache()
        with full_gpu(), pytest.raises(torch.OutOfMemoryError, match=rf"{name}.*out of memory"):
            call()
        check_result(call())


class full_gpu:  # noqa: N801 - used as a function
    """Torch may have no more memory than it has taken, and none of that is free."""

    def __enter__(self) -> None:
        _, total = torch.cuda.mem_get_info()
        reserved = torch.cuda.memory_reserved()
        # A little above what is taken: enough for small tensors, too little for the large ones.
        torch.cuda.set_per_process_memory_fraction(min(1.0, (reserved + (32 << 20)) / total))
        self._held: list[torch.Tensor] = []
        try:
            while True:
                self._held.append(torch.empty(16 << 20, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            pass

    def __exit__(self, *error: object) -> None:
        self._held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)
