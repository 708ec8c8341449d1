"""What the suite `vllm` runs in a process of its own: one engine, timed at several batches.

Decoding is timed by difference: generating many tokens takes a prefill and as many steps, one token
takes the prefill alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

import gristmill
from gristmill.bench.fresh import beyond_the_first, end_with
from gristmill.bench.results import described
from gristmill.bench.serving.processes import wait_for_turn, write_answer

WARM_TOKENS = 8
PROFILED_TOKENS = 9
KERNELS = 16


def main(words: Sequence[str]) -> None:
    """`words`: one, a spec as JSON; see `serving.spec`. The answer goes into its folder."""
    spec = json.loads(words[0])
    place = Path(spec["place"])
    end_with(spec["parent"])
    try:
        answer = _measured(spec, place)
    except Exception as error:
        answer = {"error": described(error)}
        write_answer(place, answer)
        raise
    write_answer(place, answer)


def _measured(spec: dict[str, Any], place: Path) -> dict[str, Any]:
    import vllm

    _register()
    start = time.perf_counter()
    engine = _Engine(spec, vllm)
    start_s = time.perf_counter() - start
    wait_for_turn(place)
    batches = [engine.timed(batch) for batch in spec["batches"]]
    # A profiler leaves traces in what is timed after it: last.
    for row in batches:
        row |= engine.kernels(row["batch"])
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else None
    return {
        "version": str(vllm.__version__),
        "start_s": round(start_s, 1),
        "peak_gib": None if peak is None else round(peak, 2),
        "choices": gristmill.counters()["choices"],
        "fallbacks": gristmill.counters()["fallbacks"],
        "batches": batches,
    }


def _register() -> None:
    """What vLLM does itself where gristmill is installed, and not only on the path."""
    from gristmill.integrations.vllm.plugin import register_norms, register_nvfp4

    register_norms()
    register_nvfp4()


class _Engine:
    """vLLM's offline engine and prompts of random tokens, never the same twice."""

    def __init__(self, spec: dict[str, Any], vllm: Any) -> None:
        self._spec, self._sampling = spec, vllm.SamplingParams
        self._llm = vllm.LLM(spec["folder"], **spec["options"])
        self._generator = torch.Generator().manual_seed(7)

    def timed(self, batch: int) -> dict[str, Any]:
        tokens = self._spec["tokens"]
        self._seconds(batch, WARM_TOKENS)
        few, many = [], []
        for _ in range(self._spec["repeats"]):
            few.append(self._seconds(batch, 1))
            many.append(self._seconds(batch, tokens))
        steps = tokens - 1
        step_s = beyond_the_first(many, few, tokens)
        return {
            "batch": batch,
            **self._graph(batch),
            "ms": round(step_s * 1e3, 4),
            "spread_ms": round((max(many) - min(many)) / steps * 1e3, 4),
            "tokens_per_s": round(batch / step_s, 1),
            "prefill_ms": round(median(few) * 1e3, 3),
        }

    def _graph(self, batch: int) -> dict[str, int | None]:
        """The size of the CUDA graph that a step runs in, None without one; nothing on a CPU."""
        if not torch.cuda.is_available():
            return {}
        try:
            config = self._llm.llm_engine.vllm_config.compilation_config
            sizes = config.cudagraph_capture_sizes or ()
        except AttributeError:  # another version of vLLM
            return {}
        return {"graph": min((size for size in sizes if size >= batch), default=None)}

    def kernels(self, batch: int) -> dict[str, Any]:
        """What ran on the GPU in a decode step: name, launches, microseconds; nothing on a CPU."""
        if not torch.cuda.is_available():
            return {}
        few, many = self._profiled(batch, 1), self._profiled(batch, PROFILED_TOKENS)
        steps = PROFILED_TOKENS - 1
        found = []
        for name, (count, us) in many.items():
            before = few.get(name, (0, 0.0))
            found.append((name, (count - before[0]) / steps, (us - before[1]) / steps))
        found.sort(key=lambda one: -one[2])
        return {
            "kernel_us": round(sum(us for _, _, us in found), 1),
            "kernels": [
                [name[:120], round(count, 2), round(us, 1)] for name, count, us in found[:KERNELS]
            ],
        }

    def _profiled(self, batch: int, tokens: int) -> dict[str, tuple[int, float]]:
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self._seconds(batch, tokens)
            torch.cuda.synchronize()
        events = profile.key_averages()
        return {event.key: (event.count, event.self_device_time_total) for event in events}

    def _seconds(self, batch: int, tokens: int) -> float:
        prompts, sampling = self._prompts(batch), self._greedy(tokens)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        answers = self._llm.generate(prompts, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        if any(len(answer.outputs[0].token_ids) != tokens for answer in answers):
            raise RuntimeError(f"vLLM gave fewer tokens than the {tokens} that were asked for")
        return seconds

    def _greedy(self, tokens: int) -> Any:
        return self._sampling(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)

    def _prompts(self, batch: int) -> list[dict[str, list[int]]]:
        shape = (batch, self._spec["prompt"])
        ids = torch.randint(3, self._spec["vocabulary"], shape, generator=self._generator)
        return [{"prompt_token_ids": row} for row in ids.tolist()]
