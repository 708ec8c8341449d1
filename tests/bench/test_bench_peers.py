from __future__ import annotations

from typing import Any

import pytest
import torch

from gristmill.bench.check import WrongResultError, check
from gristmill.bench.inputs import argument_sets, arguments, compared, saved, terms_of
from gristmill.bench.peers import FAMILIES, GRISTMILL, PEERS, Peer, choose
from gristmill.bench.peers import cross_entropy as ce
from gristmill.bench.peers import layer_norm as ln
from gristmill.bench.peers import linear as lin
from gristmill.bench.peers import nvfp4_linear as nvfp4
from gristmill.bench.peers import rms_norm as rms
from gristmill.bench.peers import softmax as sm
from gristmill.bench.peers import topk_router as router
from gristmill.bench.suites import KINDS, Task
from gristmill.errors import ArgumentError
from gristmill.ops.registry import OPS as REGISTRY

CPU = torch.device("cpu")
# The formulas that Inductor gets, over the arguments of a task.
PLAIN: dict[str, Any] = {
    "rms_norm": lambda x, w, eps, *_: rms.plain_forward(x, w, eps),
    "add_rms_norm": lambda x, r, w, eps, *_: rms.plain_add(x, r, w, eps),
    "rms_norm_bwd": lambda dy, x, w, *rest: rms.plain_backward(dy, x, w, rest[-1]),
    "layer_norm": lambda x, w, b, eps, *_: ln.plain_forward(x, w, b, eps),
    "add_layer_norm": lambda x, r, w, b, eps, *_: ln.plain_add(x, r, w, b, eps),
    "layer_norm_bwd": lambda dy, x, w, *rest: ln.plain_backward(dy, x, w, *rest[-2:]),
    "softmax": lambda x, *_: sm.plain_forward(x),
    "softmax_bwd": lambda dy, y, *_: sm.plain_backward(dy, y),
    "softmax_causal": lambda x, *_: sm.plain_causal(x),
    "softmax_causal_bwd": lambda dy, y, *_: sm.plain_backward(dy, y),
    "cross_entropy": lambda logits, target, *_: ce.plain_forward(logits, target),
    "cross_entropy_bwd": lambda dloss, _, *rest: ce.plain_backward(dloss, *rest[:3]),
    "cross_entropy_fwd_bwd": lambda *args: ce._through_autograd(ce.plain_forward, [args])(*args),
    "cross_entropy_train": lambda *args: ce._through_autograd(ce.plain_mean, [args])(*args),
    **dict.fromkeys(lin.TASKS, lin.plain),
    **dict.fromkeys(router.TASKS, lambda *args: router.formula(*args)[:1]),
}
# Mixtures of experts are measured in another way, and tested by themselves.
NAMES = [name for name, kind in KINDS.items() if not kind.experts]
# NVFP4 has no op of torch's: there the same layer over a weight in 16 bits is the least to beat.
DENSE = [name for name in NAMES if name not in nvfp4.TASKS]
SHAPE = {"softmax_causal": (3, 7, 96), "softmax_causal_bwd": (3, 7, 96)}


def task_of(name: str, dtype: str = "bfloat16") -> Task:
    return Task(name, SHAPE.get(name, (5, 96)), dtype)


def torchs(name: str) -> Peer:
    return PEERS["eager" if name in DENSE else "cublas"]


def full_arguments(task: Task, device: torch.device = CPU) -> tuple[Any, ...]:
    args = arguments(task, device)
    return (*args, *saved(task, args))


def expected(task: Task, device: torch.device = CPU) -> Any:
    return compared(task, REGISTRY[task.op].reference(*arguments(task, device)))


@pytest.mark.parametrize("name", DENSE)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_the_formula_given_to_inductor_is_the_op(name: str, dtype: str) -> None:
    task = task_of(name, dtype)
    args = full_arguments(task)
    if name == "cross_entropy_bwd":
        args = (*args[:4], ce._lse(arguments(task, CPU)))
    check(PLAIN[name](*args), expected(task))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("whose", ["gristmill", "torch"])
def test_adapters_compute_the_op_on_every_set(whose: str, name: str) -> None:
    task, peer = task_of(name), GRISTMILL if whose == "gristmill" else torchs(name)
    sets = argument_sets(full_arguments(task), CPU)
    assert len(sets) > 1
    (builder,) = peer.implementations(name).values()
    function = builder(sets)
    for args in sets:
        check(function(*args), expected(task), coarse=name in peer.coarse)
    # A second time: nothing was written over.
    check(function(*sets[0]), expected(task), coarse=name in peer.coarse)


@pytest.mark.parametrize("name", NAMES)
def test_adapters_tell_one_set_from_another(name: str) -> None:
    """What an adapter makes ahead belongs to a set, not to the first that it was given."""
    task = task_of(name)
    one = full_arguments(task)
    args = tuple(
        arg.flip(0) if isinstance(arg, torch.Tensor) and arg.dim() else arg
        for arg in arguments(task, CPU)
    )
    other = (*args, *saved(task, args))
    right = compared(task, REGISTRY[task.op].reference(*args))
    for peer in (GRISTMILL, torchs(name)):
        (builder,) = peer.implementations(name).values()
        check(builder([one, other])(*other), right, coarse=name in peer.coarse)


@pytest.mark.long
@pytest.mark.parametrize("name", DENSE)
def test_inductor_computes_the_op(name: str) -> None:
    task = task_of(name)
    sets = argument_sets(full_arguments(task), CPU)
    function = PEERS["inductor"].implementations(name)["inductor"](sets)
    check(function(*sets[0]), expected(task))


def test_every_task_has_gristmill_eager_and_inductor() -> None:
    assert {name for family in FAMILIES for name in family.BUILDERS["gristmill"]} >= set(KINDS)
    assert set(GRISTMILL.builders) >= set(KINDS)
    for peer in (PEERS["eager"], PEERS["inductor"]):
        assert set(peer.builders) >= set(DENSE)
    assert set(PEERS["cublas"].builders) == set(NAMES) - set(DENSE)
    assert set(PEERS["torch"].builders) == set(KINDS) - set(NAMES)
    assert set(PLAIN) >= set(DENSE)


def test_names_in_results_are_those_of_recorded_ones() -> None:
    quack = PEERS["quack"]
    assert list(quack.implementations("cross_entropy")) == ["quack"]
    both = quack.implementations("cross_entropy_fwd_bwd")
    assert list(both) == ["quack_two_pass", "quack_one_pass"]
    assert PEERS["flashinfer"].implementations("softmax") == {}
    names = [name for peer in PEERS.values() for name in peer.implementations("nvfp4_linear")]
    assert sorted(names) == ["cublas_bf16", "humming", "quack_w4a16", "vllm_marlin"]
    names = [name for peer in PEERS.values() for name in peer.implementations("nvfp4_moe")]
    assert sorted(names) == ["humming", "torch_grouped_mm_bf16", "vllm_marlin_nvfp4"]


def test_what_a_forward_would_have_saved_is_that_of_each_row() -> None:
    task = Task("rms_norm_bwd", (7, 48), "float32")
    args = arguments(task, CPU)
    (rstd,) = saved(task, args)
    x = args[1].double()
    torch.testing.assert_close(rstd, (x.square().mean(-1) + args[4]).rsqrt().float())
    assert saved(Task("rms_norm", (7, 48), "float32"), args[:6]) == ()

    task = Task("layer_norm_bwd", (7, 48), "float32")
    args = arguments(task, CPU)
    mean, rstd = saved(task, args)
    x = args[1].double()
    variance = (x - x.mean(-1, keepdim=True)).square().mean(-1)
    torch.testing.assert_close(mean, x.mean(-1).float())
    torch.testing.assert_close(rstd, (variance + 1e-5).rsqrt().float())


def test_the_backward_of_cross_entropy_gets_what_the_forward_gives() -> None:
    task = Task("cross_entropy_bwd", (6, 50), "float32")
    dloss, dlse, logits, target, stats, denominators, weight, *rest = arguments(task, CPU)
    loss, _, none, right = REGISTRY["cross_entropy"].reference(
        logits, target, None, -100, 0.0, 0.0, None, "none", False
    )
    assert dloss.shape == loss.shape == target.shape
    torch.testing.assert_close(stats, right)
    assert denominators.shape == none.shape
    assert (dlse, weight) == (None, None)
    assert rest == [-100, 0.0, 0.0, None, "none", 0, 0]


def test_a_peer_of_several_ways_has_a_row_for_each() -> None:
    peer = Peer("p", "torch", "torch", {"softmax": {"one": lambda s: len, "two": lambda s: len}})
    assert list(peer.implementations("softmax")) == ["p_one", "p_two"]


def test_on_a_cpu_the_gpu_libraries_say_why_not() -> None:
    here, reasons = choose([], CPU)
    assert [peer.name for peer in here] == ["eager", "inductor", "cublas", "torch"]
    absent = ("quack", "liger", "flashinfer", "humming", "vllm")
    assert reasons == dict.fromkeys(absent, "needs a GPU")


def test_only_peers_with_one_of_the_tasks_are_asked() -> None:
    here, reasons = choose([], CPU, ["rms_norm"])
    assert [peer.name for peer in here] == ["eager", "inductor"]
    assert list(reasons) == ["quack", "liger", "flashinfer"]
    here, reasons = choose([], CPU, ["nvfp4_linear"])
    assert [peer.name for peer in here] == ["cublas"]
    assert list(reasons) == ["quack", "humming", "vllm"]
    # Whoever is named is asked, whatever there is to do.
    assert [peer.name for peer in choose(["cublas"], CPU, ["rms_norm"])[0]] == ["cublas"]


def test_what_cannot_be_imported_says_so() -> None:
    absent = Peer("absent", "absent", "no_module_of_this_name", {}, cpu=True)
    assert absent.missing(CPU) == "cannot be imported: No module named 'no_module_of_this_name'"
    assert absent.version() == "unknown"


def test_none_and_unknown_names() -> None:
    assert choose(["none"], CPU) == ([], {})
    assert [peer.name for peer in choose(["eager"], CPU)[0]] == ["eager"]
    with pytest.raises(ArgumentError, match=r"unknown peer 'quak' \(did you mean quack\?\)"):
        choose(["quak"], CPU)


def _torch_on_cuda(dy: torch.Tensor, y: torch.Tensor, share: float = 1.0) -> torch.Tensor:
    """The gradient of softmax as torch's kernel for CUDA rounds it; `share`: of the sum."""
    products = (dy * y).float()  # in their dtype: rounded here
    return (products - share * y.float() * products.sum(-1, keepdim=True)).to(y.dtype)


@pytest.mark.parametrize("name", ["softmax_bwd", "softmax_causal_bwd"])
@pytest.mark.parametrize("shape", [(64, 1024), (8, 300), (3, 2, 96)])
def test_a_gradient_is_held_to_what_its_products_are_rounded_by(
    name: str, shape: tuple[int, ...]
) -> None:
    """Rows that see few columns have terms that cancel; a wrong sum shows in the others."""
    task = Task(name, shape, "bfloat16")
    dy, y, *rest = arguments(task, CPU)
    right = expected(task)
    coarse = {"coarse": True, "terms": terms_of(task, (dy, y, *rest))}
    assert name in PEERS["eager"].coarse
    rounded = _torch_on_cuda(dy, y)
    # Half a unit of the terms for them, and half of dx for itself; bf16 terms are off by as little.
    assert check(rounded, right, **coarse) <= 1.02 * torch.finfo(torch.bfloat16).eps
    for wrong in (
        _torch_on_cuda(dy, y, 0.0),
        _torch_on_cuda(dy * 1.1, y),
        rounded.index_fill(-2, torch.tensor([y.shape[-2] - 1]), 0.0),
    ):
        with pytest.raises(WrongResultError, match="is off by"):
            check(wrong, right, **coarse)
    if name == "softmax_causal_bwd" and shape == (64, 1024):
        with pytest.raises(WrongResultError, match="is off by"):
            check(rounded, right)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("peer", "name"),
    [
        pytest.param(peer, name, id=f"{peer.name}-{name}")
        for peer in PEERS.values()
        for name in NAMES
        if peer.implementations(name)
    ],
)
def test_peers_on_a_gpu(peer: Peer, name: str) -> None:
    device = torch.device("cuda")
    if (reason := peer.missing(device)) is not None:
        pytest.skip(reason)
    task = Task(name, (64, 1024), "bfloat16")
    sets = argument_sets(full_arguments(task, device), device)[:4]
    for builder in peer.implementations(name).values():
        function = builder(sets)
        for one in sets:
            right, coarse = expected(task, device), name in peer.coarse
            check(function(*one), right, coarse=coarse, terms=terms_of(task, one))
