"""torch's own samples of its ops, given to ours, in every layout and with extreme values.

The samples and error inputs are those of `torch.testing._internal`'s `op_db`. What ours do not take
on purpose stands in `opinfo_counterparts.py` with its reason; each of these must be refused, and
everything else must agree with torch in fp64.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from opinfo_counterparts import DTYPES, Apart, Counterpart, here
from opinfo_judge import mismatches
from opinfo_layouts import ALL

from gristmill.errors import GristmillError

IDS = [pytest.param(one, id=f"{number}-{one}") for number, one in enumerate(here())]
# What an argument that is not there raises is Python's own.
REFUSED = (GristmillError, TypeError)


def report(found: list[str]) -> None:
    shown = "\n".join(found[:40])
    assert not found, f"{len(found)} differ from torch:\n{shown}"


CASES = [(one, dtype, lay) for one in here() for dtype in DTYPES for lay in ALL]


def name_of(value: Any) -> str:
    return str(value).replace(" ", "_")


@pytest.mark.parametrize("counterpart", IDS)
def test_a_sample_in_each_layout(counterpart: Counterpart) -> None:
    """Another sample and another dtype each time; all of them with the long tests."""
    calls = {dtype: list(counterpart.calls(DTYPES[dtype])) for dtype in DTYPES}
    found = []
    for number, lay in enumerate(ALL):
        some = calls[list(DTYPES)[number % len(DTYPES)]]
        if some:
            found += mismatches(some[7 * number % len(some)], lay, "cpu")
    report(found)


@pytest.mark.long
@pytest.mark.parametrize(("counterpart", "dtype", "lay"), CASES, ids=name_of)
def test_samples_on_a_cpu(counterpart: Counterpart, dtype: str, lay: str) -> None:
    calls = counterpart.calls(DTYPES[dtype])
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
    calls = list(counterpart.calls(DTYPES[dtype], way))
    step = max(1, -(-len(calls) // FEW))
    report([one for call in calls[::step] for lay in ALL for one in mismatches(call, lay, "cuda")])


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("counterpart", "way"), WAYS)
def test_all_samples_on_a_gpu(counterpart: Counterpart, way: str, dtype: str) -> None:
    calls = counterpart.calls(DTYPES[dtype], way)
    report([one for call in calls for lay in ALL for one in mismatches(call, lay, "cuda")])


def ran(make: Any, way: str, sample: Any) -> None:
    call = make(way, sample)
    call.ours(*call.tensors)


@pytest.mark.parametrize("counterpart", IDS)
def test_what_is_listed_is_refused(counterpart: Counterpart) -> None:
    """Each of it, and nothing is listed that no sample shows."""
    shown: set[Apart] = set()
    for sample in counterpart.samples(torch.float32):
        reasons = [one for one in counterpart.apart if one.holds(sample)]
        shown.update(reasons)
        for way, make in counterpart.ways.items() if reasons else ():
            with pytest.raises(REFUSED):
                ran(make, way, sample)
    assert shown == set(counterpart.apart)


@pytest.mark.parametrize("counterpart", IDS)
def test_error_inputs(counterpart: Counterpart) -> None:
    """What torch refuses is refused, or listed as accepted."""
    accepted = set()
    errors = counterpart.info.error_inputs("cpu") if counterpart.info.error_inputs_func else ()
    for error in errors:
        reasons = [words for words in counterpart.accepted if words in error.error_regex]
        accepted.update(reasons)
        for way, make in counterpart.ways.items():
            if reasons:
                ran(make, way, error.sample_input)
                continue
            with pytest.raises(REFUSED):
                ran(make, way, error.sample_input)
    assert accepted == set(counterpart.accepted)


def test_every_counterpart_is_there() -> None:
    """torch may rename its OpInfos: all that are in the table are in its list, and give samples."""
    assert [str(one) for one in here() if one.info is None] == []
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
