"""A small Llama of transformers, patched, on several ranks."""

from __future__ import annotations

import os
from typing import Any

import torch
from mesh_pool import device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import gristmill

STEPS = 3


def model_and_data() -> tuple[Any, torch.Tensor, torch.Tensor]:
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=8,
        max_position_embeddings=32,
    )
    model = transformers.LlamaForCausalLM(config).train()
    tokens = torch.randint(0, 60, (4, 8))
    labels = tokens.clone()
    labels[:, 3] = -100
    return model, tokens, labels


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).detach()


def train(model: Any, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses = []
    for _ in range(STEPS):
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        losses.append(whole(loss).clone())
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole(one).clone() for name, one in model.named_parameters()}
    return {"losses": losses, "weights": weights}


def tensor_parallel(model: Any, mesh: Any, local_logits: bool) -> Any:
    column = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    column += ("mlp.gate_proj", "mlp.up_proj")
    plan: dict[str, Any] = {f"model.layers.*.{name}": ColwiseParallel() for name in column}
    plan |= {
        f"model.layers.*.{name}": RowwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj")
    }
    if local_logits:
        plan["lm_head"] = ColwiseParallel(output_layouts=Replicate())
    else:
        plan["lm_head"] = ColwiseParallel(use_local_output=False)
    return parallelize_module(model, mesh, plan)


def run_tensor_parallel(first: str, local_logits: bool, patched: bool = True) -> dict[str, Any]:
    """Patched first, or made parallel first."""
    model, tokens, labels = model_and_data()
    mesh = device_mesh(4)
    if first == "patch" and patched:
        gristmill.patch(model)
    model = tensor_parallel(model, mesh, local_logits)
    if first == "parallel" and patched:
        gristmill.patch(model)
    return train(model, tokens, labels)


def run_fully_sharded(first: str) -> dict[str, Any]:
    model, tokens, labels = model_and_data()
    mesh = device_mesh(4)
    if first == "patch":
        gristmill.patch(model)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if first == "parallel":
        gristmill.patch(model)
    rank = mesh.get_local_rank()
    found = train(model, tokens[rank : rank + 1], labels[rank : rank + 1])
    for loss in found["losses"]:
        torch.distributed.all_reduce(loss)
        loss /= mesh.size()
    return found


def run_tp_plan(folder: str) -> dict[str, Any]:
    """transformers' own tensor parallelism, then the patch."""
    import transformers

    rank = str(torch.distributed.get_rank())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "4"}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, tp_plan="auto")
    gristmill.patch(model)
    _, tokens, labels = model_and_data()
    found = model.train()(input_ids=tokens, labels=labels, use_cache=False)
    found.loss.backward()
    q = model.model.layers[0].self_attn.q_proj.weight
    local = q.to_local() if hasattr(q, "to_local") else q
    return {
        "loss": whole(found.loss),
        "logits": whole(found.logits),
        "parallel": tuple(local.shape) == (8, 32),
    }
