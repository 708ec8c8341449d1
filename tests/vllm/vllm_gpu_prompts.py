"""Prompts of all lengths in one batch on a GPU, compiled, in CUDA graphs, by pieces, from a cache.

`PYTHONPATH=src python tests/vllm/vllm_gpu_prompts.py FOLDER` starts six engines of vLLM at once: a
Llama and a Qwen3-MoE, each dense in vLLM's own layers, in NVFP4 with vLLM's norms, and in NVFP4
with gristmill's. It prints a table and raises where something is not as it must be.

The truth is Hugging Face's model with the dequantised weights, in fp32, on the tokens that an
engine generated. The measure is the error of the dense engine in bf16, which is vLLM's own.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from vllm_gpu_engine import finish, start
from vllm_gpu_models import KINDS, options, random_prompt, write_models

LENGTHS = (1, 5, 17, 200, 1500, 3000)
CHUNK = 512
TOKENS = 12
ENGINES = {"dense": ("dense", False), "nvfp4": ("nvfp4", False), "norms": ("nvfp4", True)}
# Ours keeps its weights as they are, where the dense engine has them rounded to bf16: its error is
# that of the activations alone, and not larger.
MEDIAN, TAIL = 1.25, 1.5


def specs(folder: Path, lengths: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Two rounds of one batch: all log-probabilities, then prompts of which pieces are cached."""
    prompts = [random_prompt(length, length) for length in lengths]
    rounds = [
        {"prompts": prompts, "tokens": TOKENS, "prompt_logprobs": True},
        {"prompts": prompts, "tokens": TOKENS},
        {"prompts": prompts, "tokens": TOKENS},
    ]
    more = {
        "max_model_len": max(lengths) + 96,
        "max_num_batched_tokens": CHUNK,
        "max_num_seqs": 16,
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
    }
    return {
        f"{kind}-{name}": {"llm": options(folder, kind, *engine, **more), "rounds": rounds}
        for kind in KINDS
        for name, engine in ENGINES.items()
    }


def errors(result: dict[str, Any], dense: Path, device: str) -> list[float]:
    """Of every log-probability that was given in all rounds."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(dense, dtype=torch.float32).to(device).eval()
    found: list[float] = []
    for answers in result["rounds"]:
        for answer in answers:
            with torch.no_grad():
                ids = torch.tensor([answer["tokens"]], device=device)
                table = model(ids).logits[0].float().log_softmax(-1).cpu()
            steps = [*answer["prompt"], *answer["generated"]]
            first = len(answer["tokens"]) - 1 - len(steps)
            for position, step in enumerate(steps, start=first):
                keys = [int(key) for key in step]
                differences = table[position, keys] - torch.tensor(list(step.values()))
                found.extend(differences.abs().tolist())
    return found


def at(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


def check(
    name: str, result: dict[str, Any], row: dict[str, float], dense: dict[str, float]
) -> None:
    """Raise if the engine `name` did not do what it must."""
    ours = not name.endswith("-dense")
    wrong = []
    if (result["quantization"] == "gristmill_nvfp4") != ours:
        wrong.append(f"quantization is {result['quantization']}")
    for number, answers in enumerate(result["rounds"][1:], start=2):
        hits = [answer["cached"] for answer in answers if len(answer["tokens"]) > 150]
        if not hits or not all(hits):
            wrong.append(f"round {number} took nothing from the cache of prefixes: {hits}")
    if ours and (row["median"] > MEDIAN * dense["median"] or row["p99"] > TAIL * dense["p99"]):
        wrong.append(f"error {row} beside {dense} of the dense engine")
    if ours and torch.cuda.is_available():
        wrong += _wrong_kernels(name, result)
    if wrong:
        raise RuntimeError(f"{name}: {'; '.join(wrong)}; {result['lines']}")


def _wrong_kernels(name: str, result: dict[str, Any]) -> list[str]:
    wrong = []
    if len(result["ready"]) != 1:
        wrong.append(f"kernels were called ready {len(result['ready'])} times")
    if result["in_capture"]:
        wrong.append(f"compiled inside a capture: {result['in_capture']}")
    if result["compiled"] != result["compiled_when_ready"]:
        late = result["compiled"] - (result["compiled_when_ready"] or 0)
        wrong.append(f"{late} kernels were compiled after they were called ready")
    if result["fallbacks"]:
        wrong.append(f"fallbacks: {result['fallbacks']}")
    wanted = ["nvfp4_linear", *(["nvfp4_moe"] if name.startswith("moe") else [])]
    wanted += ["rms_norm", "fused_add_rms_norm_"] if name.endswith("-norms") else []
    kernels = {key.partition(":")[0] for key in result["choices"] if ":cuda" in key}
    wrong += [f"{op} ran no kernel: {result['choices']}" for op in wanted if op not in kernels]
    return wrong


def main(folder: Path, lengths: tuple[int, ...] = LENGTHS, timeout: float = 540.0) -> str:
    """The table, once all checks have passed."""
    folder = folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    write_models(folder)
    processes = {name: start(name, spec, folder) for name, spec in specs(folder, lengths).items()}
    results = finish(processes, folder, timeout)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head = [("start s", 8), ("compiled", 8), ("late", 5), ("median", 8), ("p99", 8), ("max", 8)]
    lines = [" ".join([f"{'engine':14}", *(f"{word:>{width}}" for word, width in head)])]
    rows: dict[str, dict[str, float]] = {}
    for name, result in results.items():
        found = errors(result, folder / name.split("-")[0] / "dense", device)
        rows[name] = {"median": at(found, 0.5), "p99": at(found, 0.99), "max": max(found)}
        late = result["compiled"] - (result["compiled_when_ready"] or 0)
        sizes = " ".join(f"{value:8.4f}" for value in rows[name].values())
        numbers = f"{result['start_s']:8.1f} {result['compiled']:8d} {late:5d}"
        lines.append(f"{name:14} {numbers} {sizes}  {' '.join(result['ready'])}")
    table = "\n".join(lines)
    sys.stdout.write(table + "\n")
    for name, result in results.items():
        check(name, result, rows[name], rows[f"{name.split('-')[0]}-dense"])
    return table


if __name__ == "__main__":
    main(Path(sys.argv[1]), tuple(map(int, sys.argv[2:])) or LENGTHS)
