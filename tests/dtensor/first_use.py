"""A process of its own: the first that gristmill sees of DTensor, in eager mode or compiled.

One rank of four, in a group that sends nothing: nothing has to be sent here. Argument: how.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

import gristmill


def step(x: Any, weight: Any, product: Any) -> Any:
    return gristmill.softmax(gristmill.linear(gristmill.rms_norm(x, weight), product), scale=0.5)


def leaves(x: Any, weight: Any, product: Any) -> list[Any]:
    return [one.detach().clone().requires_grad_() for one in (x, weight, product)]


def main(how: str) -> None:
    assert "torch.distributed.tensor" not in sys.modules
    assert "gristmill.integrations.dtensor" not in sys.modules
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    mesh = init_device_mesh("cpu", (4,))
    x, weight, product = torch.randn(5, 8, 16), torch.randn(16), torch.randn(12, 16)
    plain = leaves(x[:, :2], weight, product)
    wanted = step(*plain)
    slope = torch.randn(5, 2, 12)
    wanted.backward(slope)

    local = leaves(x[:, :2], weight, product)
    places = [Shard(1), Replicate(), Replicate()]
    held = [
        DTensor.from_local(one, mesh, [place], run_check=False)
        for one, place in zip(local, places, strict=True)
    ]
    if how == "compiled":
        found = torch.compile(step, fullgraph=True, backend="aot_eager")(*held)
    elif how == "op":
        found = torch.ops.gristmill.softmax(
            torch.ops.gristmill.linear(torch.ops.gristmill.rms_norm(*held[:2]), held[2]), 0, 0.5
        )
    else:
        found = step(*held)
    assert found.placements == (Shard(1),)
    assert found.shape == (5, 8, 12)
    torch.testing.assert_close(found.to_local(), wanted)
    given = DTensor.from_local(slope, mesh, [Shard(1)], run_check=False)
    slopes = torch.autograd.grad(found, held, given)
    for one, place, leaf in zip(slopes, [Shard(1), Partial(), Partial()], plain, strict=True):
        assert one.placements == (place,)
        torch.testing.assert_close(one.to_local(), leaf.grad)


if __name__ == "__main__":
    main(sys.argv[1])
