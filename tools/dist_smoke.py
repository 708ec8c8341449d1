"""What a new user would try, run by tools/check_dist.py in an environment with torch and the wheel.

    python -I tools/dist_smoke.py VERSION EMPTY_FOLDER

Says what it found in one line, or fails at the first thing that does not work.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path


def expect(holds: bool, what: str) -> None:
    if not holds:
        sys.exit(f"smoke test: {what}")


def imports(release: str) -> None:
    """From the environment, of the right version, and without what a command needs only."""
    import torch

    before = set(sys.modules)
    import gristmill

    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    expect(
        Path(gristmill.__file__).is_relative_to(sys.prefix), f"{gristmill.__file__} was imported"
    )
    versions = {gristmill.__version__, importlib.metadata.version("gristmill")}
    expect(versions == {release}, f"the version is {versions}, not {release}")
    late = {"cuda", "cutlass", "regex", "rich", "triton", "typer"} & new
    expect(not late, f"import gristmill also imports {late}")
    expect(not torch.cuda.is_initialized(), "import gristmill touches the GPU")


def computes() -> None:
    """An op, its gradient and its compiled form against torch's; NVFP4 against its own values."""
    import torch
    import torch.nn.functional as F

    import gristmill as gm

    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(64, 512, device=device, requires_grad=True)
    weight = torch.randn(512, device=device, requires_grad=True)

    def ours(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return gm.softmax(gm.rms_norm(x, weight))

    def torchs(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.softmax(F.rms_norm(x, (512,), weight, 1e-6), -1)

    wanted = torchs(x, weight)
    grad = torch.randn_like(wanted)
    wanted_grads = torch.autograd.grad(wanted, (x, weight), grad)
    for function in (ours, torch.compile(ours, fullgraph=True, backend="aot_eager")):
        y = function(x, weight)
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(torch.autograd.grad(y, (x, weight), grad), wanted_grads)
    w4 = gm.nvfp4.quantize(torch.randn(128, 512, device=device) / 23)
    dense = F.linear(x.detach(), gm.nvfp4.dequantize(w4, torch.float32))
    torch.testing.assert_close(gm.nvfp4.linear(x.detach(), w4), dense, rtol=1e-2, atol=1e-2)


def commands(release: str) -> str:
    """The command works, chooses by the shipped table, and says what this machine is."""
    expect(command("--version").strip() == f"gristmill {release}", "gristmill --version is wrong")
    choice = json.loads(command("explain", "rms_norm", "--arch", "sm_90a", "--json"))
    decided = " ".join(choice["notes"])
    expect("shipped table" in decided, f"no shipped table decides for sm_90a: {decided!r}")
    chosen = [one["variant"] for one in choice["variants"] if one["status"] == "chosen"]
    expect(chosen != ["library"], "sm_90a gets torch's own rms_norm")
    doctor = command("doctor")
    expect("Everything that should work here does." in doctor, f"doctor is not content:\n{doctor}")
    return doctor


def command(*words: str) -> str:
    gristmill = Path(sys.prefix) / "bin" / "gristmill"
    done = subprocess.run([gristmill, *words], capture_output=True, text=True)
    expect(done.returncode == 0, f"gristmill {' '.join(words)} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def compiler(doctor: str) -> str:
    """With a torch for CUDA 13 the compiler is there by itself; without, nothing breaks."""
    import torch

    if (torch.version.cuda or "").startswith("13."):
        from cuda.bindings import nvrtc

        expect(int(nvrtc.nvrtcVersion()[0]) == 0, "NVRTC of torch's own wheels does not load")
        return f"torch {torch.__version__}, its own NVRTC"
    expect(
        "no GPU" in doctor or torch.cuda.is_available(), "doctor does not say that no GPU is here"
    )
    return f"torch {torch.__version__}, no compiler needed"


def plugins() -> None:
    """Both entry points of vLLM's can be loaded where there is no vLLM."""
    found = importlib.metadata.entry_points(group="vllm.general_plugins")
    names = {one.name for one in found if callable(one.load())}
    expect(names >= {"gristmill_norms", "gristmill_nvfp4"}, f"vLLM would find {names} only")


def main() -> None:
    release, folder = sys.argv[1:]
    for name in [name for name in os.environ if name.startswith("GRISTMILL_")]:
        del os.environ[name]
    os.environ["HOME"] = folder  # the cache goes there
    imports(release)
    computes()
    plugins()
    doctor = commands(release)
    sys.stdout.write(f"gristmill {release} works: {compiler(doctor)}\n")


if __name__ == "__main__":
    main()
