"""Predictions of a model with some cache against those with the uncompressed one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .model import Tokens, continuation, filled, loss, prefill


@dataclass(frozen=True)
class TokenDivergence:
    """How the prediction at each token of a text differs.

    Attributes:
        divergence: Kullback-Leibler divergence in nats.
        agrees: whether the most likely prediction is the same.
        loss_change: of the negative log-likelihood, for all tokens but the last.
    """

    divergence: Tensor
    agrees: Tensor
    loss_change: Tensor

    @classmethod
    def of(cls, logits: Tensor, exact: Tensor, targets: Tensor) -> TokenDivergence:
        """Compare predictions; the arguments are those of `Divergence.of`."""
        wanted, got = (x.double().log_softmax(-1) for x in (exact, logits))
        return cls(
            (wanted.exp() * (wanted - got)).sum(-1),
            wanted.argmax(-1) == got.argmax(-1),
            loss(got[:-1], targets) - loss(wanted[:-1], targets),
        )


@dataclass(frozen=True)
class Divergence:
    """Predictions against those with the uncompressed cache.

    Attributes:
        mean: mean divergence, in nats.
        median: median divergence.
        agreement: share of tokens with the same most likely prediction.
        perplexity: relative change of the perplexity.
    """

    mean: float
    median: float
    agreement: float
    perplexity: float

    @classmethod
    def of(cls, logits: Tensor, exact: Tensor, targets: Tensor) -> Divergence:
        """Compare predictions.

        Args:
            logits: ``[tokens, vocabulary]``.
            exact: the same with the uncompressed cache.
            targets: ``[tokens - 1]``, what followed all tokens but the last.
        """
        tokens = TokenDivergence.of(logits, exact, targets)
        return cls(
            float(tokens.divergence.mean()),
            float(tokens.divergence.median()),
            float(tokens.agrees.float().mean()),
            float(tokens.loss_change.mean().exp() - 1),
        )


@dataclass(frozen=True)
class Trial:
    """A text that a model has read, and its exact continuation.

    Attributes:
        model: the model.
        tokens: keys and values of what was read.
        ids: the continuation, ``int64[1, tokens]``.
        exact: its logits with the uncompressed cache.
        losses: of the tokens that were read.
    """

    model: Any
    tokens: Tokens
    ids: Tensor
    exact: Tensor
    losses: Tensor

    @classmethod
    def read(cls, model: Any, ids: Tensor, past: int) -> Trial:
        """Read ``past`` tokens; the rest is the continuation."""
        from transformers import DynamicCache

        tokens, losses = prefill(model, ids[:, :past])
        rest = ids[:, past:]
        exact = continuation(model, filled(DynamicCache(), tokens), rest, rest.shape[1])
        return cls(model, tokens, rest, exact, losses)

    @property
    def perplexity(self) -> float:
        """Perplexity of what was read and of the continuation."""
        rest = loss(self.exact[:-1], self.ids[0, 1:])
        return float(torch.cat((self.losses, rest)).mean().exp())

    def divergence(self, cache: Any, step: int = 1) -> Divergence:
        """What an empty cache does to the continuation, in calls of ``step`` tokens."""
        return Divergence.of(self._logits(cache, step), self.exact, self.ids[0, 1:])

    def by_token(self, cache: Any, step: int | Sequence[int] = 1) -> TokenDivergence:
        """The same for each token; ``step`` may give the tokens of each call."""
        return TokenDivergence.of(self._logits(cache, step), self.exact, self.ids[0, 1:])

    def _logits(self, cache: Any, step: int | Sequence[int]) -> Tensor:
        return continuation(self.model, filled(cache, self.tokens), self.ids, step)
