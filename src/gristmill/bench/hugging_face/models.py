"""The models that the suite `transformers` trains and generates with: Llamas of random weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sizes:
    """Of a Llama; `batch` sequences of `length` tokens are trained on in a step.

    `prompt` and `tokens`: given to generation, and asked of it.
    """

    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int
    vocabulary: int
    batch: int
    length: int
    prompt: int = 64
    tokens: int = 128

    @property
    def trained(self) -> str:
        return f"{self.batch}x{self.length}"


# Blocks as in Llama 3 8B: four of them for training, which fit with their optimizer's state, and
# all of them for generation.
TRAINING = Sizes(4096, 14336, 4, 32, 8, 128256, batch=4, length=2048)
GENERATION = Sizes(4096, 14336, 32, 32, 8, 128256, batch=1, length=2048)
# So small that a CPU runs them: to see that the suite works.
TINY = Sizes(64, 128, 2, 4, 2, 512, batch=2, length=32, prompt=8, tokens=6)


def llama(sizes: Sizes, device: torch.device, *, use_cache: bool) -> Any:
    """The model in bf16, made where it runs, the same weights every time."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=sizes.hidden,
        intermediate_size=sizes.inner,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.groups,
        vocab_size=sizes.vocabulary,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        use_cache=use_cache,
        # No token ends a text: as many are generated as were asked for.
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    make: Any = transformers.AutoModelForCausalLM.from_config
    with device:
        return make(config, dtype=torch.bfloat16, attn_implementation="sdpa")


def tokens(
    shape: tuple[int, int], vocabulary: int, device: torch.device, seed: int = 1
) -> torch.Tensor:
    """Random ones, the same for everybody."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, shape, generator=generator).to(device)
