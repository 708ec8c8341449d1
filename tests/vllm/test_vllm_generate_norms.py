"""Real vLLM generates with our norms, eager and compiled, and says what it says without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from vllm_helpers import generate
from vllm_models import PROMPTS, tiny_llama, tiny_qwen3_moe, write_dense

TOKENS = 6
NORMS = ("rms_norm", "fused_add_rms_norm")
FIRST = {name: ["gristmill", "native"] for name in NORMS}
# In a forward pass: one norm without a residual at the top, then two a layer and the last one; and
# with q and k normalised, two more a layer.
LLAMA_RATIO, QWEN_RATIO = (1, 4), (5, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate")
    write_dense(tiny_llama(), folder / "llama")
    write_dense(tiny_qwen3_moe(), folder / "qwen")
    return folder


def run(folder: Path, model: str, llm: dict[str, Any], **changes: str) -> dict[str, Any]:
    spec = {
        "llm": {"model": str(folder / model), **llm},
        "prompts": PROMPTS,
        "max_tokens": TOKENS,
    }
    return generate(spec, folder, **changes)


def worst(one: dict[str, Any], other: dict[str, Any]) -> float:
    """The largest difference of a log-probability, as long as both have generated the same."""
    largest = 0.0
    compared = 0
    for ours, theirs in zip(one["results"], other["results"], strict=True):
        for position, (a, b) in enumerate(zip(ours["steps"], theirs["steps"], strict=True)):
            # Both saw the same tokens up to here, or the rest cannot be compared.
            if ours["tokens"][: position + 1] != theirs["tokens"][: position + 1]:
                break
            for token in a.keys() & b.keys():
                largest = max(largest, abs(a[token] - b[token]))
                compared += 1
    assert compared > 50
    return largest


def assert_ran(result: dict[str, Any], ratio: tuple[int, int]) -> None:
    calls = result["calls"]
    assert set(calls) == {"rms_norm", "fused_add_rms_norm_"}
    passes = calls["rms_norm"] / ratio[0]
    assert passes == calls["fused_add_rms_norm_"] / ratio[1]
    assert passes >= TOKENS
    assert result["priority"] == FIRST


@pytest.mark.parametrize(("model", "ratio"), [("llama", LLAMA_RATIO), ("qwen", QWEN_RATIO)])
def test_eager_by_option(folder: Path, model: str, ratio: tuple[int, int]) -> None:
    """bf16, and to the bit: on a CPU both norms round exactly as vLLM's do."""
    llm = {"enforce_eager": True, "dtype": "bfloat16"}
    without = run(folder, model, llm)
    assert without["calls"] == {}
    assert without["priority"] == {name: ["native"] for name in NORMS}
    result = run(folder, model, {**llm, "ir_op_priority": {name: ["gristmill"] for name in NORMS}})
    assert_ran(result, ratio)
    assert result["results"] == without["results"]


def test_compiled_by_switch(folder: Path) -> None:
    """fp32: Inductor melts vLLM's norms into their neighbours, ours stand by themselves."""
    llm = {"dtype": "float32"}
    without = run(folder, "llama", llm)
    assert without["calls"] == {}
    result = run(folder, "llama", llm, GRISTMILL_VLLM="norms")
    assert_ran(result, LLAMA_RATIO)
    assert worst(result, without) < 1e-4
    assert "Final IR op priority" in result["log"]
    assert "rms_norm=['gristmill', 'native']" in result["log"]
