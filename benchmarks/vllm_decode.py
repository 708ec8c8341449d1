"""gristmill inside a real vLLM on a GPU: is it chosen, does it agree, what does a decode step take.

    python benchmarks/vllm_decode.py make FOLDER      # random weights, as NVFP4 and dense
    python benchmarks/vllm_decode.py run FOLDER/nvfp4 --output ours.json
    python benchmarks/vllm_decode.py compare dense.json ours.json

`make` writes one model twice: as a ModelOpt NVFP4 checkpoint, with scales that differ between q, k
and v and between gate and up, and as the dense bf16 checkpoint of the same values. `run` generates
in one process, with whatever plugin the environment asks for (GRISTMILL_VLLM=norms,nvfp4), and
writes log-probabilities, the variants that ran, and ms per decode step. `compare` holds the
log-probabilities of two runs of one model against each other.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN3_MOE_SMALL = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 4096,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {"llama-8b": LLAMA_8B, "qwen3-moe": QWEN3_MOE_SMALL}
# Differ on purpose: a global scale must hold per shard. Small enough for sane activations.
SPREAD = {"q_proj": 2.0, "k_proj": 1.0, "v_proj": 0.5, "gate_proj": 1.0, "up_proj": 0.25}
PROMPTS, PROMPT_LENGTH, CHECKED_TOKENS = 4, 48, 8
TIMED_PROMPT, TIMED_TOKENS = 64, 128


def linears(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """The quantised modules of one layer and their shapes."""
    hidden, head = config["hidden_size"], config["head_dim"]
    heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
    found = {
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (groups * head, hidden),
        "self_attn.v_proj": (groups * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
    }
    experts = config.get("num_experts")
    inner = config["moe_intermediate_size"] if experts else config["intermediate_size"]
    places = [f"mlp.experts.{e}" for e in range(experts)] if experts else ["mlp"]
    for place in places:
        found[f"{place}.gate_proj"] = (inner, hidden)
        found[f"{place}.up_proj"] = (inner, hidden)
        found[f"{place}.down_proj"] = (hidden, inner)
    return found


def make(folder: Path, name: str, layers: int | None) -> None:
    import torch
    from safetensors.torch import save_file

    from gristmill import nvfp4
    from gristmill.checkpoints import save_modelopt

    config = dict(MODELS[name])
    config["num_hidden_layers"] = layers or config["num_hidden_layers"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]

    def random(*shape: int, std: float) -> torch.Tensor:
        return torch.randn(shape, device=device) * std

    quantised: dict[str, Any] = {}
    plain: dict[str, torch.Tensor] = {
        "model.embed_tokens.weight": random(vocabulary, hidden, std=1.0).bfloat16().cpu(),
        "lm_head.weight": random(vocabulary, hidden, std=2 / hidden**0.5).bfloat16().cpu(),
        "model.norm.weight": (1 + random(hidden, std=0.1)).bfloat16().cpu(),
    }
    dense = dict(plain)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        small = {
            "input_layernorm": hidden,
            "post_attention_layernorm": hidden,
        }
        if "num_experts" in config:
            small |= {
                "self_attn.q_norm": config["head_dim"],
                "self_attn.k_norm": config["head_dim"],
            }
            gate = random(config["num_experts"], hidden, std=1 / hidden**0.5)
            plain[f"{prefix}.mlp.gate.weight"] = gate.bfloat16().cpu()
        for norm, size in small.items():
            plain[f"{prefix}.{norm}.weight"] = (1 + random(size, std=0.1)).bfloat16().cpu()
        for module, shape in linears(config).items():
            spread = SPREAD.get(module.rpartition(".")[2], 0.5)
            weight = nvfp4.quantize(random(*shape, std=spread / shape[1] ** 0.5))
            dense[f"{prefix}.{module}.weight"] = nvfp4.dequantize(weight, torch.bfloat16).cpu()
            quantised[f"{prefix}.{module}"] = weight.to("cpu")
    dense |= plain
    save_modelopt(
        folder / "nvfp4", {**quantised, **plain}, config=config, ignore=["lm_head", "*.mlp.gate"]
    )
    (folder / "dense").mkdir(parents=True, exist_ok=True)
    (folder / "dense" / "config.json").write_text(json.dumps(config, indent=1))
    save_file(dense, folder / "dense" / "model.safetensors", metadata={"format": "pt"})


def run(
    folder: Path, output: Path, batches: list[int], quantization: str | None, eager: bool
) -> None:
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the counters are read here
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch
    import vllm
    from vllm import LLM, SamplingParams

    import gristmill

    vocabulary = json.loads((folder / "config.json").read_text())["vocab_size"]
    start = time.perf_counter()
    llm = LLM(
        str(folder),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=max([*batches, PROMPTS]),
        gpu_memory_utilization=0.6,
        quantization=quantization,
        enforce_eager=eager,
        enable_prefix_caching=False,
        seed=0,
    )
    ready = time.perf_counter() - start
    generator = torch.Generator().manual_seed(7)

    def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
        ids = torch.randint(3, vocabulary, (count, length), generator=generator)
        return [{"prompt_token_ids": row} for row in ids.tolist()]

    asked = prompts(PROMPTS, PROMPT_LENGTH)
    scored = SamplingParams(
        temperature=0,
        max_tokens=CHECKED_TOKENS,
        logprobs=1,
        prompt_logprobs=1,
        ignore_eos=True,
        detokenize=False,
    )
    first = llm.generate(asked, scored, use_tqdm=False)
    given = [_prompt_logprobs(one) for one in first]
    # The same tokens once more, as a prompt: what decoding (a graph's replay) said of them must be
    # what one long pass over them says.
    longer = [
        {"prompt_token_ids": one.prompt_token_ids + list(one.outputs[0].token_ids)} for one in first
    ]
    again = [_prompt_logprobs(one) for one in llm.generate(longer, scored, use_tqdm=False)]
    steps = [
        [entry[token].logprob for entry, token in zip(o.logprobs, o.token_ids, strict=True)]
        for o in (one.outputs[0] for one in first)
    ]
    decoded_off = max(
        abs(a - b)
        for step, refed in zip(steps, again, strict=True)
        for a, b in zip(step, refed[-CHECKED_TOKENS:], strict=True)
    )
    rows = []
    for batch in batches:
        few, many = (
            SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False)
            for n in (1, TIMED_TOKENS)
        )
        times: dict[int, list[float]] = {1: [], TIMED_TOKENS: []}
        for _ in range(3):
            for params in (few, many):
                ids = prompts(batch, TIMED_PROMPT)
                torch.cuda.synchronize()
                start = time.perf_counter()
                llm.generate(ids, params, use_tqdm=False)
                times[params.max_tokens].append(time.perf_counter() - start)
        span = min(times[TIMED_TOKENS]) - min(times[1])
        rows.append({"batch": batch, "ms": round(span / (TIMED_TOKENS - 1) * 1e3, 3)})
    report = {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "plugin": os.environ.get("GRISTMILL_VLLM", ""),
        "model": f"{folder.parent.name}/{folder.name}",
        "seconds_to_ready": round(ready, 1),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2),
        "choices": dict(gristmill.counters()["choices"]),
        "kernels": _kernels(llm, prompts(2, 8)),
        "decode_against_prefill": decoded_off,
        "rows": rows,
        "prompt_logprobs": given,
    }
    output.write_text(json.dumps(report, indent=1))
    _say({key: value for key, value in report.items() if key != "prompt_logprobs"})


def _prompt_logprobs(result: Any) -> list[float]:
    pairs = zip(result.prompt_logprobs, result.prompt_token_ids, strict=True)
    return [entry[token].logprob for entry, token in pairs if entry is not None]


def _kernels(llm: Any, asked: list[Any]) -> dict[str, int]:
    """Launches of norm and matmul kernels in a few decode steps, by the name a profiler gives."""
    import torch
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True, detokenize=False)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        llm.generate(asked, params, use_tqdm=False)
        torch.cuda.synchronize()
    found = {event.key: event.count for event in profile.key_averages()}
    return dict(sorted(found.items(), key=lambda item: -item[1])[:14])


def compare(one: Path, other: Path) -> None:
    a, b = (json.loads(path.read_text()) for path in (one, other))
    off = [
        abs(x - y)
        for left, right in zip(a["prompt_logprobs"], b["prompt_logprobs"], strict=True)
        for x, y in zip(left, right, strict=True)
    ]
    spread = max(max(row) - min(row) for row in a["prompt_logprobs"])
    _say(
        {
            "between": [str(one), str(other)],
            "tokens": len(off),
            "largest": round(max(off), 4),
            "mean": round(sum(off) / len(off), 5),
            "spread_of_logprobs": round(spread, 3),
        }
    )


def _say(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(value, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    making = commands.add_parser("make", help="write the model, NVFP4 and dense")
    making.add_argument("folder", type=Path)
    making.add_argument("--model", choices=MODELS, default="llama-8b")
    making.add_argument("--layers", type=int, help="fewer layers, for a quick look")
    running = commands.add_parser("run", help="generate, compare decode with prefill, time")
    running.add_argument("folder", type=Path)
    running.add_argument("--output", type=Path, required=True)
    running.add_argument("--batches", default="1,16,64")
    running.add_argument("--quantization", help="passed to vLLM; by default it decides")
    running.add_argument("--eager", action="store_true", help="neither compiled nor captured")
    comparing = commands.add_parser("compare", help="log-probabilities of two runs")
    comparing.add_argument("one", type=Path)
    comparing.add_argument("other", type=Path)
    args = parser.parse_args()
    if args.command == "make":
        make(args.folder, args.model, args.layers)
    elif args.command == "run":
        batches = [int(part) for part in args.batches.split(",") if part]
        run(args.folder, args.output, batches, args.quantization, args.eager)
    else:
        compare(args.one, args.other)


if __name__ == "__main__":
    main()
