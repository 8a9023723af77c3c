"""Left padding that a mask shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from torch_kvq.cache.padding import left_padding


def causal(padding: list[int], length: int, window: int | None = None) -> Tensor:
    """Mask ``[batch, 1, length, length]`` with so much left padding in each row."""
    position = torch.arange(length)
    distance = position.unsqueeze(1) - position
    allowed = (distance >= 0) & (distance < (window or length))
    real = position >= torch.tensor(padding).unsqueeze(1)
    return (allowed & real.unsqueeze(1)).unsqueeze(1)


def additive(mask: Tensor, masked: float) -> Tensor:
    return torch.zeros(mask.shape).masked_fill(~mask, masked)


def found(mask: Tensor, queries: int, before: int, tokens: int) -> list[int]:
    padding = left_padding(mask, queries, before, tokens)
    assert padding is not None
    return padding.tolist()


@pytest.mark.parametrize("window", [None, 3])
def test_padding_of_every_row(window: int | None) -> None:
    mask = causal([0, 2, 7, 8], 8, window)
    assert found(mask, 8, 0, 8) == [0, 2, 7, 8]
    assert found(additive(mask, torch.finfo(torch.float32).min), 8, 0, 8) == [0, 2, 7, 8]
    assert found(additive(mask, -torch.inf), 8, 0, 8) == [0, 2, 7, 8]


def test_a_bias_is_not_padding() -> None:
    assert found(additive(causal([3], 8), -100.0), 8, 0, 8) == [0]


def test_later_chunk_counts_its_own_tokens() -> None:
    mask = causal([6, 9, 1], 9)[:, :, 4:]
    assert found(mask, 5, 4, 5) == [2, 5, 0]


def test_mask_with_columns_for_the_future() -> None:
    assert found(torch.nn.functional.pad(causal([3], 6), (0, 10)), 6, 0, 6) == [3]


def test_one_row_for_all_queries() -> None:
    mask = (torch.arange(6) >= 2).view(1, 1, 1, 6)
    assert found(mask, 6, 0, 6) == [2]


def test_heads_that_differ_are_joined() -> None:
    mask = torch.cat((causal([4], 6), causal([1], 6)), 1)
    assert found(mask, 6, 0, 6) == [1]


def test_tokens_whose_queries_are_unknown_are_kept() -> None:
    mask = causal([4], 6)
    assert left_padding(mask[:, :, -1:], 1, 0, 6) is None
    assert found(mask[:, :, -2:], 2, 0, 6) == [0]


def test_too_few_columns() -> None:
    with pytest.raises(ValueError, match=r"attn_mask\.shape\[3\] must be at least 9"):
        left_padding(causal([0], 6), 6, 3, 6)
