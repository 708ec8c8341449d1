"""The provider's two functions for a vLLM that promises results which do not depend on the batch.

Which kernel a norm runs by is chosen at every call, by the modes in force there. A compiled graph
enters none, and a mode that was in force while it was traced is forgotten. So each function is an
op of its own, whose kernel enters gristmill's batch-invariant mode around the norm: whichever
thread calls it, eagerly, from a compiled graph or into a captured one.

As in norms.py, signatures are those of vLLM's own implementations to the letter.
"""

from functools import partial

import torch
from torch import Tensor

from gristmill.integrations.vllm import norms
from gristmill.ops import written_views
from gristmill.ops.autograd import Refusal, define_autograd
from gristmill.ops.direct import needs_grad, refuse_tangents
from gristmill.ops.op import LIBRARY, NAMESPACE
from gristmill.select.overrides import batch_invariant

_RMS_NORM = "vllm_invariant_rms_norm"
_FUSED_ADD_RMS_NORM = "vllm_invariant_fused_add_rms_norm_"


def rms_norm(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> Tensor:
    y: Tensor = torch.ops.gristmill.vllm_invariant_rms_norm(x, weight, epsilon)
    return y


def fused_add_rms_norm(
    x: Tensor,
    x_residual: Tensor,
    weight: Tensor | None,
    epsilon: float,
    variance_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    torch.ops.gristmill.vllm_invariant_fused_add_rms_norm_(x, x_residual, weight, epsilon)
    return x, x_residual


def rms_norm_takes(
    x: Tensor, weight: Tensor | None, epsilon: float, variance_size: int | None = None
) -> bool:
    # The op around the norm hides it from autograd. Heads too, in graphs: what Inductor makes of
    # them promises nothing.
    return not needs_grad(x, weight) and norms.is_ours(x, weight, variance_size)


fused_add_rms_norm_takes = norms.fused_add_rms_norm_takes


def _rms_norm(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    with batch_invariant():
        return norms.rms_norm(x, weight, epsilon)


def _fused_add_rms_norm_(
    x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float
) -> None:
    with batch_invariant():
        norms.fused_add_rms_norm(x, residual, weight, epsilon)


def _empty_like(x: Tensor, weight: Tensor | None, epsilon: float) -> Tensor:
    return torch.empty_like(x)


def _nothing(x: Tensor, residual: Tensor, weight: Tensor | None, epsilon: float) -> None:
    return None


_TAGS = (torch.Tag.pt2_compliant_tag,)
LIBRARY.define(f"{_RMS_NORM}(Tensor x, Tensor? weight, float epsilon) -> Tensor", tags=_TAGS)
LIBRARY.define(
    f"{_FUSED_ADD_RMS_NORM}(Tensor(a!) x, Tensor(b!) residual, Tensor? weight, float epsilon) "
    "-> ()",
    tags=_TAGS,
)
for _name, _run, _fake, _instead in (
    (_RMS_NORM, _rms_norm, _empty_like, "gristmill.rms_norm"),
    (_FUSED_ADD_RMS_NORM, _fused_add_rms_norm_, _nothing, "gristmill.add_rms_norm"),
):
    LIBRARY.impl(_name, _run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{_name}", _fake, lib=LIBRARY)
    _overload = getattr(torch.ops.gristmill, _name).default
    written_views.define(LIBRARY, _name, _overload)
    define_autograd(
        LIBRARY,
        _overload,
        _run,
        Refusal(_name, _instead).differentiated,
        partial(refuse_tangents, _name),
    )
