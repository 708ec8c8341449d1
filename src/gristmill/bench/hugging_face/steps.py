"""Generation as servers do it: prefill once, then one token after the other by the same step.

A step is the forward of one token, its argmax, and the notes for the next step, all on the device:
what changes from step to step (token, position, mask, the cache's length) is in tensors whose
addresses stay, and nothing is read back. So a CUDA graph of one step is a graph of all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

WARM_STEPS = 3


class Steps:
    """Greedy tokens of a model of transformers', `count` of them after the prompt `ids`.

    `compiled`: the step's forward is (the prefill's never: it is another shape, and runs once).
    Until `capture` a step is run by the host; from then on it is a replay.
    """

    def __init__(self, model: Any, ids: torch.Tensor, count: int, *, compiled: bool):
        from transformers import StaticCache

        self._model, self._ids, self._device = model, ids, ids.device
        self._count = count
        # The last token is never fed, but a length of the prompt's kind keeps attention aligned.
        size = ids.shape[1] + count
        self._cache = StaticCache(config=model.config, max_cache_len=size)
        self._forward: Callable[..., Any] = (
            torch.compile(model, dynamic=False) if compiled else model
        )
        self._slots = torch.arange(size, device=self._device)
        self._text = torch.zeros((1, size), dtype=torch.long, device=self._device)
        self._token = torch.zeros((1, 1), dtype=torch.long, device=self._device)
        self._position = torch.zeros((1, 1), dtype=torch.long, device=self._device)
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def start(self) -> None:
        """Forget everything, read the prompt, and know the first token."""
        prompt = self._ids.shape[1]
        self._cache.reset()
        self._text.zero_()
        self._text[:, :prompt] = self._ids
        said = self._model(
            input_ids=self._ids, past_key_values=self._cache, use_cache=True, logits_to_keep=1
        )
        self._position.fill_(prompt)
        self._take(said.logits)

    def steps(self, after: Callable[[], None] | None = None) -> None:
        """All tokens but the first, which `start` made; `after` each, the host is asked to."""
        step = self._step if self._graph is None else self._graph.replay
        for _ in range(self._count - 1):
            step()
            if after is not None:
                after()

    def tokens(self) -> list[int]:
        """What was generated since `start`; waits for the device."""
        made: list[int] = self._text[0, self._ids.shape[1] :].tolist()
        return made

    def capture(self) -> None:
        """One step as a CUDA graph. Steps were run before: nothing is compiled or chosen here."""
        self.start()
        beside = torch.cuda.Stream(self._device)
        beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(beside):
            for _ in range(min(WARM_STEPS, self._count - 1)):
                self._step()
        torch.cuda.current_stream(self._device).wait_stream(beside)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Threads of a compiler's may call CUDA meanwhile; only what this one does is captured.
        with torch.cuda.graph(graph, stream=beside, capture_error_mode="thread_local"):
            self._step()
        self._graph = graph

    def forget_capture(self) -> None:
        self._graph = None

    @torch.no_grad()
    def _step(self) -> None:
        # A mask that is made already: transformers takes one of four dimensions as it is.
        mask = (self._slots <= self._position).view(1, 1, 1, -1)
        said = self._forward(
            input_ids=self._token,
            attention_mask=mask,
            position_ids=self._position,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        )
        self._position.add_(1)
        self._take(said.logits)

    def _take(self, logits: torch.Tensor) -> None:
        """The token at `_position`: the next step's, and a part of the text."""
        self._token.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self._text.scatter_(1, self._position, self._token)


def difference(steps: Steps, expected: list[int]) -> str | None:
    """Why the tokens are not those expected, or None if they are.

    Where they are not, steps without a graph are run once more, for it may be them that differ.
    """
    made = steps.tokens()
    if made == expected:
        return None
    pairs = zip(made, expected, strict=True)
    at = next(index for index, (one, other) in enumerate(pairs) if one != other)
    steps.forget_capture()
    steps.start()
    steps.steps()
    again = "" if steps.tokens() == expected else "; neither do those steps repeat themselves"
    return (
        f"token {at} of {len(made)} is {made[at]}, and that of the same steps without a graph is "
        f"{expected[at]}{again}"
    )
