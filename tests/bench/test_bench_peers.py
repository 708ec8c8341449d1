from __future__ import annotations

import pytest
import torch

from gristmill.bench import peers
from gristmill.bench.check import check
from gristmill.bench.inputs import argument_sets, arguments, saved
from gristmill.bench.peers import GRISTMILL, PEERS, Peer, choose
from gristmill.bench.suites import OPS, Task
from gristmill.errors import ArgumentError
from gristmill.ops.registry import OPS as REGISTRY

CPU = torch.device("cpu")
PLAIN = {
    "rms_norm": lambda x, w, eps, *_: peers.plain_forward(x, w, eps),
    "add_rms_norm": lambda x, r, w, eps, *_: peers.plain_add(x, r, w, eps),
    "rms_norm_bwd": lambda dy, x, w, *rest: peers.plain_backward(dy, x, w, rest[-1]),
}


def full_arguments(task: Task) -> tuple[object, ...]:
    args = arguments(task, CPU)
    extra = saved(task, args)
    return args if extra is None else (*args, extra)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_formula_given_to_inductor_is_the_op(name: str, dtype: str) -> None:
    task = Task(name, 5, 96, dtype)
    args = full_arguments(task)
    expected = REGISTRY[task.op].reference(*arguments(task, CPU))
    check(PLAIN[name](*args), expected)


@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("peer", [GRISTMILL, PEERS["eager"]], ids=lambda peer: peer.name)
def test_adapters_compute_the_op_on_every_set(peer: Peer, name: str) -> None:
    task = Task(name, 5, 96, "bfloat16")
    sets = argument_sets(full_arguments(task), CPU)
    expected = REGISTRY[task.op].reference(*arguments(task, CPU))
    function = peer.builders[name](sets)
    assert len(sets) > 1
    for args in sets:
        check(function(*args), expected)


@pytest.mark.long
@pytest.mark.parametrize("name", OPS)
def test_inductor_computes_the_op(name: str) -> None:
    task = Task(name, 5, 96, "bfloat16")
    sets = argument_sets(full_arguments(task), CPU)
    function = PEERS["inductor"].builders[name](sets)
    check(function(*sets[0]), REGISTRY[task.op].reference(*arguments(task, CPU)))


def test_rstd_is_that_of_each_row() -> None:
    task = Task("rms_norm_bwd", 7, 48, "float32")
    args = arguments(task, CPU)
    rstd = saved(task, args)
    assert rstd is not None
    x = args[1].double()
    expected = (x.square().mean(-1) + args[4]).rsqrt().float()
    torch.testing.assert_close(rstd, expected)
    assert saved(Task("rms_norm", 7, 48, "float32"), args) is None


def test_on_a_cpu_the_gpu_libraries_say_why_not() -> None:
    here, reasons = choose([], CPU)
    assert [peer.name for peer in here] == ["eager", "inductor"]
    assert reasons == dict.fromkeys(("quack", "liger", "flashinfer"), "needs a GPU")


def test_what_cannot_be_imported_says_so() -> None:
    absent = Peer("absent", "absent", "no_module_of_this_name", {}, cpu=True)
    assert absent.missing(CPU) == "cannot be imported: No module named 'no_module_of_this_name'"
    assert absent.version() == "unknown"


def test_none_and_unknown_names() -> None:
    assert choose(["none"], CPU) == ([], {})
    assert [peer.name for peer in choose(["eager"], CPU)[0]] == ["eager"]
    with pytest.raises(ArgumentError, match=r"unknown peer 'quak' \(did you mean quack\?\)"):
        choose(["quak"], CPU)


@pytest.mark.gpu
@pytest.mark.parametrize("name", OPS)
@pytest.mark.parametrize("peer", PEERS.values(), ids=PEERS)
def test_peers_on_a_gpu(peer: Peer, name: str) -> None:
    device = torch.device("cuda")
    reason = peer.missing(device)
    if reason is not None or name not in peer.builders:
        pytest.skip(reason or f"{peer.name} has no {name}")
    task = Task(name, 64, 1024, "bfloat16")
    args = arguments(task, device)
    extra = saved(task, args)
    sets = argument_sets(args if extra is None else (*args, extra), device)[:4]
    function = peer.builders[name](sets)
    expected = REGISTRY[task.op].reference(*args)
    for one in sets:
        check(function(*one), expected)
