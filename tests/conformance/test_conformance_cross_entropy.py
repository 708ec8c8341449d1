"""gristmill.cross_entropy as a user of torch knows it: options, gradients, what is not finite."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conformance_helpers import DEVICES, ENTROPY_NAMES, same_bits, tuned_launches
from torch.utils.checkpoint import checkpoint

import gristmill
from gristmill.errors import ArgumentError, DoubleBackwardError, NoGradientError
from gristmill.ops.registry import OPS
from gristmill.ops.rows.config import TWICE
from gristmill.select import HINTS, KNOWN, ranked

OP = OPS["cross_entropy"]
over_devices = pytest.mark.parametrize("device", DEVICES)


def inputs(
    rows: int = 9,
    classes: int = 33,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    *,
    ignored: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rows * classes)
    logits = (2 * torch.randn(rows, classes, generator=generator)).to(dtype).to(device)
    target = torch.randint(0, classes, (rows,), generator=generator)
    if ignored:
        target[::4] = -100
    return logits.requires_grad_(), target.to(device)


def formula(
    logits: torch.Tensor,
    target: torch.Tensor,
    softcap: float | None = None,
    z_loss: float = 0.0,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss and lse by torch's own ops, in fp64, with a graph."""
    v = logits.double()
    v = v if softcap is None else softcap * torch.tanh(v / softcap)
    lse = torch.logsumexp(v, -1)
    weight = options.pop("weight", None)
    weight = None if weight is None else weight.double()
    loss = F.cross_entropy(v, target, weight=weight, **options)
    penalty = z_loss * lse.square() * (target != options.get("ignore_index", -100))
    reduction = options.get("reduction", "mean")
    if reduction == "none":
        return loss + penalty, lse
    count = (target != options.get("ignore_index", -100)).sum() if reduction == "mean" else 1
    return loss + penalty.sum() / count, lse


def close(one: torch.Tensor, other: torch.Tensor, roundings: float = 16.0) -> None:
    eps, one, other = torch.finfo(one.dtype).eps, one.detach(), other.detach()
    size = float(other.abs().max()) if other.numel() else 0.0
    limit = roundings * eps
    torch.testing.assert_close(one.double(), other.double(), rtol=limit, atol=limit * max(1, size))


# --- as torch


@over_devices
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
def test_loss_and_gradient_are_torchs(
    weighted: bool, smoothing: float, reduction: str, device: str
) -> None:
    for dtype, ignore_index in itertools.product((torch.float32, torch.float64), (-100, 5)):
        logits, target = inputs(dtype=dtype, device=device)
        target = target.where(target != -100, ignore_index)
        weight = torch.rand(33, dtype=dtype, device=device) if weighted else None
        options: dict[str, Any] = {
            "weight": weight,
            "label_smoothing": smoothing,
            "reduction": reduction,
            "ignore_index": ignore_index,
        }
        loss = gristmill.cross_entropy(logits, target, **options)
        expected = F.cross_entropy(logits, target, **options)
        assert loss.dtype == dtype
        close(loss, expected)
        dloss = torch.rand_like(loss)
        mine, theirs = (torch.autograd.grad(one, logits, dloss)[0] for one in (loss, expected))
        assert mine.dtype == dtype
        close(mine, theirs)


@over_devices
@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "options",
    [
        {"softcap": 3.0},
        {"z_loss": 0.05},
        {"softcap": 2.0, "z_loss": 0.05, "label_smoothing": 0.2},
        {"z_loss": 0.05, "weight": True},
        {"softcap": 30.0, "z_loss": 1e-4, "weight": True, "label_smoothing": 0.1},
    ],
    ids=str,
)
def test_gradients_are_those_of_the_formula(
    options: dict[str, Any], reduction: str, one_pass: bool, device: str
) -> None:
    for dtype in (torch.float32, torch.float64):
        logits, target = inputs(dtype=dtype, device=device)
        own = dict(options, reduction=reduction)
        if own.get("weight"):
            own["weight"] = torch.rand(33, dtype=dtype, device=device) + 0.1
        loss = gristmill.cross_entropy(logits, target, one_pass=one_pass, **own)
        expected, _ = formula(logits, target, **own)
        close(loss, expected)
        dloss = torch.rand_like(loss)
        (mine,) = torch.autograd.grad(loss, logits, dloss)
        (theirs,) = torch.autograd.grad(expected, logits, dloss.double())
        close(mine, theirs)


def test_gradcheck() -> None:
    logits, target = inputs(5, 7, torch.float64)
    weight = torch.rand(7, dtype=torch.float64)

    def function(logits: torch.Tensor) -> Any:
        return gristmill.cross_entropy(
            logits,
            target,
            weight=weight,
            label_smoothing=0.1,
            z_loss=0.1,
            softcap=4.0,
            return_lse=True,
        )

    assert torch.autograd.gradcheck(function, (logits,))


@over_devices
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_lse_is_returned_and_differentiable(reduction: str, device: str) -> None:
    """Of ignored rows, too."""
    logits, target = inputs(device=device)
    for softcap in (None, 3.0):
        options: dict[str, Any] = {"softcap": softcap, "reduction": reduction, "z_loss": 0.01}
        loss, lse = gristmill.cross_entropy(logits, target, return_lse=True, **options)
        expected, expected_lse = formula(logits, target, **options)
        close(lse, expected_lse)
        assert lse.shape == target.shape
        factor = torch.rand_like(lse)
        for parts in ((1.0, 0.0), (0.0, 1.0), (0.5, 2.0)):
            mine = parts[0] * loss.sum() + parts[1] * (lse * factor).sum()
            theirs = parts[0] * expected.sum() + parts[1] * (expected_lse * factor).sum()
            (one,) = torch.autograd.grad(mine, logits, retain_graph=True)
            (other,) = torch.autograd.grad(theirs, logits, retain_graph=True)
            close(one, other)
        (alone,) = torch.autograd.grad(lse, logits, factor)
        (expected_alone,) = torch.autograd.grad(expected_lse, logits, factor.double())
        close(alone, expected_alone)


def test_lse_that_was_not_asked_for_is_a_constant_in_ignored_rows() -> None:
    logits, target = inputs()
    _, lse, *_ = OP.overload(logits, target)
    assert not lse[target == -100].any()
    (found,) = torch.autograd.grad(lse.sum(), logits)
    assert not found[target == -100].any()
    close(found[target != -100], torch.softmax(logits.detach(), -1)[target != -100])


@over_devices
def test_leading_dims_and_targets_of_any_layout(device: str) -> None:
    logits = torch.randn(2, 3, 5, 17, device=device)
    target = torch.randint(0, 17, (5, 3, 2), device=device).permute(2, 1, 0)
    assert not target.is_contiguous()
    loss = gristmill.cross_entropy(logits, target, reduction="none")
    expected = F.cross_entropy(logits.movedim(-1, 1), target, reduction="none")
    assert loss.shape == target.shape
    close(loss, expected)
    single = gristmill.cross_entropy(logits[0, 0, 0], target[0, 0, 0])
    close(single, F.cross_entropy(logits[0, 0, 0], target[0, 0, 0]))


# --- torch's machinery


def test_compiled_whole_with_gradients() -> None:
    logits, target = inputs(dtype=torch.bfloat16)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def function(logits: torch.Tensor, target: torch.Tensor) -> Any:
        return gristmill.cross_entropy(logits * 2, target, z_loss=0.01, return_lse=True)

    mine = function(logits, target)
    expected = gristmill.cross_entropy(logits * 2, target, z_loss=0.01, return_lse=True)
    for one, other in zip(mine, expected, strict=True):
        assert same_bits(one, other)
    (one,) = torch.autograd.grad(sum(part.sum() for part in mine), logits)
    (other,) = torch.autograd.grad(sum(part.sum() for part in expected), logits)
    assert same_bits(one, other)


def test_inlined_it_is_the_formula() -> None:
    logits, target = inputs()

    def function(logits: torch.Tensor) -> Any:
        return gristmill.cross_entropy(logits, target, label_smoothing=0.1)

    with gristmill.inline("cross_entropy"):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        loss = compiled(logits)
        (gradient,) = torch.autograd.grad(loss, logits)
    close(loss, function(logits))
    close(gradient, torch.autograd.grad(function(logits), logits)[0])


def test_transforms_see_through_it() -> None:
    logits, target = inputs()
    x = logits.detach()

    def function(x: torch.Tensor) -> Any:
        return gristmill.cross_entropy(x, target, one_pass=False)

    expected = torch.autograd.grad(function(logits), logits)[0]
    close(torch.func.grad(function)(x), expected)
    close(torch.func.grad(lambda x: gristmill.cross_entropy(x, target, one_pass=True))(x), expected)
    each = torch.vmap(lambda x, t: gristmill.cross_entropy(x, t, reduction="none"))(x, target)
    close(each, gristmill.cross_entropy(x, target, reduction="none"))
    tangent = torch.randn_like(x)
    _, found = torch.func.jvp(function, (x,), (tangent,))
    close(found, (expected * tangent).sum())


@pytest.mark.parametrize("one_pass", [False, True])
def test_autocast_changes_nothing(one_pass: bool) -> None:
    """The loss is fp32 already, as torch's is under autocast."""
    logits, target = inputs(dtype=torch.bfloat16)
    expected = gristmill.cross_entropy(logits, target)
    with torch.autocast("cpu", torch.bfloat16):
        loss = gristmill.cross_entropy(logits, target, one_pass=one_pass)
    assert loss.dtype == torch.float32
    close(loss, expected)
    assert torch.autograd.grad(loss, logits)[0].dtype == torch.bfloat16


def test_there_is_no_second_gradient() -> None:
    logits, target = inputs()
    loss = gristmill.cross_entropy(logits, target)
    (gradient,) = torch.autograd.grad(loss, logits, create_graph=True)
    with pytest.raises(DoubleBackwardError, match=r"F?functional.cross_entropy"):
        gradient.sum().backward()


def test_a_shard_has_no_gradient_and_says_what_has() -> None:
    logits, target = inputs()
    with pytest.raises(NoGradientError, match="vocab_parallel_cross_entropy"):
        OPS["cross_entropy_shard"].overload(logits, target, 0, 33, -100, None, False)


def test_checkpointing() -> None:
    logits, target = inputs()

    def function(x: torch.Tensor) -> Any:
        return gristmill.cross_entropy(x * 2, target)

    (expected,) = torch.autograd.grad(function(logits), logits)
    for reentrant in (False, True):
        loss = checkpoint(function, logits, use_reentrant=reentrant)
        loss.backward()
        assert logits.grad is not None
        close(logits.grad, expected)
        logits.grad = None


def test_shards_add_up_to_the_whole() -> None:
    """What vocab_parallel_cross_entropy does with them: any split gives the same loss."""
    logits, target = inputs(9, 100)
    x = logits.detach()
    expected = gristmill.cross_entropy(x, target, reduction="none")
    op = OPS["cross_entropy_shard"]
    ends = [0, 1, 40, 41, 100]
    parts = torch.stack(
        [
            op.run(x[:, begin:end], target, begin, 100, -100, None, False)
            for begin, end in itertools.pairwise(ends)
        ]
    )
    largest = parts[..., 0].amax(0)
    total = (parts[..., 1] * (parts[..., 0] - largest).exp()).sum(0)
    loss = (largest - parts[..., 2].sum(0)) + total.log()
    close(torch.where(target == -100, 0.0, loss), expected)


@pytest.mark.parametrize("device", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("name", ENTROPY_NAMES)
def test_every_case_has_a_launchable_choice_on_every_gpu(name: str, device: Any) -> None:
    op = OPS[name]
    empty = [op.example(shape, torch.float32, "meta") for shape in ((3, 0), (0, 8), (2, 0, 64))]
    for args in [*(case.make("meta", 0) for case in op.cases()), *empty]:
        problem = op.problem(*args, device=device)
        choices = ranked(op.name, op.variants, problem)
        wide = any(dtype == "float64" for _, dtype in problem.dtypes)
        assert choices[0].variant.name.startswith("cuda_") != wide
        for choice in choices:
            config, variant = choice.config, choice.variant
            if config is None or 0 in (problem.rows, problem.dim("N")):
                continue
            what = f"{problem.key(problem.rows)} {variant.name} {config}"
            assert 32 <= config.threads <= 1024, what
            assert config.threads % 32 == 0, what
            reach = config.lanes if variant.scope == "WARP" else config.threads * config.cluster
            if config.feed != TWICE:
                assert reach * config.items >= problem.layout.layout.vectors, what
            assert variant.shared_bytes(problem.layout, config) <= device.shared_per_block, what
            if variant.scope == "CLUSTER":
                assert 2 <= config.cluster <= 16, what
            assert all(program.names for program in variant.programs(problem, config))


@pytest.mark.parametrize("name", ENTROPY_NAMES)
def test_rows_beyond_what_kernels_count_are_refused_with_a_reason(name: str) -> None:
    op = OPS[name]
    for shape in ((2, 2**31), (2, 2**40 + 1), (2**31, 64)):
        problem = op.problem(*op.example(shape, torch.bfloat16, "meta"), device=KNOWN["sm_90a"])
        for variant in op.variants:
            assert (variant.supports(problem) is None) == (variant.name == "reference"), shape


@pytest.mark.parametrize("name", ENTROPY_NAMES)
def test_growing_rows_need_few_kernels(name: str) -> None:
    """M is a runtime argument: batches of every size are served by a handful.

    And where a table has rows, what these name.
    """
    op = OPS[name]
    for columns in (1000, 4096, 50257, 128256):
        programs = set()
        for rows in (*range(1, 100), *HINTS, *range(1000, 70000, 3001)):
            args = op.example((rows, columns), torch.bfloat16, "meta")
            problem = op.problem(*args, device=KNOWN["sm_90a"])
            choice = ranked(op.name, op.variants, problem)[0]
            programs.update(choice.variant.programs(problem, choice.config))
        most = 6 + tuned_launches(problem)
        assert 1 <= len(programs) <= most, (columns, [program.names for program in programs])


def test_explain_and_use() -> None:
    logits, target = inputs()
    explanation = gristmill.explain("cross_entropy", logits, target, reduction="sum")
    assert explanation.chosen == "reference"
    with pytest.raises(ArgumentError):
        gristmill.explain("cross_entropy", logits, target, reduction="most")
