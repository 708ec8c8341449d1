"""torch's own samples of its ops, given to ours, in every layout and with extreme values.

The samples and error inputs are those of `torch.testing._internal`'s `op_db`. What ours do not take
on purpose stands in `opinfo_counterparts.py` with its reason. Each of these must raise the error
that is listed, and everything else must agree with torch in fp64.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from opinfo_call import Call
from opinfo_counterparts import (
    ALL_APART,
    DTYPES,
    LEFT_OUT,
    PROBABILITIES,
    Apart,
    Counterpart,
    Sample,
    SampleInput,
    here,
    without_counterpart,
)
from opinfo_judge import judged, mismatches
from opinfo_layouts import ALL

import gristmill as gm
from gristmill.errors import GristmillError

IDS = [pytest.param(one, id=f"{number}-{one}") for number, one in enumerate(here())]


def report(found: list[str]) -> None:
    shown = "\n".join(found[:40])
    assert not found, f"{len(found)} differ from torch:\n{shown}"


CASES = [(one, dtype, lay) for one in here() for dtype in DTYPES for lay in ALL]


def name_of(value: Any) -> str:
    return str(value).replace(" ", "_")


def places(call: Call, lay: str) -> dict[str, bool]:
    """Its results and gradients, and whether any element of each is judged."""
    seen = judged(call, lay, "cpu")
    results = len(seen) - len(call.grads)
    names = [f"result {place}" for place in range(results)]
    names += [f"gradient {place}" for place in range(len(call.grads))]
    return dict(zip(names, seen, strict=True))


@pytest.mark.parametrize("counterpart", IDS)
def test_a_sample_in_each_layout(counterpart: Counterpart) -> None:
    """Samples and dtypes take turns; all of them run with the long tests.

    Fewer extreme values are judged in the narrow dtypes: further samples are added until each
    result and each gradient has an element that is judged.
    """
    dtypes = list(DTYPES)
    calls = {dtype: list(counterpart.calls(DTYPES[dtype])) for dtype in dtypes}
    every = {name for call in with_calls(calls["float32"]) for name in places(call, "dense")}
    found = []
    for number, lay in enumerate(ALL):
        left = set(every)
        for turn in range(len(dtypes)):
            some = calls[dtypes[(number + turn) % len(dtypes)]]
            start = 7 * number % max(1, len(some))
            for call in (*some[start:], *some[:start]):
                new = {name for name, seen in places(call, lay).items() if seen} if left else set()
                if new & left:
                    left -= new
                    found += mismatches(call, lay, "cpu")
        assert not left, f"{lay}: {left} of no sample are judged"
    report(found)


def with_calls(calls: Sequence[Call]) -> Sequence[Call]:
    assert calls
    return calls


@pytest.mark.long
@pytest.mark.parametrize(("counterpart", "dtype", "lay"), CASES, ids=name_of)
def test_samples_on_a_cpu(counterpart: Counterpart, dtype: str, lay: str) -> None:
    calls = with_calls(list(counterpart.calls(DTYPES[dtype])))
    report([one for call in calls for one in mismatches(call, lay, "cpu")])


WAYS = [
    pytest.param(one, way, id=f"{number}-{one}-{way}".replace(" ", "_"))
    for number, one in enumerate(here())
    for way in one.ways
]
FEW = 8  # calls of each way: the first and the longest among them


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("counterpart", "way"), WAYS)
def test_samples_on_a_gpu(counterpart: Counterpart, way: str, dtype: str) -> None:
    """By every variant, in all layouts in one test: one process builds a kernel once."""
    calls = with_calls(list(counterpart.calls(DTYPES[dtype], way)))
    step = max(1, -(-len(calls) // FEW))
    report([one for call in calls[::step] for lay in ALL for one in mismatches(call, lay, "cuda")])


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("counterpart", "way"), WAYS)
def test_all_samples_on_a_gpu(counterpart: Counterpart, way: str, dtype: str) -> None:
    calls = with_calls(list(counterpart.calls(DTYPES[dtype], way)))
    report([one for call in calls for lay in ALL for one in mismatches(call, lay, "cuda")])


def ran(make: Any, way: str, sample: Any) -> None:
    call = make(way, sample)
    call.ours(*call.tensors)


@pytest.mark.parametrize(
    "counterpart", [*IDS, *[pytest.param(one, id=str(one)) for one in ALL_APART]]
)
def test_what_is_listed_is_refused(counterpart: Counterpart) -> None:
    """Each of it, by an error about the argument at fault or for want of an argument."""
    shown: set[Apart] = set()
    for sample in counterpart.samples(torch.float32):
        reasons = [one for one in counterpart.apart if one.holds(sample)]
        shown.update(reasons)
        lacking = [one.lacks for one in reasons if one.lacks is not None]
        for function, argument in lacking:
            assert argument not in inspect.signature(getattr(gm, function)).parameters
        if lacking or not reasons:
            continue
        errors = "|".join(one.error for one in reasons)
        for way, make in counterpart.ways.items():
            with pytest.raises(GristmillError, match=rf"^\w+: ({errors})"):
                ran(make, way, sample)
    assert shown == set(counterpart.apart)  # nothing is listed that no sample shows


@pytest.mark.parametrize("counterpart", ALL_APART, ids=str)
def test_what_has_no_calls_is_listed_so(counterpart: Counterpart) -> None:
    assert counterpart.samples(torch.float32)
    assert list(counterpart.calls(torch.float32)) == []


def with_classes(sample: Sample) -> Sample:
    """Targets that are probabilities would be refused before anything else is looked at."""
    target = torch.zeros(sample.input.shape[:-1], dtype=torch.int64)
    return SampleInput(sample.input, args=(*sample.args[:-1], target), kwargs=sample.kwargs)


@pytest.mark.parametrize(
    "counterpart",
    [
        pytest.param(one, id=f"{number}-{one}")
        for number, one in enumerate(here())
        if one.info is not None and one.info.error_inputs_func is not None
    ],
)
def test_error_inputs(counterpart: Counterpart) -> None:
    """What torch refuses is refused for the same argument, or listed as accepted."""
    known = {**counterpart.refused, **counterpart.accepted}
    shown = set()
    for error in counterpart.info.error_inputs("cpu"):
        (reason,) = [words for words in known if words in error.error_regex]
        shown.add(reason)
        message = counterpart.refused.get(reason)
        sample = error.sample_input
        if PROBABILITIES in counterpart.apart and message != PROBABILITIES.error:
            sample = with_classes(sample)
        for way, make in counterpart.ways.items():
            if message is None:
                ran(make, way, sample)
                continue
            with pytest.raises(GristmillError, match=rf"^\w+: {message}"):
                ran(make, way, sample)
    assert shown == known.keys()


def test_every_op_of_these_families_is_listed() -> None:
    """As a counterpart, or with the reason why it has none; newer versions of torch add some."""
    assert without_counterpart() <= LEFT_OUT.keys()


def test_every_counterpart_is_there() -> None:
    """torch may rename its OpInfos: all that are in the table are in its list, and give samples."""
    assert [str(one) for one in (*here(), *ALL_APART) if one.info is None] == []
    for counterpart in here():
        assert counterpart.samples(torch.float32), str(counterpart)


@pytest.mark.parametrize(("name", "broken"), [("negative view", -1.0), ("dense", 1.5)])
def test_a_wrong_result_is_seen(name: str, broken: float) -> None:
    """The judge itself: a function with another sign, or another factor, differs in every call."""
    softmax = next(one for one in here() if one.name == "softmax")
    for call in softmax.calls(torch.float32):
        if call.tensors[0].numel():
            wrong = replace(call, ours=lambda *args, ours=call.ours: ours(*args) * broken)
            assert list(mismatches(wrong, name, "cpu")), call.sample


@pytest.mark.parametrize(
    ("name", "dtype", "lay", "words"),
    [
        ("nn.functional.rms_norm", "float32", "large", "by library: result 0"),
        ("nn.functional.layer_norm", "float32", "large", "by library: result 0"),
        ("softmax", "float16", "largest gradient", "by reference: gradient 0"),
        ("nn.functional.linear_cross_entropy", "float32", "offset", "by reference: gradient 0"),
    ],
)
def test_rows_inside_the_range_are_judged(name: str, dtype: str, lay: str, words: str) -> None:
    """Beside rows that leave it, and where only the sample's dtype is near its limit."""
    counterpart = next((one for one in here() if one.name == name), None)
    if counterpart is None:
        pytest.skip(f"torch {torch.__version__} has no OpInfo of {name}")
    found: list[str] = []
    for call in counterpart.calls(DTYPES[dtype]):
        wrong = replace(call, ours=lambda *args, ours=call.ours: _larger(ours(*args)))
        found += mismatches(wrong, lay, "cpu")
    assert any(words in one for one in found), found[:10]


def _larger(results: Any) -> Any:
    return results * 1.5 if isinstance(results, torch.Tensor) else [one * 1.5 for one in results]
