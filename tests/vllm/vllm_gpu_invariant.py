"""A request alone and the same among 63 others on a GPU, with VLLM_BATCH_INVARIANT: bit by bit.

`PYTHONPATH=src python tests/vllm/vllm_gpu_invariant.py FOLDER` starts six engines of vLLM at once,
compiled, with CUDA graphs: a Llama and a Qwen3-MoE, each dense in vLLM's own layers (if that
differs, the rest cannot be equal either), in NVFP4 with gristmill's layers and norms, and the same
without the variable, to see what it changes. It prints a table and raises where rows with the
variable differ.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from vllm_gpu_engine import finish, start
from vllm_gpu_models import KINDS, options, random_prompt, write_models

LENGTH, OTHERS, TOKENS = 77, 63, 24
ENGINES = {
    "dense": ("dense", False, "1"),
    "nvfp4": ("nvfp4", True, "1"),
    "free": ("nvfp4", True, "0"),
}


def rounds(others: int) -> list[dict[str, Any]]:
    """The request alone, first, in the middle and last of a batch of all lengths."""
    request = random_prompt(LENGTH, 1)
    crowd = [random_prompt(1 + 37 * number % 400, 100 + number) for number in range(others)]
    batches = [[request]]
    for place in (0, others // 2, others):
        batches.append([*crowd[:place], request, *crowd[place:]])
    return [{"prompts": batch, "tokens": TOKENS, "prompt_logprobs": True} for batch in batches]


def differences(result: dict[str, Any], others: int) -> tuple[int, float]:
    """How many log-probabilities of the request differ from those alone, and the largest of it."""
    alone = result["rounds"][0][0]
    count, most = 0, 0.0
    for batch, place in zip(result["rounds"][1:], (0, others // 2, others), strict=True):
        among = batch[place]
        for part in ("prompt", "generated"):
            for one, other in zip(alone[part], among[part], strict=True):
                keys = {*one, *other}
                for key in keys:
                    if one.get(key) != other.get(key):
                        count += 1
                        both = key in one and key in other
                        most = max(most, abs(one[key] - other[key]) if both else float("inf"))
        count += alone["tokens"] != among["tokens"]
    return count, most


def main(folder: Path, others: int = OTHERS, timeout: float = 540.0) -> str:
    """The table, if nothing differs that must not."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_models(folder)
    more = {"max_model_len": 1024, "max_num_seqs": 64, "enable_prefix_caching": False}
    processes = {}
    for kind in KINDS:
        for name, (weights, norms, variable) in ENGINES.items():
            llm = options(folder, kind, weights, norms, **more)
            spec = {"llm": llm, "rounds": rounds(others)}
            label = f"{kind}-{name}"
            processes[label] = start(label, spec, folder, VLLM_BATCH_INVARIANT=variable)
    results = finish(processes, folder, timeout)
    lines, wrong = [f"{'engine':12} {'start s':>8} {'differ':>8} {'most':>10}  gristmill"], []
    for name, result in results.items():
        count, most = differences(result, others)
        chosen = " ".join(sorted(map(str, result["choices"])))
        lines.append(f"{name:12} {result['start_s']:8.1f} {count:8d} {most:10.3g}  {chosen[:160]}")
        if count and not name.endswith("-free"):
            wrong.append(f"{name}: {count} log-probabilities differ, by up to {most}")
        if name.endswith("-nvfp4") and result["quantization"] != "gristmill_nvfp4":
            wrong.append(f"{name}: quantization is {result['quantization']}")
        if name.endswith("-nvfp4") and torch.cuda.is_available():
            if result["in_capture"]:
                wrong.append(f"{name}: compiled inside a capture: {result['in_capture']}")
            if result["compiled"] != result["compiled_when_ready"]:
                counts = result["compiled_when_ready"], result["compiled"]
                wrong.append(f"{name}: compiled after kernels were called ready: {counts}")
    table = "\n".join(lines)
    sys.stdout.write(table + "\n")
    if wrong:
        raise RuntimeError("; ".join(wrong))
    return table


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
