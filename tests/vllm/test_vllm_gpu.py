"""Real vLLM on a GPU: see the two scripts, which can be run by themselves, too."""

from __future__ import annotations

from pathlib import Path

import pytest
import vllm_gpu_invariant
import vllm_gpu_prompts


@pytest.mark.gpu
def test_prompts_of_all_lengths_in_one_batch(tmp_path: Path) -> None:
    vllm_gpu_prompts.main(tmp_path)


@pytest.mark.gpu
def test_a_request_alone_and_among_others(tmp_path: Path) -> None:
    vllm_gpu_invariant.main(tmp_path)
