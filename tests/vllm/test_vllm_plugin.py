"""The plugin as vLLM loads it, in fresh processes: registered, quick, silent, off until asked."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from vllm_helpers import run

# Loads the plugins as every process of vLLM does, then tells what has changed.
SCRIPT = """
import json, time
import torch
import vllm.engine.arg_utils
from vllm import ir
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.plugins import load_general_plugins, load_plugins_by_group

norms = {"rms_norm": ir.ops.rms_norm, "fused_add_rms_norm": ir.ops.fused_add_rms_norm}
default = vars(current_platform.get_default_ir_op_priority(VllmConfig()))
import gristmill
start = time.process_time()
import gristmill.integrations.vllm.plugin
seconds = time.process_time() - start
found = load_plugins_by_group("vllm.general_plugins")
ours = {name: register for name, register in found.items() if name.startswith("gristmill")}
start = time.process_time()
for register in ours.values():
    register()
seconds += time.process_time() - start
implementations = {name: op.impls.get("gristmill") for name, op in norms.items()}
load_general_plugins()
for register in ours.values():
    register()
assert implementations == {name: op.impls.get("gristmill") for name, op in norms.items()}
from gristmill.jit.counters import snapshot

report = {
    "loaded": sorted(ours),
    "seconds": seconds,
    "supported": {name: one and one.supported for name, one in implementations.items()},
    "files": {name: one and one.impl_fn.__code__.co_filename.rpartition("/")[2]
              for name, one in implementations.items()},
    "before": default,
    "default": vars(current_platform.get_default_ir_op_priority(VllmConfig())),
    "asked": vars(VllmConfig(kernel_config={"ir_op_priority": {"rms_norm": "native"}})
                  .kernel_config.ir_op_priority),
    "compiled": snapshot(),
    "cuda": torch.cuda.is_initialized(),
}
if all(implementations.values()):
    for op in norms.values():
        op.set_default(["gristmill", "native"])
    report["order"] = {name: op.get_priority() for name, op in norms.items()}
print("REPORT", json.dumps(report))
"""
NORMS = ("rms_norm", "fused_add_rms_norm")


def load(folder: Path, **changes: str) -> tuple[dict[str, Any], list[str]]:
    """The report, and the lines that gristmill logged."""
    done = run(["-c", SCRIPT], folder, **changes)
    (line,) = re.findall(r"^REPORT (.*)$", done.stdout, re.M)
    said = [line for line in done.stderr.splitlines() if line.startswith("gristmill:")]
    return json.loads(line), said


def test_registered_at_once_and_nothing_changed(tmp_path: Path) -> None:
    report, said = load(tmp_path)
    assert report["loaded"] == ["gristmill_norms", "gristmill_nvfp4"]
    assert report["supported"] == dict.fromkeys(NORMS, True)
    assert report["files"] == dict.fromkeys(NORMS, "norms.py")
    assert report["default"] == report["before"]
    assert report["order"] == {name: ["gristmill", "native"] for name in NORMS}
    assert said == []
    assert not report["cuda"]
    assert not any(report["compiled"].values())
    assert report["seconds"] < 0.05  # beyond `import gristmill`, which another test times


def test_the_switch_puts_us_first_but_behind_what_was_asked_for(tmp_path: Path) -> None:
    report, said = load(tmp_path, GRISTMILL_VLLM="norms")
    for name, order in report["before"].items():
        first = ["gristmill"] if name in NORMS else []
        assert report["default"][name] == first + order
    assert report["asked"]["rms_norm"] == ["native", "gristmill"]
    assert report["asked"]["fused_add_rms_norm"] == report["default"]["fused_add_rms_norm"]
    assert said == []


def test_a_mistake_in_the_switch_is_one_line(tmp_path: Path) -> None:
    report, said = load(tmp_path, GRISTMILL_VLLM="norm")
    assert report["default"] == report["before"]
    assert report["supported"] == dict.fromkeys(NORMS, True)
    (line,) = said
    for words in ("nothing is switched on", "GRISTMILL_VLLM", "'norm'", "did you mean norms"):
        assert words in line


def test_batch_invariant_norms_take_part_in_their_own_mode(tmp_path: Path) -> None:
    report, said = load(tmp_path, GRISTMILL_VLLM="norms", VLLM_BATCH_INVARIANT="1")
    assert report["supported"] == dict.fromkeys(NORMS, True)
    assert report["files"] == dict.fromkeys(NORMS, "norms_invariant.py")
    assert report["order"] == {name: ["gristmill", "native"] for name in NORMS}
    for name in NORMS:
        assert report["default"][name] == ["gristmill", *report["before"][name]]
    assert said == []


def test_either_half_can_be_left_out(tmp_path: Path) -> None:
    report, said = load(tmp_path, VLLM_PLUGINS="gristmill_nvfp4", GRISTMILL_VLLM="norms")
    assert report["loaded"] == ["gristmill_nvfp4"]
    assert report["supported"] == dict.fromkeys(NORMS, None)
    assert report["default"] == report["before"]
    assert said == []


@pytest.mark.parametrize("option", ["--ir-op-priority.rms_norm=gristmill", "--ir-op-priority"])
def test_the_option_of_the_command_line(option: str) -> None:
    """As `vllm serve` parses it; what it does in a model is tested where one is run."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    words = [option] if "=" in option else [option, '{"rms_norm": ["gristmill"]}']
    arguments = EngineArgs.add_cli_args(FlexibleArgumentParser()).parse_args(words)
    chosen = EngineArgs.from_cli_args(arguments).ir_op_priority
    assert chosen.rms_norm == ["gristmill"]
