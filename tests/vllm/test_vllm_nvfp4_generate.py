"""Real vLLM generates from NVFP4 checkpoints, and says what the same weights in the open say.

The truth is Hugging Face's model with the dequantised weights, in fp32, on the tokens that vLLM
generated: tokens are never compared. In fp32 the two differ by the order of their sums alone, 2e-6
here; one scale for q, k and v changes log-probabilities by more than 1.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.engine.arg_utils import EngineArgs
from vllm_helpers import generate
from vllm_models import (
    PROMPTS,
    TinyModel,
    log_probabilities,
    tiny_llama,
    tiny_qwen3_moe,
    with_one_scale,
    write_compressed_tensors,
    write_dense,
    write_modelopt,
)

from gristmill.integrations.vllm.plugin import register_nvfp4
from gristmill.settings import reload_settings

TOKENS = 4
FP32 = 1e-4
WORKER = {"worker_extension_cls": "vllm_nvfp4_worker.Nvfp4Worker"}
KV_SCALES = (0.25, 0.5)
FLAG = {"quantization": "gristmill_nvfp4"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvfp4")
    for name, model in (("llama", tiny_llama()), ("moe", tiny_qwen3_moe())):
        write_dense(model, folder / name / "dense")
        write_modelopt(model, folder / name / "modelopt")
        write_compressed_tensors(model, folder / name / "compressed")
    write_modelopt(tiny_llama(), folder / "llama" / "legacy", legacy=True)
    write_modelopt(tiny_llama(), folder / "llama" / "kv", kv_scales=KV_SCALES)
    return folder


def run(folder: Path, model: str, llm: dict[str, Any], **changes: str) -> dict[str, Any]:
    spec = {
        "llm": {"model": str(folder / model), **WORKER, **llm},
        "prompts": PROMPTS,
        "max_tokens": TOKENS,
        "ask": ["gristmill_kv_scales", "gristmill_nbytes"],
    }
    return generate(spec, folder, **changes)


def worst(result: dict[str, Any], dense: Path) -> float:
    """The largest difference of a log-probability from that of the model in `dense`."""
    answers = result["results"]
    tables = log_probabilities(dense, [answer["tokens"] for answer in answers])
    differences = [
        abs(float(table[position, int(token)]) - value)
        for answer, table in zip(answers, tables, strict=True)
        for position, step in enumerate(answer["steps"])
        for token, value in step.items()
    ]
    assert len(differences) >= 5 * (sum(map(len, PROMPTS)) + len(PROMPTS) * (TOKENS - 1))
    return max(differences)


def assert_ran(result: dict[str, Any], model: TinyModel) -> None:
    """By our method, in vLLM's worker, every layer in every pass."""
    assert result["quantization"] == "gristmill_nvfp4"
    calls, layers = result["calls"], model.config["num_hidden_layers"]
    experts = "num_experts" in model.config
    linear = layers * (2 if experts else 4)  # the fused ones
    passes, rest = divmod(calls["nvfp4_linear"], linear)
    assert rest == 0
    assert passes >= TOKENS
    assert calls.get("nvfp4_moe", 0) == (passes * layers if experts else 0)


def nbytes(model: TinyModel) -> int:
    """Of layers that have their weights once: the checkpoint's, and a scale for each row."""
    weights = model.quantized.values()
    return sum(w.codes.nbytes + w.scales.nbytes + 4 * w.shape[0] for w in weights)


@pytest.mark.vllm_quick
def test_moe_of_modelopt_compiled_by_switch(folder: Path) -> None:
    result = run(folder, "moe/modelopt", {"dtype": "float32"}, GRISTMILL_VLLM="norms,nvfp4")
    assert_ran(result, tiny_qwen3_moe())
    assert result["calls"]["rms_norm"] > 0
    assert worst(result, folder / "moe/dense") < FP32


def test_moe_of_compressed_tensors_eager_by_flag(folder: Path) -> None:
    llm = {"dtype": "float32", "enforce_eager": True, **FLAG}
    result = run(folder, "moe/compressed", llm)
    assert_ran(result, tiny_qwen3_moe())
    assert worst(result, folder / "moe/dense") < FP32
    assert result["gristmill_nbytes"] == nbytes(tiny_qwen3_moe())


def test_llama_of_compressed_tensors_compiled_by_flag(folder: Path) -> None:
    result = run(folder, "llama/compressed", {"dtype": "float32", **FLAG})
    assert_ran(result, tiny_llama())
    assert worst(result, folder / "llama/dense") < FP32


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="vLLM binds each rank to a core")
@pytest.mark.parametrize(
    ("kind", "parallel"),
    [("llama", {}), ("moe", {"enable_expert_parallel": True})],
    ids=["tp", "ep"],
)
def test_two_ranks(kind: str, parallel: dict[str, bool], folder: Path) -> None:
    """Each a process of its own, with a half of every layer, or a half of the experts."""
    cores = sorted(os.sched_getaffinity(0))[:2]
    llm = {"dtype": "float32", "enforce_eager": True, "tensor_parallel_size": 2, **parallel, **FLAG}
    bind = "|".join(map(str, cores))
    result = run(folder, f"{kind}/modelopt", llm, VLLM_CPU_OMP_THREADS_BIND=bind)
    model = tiny_llama() if kind == "llama" else tiny_qwen3_moe()
    assert_ran(result, model)
    assert result["calls_of_workers"] == [result["calls"]] * 2
    assert worst(result, folder / kind / "dense") < FP32
    assert result["gristmill_nbytes"] < 0.6 * nbytes(model)


def test_llama_with_an_fp8_cache_eager_by_switch(folder: Path) -> None:
    """The scales of the cache come from the checkpoint, and its rounding is all that differs."""
    llm = {"dtype": "float32", "enforce_eager": True}
    result = run(folder, "llama/kv", llm, GRISTMILL_VLLM="nvfp4")
    assert_ran(result, tiny_llama())
    assert result["gristmill_kv_scales"] == [list(KV_SCALES)] * 2
    assert FP32 < worst(result, folder / "llama/dense") < 0.2


def test_llama_in_bf16_is_as_good_as_without_the_plugin(folder: Path) -> None:
    """vLLM's own error in bf16, on the dense model, is the measure of ours.

    Ours keeps the scales in fp32 and rounds once, where the dense model has its weights rounded.
    """
    llm = {"dtype": "bfloat16", "enforce_eager": True}
    dense = run(folder, "llama/dense", llm)
    assert dense["calls"] == {}
    assert dense["quantization"] is None
    ours = run(folder, "llama/legacy", llm, GRISTMILL_VLLM="nvfp4")
    assert_ran(ours, tiny_llama())
    assert worst(ours, folder / "llama/dense") < 1.5 * worst(dense, folder / "llama/dense")


@pytest.mark.parametrize("parts", [("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")])
@pytest.mark.parametrize("make", [tiny_llama, tiny_qwen3_moe])
def test_one_scale_for_all_parts_would_be_seen(
    make: Any, parts: tuple[str, ...], folder: Path, tmp_path: Path
) -> None:
    model = make()
    name = "moe" if "num_experts" in model.config else "llama"
    right = log_probabilities(folder / name / "dense", PROMPTS)
    wrong = log_probabilities(write_dense(with_one_scale(model, parts), tmp_path), PROMPTS)
    assert min(float((a - b).abs().max()) for a, b in zip(right, wrong, strict=True)) > 1


@pytest.mark.parametrize("kind", ["modelopt", "legacy", "compressed"])
@pytest.mark.parametrize(
    ("wanted", "asked", "got"),
    [
        ("", None, None),
        ("norms", None, None),
        ("nvfp4", None, "gristmill_nvfp4"),
        ("", "gristmill_nvfp4", "gristmill_nvfp4"),
    ],
)
def test_vllm_takes_what_was_asked_for(
    kind: str,
    wanted: str,
    asked: str | None,
    got: str | None,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vLLM's own decision, from the checkpoint's files, with the plugin loaded in all cases."""
    monkeypatch.setenv("GRISTMILL_VLLM", wanted)
    reload_settings()
    try:
        register_nvfp4()
        options = EngineArgs(
            model=str(folder / "llama" / kind), quantization=asked, skip_tokenizer_init=True
        )
        chosen = options.create_model_config().quantization
    finally:
        monkeypatch.undo()
        reload_settings()
    own = {"modelopt": "modelopt_fp4", "legacy": "modelopt_fp4", "compressed": "compressed-tensors"}
    assert chosen == (got or own[kind])


def test_dequantised_is_what_the_checkpoint_holds(folder: Path) -> None:
    """The truth of this file, taken from the NVFP4 checkpoints themselves."""
    from gristmill.checkpoints import Checkpoint
    from gristmill.nvfp4 import dequantize

    for kind in ("modelopt", "compressed"):
        checkpoint = Checkpoint(folder / "llama" / kind)
        for name, weight in tiny_llama().quantized.items():
            read = dequantize(checkpoint.linear(name))
            torch.testing.assert_close(read, dequantize(weight), rtol=1e-6, atol=0)
