"""State dicts, pickles and checkpoints of modules whose weights have the layout of a GPU."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nn_layouts import (
    LAYOUTS,
    NAMES,
    SHAPES,
    addresses,
    assert_same,
    assert_state,
    copied,
    dense,
    fresh_state,
    state,
)

from gristmill import nvfp4
from gristmill.checkpoints import Checkpoint, save_modelopt
from gristmill.nn import NVFP4Linear

Become = Callable[[str], None]


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_a_state_dict_is_its_own_where_it_must_be(become: Become) -> None:
    become("sm_90a")
    made = NVFP4Linear.from_linear(dense())
    before = copied(made.state_dict())
    for value in made.state_dict().values():
        if value.dtype == torch.uint8:
            value.zero_()
    assert_state(made, before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loading_keeps_the_addresses(shape: tuple[int, int], arch: str) -> None:
    """Captured graphs have them."""
    made = NVFP4Linear.from_linear(dense(shape))
    before = addresses(made)
    stored = fresh_state(*shape)
    kept = copied(stored)
    made.load_state_dict(stored)
    assert addresses(made) == before
    assert_state(made, kept)
    assert_same(stored, kept)
    x = torch.randn(3, shape[1])
    weight = nvfp4.NVFP4Tensor(*(stored[name] for name in NAMES))
    torch.testing.assert_close(made(x), nvfp4.linear(x, weight, stored["bias"]))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("assign", [False, True])
def test_a_part_can_be_loaded_alone(assign: bool, name: str, arch: str) -> None:
    made = NVFP4Linear.from_linear(dense())
    wanted = copied(made.state_dict())
    other = fresh_state()
    missing = made.load_state_dict({name: other[name]}, strict=False, assign=assign)
    assert set(missing.missing_keys) == {*NAMES, "bias"} - {name}
    assert_state(made, {**wanted, name: other[name]})
    assert made.layout == LAYOUTS[arch]


@pytest.mark.parametrize("assign", [False, True])
def test_what_is_not_loaded_is_not_packed_again(assign: bool, arch: str) -> None:
    """Adapters are loaded alone, and often."""
    made, bias = NVFP4Linear.from_linear(dense()), torch.randn(40)
    before = {name: (part, part._version) for name, part in made.named_buffers()}
    wanted = {**copied(made.state_dict()), "bias": bias}
    made.load_state_dict({"bias": bias}, strict=False, assign=assign)
    for name, part in made.named_buffers():
        assert part is before[name][0]
        assert part._version == before[name][1]
    assert_state(made, wanted)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_tensors_are_assigned_to_a_module_without_any(one_by_one: bool, arch: str) -> None:
    made, stored = NVFP4Linear(48, 40, device="meta"), fresh_state()
    kept = copied(stored)
    loads = [{name: value} for name, value in stored.items()] if one_by_one else [stored]
    for some in loads:
        made.load_state_dict(some, strict=not one_by_one, assign=True)
    assert made.layout == LAYOUTS[arch]
    assert_state(made, kept)
    assert_same(stored, kept)


def test_parameters_are_assigned_as_buffers(arch: str) -> None:
    made, stored = NVFP4Linear(48, 40), fresh_state()
    given = {name: torch.nn.Parameter(part, False) for name, part in stored.items()}
    made.load_state_dict(given, assign=True)
    assert {*dict(made.named_buffers())} == {*NAMES}
    assert made.layout == LAYOUTS[arch]
    assert_state(made, stored)


def test_what_does_not_fit_is_not_loaded(arch: str) -> None:
    made = NVFP4Linear.from_linear(dense())
    wanted = copied(made.state_dict())
    for name, value, message in (
        ("weight", torch.zeros(40, 23, dtype=torch.uint8), r"size mismatch for weight:.*40, 24"),
        ("weight_scale", torch.zeros(40, 3), "weight_scale must have dtype torch.float8_e4m3fn"),
        ("weight_scale_2", torch.ones(39), "size mismatch for weight_scale_2"),
        ("other", torch.ones(1), "Unexpected key.*other"),
        # What the buffers themselves look like is no state.
        ("weight", made.weight.clone(), "" if LAYOUTS[arch] == "tiles" else "size mismatch"),
    ):
        if not message:
            continue
        with pytest.raises(RuntimeError, match=message):
            made.load_state_dict({**wanted, name: value})
        assert_state(made, wanted)
    with pytest.raises(RuntimeError, match=r"Missing key.*weight_scale_2"):
        made.load_state_dict({k: v for k, v in wanted.items() if k != "weight_scale_2"})


@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_of_modelopt_loads(assign: bool, arch: str) -> None:
    weight = nvfp4.quantize(torch.randn(40, 48))
    stored = {
        "proj.weight": weight.codes,
        "proj.weight_scale": weight.scales.view(torch.uint8),
        "proj.weight_scale_2": weight.global_scale,
        "proj.input_scale": torch.tensor(0.5),
        "proj.bias": torch.randn(40),
    }
    model = torch.nn.ModuleDict({"proj": NVFP4Linear(48, 40)})
    file = io.BytesIO()
    torch.save(stored, file)
    file.seek(0)
    model.load_state_dict(torch.load(file, weights_only=True), assign=assign)
    assert_state(model["proj"], state(weight, stored["proj.bias"]))
    assert model["proj"].layout == LAYOUTS[arch]


def test_a_hook_may_bring_the_weight(arch: str) -> None:
    made, stored = NVFP4Linear(48, 40), fresh_state()

    def rename(module: Any, found: dict[str, Any], prefix: str, *others: Any) -> None:
        for name in stored:
            found[prefix + name] = found.pop(f"{prefix}old_{name}")

    hooked: Any = made
    hooked.register_load_state_dict_pre_hook(rename)
    made.load_state_dict({f"old_{name}": value for name, value in stored.items()})
    assert_state(made, stored)


def test_a_hook_may_bring_a_layer_of_modelopt(arch: str) -> None:
    """Its one global scale and its bytes are what the module takes, whoever brings them."""
    made, weight = NVFP4Linear(48, 40, bias=False), nvfp4.quantize(torch.randn(40, 48))
    parts = (weight.codes, weight.scales.view(torch.uint8), weight.global_scale)
    hooked: Any = made
    hooked.register_load_state_dict_pre_hook(
        lambda module, found, *others: found.update(zip(NAMES, parts, strict=True))
    )
    made.load_state_dict({})
    wanted = state(weight, torch.empty(0))
    del wanted["bias"]
    assert_state(made, wanted)
    assert len(hooked._load_state_dict_pre_hooks) == 1


def test_a_hook_that_fails_leaves_the_weight(arch: str) -> None:
    made = NVFP4Linear.from_linear(dense((128, 128)))
    before, wanted = addresses(made), copied(made.state_dict())

    def fail(*args: Any) -> None:
        raise RuntimeError("no such file")

    hooked: Any = made
    hook = hooked.register_load_state_dict_pre_hook(fail)
    with pytest.raises(RuntimeError, match="no such file"):
        made.load_state_dict(fresh_state(128, 128))
    hook.remove()
    assert not hooked._load_state_dict_pre_hooks
    assert addresses(made) == before
    assert_state(made, wanted)


@pytest.mark.parametrize("there", LAYOUTS)
@pytest.mark.parametrize("how", ["pickle", "torch.save"])
def test_a_pickle_comes_out_as_its_device_wants_it(
    how: str, there: str, arch: str, become: Become
) -> None:
    made = NVFP4Linear.from_linear(dense())
    wanted = copied(made.state_dict())
    x = torch.randn(3, 48)
    file = io.BytesIO()
    pickle.dump(made, file) if how == "pickle" else torch.save(made, file)
    file.seek(0)
    become(there)
    other = pickle.load(file) if how == "pickle" else torch.load(file, weights_only=False)
    assert other.layout == LAYOUTS[there]
    assert_state(other, wanted)
    torch.testing.assert_close(other(x), made(x))


def test_a_deep_copy_has_memory_of_its_own(arch: str) -> None:
    made = NVFP4Linear.from_linear(dense())
    wanted = copied(made.state_dict())
    other = copy.deepcopy(made)
    assert other.layout == made.layout
    made.load_state_dict(fresh_state())
    assert_state(other, wanted)
    assert not set(addresses(other).values()) & set(addresses(made).values())


def test_a_checkpoint_there_and_back(tmp_path: Path, arch: str) -> None:
    model = torch.nn.ModuleDict({"proj": NVFP4Linear.from_linear(dense((128, 128)))})
    save_modelopt(tmp_path, model.state_dict())
    made = NVFP4Linear.from_checkpoint(Checkpoint(tmp_path), "proj")
    assert made.layout == LAYOUTS[arch]
    assert_state(made, model["proj"].state_dict())
