"""nvfp4_wgmma.cu for Hopper, the only architecture that has its instructions, within its limits."""

from __future__ import annotations

import os
import re
from importlib import resources
from pathlib import Path

import pytest
from nvfp4_wgmma_cases import EVERY, Kernel

from gristmill.errors import CompilerUnavailable
from gristmill.jit.nvrtc import compile_program, compiler_version
from gristmill.jit.resources import resource_usage
from gristmill.select.device import KNOWN

ARCH = "sm_90a"
SOURCE = Path(str(resources.files("gristmill"))) / "kernels" / "cuda" / "nvfp4_wgmma.cu"
REGISTERS_PER_BLOCK = 65536
REGISTER_GRANULE = 8
# With four groups of 128 tokens the sums leave too few registers for two sets of operands: the
# assembler puts every matrix instruction behind the one before it. Right, and never chosen.
SERIALIZED = "128x256"


@pytest.fixture(scope="module")
def compiler() -> None:
    try:
        compiler_version()
    except CompilerUnavailable as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


def registers_after(kernel: Kernel) -> int:
    """What the threads hold together once the producer has given and the others have taken."""
    text = SOURCE.read_text()
    (given,) = re.findall(r"lower_registers<(\d+)>", text)
    (few, three, more) = re.findall(
        r"raise_registers<GROUPS < 3 \? (\d+) : GROUPS == 3 \? (\d+) : (\d+)>", text
    )[0]
    taken = int(few if kernel.groups < 3 else three if kernel.groups == 3 else more)
    return 128 * int(given) + 128 * kernel.groups * taken


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kernel", EVERY, ids=str)
def test_compiles_within_limits(kernel: Kernel) -> None:
    binary = compile_program(kernel.program, ARCH, verbose=True)
    used = resource_usage(binary)[binary.lowered[kernel.name]]
    assert used.spill_bytes == 0
    assert used.stack_bytes == 0
    granted = -(-used.registers // REGISTER_GRANULE) * REGISTER_GRANULE * kernel.threads
    assert granted <= REGISTERS_PER_BLOCK
    if kernel.raised:  # else the instruction waits for registers that nobody gives
        assert registers_after(kernel) <= granted
    assert kernel.shared <= KNOWN[ARCH].shared_per_block
    assert ("serialized" in binary.log) == str(kernel).startswith(SERIALIZED)
