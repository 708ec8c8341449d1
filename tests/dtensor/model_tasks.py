"""A small Llama of gristmill's modules and functions, trained by one process or by several."""

from __future__ import annotations

from typing import Any

import torch
from mesh_pool import device_mesh
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import gristmill

VOCABULARY, WIDTH, INNER, HEADS, LAYERS = 39, 32, 48, 4, 2
BATCH, LENGTH, STEPS = 4, 8, 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # However many heads are here.
        size = WIDTH // HEADS
        q, k, v = (
            part(x).unflatten(-1, (-1, size)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        chances = gristmill.softmax(q @ k.transpose(-1, -2), scale=size**-0.5, causal="top_left")
        return self.o((chances @ v).transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(2))
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = gristmill.nn.RMSNorm(WIDTH, eps=1e-6)
        self.attention = Attention()
        self.mlp_norm = gristmill.nn.LayerNorm(WIDTH)
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = gristmill.nn.RMSNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model_and_data() -> tuple[Llama, torch.Tensor, torch.Tensor]:
    """The same in every process; as many rows of each sample count."""
    torch.manual_seed(0)
    model = Llama().double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    target = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
    target[:, 2] = -100
    return model, tokens, target


OPTIONS = {"z_loss": 1e-3, "label_smoothing": 0.1}


def whole(tensor: Any) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def train(
    model: Any, tokens: torch.Tensor, target: torch.Tensor, loss_of: Any = None
) -> dict[str, Any]:
    """Losses, the first gradients, and the weights after some steps, clipped gradients and all."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    losses, gradients = [], {}
    for step in range(STEPS):
        if loss_of is None:
            loss = gristmill.cross_entropy(model(tokens), target, **OPTIONS)
        else:
            loss = loss_of(model, tokens, target)
        loss.backward()
        losses.append(whole(loss))
        if step == 0:
            gradients = {name: whole(one.grad).clone() for name, one in model.named_parameters()}
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: whole(one).clone() for name, one in model.named_parameters()}
    return {"losses": losses, "gradients": gradients, "weights": weights}


def tensor_parallel(model: Llama, mesh: Any) -> Llama:
    """With sequence parallelism between the products, and logits sharded on the vocabulary."""
    whole_input = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
    plan: dict[str, Any] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
    }
    for name in ("q", "k", "v"):
        plan[f"blocks.*.attention.{name}"] = ColwiseParallel()
    plan |= {
        "blocks.*.attention_norm": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(**whole_input),
        "blocks.*.attention.o": RowwiseParallel(output_layouts=Shard(1)),
        "blocks.*.mlp_norm": SequenceParallel(),
        "blocks.*.mlp": PrepareModuleInput(**whole_input),
        "blocks.*.mlp.gate": ColwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=Shard(1)),
    }
    return parallelize_module(model, mesh, plan)


def fully_sharded(model: Llama, mesh: Any) -> Llama:
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run_alone() -> dict[str, Any]:
    return train(*model_and_data())


def run_tensor_parallel(compiled: bool = False) -> dict[str, Any]:
    model, tokens, target = model_and_data()
    model = tensor_parallel(model, device_mesh(4))
    if not compiled:
        return train(model, tokens, target)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def loss_of(model: Any, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return gristmill.cross_entropy(model(tokens), target, **OPTIONS)

    return train(model, tokens, target, loss_of)


def _averaged(found: dict[str, Any], mesh: Any) -> dict[str, Any]:
    """With losses of the ranks' own samples made that of all."""
    for loss in found["losses"]:
        torch.distributed.all_reduce(loss, group=mesh.get_group())
        loss /= mesh.size()
    return found


def run_fully_sharded() -> dict[str, Any]:
    mesh = device_mesh(4)
    model, tokens, target = model_and_data()
    rank = mesh.get_local_rank()
    own = slice(rank, rank + 1)
    return _averaged(train(fully_sharded(model, mesh), tokens[own], target[own]), mesh)


def run_both() -> dict[str, Any]:
    mesh = device_mesh(2, 2, names=("dp", "tp"))
    model, tokens, target = model_and_data()
    model = fully_sharded(tensor_parallel(model, mesh["tp"]), mesh["dp"])
    rank = mesh["dp"].get_local_rank()
    own = slice(2 * rank, 2 * rank + 2)
    return _averaged(train(model, tokens[own], target[own]), mesh["dp"])


def run_all_dtensors() -> dict[str, Any]:
    """Data parallelism by DTensor alone: all weights replicated, the batch sharded."""
    mesh = device_mesh(4)
    model, tokens, target = model_and_data()
    model = distribute_module(model, mesh)
    spread = [distribute_tensor(one, mesh, [Shard(0)]) for one in (tokens, target)]
    return train(model, *spread)


def run_linear_loss() -> dict[str, Any]:
    """The loss of the head without its logits, the head's classes sharded."""
    mesh = device_mesh(4)
    model, tokens, target = model_and_data()
    model = tensor_parallel(model, mesh)

    def loss_of(model: Any, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = model.embedding(tokens)
        for block in model.blocks:
            x = block(x)
        x = model.norm(x)
        return gristmill.linear_cross_entropy(x, model.head.weight, target, **OPTIONS)

    return train(model, tokens, target, loss_of)
