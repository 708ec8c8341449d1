"""State dicts that are rejected: the module keeps all that it had, in the memory that it had."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from nn_layouts import LAYOUTS, State, addresses, assert_same, assert_state, copied
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from gristmill.formats.nvfp4 import packing
from gristmill.nn import NVFP4Linear, NVFP4MoE, nvfp4_module

Become = Callable[[str], None]
Change = Callable[[torch.Tensor], Any]


def linear() -> NVFP4Linear:
    return NVFP4Linear.from_linear(torch.nn.Linear(64, 48))


def experts() -> NVFP4MoE:
    gate, up, down = torch.randn(2, 48, 32), torch.randn(2, 48, 32), torch.randn(2, 32, 48)
    return NVFP4MoE.from_experts(
        gate, up, down, w13_bias=torch.randn(2, 96), w2_bias=torch.randn(2, 32)
    )


MODULES = {"linear": linear, "experts": experts}


def as_bytes(part: torch.Tensor) -> torch.Tensor:
    return part.reshape(-1, part.shape[-1]).contiguous().view(torch.uint8)


def nested(part: torch.Tensor, **options: Any) -> torch.Tensor:
    return torch.nested.nested_tensor([as_bytes(part)], **options)


def faked(part: torch.Tensor) -> torch.Tensor:
    with FakeTensorMode() as mode:
        return mode.from_tensor(part)


def filled(value: float) -> Change:
    def change(part: torch.Tensor) -> torch.Tensor:
        part.view(-1)[-1:] = torch.tensor([value]).to(part.dtype)
        return part

    return change


# Of each part of a state dict, by the end of its name: what it is changed to, and the error.
SHAPES: dict[str, Change] = {
    "size mismatch for {}": lambda part: part[..., :-1],
    "size mismatch for {}:": lambda part: part[None],
}
KINDS: dict[str, Change] = {
    "{} must be a dense tensor, got list": lambda part: part.float().tolist(),
    "{} must be a dense tensor, got Tensor of layout": lambda part: part.float().to_sparse(),
    "{} must be a dense tensor, got .*sparse_coo": lambda part: as_bytes(part).to_sparse(),
    "{} must be a dense tensor, got .*sparse_csr": lambda part: as_bytes(part).to_sparse_csr(),
    "{} must be a dense tensor, got Tensor of": lambda part: nested(part),
    "{} must be a dense tensor, got NestedTensor": lambda part: nested(part, layout=torch.jagged),
    "{} must be a dense tensor, got UninitializedParameter": lambda part: UninitializedParameter(),
    "{} must be a dense tensor, got UninitializedBuffer": lambda part: UninitializedBuffer(),
    "{} must have .*dtype": lambda part: part.float().to(torch.int16),
    "{} is on the meta device": lambda part: part.to("meta"),
    "{} is on the meta device or fake": faked,
}
BLOCKS = {
    f"{{}}: block scales must be neither negative nor NaN, got {value}": filled(value)
    for value in (math.nan, -1.0)
}
GLOBALS = {
    f"{{}}: global scales must be finite and not negative, got {value}": filled(value)
    for value in (math.nan, math.inf, -math.inf, -1.0)
}


def damages(state: State) -> list[tuple[str, str, Any]]:
    """Every way in which one tensor can be wrong: its name, the error, the tensor."""
    found = []
    for name, part in state.items():
        changes = {**SHAPES, **KINDS}
        changes |= BLOCKS if name.endswith("weight_scale") else {}
        changes |= GLOBALS if name.endswith("weight_scale_2") else {}
        for message, change in changes.items():
            if name.endswith("weight_scale_2") and message == "size mismatch for {}:":
                continue
            found.append((name, message.format(name), change(part.clone())))
    return found


@pytest.mark.filterwarnings("ignore:.*(in prototype|in beta)")
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("arch_here", LAYOUTS)
def test_one_bad_tensor_rejects_all(
    kind: str, assign: bool, arch_here: str, become: Become
) -> None:
    """Alone, strictly and not, and in a larger module, of which the rest is torch's to load."""
    become(arch_here)
    made, other = MODULES[kind](), MODULES[kind]()
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), made)
    kept, given = copied(made.state_dict()), copied(other.state_dict())
    before = addresses(made)
    for name, message, value in damages(given):
        if assign and "meta device" in message:
            continue
        bad = {**given, name: value}
        nested = {f"1.{key}": part for key, part in bad.items()}
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=message):
                made.load_state_dict(bad, strict, assign)
            with pytest.raises(RuntimeError, match=message.replace(name, rf"1\.{name}")):
                model.load_state_dict(nested, strict, assign)
        assert addresses(made) == before
    assert_state(made, kept)
    made.load_state_dict(given, assign=assign)
    assert_state(made, given)


@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("arch_here", LAYOUTS)
def test_a_missing_or_unexpected_key_rejects_all(
    kind: str, assign: bool, arch_here: str, become: Become
) -> None:
    become(arch_here)
    made, given = MODULES[kind](), copied(MODULES[kind]().state_dict())
    kept, before = copied(made.state_dict()), addresses(made)
    for name in given:
        some = {key: part for key, part in given.items() if key != name}
        with pytest.raises(RuntimeError) as caught:
            made.load_state_dict(some, assign=assign)
        assert f'Missing key(s) in state_dict: "{name}". ' in str(caught.value)
        assert addresses(made) == before
        assert_state(made, kept)
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "odd"'):
        made.load_state_dict({**given, "odd": torch.ones(1)}, assign=assign)
    assert addresses(made) == before
    assert_state(made, kept)
    found = made.load_state_dict({**given, "odd": torch.ones(1)}, False, assign)
    assert found.unexpected_keys == ["odd"]
    assert_state(made, given)


def test_modules_beside_a_rejected_one() -> None:
    """Each is loaded wholly or not at all."""
    model = torch.nn.ModuleDict({"a": linear(), "b": linear(), "c": linear()})
    kept = copied(model.state_dict())
    given = {key: copied(linear().state_dict())[key[2:]] for key in kept}
    bad = {**given, "b.weight_scale_2": torch.full((48,), math.nan)}
    with pytest.raises(RuntimeError, match=r"b\.weight_scale_2: global scales must be finite"):
        model.load_state_dict(bad)
    mixed = {key: kept[key] if key.startswith("b.") else part for key, part in given.items()}
    assert_state(model, mixed)


def test_a_module_that_is_there_twice() -> None:
    """Under each of its names it loads all or nothing."""
    made = linear()
    model = torch.nn.ModuleDict({"a": made, "b": made})
    given = copied(linear().state_dict())
    bad = {"a.weight_scale": given["weight_scale"].view(torch.uint8) * 0 + 255}
    with pytest.raises(RuntimeError, match=r"a\.weight_scale: block scales must be"):
        model.load_state_dict(
            {f"{name}.{key}": part for name in "ab" for key, part in given.items()} | bad
        )
    assert_state(made, given)


def test_a_meta_module_stays_on_meta() -> None:
    made, given = NVFP4Linear(64, 48, device="meta"), copied(linear().state_dict())
    with pytest.raises(RuntimeError, match="weight_scale_2: global scales must be finite"):
        made.load_state_dict({**given, "weight_scale_2": -given["weight_scale_2"]}, assign=True)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "bias"'):
        made.load_state_dict({k: v for k, v in given.items() if k != "bias"}, assign=True)
    assert all(part.is_meta for part in (*made.parameters(), *made.buffers()))
    made.load_state_dict(given, assign=True)
    assert_state(made, given)


@pytest.mark.parametrize("copied_by", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
def test_copies_reject_alike(copied_by: Callable[[Any], Any], arch: str) -> None:
    made = linear()
    one, kept = copied_by(made), copied(made.state_dict())
    given = copied(linear().state_dict())
    with pytest.raises(RuntimeError, match="weight_scale_2: global scales must be finite"):
        one.load_state_dict({**given, "weight_scale_2": -given["weight_scale_2"]})
    assert_state(one, kept)
    one.load_state_dict(given)
    assert_state(one, given)
    assert_state(made, kept)
    assert "_is_strict" not in vars(one)


def test_a_hook_may_clear_missing_and_unexpected_keys(arch: str) -> None:
    """Then there is no error, and what is there is loaded."""
    made, given = linear(), copied(linear().state_dict())
    kept = copied(made.state_dict())
    hook = made.register_load_state_dict_post_hook(
        lambda module, keys: [one.clear() for one in keys] and None
    )
    some = {key: part for key, part in given.items() if key != "bias"}
    made.load_state_dict({**some, "odd": torch.ones(1)})
    assert_state(made, {**given, "bias": kept["bias"]})
    hook.remove()
    assert "_is_strict" not in vars(made)


def test_buffers_and_state_that_users_add() -> None:
    class Counting(NVFP4Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

        def set_extra_state(self, state: Any) -> None:
            self.found = state

    made = Counting(64, 48)
    made.register_buffer("steps", torch.tensor([7]))
    given = copied(linear().state_dict()) | {"steps": torch.tensor([9])}
    made.load_state_dict({**given, "_extra_state": {"calls": 4}})
    assert made.found == {"calls": 4}
    state = made.state_dict()
    assert state.pop("_extra_state") == {"calls": 3}
    assert_same(state, given)


def test_values_that_are_not_there_are_assigned() -> None:
    """Without a look at them."""
    made, given = linear(), {name: faked(part) for name, part in linear().state_dict().items()}
    made.load_state_dict(given, assign=True)
    assert all(hasattr(part, "fake_mode") for part in made.state_dict().values())


def test_what_cannot_be_written_to_rejects_all(arch: str) -> None:
    """A bias whose elements share memory, and tensors of inference mode outside of it."""
    given, other = copied(linear().state_dict()), linear()
    other.bias = torch.nn.Parameter(torch.zeros(1).expand(48), requires_grad=False)
    with torch.inference_mode():
        inferred = linear()
    for made, words in ((other, "elements of it share memory"), (inferred, "in inference mode")):
        kept, before = copied(made.state_dict()), addresses(made)
        for strict in (True, False):
            with pytest.raises(RuntimeError, match=f"bias .*{words}"):
                made.load_state_dict(given, strict)
        assert addresses(made) == before
        assert_state(made, kept)
        made.load_state_dict(given, assign=True)
        assert_state(made, given)
    with torch.inference_mode():
        inferred = linear()
        inferred.load_state_dict(given)
        other.load_state_dict(given)
    assert_state(inferred, given)


@pytest.mark.parametrize("arch", LAYOUTS)
def test_what_torch_cannot_assign_rejects_all(arch: str, become: Become) -> None:
    """A tensor made in inference mode cannot become a parameter that is trained."""
    become(arch)
    made, given = linear(), linear().state_dict()
    kept, before = copied(made.state_dict()), addresses(made)
    with torch.inference_mode():
        given = copied(given)
    for strict in (True, False):
        with pytest.raises(RuntimeError, match="requires_grad=True on inference tensor"):
            made.load_state_dict(given, strict, assign=True)
        assert addresses(made) == before
        assert_state(made, kept)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("arch", LAYOUTS)
def test_what_a_hook_rejects_is_not_loaded(arch: str, assign: bool, become: Become) -> None:
    become(arch)
    made, given = linear(), linear().state_dict()
    kept, before = copied(made.state_dict()), addresses(made)
    made.register_load_state_dict_pre_hook(lambda *args: args[-1].append("not this one"))
    with pytest.raises(RuntimeError, match="not this one"):
        made.load_state_dict(given, assign=assign)
    assert addresses(made) == before
    assert_state(made, kept)


def test_layers_beside_a_tensor_without_strides() -> None:
    """Torch loads them: it raises its error at the end."""
    model, given = torch.nn.Sequential(linear(), linear(), linear()), {}
    for number in range(3):
        given |= {f"{number}.{key}": part for key, part in linear().state_dict().items()}
    kept = copied(model[1].state_dict())
    bad = {**given, "1.weight_scale": given["1.weight_scale"].view(torch.uint8).to_sparse()}
    with pytest.raises(RuntimeError, match=r"1\.weight_scale must be a dense tensor"):
        model.load_state_dict(bad)
    for number in (0, 2):
        wanted = {k[2:]: part for k, part in given.items() if k.startswith(f"{number}.")}
        assert_state(model[number], wanted)
    assert_state(model[1], kept)


def test_scales_of_zero_load() -> None:
    """Those of a layer of zeros."""
    made = NVFP4Linear.from_linear(torch.nn.Linear(64, 48))
    given = copied(made.state_dict())
    given["weight_scale_2"].zero_()
    given["weight_scale"].view(torch.uint8).zero_()
    made.load_state_dict(given)
    assert_state(made, given)
    assert torch.equal(made(torch.randn(3, 64)), made.bias.expand(3, 48))


def test_a_gpu_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look at values there would be to synchronize: fakes raise where that happens."""
    monkeypatch.setattr(packing, "is_real", lambda found: True)
    kinds = linear()._kinds()
    with FakeTensorMode():
        for name, (shape, dtype) in kinds.items():
            found = torch.empty(shape, dtype=dtype, device="cuda")
            assert nvfp4_module._problem(name, found, found, (shape, dtype), False) is None
            if name != "weight":
                with pytest.raises(RuntimeError):
                    nvfp4_module._problem(name, found.to("cpu"), found, (shape, dtype), False)
