"""What a compiler gives: a cubin and what must be known to launch it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Binary:
    """A compiled program: the cubin, and the symbol of each kernel's name in it.

    `compiler` and `headers` are versions, for the cache: "nvrtc 13.0", and "cuda 13.0" where the
    program includes headers of the CUDA toolkit ("" otherwise). `facts` are the numbers of a launch
    that a compiler settles and not its caller (see `jit/triton.py`); NVRTC settles none.
    """

    cubin: bytes
    lowered: Mapping[str, str]
    log: str
    compiler: str
    headers: str = ""
    facts: Mapping[str, int] = field(default_factory=dict)
