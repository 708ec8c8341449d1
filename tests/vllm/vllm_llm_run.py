"""Generate with real vLLM and write down what came: `python vllm_llm_run.py RUN.json RESULT.json`.

A run is the keyword arguments of `LLM`, prompts of token ids, how many tokens to add, and what else
to ask of vLLM's worker. The result has the tokens, their log-probabilities and those of the
likeliest ones, and how often each op of gristmill ran in the worker (the first of several).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOP = 5
WORKER = {"worker_extension_cls": "vllm_counting.Counting"}


def main(run: dict[str, Any]) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    llm = LLM(
        skip_tokenizer_init=True, max_model_len=64, max_num_seqs=4, **{**WORKER, **run["llm"]}
    )
    llm.collective_rpc("gristmill_reset")
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=run["max_tokens"],
        ignore_eos=True,
        detokenize=False,
        logprobs=TOP,
        prompt_logprobs=TOP,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in run["prompts"]]
    results = []
    for answer in llm.generate(prompts, sampling, use_tqdm=False):
        output = answer.outputs[0]
        # The first token of a prompt has no log-probability.
        steps = [*answer.prompt_logprobs[1:], *output.logprobs]
        results.append(
            {
                "tokens": [*answer.prompt_token_ids, *output.token_ids],
                "steps": [{str(key): one.logprob for key, one in step.items()} for step in steps],
            }
        )
    every = llm.collective_rpc("gristmill_calls")
    priority = llm.collective_rpc("gristmill_priority")[0]
    quantization = llm.llm_engine.vllm_config.model_config.quantization
    return {
        "results": results,
        "calls": every[0],
        "calls_of_workers": every,
        "priority": priority,
        "quantization": quantization,
        **{name: llm.collective_rpc(name)[0] for name in run.get("ask", ())},
    }


if __name__ == "__main__":
    source, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps(main(json.loads(source.read_text()))))
