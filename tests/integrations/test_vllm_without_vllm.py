"""The vLLM plugin where vLLM is not installed, or is not the vLLM it knows: a fake stands in."""

from __future__ import annotations

import dataclasses
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from gristmill.integrations.vllm import adapter, plugin
from gristmill.log import forget_warnings, logger
from gristmill.settings import reload_settings

ROOT = Path(__file__).resolve().parent.parent.parent


def native_rms_norm(x, weight, epsilon, variance_size=None): ...


def native_fused_add(x, x_residual, weight, epsilon, variance_size=None): ...


class FakeOp:
    """An IR op: implementations by provider, entered by `register_impl`."""

    def __init__(self, native: Callable[..., Any], allow_inplace: bool) -> None:
        self.impls: dict[str, Any] = {"native": SimpleNamespace(impl_fn=native, supported=True)}
        self.allow_inplace = allow_inplace

    def register_impl(self, provider, *, supported=True, supports_args=None, inplace=False):
        assert provider not in self.impls

        def register(function: Callable[..., Any]) -> None:
            self.impls[provider] = SimpleNamespace(
                impl_fn=function, supported=supported, supports_args=supports_args, inplace=inplace
            )

        return register


@dataclasses.dataclass
class Priority:
    rms_norm: list[str]
    fused_add_rms_norm: list[str]
    other: list[str]


class FakeVllm:
    """The modules of vLLM that the plugin looks at, as an object whose parts tests can change."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        class Platform:
            kind = "cpu"

            def is_cuda(self) -> bool:
                return self.kind == "cuda"

            def is_cpu(self) -> bool:
                return self.kind == "cpu"

            @classmethod
            def get_default_ir_op_priority(cls, vllm_config: Any) -> Priority:
                return Priority(["native"], ["vllm_c", "native"], ["native"])

        self.platform = Platform
        self.ops = SimpleNamespace(
            rms_norm=FakeOp(native_rms_norm, False),
            fused_add_rms_norm=FakeOp(native_fused_add, True),
        )
        self.ir, self.envs = ModuleType("vllm.ir"), ModuleType("vllm.envs")
        self.platforms, self.kernel = ModuleType("vllm.platforms"), ModuleType("vllm.config.kernel")
        self.root, config = ModuleType("vllm"), ModuleType("vllm.config")
        self.root.__version__ = "0.32.0"
        self.root.envs, self.ir.ops = self.envs, self.ops
        self.envs.VLLM_BATCH_INVARIANT = False
        self.platforms.current_platform = Platform()
        self.kernel.IrOpPriorityConfig = Priority
        modules = (self.root, self.ir, self.envs, self.platforms, config, self.kernel)
        for module in modules:
            patch.setitem(sys.modules, module.__name__, module)

    @property
    def registered(self) -> list[str]:
        ops = vars(self.ops).items()
        return [name for name, op in ops if "gristmill" in getattr(op, "impls", ())]

    def priority(self) -> list[list[str]]:
        order = self.platform.get_default_ir_op_priority(None)
        return [order.rms_norm, order.fused_add_rms_norm, order.other]


UNCHANGED = [["native"], ["vllm_c", "native"], ["native"]]
FIRST = [["gristmill", "native"], ["gristmill", "vllm_c", "native"], ["native"]]
BOTH = ["rms_norm", "fused_add_rms_norm"]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeVllm]:
    monkeypatch.delenv("GRISTMILL_VLLM", raising=False)
    reload_settings()
    forget_warnings()
    yield FakeVllm(monkeypatch)
    monkeypatch.undo()
    reload_settings()


@pytest.fixture
def switched_on(vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch) -> FakeVllm:
    monkeypatch.setenv("GRISTMILL_VLLM", "norms")
    reload_settings()
    return vllm


def test_registers_both_and_changes_nothing(vllm: FakeVllm, caplog) -> None:
    plugin.register_norms()
    first = [vllm.ops.rms_norm.impls["gristmill"], vllm.ops.fused_add_rms_norm.impls["gristmill"]]
    plugin.register_norms()
    assert vllm.registered == BOTH
    assert first[0] is vllm.ops.rms_norm.impls["gristmill"]
    assert [one.inplace for one in first] == [False, True]
    assert [one.supported for one in first] == [True, True]
    assert vllm.priority() == UNCHANGED
    assert caplog.messages == []


def test_the_switch_prepends_once(switched_on: FakeVllm, caplog) -> None:
    plugin.register_norms()
    wrapped = switched_on.platform.__dict__["get_default_ir_op_priority"]
    plugin.register_norms()
    assert switched_on.platform.__dict__["get_default_ir_op_priority"] is wrapped
    assert switched_on.priority() == FIRST
    assert caplog.messages == []


def test_the_switch_names_us_once_where_the_platform_names_us_too(switched_on: FakeVllm) -> None:
    default = Priority(["native", "gristmill"], ["gristmill"], [])
    switched_on.platform.get_default_ir_op_priority = classmethod(lambda cls, vllm_config: default)
    plugin.register_norms()
    assert switched_on.priority() == [["gristmill", "native"], ["gristmill"], []]


def test_what_is_registered_are_plain_functions_of_a_file(vllm: FakeVllm) -> None:
    """vLLM traces them, and hashes the file they stand in."""
    plugin.register_norms()
    for op in vars(vllm.ops).values():
        function = op.impls["gristmill"].impl_fn
        assert Path(function.__code__.co_filename).name == "norms.py"
        assert function.__closure__ is None


@pytest.mark.parametrize(
    "version", ["0.33.0", "1.4.0", "0.26.1rc0.dev1114+g5a014e3", "dev", "0.22"]
)
def test_a_version_that_has_all_that_is_needed_is_taken(
    switched_on: FakeVllm, version: str, caplog
) -> None:
    switched_on.root.__version__ = version
    plugin.register_norms()
    assert switched_on.registered == BOTH
    assert switched_on.priority() == FIRST
    assert caplog.messages == []


def drop(name: str) -> Callable[[FakeVllm], None]:
    return lambda vllm: delattr(vllm.ops, name)


def other_signature(vllm: FakeVllm) -> None:
    vllm.ops.rms_norm = FakeOp(
        lambda x, weight, epsilon, variance_size=None, group=None: ..., False
    )


def other_default(vllm: FakeVllm) -> None:
    native = lambda x, weight, epsilon=1e-6, variance_size=None: ...  # noqa: E731
    vllm.ops.rms_norm = FakeOp(native, allow_inplace=False)


def no_inplace(vllm: FakeVllm) -> None:
    vllm.ops.fused_add_rms_norm.allow_inplace = False


def other_registration(vllm: FakeVllm) -> None:
    vllm.ops.fused_add_rms_norm.register_impl = lambda provider, *, supported=True: ...


def no_implementations(vllm: FakeVllm) -> None:
    del vllm.ops.rms_norm.impls


def no_ir(vllm: FakeVllm) -> None:
    del vllm.ir.ops


def no_batch_invariance(vllm: FakeVllm) -> None:
    del vllm.envs.VLLM_BATCH_INVARIANT


def old(version: str) -> Callable[[FakeVllm], None]:
    return lambda vllm: setattr(vllm.root, "__version__", version)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (old("0.21.0"), ["0.21.0", "older than 0.22"]),
        (old("0.9.2+cu129"), ["0.9.2", "older than 0.22"]),
        (no_ir, ["vllm.ir.ops"]),
        (drop("fused_add_rms_norm"), ["vllm.ir.ops.fused_add_rms_norm"]),
        (other_signature, ["vllm.ir.ops.rms_norm", "group"]),
        (other_default, ["vllm.ir.ops.rms_norm", "variance_size"]),
        (no_inplace, ["in place", "vllm.ir.ops.fused_add_rms_norm"]),
        (other_registration, ["inplace, supports_args", "register_impl"]),
        (no_implementations, ["vllm.ir.ops.rms_norm", "AttributeError"]),
        (no_batch_invariance, ["VLLM_BATCH_INVARIANT"]),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_what_it_does_not_know_is_declined_in_one_line(
    switched_on: FakeVllm, change: Callable[[FakeVllm], None], words: list[str], caplog
) -> None:
    switched_on.root.__version__ = "0.40.1"
    change(switched_on)
    plugin.register_norms()
    plugin.register_norms()
    assert switched_on.registered == []
    assert switched_on.priority() == UNCHANGED
    (line,) = caplog.messages
    version = switched_on.root.__version__
    for word in [*words, "vLLM norms", f"vLLM {version}", "0.22 to 0.32", "install"]:
        assert word in line


def no_classmethod(vllm: FakeVllm) -> None:
    del vllm.platform.get_default_ir_op_priority


def more_parameters(vllm: FakeVllm) -> None:
    vllm.platform.get_default_ir_op_priority = classmethod(lambda cls, vllm_config, more: ...)


def no_field(vllm: FakeVllm) -> None:
    vllm.kernel.IrOpPriorityConfig = dataclasses.make_dataclass("Priority", [("rms_norm", list)])


def no_priority_config(vllm: FakeVllm) -> None:
    del vllm.kernel.IrOpPriorityConfig


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (no_classmethod, "get_default_ir_op_priority"),
        (more_parameters, "get_default_ir_op_priority"),
        (no_field, "fused_add_rms_norm in IrOpPriorityConfig"),
        (no_priority_config, "vllm.config.kernel.IrOpPriorityConfig"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_where_the_default_cannot_be_changed_the_provider_is_still_there(
    switched_on: FakeVllm, change: Callable[[FakeVllm], None], words: str, caplog
) -> None:
    change(switched_on)
    plugin.register_norms()
    assert switched_on.registered == BOTH
    (line,) = caplog.messages
    assert words in line
    assert "--ir-op-priority" in line


def test_a_platform_that_is_not_ours(switched_on: FakeVllm, caplog) -> None:
    switched_on.platform.kind = "rocm"
    plugin.register_norms()
    assert not switched_on.ops.rms_norm.impls["gristmill"].supported
    assert switched_on.priority() == UNCHANGED
    (line,) = caplog.messages
    assert "CUDA" in line


def test_batch_invariant_mode(switched_on: FakeVllm, caplog) -> None:
    """Ours come first there, too, by functions that enter gristmill's own mode."""
    switched_on.envs.VLLM_BATCH_INVARIANT = True
    plugin.register_norms()
    assert switched_on.priority() == FIRST
    for op in vars(switched_on.ops).values():
        ours = op.impls["gristmill"]
        assert ours.supported
        assert Path(ours.impl_fn.__code__.co_filename).name == "norms_invariant.py"
        assert ours.impl_fn.__closure__ is None
    assert caplog.messages == []


def test_a_mistake_in_the_switch_switches_nothing_on(
    vllm: FakeVllm, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setenv("GRISTMILL_VLLM", "nrms")
    with pytest.raises(ValueError, match="norms"):
        reload_settings()
    monkeypatch.setattr("gristmill.settings._current", None)
    plugin.register_norms()
    plugin.register_norms()
    assert vllm.registered == BOTH
    assert vllm.priority() == UNCHANGED
    (line,) = caplog.messages
    for words in ("nothing is switched on", "GRISTMILL_VLLM", "did you mean norms"):
        assert words in line


def test_any_other_exception_is_one_line_too(vllm: FakeVllm, caplog) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("schema 'x' does not match")

    vllm.ops.rms_norm.register_impl = lambda provider, *, supported, supports_args, inplace=0: (
        refuse
    )
    plugin.register_norms()
    plugin.register_norms()
    (line,) = caplog.messages
    assert line == "vLLM norms: could not be registered: ValueError: schema 'x' does not match"


def test_without_any_vllm_the_entry_points_do_not_raise(monkeypatch, caplog) -> None:
    forget_warnings()
    monkeypatch.setitem(sys.modules, "vllm", None)
    plugin.register_norms()
    plugin.register_nvfp4()
    assert len(caplog.messages) == 2
    for line in caplog.messages:
        assert "vllm" in line


def test_defaults_of_a_strange_shape_are_left_alone(switched_on: FakeVllm, caplog) -> None:
    plugin.register_norms()
    strange = SimpleNamespace(rms_norm=None)
    adapter_wrapped = adapter._prepending("gristmill", lambda vllm_config: strange)
    assert adapter_wrapped(object, None) is strange
    (line,) = caplog.messages
    assert "left as it is" in line


def test_nothing_of_vllm_is_imported_before_vllm_calls() -> None:
    script = (
        "import sys, gristmill\n"
        "assert not any('integrations.vllm' in name for name in sys.modules)\n"
        "import gristmill.integrations.vllm.plugin, gristmill.integrations.vllm.norms\n"
        "assert not [name for name in sys.modules if name.split('.')[0] == 'vllm']\n"
        "import torch\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run(
        [sys.executable, "-c", script], check=True, env={"PYTHONPATH": str(ROOT / "src")}
    )


def test_the_log_is_seen_without_a_log_of_the_program(switched_on, capsys, monkeypatch) -> None:
    """vLLM sets up its own logger and leaves the root alone: lines must not vanish there."""
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    assert logger.propagate
    switched_on.root.__version__ = "0.20.1"
    plugin.register_norms()
    assert "vLLM 0.20.1 is older than 0.22" in capsys.readouterr().err


def test_entry_points_are_declared() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    for name in ("norms", "nvfp4"):
        line = f'gristmill_{name} = "gristmill.integrations.vllm.plugin:register_{name}"'
        assert line in text
        assert callable(getattr(plugin, f"register_{name}"))
    assert '[project.entry-points."vllm.general_plugins"]' in text


@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32, None])
def test_the_norms_themselves_need_no_vllm(weight_dtype: torch.dtype | None) -> None:
    """vLLM's formula, written out: rounded to the weight's dtype, then to that of x."""
    from gristmill.integrations.vllm import norms

    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16() * 3
    weight = None if weight_dtype is None else torch.linspace(0.3, 1.7, 64).to(weight_dtype)

    def native(h: torch.Tensor) -> torch.Tensor:
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-5)
        return (h if weight is None else h.to(weight.dtype) * weight).bfloat16()

    assert norms.rms_norm_takes(x, weight, 1e-5)
    tolerance = {"atol": 0.0, "rtol": 2**-7}
    torch.testing.assert_close(norms.rms_norm(x, weight, 1e-5), native(x.float()), **tolerance)
    residual = x.flip(0).contiguous()
    total = x.float() + residual.float()
    given = x.clone(), residual.clone()
    assert norms.fused_add_rms_norm_takes(*given, weight, 1e-5)
    y, kept = norms.fused_add_rms_norm(*given, weight, 1e-5)
    assert y is given[0]
    assert kept is given[1]
    assert torch.equal(kept, total.bfloat16())
    torch.testing.assert_close(y, native(total), **tolerance)


def test_only_the_users_own_process_speaks(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM calls the plugin in each of its processes, and eight workers have one thing to say."""
    from gristmill.integrations.vllm.switch import tell_once

    with caplog.at_level(logging.INFO, "gristmill"):
        tell_once("own", "in the process that was started")
        monkeypatch.setattr("multiprocessing.parent_process", lambda: object())
        tell_once("worker", "in a worker")
    levels = {record.message: record.levelname for record in caplog.records}
    assert levels == {"in the process that was started": "WARNING", "in a worker": "INFO"}
