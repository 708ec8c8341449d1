"""Small models of transformers, from configs, with random weights: nothing is downloaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import transformers

VOCABULARY = 96

_SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def llama_config(**changes: Any) -> Any:
    return transformers.LlamaConfig(**_SMALL | changes)


def gemma2_config(**changes: Any) -> Any:
    own = {"final_logit_softcapping": 5.0, "attn_logit_softcapping": 20.0, "sliding_window": 8}
    return transformers.Gemma2Config(**_SMALL | own | changes)


def qwen3_moe_config(**changes: Any) -> Any:
    own = {
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "router_aux_loss_coef": 0.1,
    }
    return transformers.Qwen3MoeConfig(**_SMALL | own | changes)


def gpt2_config(**changes: Any) -> Any:
    own = {
        "vocab_size": VOCABULARY,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": 64,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }
    return transformers.GPT2Config(**own | changes)


def mixtral_config(**changes: Any) -> Any:
    own = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return transformers.MixtralConfig(**_SMALL | own | changes)


def granite_config(**changes: Any) -> Any:
    own = {"logits_scaling": 3.0, "residual_multiplier": 0.5}
    return transformers.GraniteConfig(**_SMALL | own | changes)


def cohere_config(**changes: Any) -> Any:
    return transformers.CohereConfig(**_SMALL | {"logit_scale": 0.25} | changes)


def bert_config(**changes: Any) -> Any:
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    small = {name: _SMALL[name] for name in names}
    own = {
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return transformers.BertConfig(**small | own | changes)


CONFIGS: dict[str, Callable[..., Any]] = {
    "llama": llama_config,
    "gemma2": gemma2_config,
    "qwen3_moe": qwen3_moe_config,
    "gpt2": gpt2_config,
    "mixtral": mixtral_config,
    "granite": granite_config,
    "cohere": cohere_config,
    "bert": bert_config,
}

# The four that every part of the integration is tested on.
CAUSAL = ("llama", "gemma2", "qwen3_moe", "gpt2")


def tiny(name: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any) -> Any:
    """A language model in training mode, every parameter random (norms and biases, too)."""
    return tiny_from(transformers.AutoModelForCausalLM, name, dtype, seed=seed, **changes)


def tiny_from(
    auto: Any, name: str, dtype: torch.dtype = torch.float32, *, seed: int = 0, **changes: Any
) -> Any:
    """As `tiny`, by any Auto class: `transformers.AutoModelForTokenClassification`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = auto.from_config(CONFIGS[name](**changes), attn_implementation="eager")
        for parameter in model.parameters():
            if parameter.dim() == 1:  # ones and zeros would hide what a norm does with them
                parameter.data += 0.2 * torch.randn_like(parameter)
    return model.to(dtype).train()


def tokens(batch: int = 2, length: int = 12, *, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def labels_of(ids: torch.Tensor, ignored: int = 3) -> torch.Tensor:
    """The ids, the first few of the first row ignored."""
    labels = ids.clone()
    labels[0, :ignored] = -100
    return labels


def loss_and_gradients(
    model: Any, ids: torch.Tensor, **inputs: Any
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The loss of one step, and the gradient of every parameter by its name."""
    model.zero_grad(set_to_none=True)
    loss = model(input_ids=ids, **{"labels": labels_of(ids)} | inputs).loss
    loss.backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return loss.detach(), gradients


def in_precision(model: Any, dtype: torch.dtype) -> Any:
    """A copy with the same weights in another dtype: the truth for what 16 bits give."""
    return copy.deepcopy(model).to(dtype)


def relative_error(got: torch.Tensor, truth: torch.Tensor) -> float:
    """The norm of the difference over that of the truth."""
    difference = (got.double() - truth.double()).norm()
    return float(difference.detach() / truth.detach().double().norm().clamp_min(1e-30))
