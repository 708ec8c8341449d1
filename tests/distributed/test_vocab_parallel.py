"""Cross entropy over a process group, on ranks of their own processes, beside one process."""

from __future__ import annotations

import dataclasses
import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from vocab_parallel_cases import SCENARIOS, Scenario

import gristmill
from gristmill.distributed.vocab_parallel import Options, combined
from gristmill.errors import ArgumentError, DtypeError
from gristmill.ops.cross_entropy import CROSS_ENTROPY_SHARD

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parents[1] / "src"

if not torch.distributed.is_gloo_available():
    pytest.skip("this torch has no gloo", allow_module_level=True)


@pytest.fixture(scope="module", params=[2, 4], ids=["2 ranks", "4 ranks"])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank of a group has found; they run once, for all workers of a test run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "vocab_parallel"
    folder = folder / str(request.param)
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(folder / "lock"):
        if not (folder / "done").exists():
            run_ranks(request.param, folder)
            (folder / "done").touch()
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def run_ranks(count: int, folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}:{HERE}", "CUDA_VISIBLE_DEVICES": ""}
    (folder / "store").unlink(missing_ok=True)
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / "vocab_parallel_rank.py"), str(rank), str(count), folder],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, output in zip(processes, outputs, strict=True):
        assert process.returncode == 0, output


def alone(scenario: Scenario) -> dict[str, torch.Tensor]:
    """The same by one process that has all classes."""
    logits, target, dloss, dlse = scenario.whole()
    leaf = logits.clone().requires_grad_()
    found = gristmill.cross_entropy(leaf, target, **scenario.options)
    results = {"loss": found}
    if scenario.options.get("return_lse"):
        results = dict(zip(("loss", "lse"), found, strict=True))
    gradients = [dloss, dlse][: len(results)]
    gradient = torch.autograd.grad(list(results.values()), leaf, gradients)[0]
    return {**{name: one.detach() for name, one in results.items()}, "gradient": gradient}


def units_apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest distance in units of the last place of the larger one, of 1 at least.

    A loss near 0 is the difference of numbers near 1.
    """
    if not one.numel():
        return 0.0
    same = (one == other) | (one.isnan() & other.isnan())
    larger = torch.maximum(one.abs(), other.abs()).clamp(min=1.0)
    unit = torch.finfo(one.dtype).eps * torch.exp2(torch.floor(torch.log2(larger)))
    return float(torch.where(same, 0.0, (one - other).abs() / unit).max())


@pytest.mark.parametrize("name", SCENARIOS)
def test_as_one_process(name: str, ranks: list[Any]) -> None:
    scenario = SCENARIOS[name]
    expected = alone(scenario)
    found = [one["scenarios"][name] for one in ranks]
    for key in expected.keys() - {"gradient"}:
        want = expected[key]
        for one in found:
            # Every rank has the same bits, NaNs too.
            assert one[key].dtype == want.dtype
            assert one[key].shape == want.shape
            assert one[key].numpy().tobytes() == found[0][key].numpy().tobytes()
        assert torch.equal(found[0][key].isnan(), want.isnan()), key
        if name == "confident":
            # The logarithm of a sum near 1, which one process adds up in fp32: off by three units.
            want = alone(dataclasses.replace(scenario, dtype=torch.float64))[key].float()
        assert units_apart(found[0][key], want) <= 2.0, key
    whole = torch.cat([one["gradient"] for one in found], -1)
    want = expected["gradient"]
    if name == "confident":
        want = alone(dataclasses.replace(scenario, dtype=torch.float64))["gradient"].to(want.dtype)
    assert whole.shape == want.shape
    assert torch.equal(whole.isnan(), want.isnan())
    if not want.numel():
        return
    # lse may be off by two units, hence each probability by as much of it; then one rounding. At
    # the target a probability and one cancel.
    lse = torch.logsumexp(scenario.whole()[0].double(), -1).abs()
    off = 4 * torch.finfo(expected["loss"].dtype).eps * float(lse.max())
    least = off * float(want.nan_to_num().abs().max())
    if name == "confident":
        # Hardly anything is left of them: four units of the numbers themselves.
        least = 4 * torch.finfo(want.dtype).eps * float(scenario.whole()[2].abs().max())
    off += torch.finfo(want.dtype).eps
    torch.testing.assert_close(whole, want, rtol=off, atol=least, equal_nan=True)


def test_the_scenarios_are_what_they_are_called() -> None:
    logits, target, *_ = SCENARIOS["masked shard"].whole()
    assert logits[..., :120].isinf().all()
    assert int(target.min()) >= 120
    assert SCENARIOS["unequal"].shares(4) == [7, 0, 11, 222]
    assert SCENARIOS["unequal"].shares(2) == [7, 233]
    assert alone(SCENARIOS["all ignored"])["loss"].isnan()
    assert alone(SCENARIOS["no class"])["loss"].isnan().sum() >= 1


def test_three_numbers_a_row_and_nothing_more(ranks: list[Any]) -> None:
    rows = 6 * 5
    for one in ranks:
        assert one["sent"] == [3 * (rows + 1)]  # one all-gather, forward and backward
        assert one["sent with smoothing"] == [4 * (rows + 1)]
        assert one["sent alone"] == []


def test_shards_that_do_not_fit_give_nan_everywhere(ranks: list[Any]) -> None:
    for one in ranks:
        for mistake in ("overlap", "untold", "miscounted"):
            assert one[mistake].isnan(), mistake


def test_a_group_of_one_has_it_all(ranks: list[Any]) -> None:
    logits, target, *_ = SCENARIOS["plain"].whole()
    leaf = logits.clone().requires_grad_()
    loss = gristmill.cross_entropy(leaf, target, z_loss=0.1)
    loss.backward()
    for one in ranks:
        assert torch.equal(one["alone"], loss)
        assert torch.equal(one["alone gradient"], leaf.grad)
        assert (
            "ArgumentError: vocab_parallel_cross_entropy: the group has one rank"
            in one["alone, not all"]
        )


def test_groups_within_the_group(ranks: list[Any]) -> None:
    logits, target, *_ = SCENARIOS["plain"].whole()
    want = gristmill.cross_entropy(logits, target)
    half = len(ranks) // 2
    for one in ranks[:half]:
        assert units_apart(one["half"], want) <= 2.0
    for one in ranks[half:]:
        assert "this process is not in group" in one["outside"]


def test_compiled_whole(ranks: list[Any]) -> None:
    if len(ranks) > 2:
        pytest.skip("compiled on two ranks")
    for one in ranks:
        torch.testing.assert_close(one["compiled"], one["eager"], rtol=1e-6, atol=1e-8)


def test_a_second_gradient_is_refused(ranks: list[Any]) -> None:
    for one in ranks:
        assert one["second"].startswith("DoubleBackwardError")


def test_what_is_no_group(ranks: list[Any]) -> None:
    for one in ranks:
        assert one["mesh"].startswith("DtypeError: vocab_parallel_cross_entropy: group must be")


def test_without_a_process_group() -> None:
    with pytest.raises(ArgumentError, match=r"no process group; call torch\.distributed\.init_"):
        gristmill.vocab_parallel_cross_entropy(torch.randn(3, 4), torch.tensor([0, 1, 2]))


@pytest.fixture
def group_of_one(tmp_path: Path) -> Any:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


LOGITS, TARGET = torch.randn(3, 4), torch.tensor([0, 1, 2])
WRONG: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"logits": torch.ones(3, 4, dtype=torch.int64)}, DtypeError, r"logits must have dtype"),
    ({"logits": [1.0]}, DtypeError, r"logits must be a torch.Tensor"),
    ({"logits": torch.tensor(1.0)}, ArgumentError, r"logits must have at least one dim"),
    ({"target": torch.ones(3)}, DtypeError, r"target must hold class indices.*float32"),
    ({"target": TARGET[:2]}, ArgumentError, r"target must have the shape.*\(3,\), got \(2,\)"),
    ({"reduction": "avg"}, ArgumentError, r"reduction must be .* got 'avg'"),
    ({"label_smoothing": 1.5}, ArgumentError, r"label_smoothing must be between 0 and 1"),
    ({"z_loss": -1.0}, ArgumentError, r"z_loss must be"),
    ({"softcap": 0.0}, ArgumentError, r"softcap must be None or greater than 0"),
    ({"ignore_index": 1.0}, DtypeError, r"ignore_index must be an integer"),
    ({"return_lse": 1}, DtypeError, r"return_lse must be True or False"),
    ({"first_class": 0}, DtypeError, r"classes must be an integer, and first_class and classes"),
    ({"first_class": 1, "classes": 4}, ArgumentError, r".* must lie within 0 to classes"),
    ({"first_class": -1, "classes": 9}, ArgumentError, r".* must lie within 0 to classes"),
]


@pytest.mark.parametrize(("changes", "error", "words"), WRONG)
def test_wrong_arguments(
    changes: dict[str, Any], error: type[Exception], words: str, group_of_one: None
) -> None:
    options = {"logits": LOGITS, "target": TARGET, **changes}
    with pytest.raises(error, match=f"^vocab_parallel_cross_entropy: {words}"):
        gristmill.vocab_parallel_cross_entropy(
            options.pop("logits"), options.pop("target"), **options
        )


def test_a_dtensor_is_told_from_a_shard(group_of_one: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (1,))
    logits = DTensor.from_local(LOGITS, mesh, [Shard(1)])
    with pytest.raises(DtypeError, match=r"got a DTensor; pass logits\.to_local\(\)"):
        gristmill.vocab_parallel_cross_entropy(logits, TARGET)
    found = gristmill.vocab_parallel_cross_entropy(
        logits.to_local(), TARGET, group=mesh.get_group()
    )
    assert torch.equal(found, gristmill.cross_entropy(LOGITS, TARGET))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("options", [(0.0, 0.0, None), (0.1, 1e-3, 20.0)], ids=["plain", "all"])
@pytest.mark.parametrize("count", [2, 3, 8, 16])
def test_any_number_of_ranks_by_their_numbers(
    count: int, options: tuple[Any, ...], reduction: str
) -> None:
    """What the ranks would send, put together in one process: real vocabularies, many ranks."""
    generator = torch.Generator().manual_seed(count)
    smoothing, z_loss, softcap = options
    for classes, scale in ((1000, 1.0), (50257, 0.1), (50257, 5.0)):
        logits = torch.randn(8, classes, generator=generator) * scale
        target = torch.randint(0, classes, (8,), generator=generator)
        cuts = [classes * rank // count for rank in range(count + 1)]
        sent = []
        for start, stop in itertools.pairwise(cuts):
            place = torch.tensor([[start, stop - start, classes, 0]], dtype=torch.float32)
            shard = logits[:, start:stop].contiguous()
            own = CROSS_ENTROPY_SHARD.run(
                shard, target, start, classes, -100, softcap, smoothing > 0
            )
            sent.append(torch.cat([own, place[:, : own.shape[-1]]]))
        more = Options(0, classes, -100, *options, reduction, True)
        loss, lse, *_ = combined(torch.stack(sent), target, more)
        want, want_lse = gristmill.cross_entropy(
            logits,
            target,
            label_smoothing=smoothing,
            z_loss=z_loss,
            softcap=softcap,
            reduction=reduction,
            return_lse=True,
        )
        assert units_apart(loss, want) <= 2.0
        assert units_apart(lse, want_lse) <= 2.0
