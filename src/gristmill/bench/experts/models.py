"""The mixtures of experts that benchmarks are about, by the models that have them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gristmill.errors import ArgumentError

# Entries of M x E x k x H x I, the shape of a problem.
SIZES = 5


@dataclass(frozen=True)
class Model:
    """The experts of one layer of a model.

    E experts, of which each token takes `topk`; rows of w13 are 2 I, those of w2 H. `bias`: both
    products have one. `limit`: where gate and up are cut before the activation.
    """

    name: str
    experts: int
    topk: int
    hidden: int
    inner: int
    bias: bool = False
    activation: str = "silu"
    limit: float | None = None

    def shape(self, tokens: int) -> tuple[int, ...]:
        """M x E x k x H x I, as the op's examples take it."""
        return (tokens, self.experts, self.topk, self.hidden, self.inner)

    @property
    def parameters(self) -> int:
        """Values of an expert's two matrices."""
        return 3 * self.hidden * self.inner


MODELS: Mapping[str, Model] = {
    model.name: model
    for model in (
        Model("qwen3-30b-a3b", 128, 8, 2048, 768),
        Model("qwen3-235b-a22b", 128, 8, 4096, 1536),
        Model("deepseek-v3", 256, 8, 7168, 2048),
        Model("gpt-oss-120b", 128, 4, 2880, 2880, bias=True, activation="swiglu_oai", limit=7.0),
    )
}
# For a CPU, whose times are there for ratios only.
TINY = Model("tiny", 8, 2, 128, 64)
KNOWN: Mapping[str, Model] = {**MODELS, TINY.name: TINY}

TINY_TOKENS: tuple[int, ...] = (1, 16)
ROUTINGS = ("uniform", "skewed")


def model_of(shape: tuple[int, ...]) -> Model:
    """A model without a name, of a shape M x E x k x H x I that was given by hand."""
    _, experts, topk, hidden, inner = _five(shape)
    if topk > experts:
        raise ArgumentError(f"a token cannot take {topk} distinct experts of {experts}")
    for model in KNOWN.values():
        if model.shape(0)[1:] == tuple(shape[1:]):
            return model
    return Model("x".join(map(str, shape[1:])), experts, topk, hidden, inner)


def _five(shape: tuple[int, ...]) -> tuple[int, ...]:
    if len(shape) != SIZES:
        written = "x".join(map(str, shape))
        raise ArgumentError(
            f"{written!r}: a mixture of experts is M x experts x topk x H x I, as in "
            f"8x128x8x2048x768"
        )
    return shape
