"""A hand-written decoding loop, with the model as it is or compiled, and what compiling took."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

from tests.models import tiny_model

PROMPT = 100


def model(name: str = "llama", layers: int = 1) -> Any:
    """A tiny model with room for long contexts."""
    return tiny_model(name, max_position_embeddings=4096, num_hidden_layers=layers)


class Compiled:
    """A compiled function that counts its graphs; a break is an error."""

    def __init__(self, function: Callable[..., Any], backend: str = "eager") -> None:
        self._counter = CompileCounterWithBackend(backend)
        self._function = torch.compile(function, fullgraph=True, backend=self._counter)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        return self._function(*args, **kwargs)

    @property
    def graphs(self) -> int:
        """Graphs that were compiled so far."""
        assert not counters["graph_break"]
        return self._counter.frame_count


@torch.no_grad()
def decode(
    forward: Callable[..., Any],
    cache: Any,
    steps: int,
    mask: torch.Tensor | None = None,
    **prompt: Any,
) -> torch.Tensor:
    """Greedy tokens after a prompt; a mask gets longer with each."""
    options = {} if mask is None else {"attention_mask": mask}
    tokens = [_next(forward(**prompt, **options, past_key_values=cache))]
    for _ in range(steps):
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, 1), value=1)
            options = {"attention_mask": mask}
        tokens.append(_next(forward(input_ids=tokens[-1], **options, past_key_values=cache)))
    return torch.cat(tokens, 1)


def _next(output: Any) -> torch.Tensor:
    return output.logits[:, -1:].argmax(-1)
