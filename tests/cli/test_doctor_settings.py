"""`gristmill doctor` where the environment names what is no setting."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from gristmill.cli.app import app
from gristmill.integrations.vllm.switch import is_switched_on
from gristmill.jit import optional, triton
from gristmill.log import forget_warnings
from gristmill.ops.registry import OPS
from gristmill.settings import PREFIX, reload_settings


@pytest.fixture
def cluster(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Names that Kubernetes sets for a service, and one that somebody has misspelt."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("gristmill.cli.doctor.OPS", {"rms_norm": OPS["rms_norm"]})
    monkeypatch.setenv(f"{PREFIX}CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv(f"{PREFIX}PORT", "tcp://10.0.0.1:8000")
    monkeypatch.setenv(f"{PREFIX}SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv(f"{PREFIX}VLM", "norms")
    monkeypatch.setattr("gristmill.settings._current", None)
    forget_warnings()
    yield monkeypatch
    monkeypatch.undo()
    reload_settings()


@pytest.mark.usefixtures("cluster")
def test_doctor_warns_of_names_that_are_no_settings() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    (warning,) = report["warnings"]
    assert warning == (
        "GRISTMILL_VLM is not a setting of gristmill, and is ignored (did you mean GRISTMILL_VLLM?)"
    )
    assert report["broken"] == []


@pytest.mark.usefixtures("cluster")
def test_doctor_names_a_compiler_that_is_installed_and_broken(cluster) -> None:
    cluster.delenv(f"{PREFIX}VLM")
    cluster.setattr(optional, "_broken", {"triton": "SystemExit: 3"})
    cluster.setattr(triton, "installed_version", lambda: "triton 3.7.1")
    triton._triton.cache_clear()
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 0, result.output
    (warning,) = json.loads(result.stdout)["warnings"]
    assert warning.startswith("Triton cannot be imported (SystemExit: 3); install it with: ")


def test_a_name_that_is_no_setting_switches_nothing_off_in_vllm(cluster, caplog) -> None:
    cluster.setenv(f"{PREFIX}VLLM", "norms")
    assert is_switched_on("norms")
    assert not is_switched_on("nvfp4")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("GRISTMILL_VLM is not a setting of gristmill")
