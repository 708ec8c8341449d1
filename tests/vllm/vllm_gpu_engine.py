"""One engine of vLLM on this machine's GPU, in a process of its own: what it generates, and how.

`python vllm_gpu_engine.py SPEC.json RESULT.json`. A spec has the keyword arguments of `LLM`, and
rounds of prompts: {"prompts": [[...], ...], "tokens": n, "prompt_logprobs": bool}. The result has
what came in each round, what gristmill compiled and when, and which of its kernels were chosen.

The engine runs in this process, so that gristmill's counters and its log are those of the worker.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TOP = 5
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


class Watch(logging.Handler):
    """Keeps what gristmill says, and how many kernels it had compiled when it called them ready."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []
        self.compiled_when_ready: int | None = None

    def emit(self, record: logging.LogRecord) -> None:
        import gristmill

        line = record.getMessage()
        self.lines.append(line)
        if line.startswith("vLLM: ") and "kernels ready in" in line:
            self.compiled_when_ready = gristmill.counters()["compiles"]


def run(spec: dict[str, Any]) -> dict[str, Any]:
    import gristmill
    from gristmill.integrations.vllm.plugin import register_norms, register_nvfp4

    watch = Watch()
    logger = logging.getLogger("gristmill")
    logger.setLevel(logging.INFO)
    logger.addHandler(watch)
    # What vLLM does itself where gristmill is installed, and not only on the path.
    register_norms()
    register_nvfp4()
    from vllm import LLM, SamplingParams, __version__

    start = time.perf_counter()
    llm = LLM(skip_tokenizer_init=True, seed=0, **spec["llm"])
    start_s = time.perf_counter() - start
    compiled_at_start = gristmill.counters()["compiles"]
    rounds = []
    for one in spec["rounds"]:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=one["tokens"],
            ignore_eos=True,
            detokenize=False,
            logprobs=TOP,
            prompt_logprobs=TOP if one.get("prompt_logprobs") else None,
        )
        prompts = [{"prompt_token_ids": prompt} for prompt in one["prompts"]]
        answers = llm.generate(prompts, sampling, use_tqdm=False)
        rounds.append([_answer(answer) for answer in answers])
    counters = gristmill.counters()
    return {
        "version": __version__,
        "start_s": round(start_s, 1),
        "quantization": llm.llm_engine.vllm_config.model_config.quantization,
        "rounds": rounds,
        "ready": [line for line in watch.lines if "kernels ready in" in line],
        "compiled_when_ready": watch.compiled_when_ready,
        "compiled_at_start": compiled_at_start,
        "compiled": counters["compiles"],
        "in_capture": [line for line in watch.lines if "captur" in line],
        "lines": watch.lines[-40:],
        "choices": counters["choices"],
        "fallbacks": counters["fallbacks"],
    }


def _answer(answer: Any) -> dict[str, Any]:
    output = answer.outputs[0]
    # The first token of a prompt has no log-probability.
    before = answer.prompt_logprobs[1:] if answer.prompt_logprobs else []
    steps = [{str(key): one.logprob for key, one in step.items()} for step in before]
    generated = [{str(key): one.logprob for key, one in step.items()} for step in output.logprobs]
    return {
        "tokens": [*answer.prompt_token_ids, *output.token_ids],
        "prompt": steps,
        "generated": generated,
        "cached": answer.num_cached_tokens,
    }


def start(name: str, spec: dict[str, Any], folder: Path, **changes: str) -> subprocess.Popen[bytes]:
    """This file as a process; its result and its log will be in `folder`, by `name`."""
    source = folder / f"{name}.spec.json"
    source.write_text(json.dumps(spec))
    kept = {key: value for key, value in os.environ.items() if not key.startswith("VLLM_")}
    kept.pop("GRISTMILL_VLLM", None)
    environment = {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(folder / name / "vllm"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "GRISTMILL_CACHE_DIR": str(folder / name / "kernels"),  # nothing is compiled yet
        "GRISTMILL_LOG": "info",
        "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), kept.get("PYTHONPATH", "")]),
        **changes,
    }
    (folder / name).mkdir(parents=True, exist_ok=True)
    # The trust that gristmill has in a folder is that nobody else can write to it.
    (folder / name / "kernels").mkdir(mode=0o700, exist_ok=True)
    words = [sys.executable, str(Path(__file__).resolve())]
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*words, str(source), str(folder / f"{name}.json")],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=folder,
        )


def finish(
    processes: dict[str, subprocess.Popen[bytes]], folder: Path, timeout: float
) -> dict[str, dict[str, Any]]:
    """The results of all, or an error with the end of the log of the first that has none."""
    deadline = time.monotonic() + timeout
    try:
        for process in processes.values():
            process.wait(max(1.0, deadline - time.monotonic()))
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.kill()
    found = {}
    for name, process in processes.items():
        if process.returncode:
            log = (folder / f"{name}.log").read_text(errors="replace")
            raise RuntimeError(f"{name} ended with {process.returncode}:\n{log[-6000:]}")
        found[name] = json.loads((folder / f"{name}.json").read_text())
    return found


if __name__ == "__main__":
    given, target = map(Path, sys.argv[1:])
    target.write_text(json.dumps(run(json.loads(given.read_text()))))
