"""Fresh processes with vLLM and our plugin in them: what they are started with, what they bring."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import tomllib

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
GROUP = "vllm.general_plugins"
PLUGINS = ("gristmill_norms", "gristmill_nvfp4")

# Quiet about the network, small on memory, and the settings of a user's shell kept out.
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",
}


def environment(folder: Path, **changes: str) -> dict[str, str]:
    """The environment of a process in which vLLM finds our plugin.

    `folder` takes vLLM's caches, and what an install would leave for vLLM to find if gristmill is
    only on the path.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("VLLM_") and name != "GRISTMILL_VLLM"
    }
    paths = [str(ROOT / "src"), str(HERE)]
    if not {point.name for point in entry_points(group=GROUP)} >= set(PLUGINS):
        paths.append(str(_metadata(folder / "metadata")))
    return {
        **kept,
        **SETTINGS,
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [kept.get("PYTHONPATH")])]),
        **changes,
    }


def _metadata(folder: Path) -> Path:
    """The folder with what an installed gristmill says of its entry points, from pyproject.toml."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"][GROUP]
    info = folder / "gristmill-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gristmill\nVersion: 0\n")
    lines = [f"[{GROUP}]", *(f"{name} = {value}" for name, value in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


def run(arguments: list[str], folder: Path, **changes: str) -> subprocess.CompletedProcess[str]:
    """Python with `arguments`, which must succeed."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment(folder, **changes),
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-8000:]}"
    return done


def generate(run_spec: dict[str, Any], folder: Path, **changes: str) -> dict[str, Any]:
    """What vllm_llm_run.py writes for `run_spec`, and under "log" all that vLLM said."""
    number = len(list(folder.glob("run*.json")))
    source, target = folder / f"run{number}.json", folder / f"result{number}.json"
    source.write_text(json.dumps(run_spec))
    done = run([str(HERE / "vllm_llm_run.py"), str(source), str(target)], folder, **changes)
    result: dict[str, Any] = json.loads(target.read_text())
    result["log"] = done.stdout + done.stderr
    return result
