"""Gristmill and the implementations it is measured against, each behind small adapters.

A peer takes part when it can be imported and runs on the device. Every adapter function takes the
op's positional arguments (for some backwards also what their forward saved, see `inputs.saved`) and
does the same work: the same inputs read, the same outputs written, casting once. Where a peer has a
faster mode with another contract (writing over its input), the functional mode is the one measured.
One module here per op family.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gristmill.bench.peers import (
    cross_entropy,
    experts,
    layer_norm,
    linear,
    nvfp4_linear,
    rms_norm,
    softmax,
    topk_router,
)
from gristmill.bench.peers.peer import Builder, Function, Part, Peer, Sets
from gristmill.bench.suites import known

__all__ = ["GRISTMILL", "PEERS", "Builder", "Function", "Part", "Peer", "Sets", "choose"]

FAMILIES = (
    *(rms_norm, layer_norm, softmax, cross_entropy, linear, nvfp4_linear),
    *(experts, topk_router),
)


# Products that Inductor and QuACK choose their launches for by timing, at the first call.
_PRODUCTS = frozenset((*linear.TASKS, *nvfp4_linear.TASKS, experts.TASK, experts.DENSE_TASK))


def _peer(
    name: str,
    package: str,
    module: str,
    *,
    cpu: bool = False,
    compiles: bool = False,
    tunes: frozenset[str] = frozenset(),
) -> Peer:
    builders = {
        task: builder
        for family in FAMILIES
        for task, builder in family.BUILDERS.get(name, {}).items()
    }
    empty: frozenset[str] = frozenset()
    coarse = empty.union(*(one.COARSE.get(name, empty) for one in (softmax, cross_entropy)))
    return Peer(name, package, module, builders, cpu, coarse, compiles, tunes)


GRISTMILL = _peer("gristmill", "gristmill", "gristmill", cpu=True, compiles=True)
PEERS = {
    peer.name: peer
    for peer in (
        _peer("eager", "torch", "torch", cpu=True),
        _peer("inductor", "torch", "torch._inductor", cpu=True, compiles=True, tunes=_PRODUCTS),
        _peer("quack", "quack-kernels", "quack", compiles=True, tunes=_PRODUCTS),
        _peer("liger", "liger-kernel", "liger_kernel.ops.rms_norm", compiles=True),
        _peer("flashinfer", "flashinfer-python", "flashinfer.norm", compiles=True),
        _peer("cublas", "torch", "torch", cpu=True),
        _peer("torch", "torch", "torch", cpu=True),
        _peer("humming", "humming-kernels", "humming.layer"),
        _peer("vllm", "vllm", "vllm._custom_ops"),
    )
}


def choose(
    names: Sequence[str], device: torch.device, tasks: Iterable[str] | None = None
) -> tuple[list[Peer], dict[str, str]]:
    """The peers that can take part, and for each of the others the reason.

    No names means all that have one of `tasks` (by default any). `none` means none, for a quick
    look at gristmill alone.
    """
    if list(names) == ["none"]:
        return [], {}
    chosen = set(tasks) if tasks is not None else None
    wanted = [PEERS[known("peer", name, PEERS)] for name in names] or [
        peer for peer in PEERS.values() if chosen is None or chosen & set(peer.builders)
    ]
    reasons = {peer.name: peer.missing(device) for peer in wanted}
    here = [peer for peer in wanted if reasons[peer.name] is None]
    return here, {name: reason for name, reason in reasons.items() if reason is not None}
