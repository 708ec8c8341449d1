"""What the suite `transformers` runs in a process of its own: one model, one way to run it.

An answer is JSON: what was measured, or under "error" why it was not.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch

import gristmill
from gristmill.bench.fresh import beyond_the_first
from gristmill.bench.hugging_face.models import Sizes, llama, tokens
from gristmill.bench.hugging_face.steps import Steps, difference
from gristmill.bench.results import described

Answer = dict[str, Any]
LEARNING_RATE = 1e-4
WARM_STEPS = 3
# The first losses, warm-up included: what training did, not only how fast it was.
TRACKED = 5
# So many of the modules that a patch did not take.
LEFT = 8


def main(words: Sequence[str], imports: Mapping[str, float]) -> None:
    """`words`: one, a spec as JSON; see `hugging_face.spec`."""
    try:
        answer = measure(json.loads(words[0]))
    except Exception as error:
        answer = {"error": described(error)}
    sys.stdout.write(json.dumps(answer) + "\n")


def measure(spec: Mapping[str, Any]) -> Answer:
    import transformers

    sizes, device = Sizes(**spec["sizes"]), torch.device(spec["device"])
    with gristmill.inline(*spec["inline"]) if spec["inline"] else contextlib.nullcontext():
        answer = _MEASURES[spec["op"]](sizes, device, spec)
    choices = gristmill.counters()["choices"]
    return {"version": transformers.__version__, **answer, "choices": choices}


def _training(sizes: Sizes, device: torch.device, spec: Mapping[str, Any]) -> Answer:
    """Steps of forward, loss, backward and optimizer, all on one batch."""
    model = llama(sizes, device, use_cache=False).train()
    patched = _patched(model, spec)
    run = torch.compile(model) if spec["compiled"] else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    ids = tokens((sizes.batch, sizes.length), sizes.vocabulary, device)
    losses: list[torch.Tensor] = []

    def step() -> None:
        loss = run(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    first_s = _milliseconds(step, device) / 1e3
    for _ in range(WARM_STEPS - 1):
        step()
    _forget_peak(device)
    ms = _each(step, device, spec["repeats"])
    return {
        **patched,
        **_times(ms),
        "tokens_per_s": round(sizes.batch * sizes.length / median(ms) * 1e3),
        "first_step_s": round(first_s, 2),
        **_peak(device, "peak_gib", 0),
        **_breaks(),
        "losses": [round(float(loss), 6) for loss in losses[:TRACKED]],
    }


def _loss(sizes: Sizes, device: torch.device, spec: Mapping[str, Any]) -> Answer:
    """Head and loss alone, forward and backward; memory is what they add to their inputs."""
    from transformers.loss.loss_utils import ForCausalLMLoss

    torch.manual_seed(0)
    with device:
        hidden = torch.randn(sizes.batch, sizes.length, sizes.hidden, dtype=torch.bfloat16)
        head = torch.nn.Linear(sizes.hidden, sizes.vocabulary, bias=False, dtype=torch.bfloat16)
    hidden.requires_grad_()
    labels = tokens((sizes.batch, sizes.length), sizes.vocabulary, device)
    # As transformers has it: each position is to say the next token, the last one nothing.
    targets = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].contiguous()

    def eager() -> torch.Tensor:
        loss: torch.Tensor = ForCausalLMLoss(head(hidden), labels, sizes.vocabulary)
        return loss

    def cross_entropy() -> torch.Tensor:
        loss = gristmill.cross_entropy(head(hidden), targets)
        assert isinstance(loss, torch.Tensor), "a pair only if the log-sum-exp is asked for"
        return loss

    def linear_cross_entropy() -> torch.Tensor:
        return gristmill.linear_cross_entropy(hidden, head.weight, targets)

    function = {
        "eager": eager,
        "cross_entropy": cross_entropy,
        "linear_cross_entropy": linear_cross_entropy,
    }[spec["loss"]]
    losses: list[torch.Tensor] = []

    def step() -> None:
        hidden.grad = head.weight.grad = None
        loss = function()
        loss.backward()
        losses.append(loss.detach())

    for _ in range(WARM_STEPS):
        step()
    hidden.grad = head.weight.grad = None
    before = _forget_peak(device)
    ms = _each(step, device, spec["repeats"])
    return {
        **_times(ms),
        **_peak(device, "peak_gib", before),
        "losses": [round(float(losses[0]), 6)],
    }


def _generation(sizes: Sizes, device: torch.device, spec: Mapping[str, Any]) -> Answer:
    model = llama(sizes, device, use_cache=True).eval()
    patched = _patched(model, spec)
    if device.type == "cuda":
        patched["weights_gib"] = round(_allocated(device) / 2**30, 2)
    ids = tokens((1, sizes.prompt), sizes.vocabulary, device)
    way = _captured if spec["captured"] else _generated
    return {**patched, **way(model, ids, sizes, spec), **_peak(device, "peak_gib", 0), **_breaks()}


def _generated(model: Any, ids: torch.Tensor, sizes: Sizes, spec: Mapping[str, Any]) -> Answer:
    """`generate` with a static cache, which transformers compiles itself, in CUDA graphs."""
    device = ids.device
    options: dict[str, Any] = {"cache_implementation": "static", "do_sample": False}
    if device.type == "cuda":
        from transformers import CompileConfig

        options["compile_config"] = CompileConfig(mode="reduce-overhead")

    def generate(count: int, **more: Any) -> None:
        made = model.generate(ids, max_new_tokens=count, **options, **more)
        if made.shape[1] != sizes.prompt + count:
            raise RuntimeError(f"{made.shape[1] - sizes.prompt} tokens were generated, not {count}")

    # The longest first: a cache that grew would be compiled for again.
    first_s = _milliseconds(lambda: generate(sizes.tokens), device) / 1e3
    generate(sizes.tokens)
    generate(1)
    few, many = [], []
    for _ in range(spec["repeats"]):
        few.append(_milliseconds(lambda: generate(1), device))
        many.append(_milliseconds(lambda: generate(sizes.tokens), device))
    ms = beyond_the_first(many, few, sizes.tokens)
    watch = _Watch()
    generate(sizes.tokens, streamer=watch)
    return {
        "ms": round(ms, 4),
        "spread_ms": round((max(many) - min(many)) / (sizes.tokens - 1), 4),
        "steady_ms": round(watch.median_ms(), 4),
        "tokens_per_s": round(1e3 / ms, 1),
        "prefill_ms": round(median(few), 3),
        "first_step_s": round(first_s, 2),
    }


def _captured(model: Any, ids: torch.Tensor, sizes: Sizes, spec: Mapping[str, Any]) -> Answer:
    """The same tokens by replays of one CUDA graph; on a CPU by its steps."""
    device = ids.device
    on_gpu = device.type == "cuda"
    steps = Steps(model, ids, sizes.tokens, compiled=on_gpu)

    def whole() -> None:
        steps.start()
        steps.steps()

    first_ms = _milliseconds(whole, device)
    whole()  # a compiler may think again once, and the tokens are held against code that stays
    expected = steps.tokens()
    if on_gpu:
        first_ms += _milliseconds(steps.capture, device)
    prefill = [_milliseconds(steps.start, device) for _ in range(spec["repeats"])]
    runs = []
    for _ in range(spec["repeats"]):
        steps.start()
        runs.append(sum(_each(steps.steps, device, 1)) / (sizes.tokens - 1))
    off = difference(steps, expected)
    if off is not None:
        raise RuntimeError(off)
    ms = median(runs)
    steps.start()
    clock = _Clock(device)
    steps.steps(clock.look)
    return {
        "ms": round(ms, 4),
        "spread_ms": round(max(runs) - min(runs), 4),
        "steady_ms": round(median(clock.ms()), 4),
        "tokens_per_s": round(1e3 / ms, 1),
        "prefill_ms": round(median(prefill), 3),
        "first_step_s": round(first_ms / 1e3, 2),
        "captured": on_gpu,
    }


_MEASURES: Mapping[str, Callable[[Sizes, torch.device, Mapping[str, Any]], Answer]] = {
    "training": _training,
    "loss": _loss,
    "generation": _generation,
}


class _Watch:
    """A streamer of transformers' that only looks at the clock."""

    def __init__(self) -> None:
        self._seen: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self._seen.append(time.perf_counter())

    def end(self) -> None:
        pass

    def median_ms(self) -> float:
        """From one token to the next; a step that is captured or compiled does not count."""
        pairs = itertools.pairwise(self._seen)
        # The prompt is the first that is put, the prefill's token the second.
        return median([(after - before) * 1e3 for before, after in pairs][1:])


def _patched(model: Any, spec: Mapping[str, Any]) -> Answer:
    """What of the model is gristmill's now."""
    if spec["patch"] is None:
        return {}
    report = gristmill.patch(model, **spec["patch"])
    left = [f"{one.name}: {one.reason}" for one in report.left]
    names = {one.name for one in report.replaced}
    lacking = [name for name in spec["needs"] if name not in names]
    if lacking or not names:
        what = ", ".join(lacking) or "everything"
        raise RuntimeError(f"gristmill.patch left {what} as it was ({'; '.join(left)})")
    return {"replaced": len(report.replaced), "left": left[:LEFT]}


class _Clock:
    """When the device was done with each step: the times between two looks, in milliseconds."""

    def __init__(self, device: torch.device):
        self._device = device
        self._seen: list[Any] = []

    def look(self) -> None:
        if self._device.type != "cuda":
            self._seen.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._seen.append(event)

    def ms(self) -> list[float]:
        _synchronize(self._device)
        pairs = itertools.pairwise(self._seen)
        if self._device.type == "cuda":
            return [before.elapsed_time(after) for before, after in pairs]
        return [(after - before) * 1e3 for before, after in pairs]


def _each(step: Callable[[], None], device: torch.device, count: int) -> list[float]:
    """Milliseconds of each of `count` steps; the host runs ahead of a GPU, as it does in use."""
    if device.type != "cuda":
        return [_milliseconds(step, device) for _ in range(count)]
    clock = _Clock(device)
    torch.cuda.synchronize(device)
    clock.look()
    for _ in range(count):
        step()
        clock.look()
    return clock.ms()


def _milliseconds(function: Callable[[], None], device: torch.device) -> float:
    _synchronize(device)
    start = time.perf_counter()
    function()
    _synchronize(device)
    return (time.perf_counter() - start) * 1e3


def _times(ms: Sequence[float]) -> Answer:
    return {
        "ms": round(median(ms), 4),
        "spread_ms": round(max(ms) - min(ms), 4),
        "repeats": len(ms),
    }


def _breaks() -> Answer:
    """Where compiled code fell apart: breaks of the graph, and graphs that were not captured."""
    from torch._dynamo.utils import counters

    return {
        "graph_breaks": sum(counters["graph_break"].values()),
        "capture_skips": counters["inductor"]["cudagraph_skips"],
    }


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def _forget_peak(device: torch.device) -> int:
    """From here on memory is watched; the bytes that are taken already."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
    return _allocated(device)


def _peak(device: torch.device, key: str, before: int) -> Answer:
    """GiB beyond `before`; torch counts none on a CPU."""
    if device.type != "cuda":
        return {}
    return {key: round((torch.cuda.max_memory_allocated(device) - before) / 2**30, 3)}
