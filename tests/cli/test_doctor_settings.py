"""`gristmill doctor` where the environment names what is no setting."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gristmill.cli.app import app
from gristmill.integrations.vllm.switch import is_switched_on
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
        "'GRISTMILL_VLM' is not a setting of gristmill, and is ignored (did you mean "
        "GRISTMILL_VLLM?)"
    )
    assert report["broken"] == []


# The doctor, where importing Triton fails. It is installed for this process alone.
WITH_BROKEN_TRITON = """
import importlib.metadata, sys
sys.path.insert(0, sys.argv.pop(1))
version = importlib.metadata.version
importlib.metadata.version = lambda name: "3.7.1" if name == "triton" else version(name)
from gristmill.cli.app import app
app(["doctor", "--json"])
"""


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("raise RuntimeError('no device')", "RuntimeError: no device"),
        ("raise SystemExit(3)", "SystemExit: 3"),
    ],
)
def test_doctor_names_a_compiler_that_is_installed_and_broken(
    code: str, reason: str, tmp_path: Path
) -> None:
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text(code)
    environment = {**os.environ, f"{PREFIX}CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", WITH_BROKEN_TRITON, str(tmp_path)],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    warnings = json.loads(done.stdout)["warnings"]
    said = f"Triton cannot be imported ({reason}); install it with: "
    assert [one for one in warnings if one.startswith(said)], warnings


def test_a_name_that_is_no_setting_switches_nothing_off_in_vllm(cluster, caplog) -> None:
    cluster.setenv(f"{PREFIX}VLLM", "norms")
    assert is_switched_on("norms")
    assert not is_switched_on("nvfp4")
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("'GRISTMILL_VLM' is not a setting of gristmill")
