"""The suite `vllm`: what a decode step takes in vLLM, with its own layers and with gristmill's.

Each implementation is an engine in a process of its own, with dummy weights, compiled, in CUDA
graphs. As many as the GPU's memory holds are started at once, and then timed one by one.
"""

from __future__ import annotations

import importlib.util
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from gristmill.bench.results import Results, Row
from gristmill.bench.serving import processes
from gristmill.bench.serving.models import (
    KNOWN,
    MODELS,
    kv_cache_bytes,
    weight_bytes,
    write_config,
)
from gristmill.bench.suites import known
from gristmill.errors import ArgumentError, GristmillError
from gristmill.tune.jobs import CAPTURE_SIZES

SUITE = "vllm"
BATCHES = (1, 8, 16, 32, 64, 96, 128, 160, 256)
QUICK_BATCHES = (1, 16, 64, 160)
REPEATS = 3
PROMPT, TOKENS = 64, 128
MAX_LENGTH = 2048
# At least; a large batch may not have to wait for room.
_KV_CACHE_BYTES = 4 << 30
# The end of a sequence may need a block of the KV cache that is not full.
_SLACK_TOKENS = 32
# At least, and what vLLM takes by itself for offline use of a GPU with 70 GiB or more.
_BATCHED_TOKENS = 16384
# Activations, graphs, a CUDA context: beside weights and KV cache.
_BESIDE_BYTES = 5 << 30
# Of all engines that start together, most of it compiling; of one engine beside its batches, and of
# one run of a batch: generous, since only what hangs comes to them.
START_LIMIT_S, RUN_LIMIT_S, _BATCH_LIMIT_S = 900.0, 120.0, 15.0
METHOD = (
    f"vLLM's offline LLM, dummy weights, prompts of {PROMPT} random tokens, {TOKENS} new ones, "
    f"greedy; (time of {TOKENS} tokens - time of 1) / {TOKENS - 1}, of medians"
)
NO_GPU = "no GPU is here: vLLM served a tiny model, neither compiled nor captured"
_CHILD = "gristmill.bench.serving.child"
_NORMS = {"ir_op_priority": {"rms_norm": ["gristmill"], "fused_add_rms_norm": ["gristmill"]}}


@dataclass(frozen=True)
class Implementation:
    """`options`: of vLLM's `LLM`. `nvfp4`: the model is a checkpoint of NVFP4 weights."""

    name: str
    nvfp4: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    is_ours: bool = False

    def with_norms(self) -> Implementation:
        options = {**self.options, **_NORMS}
        return Implementation(f"{self.name}_norms", self.nvfp4, options, is_ours=True)


_MARLIN = {"linear_backend": "marlin", "moe_backend": "marlin"}
_OWN = (
    Implementation("bf16"),
    Implementation("nvfp4_marlin", True, _MARLIN),
    Implementation("nvfp4_gristmill", True, {"quantization": "gristmill_nvfp4"}, is_ours=True),
)
# Each with vLLM's own norms, then with gristmill's.
IMPLEMENTATIONS = {one.name: one for own in _OWN for one in (own, own.with_norms())}
QUICK = ("bf16", "nvfp4_marlin", "nvfp4_gristmill_norms")


@dataclass(frozen=True)
class Plan:
    """What is measured: models by implementations, each at every batch."""

    models: tuple[str, ...]
    implementations: tuple[Implementation, ...]
    batches: tuple[int, ...]

    @property
    def steps(self) -> int:
        return len(self.models) * len(self.implementations)


def missing(device: torch.device) -> str | None:
    """Why the suite cannot run here, in one line."""
    if importlib.util.find_spec("vllm") is None:
        return "the suite vllm needs vLLM, and no module of that name is here: pip install vllm"
    if device.type == "cuda" and device.index not in (None, 0):
        return (
            f"the suite vllm runs on the first GPU that is seen, not on {device}: choose another "
            "one with CUDA_VISIBLE_DEVICES"
        )
    return None


def plan(
    device: torch.device,
    *,
    models: Sequence[str] = (),
    implementations: Sequence[str] = (),
    batches: Sequence[int] = (),
    quick: bool = False,
) -> Plan:
    """An empty filter means everything; on a CPU a tiny model stands for all."""
    usual = (list(MODELS)[:1] if quick else list(MODELS)) if device.type == "cuda" else ["tiny"]
    named = implementations or (QUICK if quick else tuple(IMPLEMENTATIONS))
    if wrong := [batch for batch in batches if batch < 1]:
        raise ArgumentError(f"a batch is of 1 sequence at least, not {wrong[0]}")
    return Plan(
        tuple(known("model", name, KNOWN) for name in models or usual),
        tuple(IMPLEMENTATIONS[known("implementation", name, IMPLEMENTATIONS)] for name in named),
        tuple(dict.fromkeys(batches)) or (QUICK_BATCHES if quick else BATCHES),
    )


def run(
    device: torch.device,
    results: Results,
    advance: Callable[[str], None],
    chosen: Plan,
    *,
    repeats: int = REPEATS,
) -> None:
    """Each implementation's row for each batch; one that fails has rows that say why."""
    if why := missing(device):
        raise ArgumentError(why)
    results.meta.setdefault("methods", {})[SUITE] = METHOD
    if device.type != "cuda":
        results.note(NO_GPU)
    for model in chosen.models:
        for wave in _waves(model, todo(model, chosen, results), device):
            with tempfile.TemporaryDirectory(prefix="gristmill-bench-") as folder:
                _run_wave(model, wave, chosen, device, repeats, Path(folder), results, advance)


def todo(model: str, chosen: Plan, results: Results) -> Plan:
    """The plan without those engines of which there are rows."""

    def is_there(one: Implementation, batch: int) -> bool:
        return results.has(suite=SUITE, op=model, impl=one.name, batch=batch)

    left = [
        one
        for one in chosen.implementations
        if not all(is_there(one, batch) for batch in chosen.batches)
    ]
    return replace(chosen, implementations=tuple(left))


def _run_wave(
    model: str,
    wave: Sequence[Implementation],
    chosen: Plan,
    device: torch.device,
    repeats: int,
    folder: Path,
    results: Results,
    advance: Callable[[str], None],
) -> None:
    started = []
    for one in wave:
        write_config(folder / "models" / one.name, model, nvfp4=one.nvfp4)
        told = spec(model, one, chosen.batches, device, repeats, folder / "models" / one.name)
        place = folder / "runs" / one.name
        started.append(processes.start(one.name, _CHILD, told, environment(device), place))
    answers = processes.in_turns(
        started,
        lambda name: advance(f"{SUITE} {model}, {name}"),
        start_limit_s=START_LIMIT_S,
        run_limit_s=run_limit_s(chosen.batches, repeats),
    )
    for one, (_, answer) in zip(wave, answers, strict=True):
        results.add(rows(model, one, chosen.batches, answer))


def spec(
    model: str,
    one: Implementation,
    batches: Sequence[int],
    device: torch.device,
    repeats: int,
    folder: Path,
) -> dict[str, Any]:
    """What a child is told: the engine to make, and what to time with it."""
    options: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": MAX_LENGTH,
        "max_num_seqs": max(batches),
        "enable_prefix_caching": False,
        "seed": 0,
    }
    if device.type == "cuda":
        # A share of the GPU that any of several engines finds free; the bytes are what counts.
        options["gpu_memory_utilization"] = 0.1
        options["kv_cache_memory_bytes"] = _kv_cache(model, batches)
        # All prompts of a batch in one step: all its sequences then decode together to the end.
        options["max_num_batched_tokens"] = max(_BATCHED_TOKENS, max(batches) * PROMPT)
        if not set(batches) <= set(captured(max(batches))):
            sizes = sorted({*captured(max(batches)), *batches})
            options["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    else:
        options["enforce_eager"] = True
    return {
        "folder": str(folder),
        "options": {**options, **one.options},
        "batches": list(batches),
        "prompt": PROMPT,
        "tokens": TOKENS,
        "repeats": repeats,
        "vocabulary": KNOWN[model]["vocab_size"],
    }


def captured(sequences: int) -> tuple[int, ...]:
    """The sizes of CUDA graphs that vLLM captures by itself, for so many sequences at most.

    A batch between two of them is padded to the larger one, and beyond the last there is no graph.
    """
    return tuple(size for size in CAPTURE_SIZES["vllm"] if size <= 2 * sequences)


def run_limit_s(batches: Sequence[int], repeats: int) -> float:
    """The longest that one engine may take, once it is started."""
    # Each repeat is a run of one token and one of many; then there is the profiler.
    return RUN_LIMIT_S + len(batches) * (repeats + 2) * _BATCH_LIMIT_S


def environment(device: torch.device) -> dict[str, str]:
    """One process and no network; what runs is said by options, not by a switch of the user's."""
    found = {
        "GRISTMILL_VLLM": "",
        "HF_HUB_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        # FlashInfer's would compile at its first use; greedy decoding has no need of it.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    return found if device.type == "cuda" else {**found, "VLLM_CPU_KVCACHE_SPACE": "1"}


def rows(
    model: str,
    one: Implementation,
    batches: Sequence[int],
    answer: Mapping[str, Any] | GristmillError,
) -> list[Row]:
    """A row for each batch: what the child says of it, or why it says nothing."""
    about: Row = {"suite": SUITE, "op": model, "dtype": "bfloat16", "impl": one.name}
    about["ours"] = one.is_ours
    failed = str(answer) if isinstance(answer, GristmillError) else answer.get("error")
    if failed is not None:
        return [_at(about, batch) | {"error": failed} for batch in batches]
    assert not isinstance(answer, GristmillError)
    shared = {key: value for key, value in answer.items() if key != "batches"}
    error = _wrong(one, shared["choices"])
    return [
        _at(about, timed["batch"]) | timed | shared | {"error": error}
        for timed in answer["batches"]
    ]


def _at(about: Row, batch: int) -> Row:
    return {**about, "shape": f"batch {batch}", "batch": batch}


def _wrong(one: Implementation, choices: Mapping[str, int]) -> str | None:
    """An engine that was asked for gristmill's layers and ran none of them measures another."""
    ran = {name.partition(":")[0] for name in choices}
    if "ir_op_priority" in one.options and not ran & {"rms_norm", "fused_add_rms_norm_"}:
        return "no norm of gristmill's ran"
    if "quantization" in one.options and not ran & {"nvfp4_linear", "nvfp4_moe"}:
        return "no NVFP4 layer of gristmill's ran"
    return None


def _kv_cache(model: str, batches: Sequence[int]) -> int:
    tokens = max(batches) * (PROMPT + TOKENS + _SLACK_TOKENS)
    return max(_KV_CACHE_BYTES, kv_cache_bytes(KNOWN[model], tokens))


def _waves(model: str, chosen: Plan, device: torch.device) -> Iterator[list[Implementation]]:
    """Implementations, as many at a time as have room in the GPU's free memory."""
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0] * 9 // 10
        most = max(1, (os.cpu_count() or 1) // 2)
    else:
        room, most = 0, 1
    beside = _kv_cache(model, chosen.batches) + _BESIDE_BYTES
    waiting = list(chosen.implementations)
    while waiting:
        wave: list[Implementation] = []
        taken = 0
        for one in list(waiting):
            need = weight_bytes(KNOWN[model], nvfp4=one.nvfp4) + beside
            if not wave or (taken + need <= room and len(wave) < most):
                wave.append(one)
                waiting.remove(one)
                taken += need
        yield wave
