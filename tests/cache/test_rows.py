"""Rows and tokens that come and go: nothing is decoded, and no row depends on its neighbours."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_kvq import KVQLayer

SMALL: dict[str, Any] = {"quantized_start": 80, "residual_length": 10}
MODES = pytest.mark.parametrize("mode", [{}, {"max_cache_len": 700}], ids=["grow", "static"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def row_of(layer: KVQLayer, row: int) -> tuple[int, list[Tensor]]:
    """Tokens of a row, and all that is stored for them in an order without pages.

    Tokens that are due are packed before: when that happens depends on the steps, the codes do not.
    """
    assert layer.state is not None
    layer.state.pack()
    start, length, quantized = layer.state.lengths[row].tolist()
    pages = layer.state.table.rows[row][: -(-quantized // 64)]
    held = length - start - quantized
    return length - start, [
        layer.state.table.pool.tiles[pages],
        layer.state.exact_key[row, :, :held],
        layer.state.exact_value[row, :, :held],
        *([layer.state.balance[row]] if quantized else []),
    ]


def assert_same_row(layer: KVQLayer, row: int, other: KVQLayer, other_row: int) -> None:
    tokens, parts = row_of(layer, row)
    other_tokens, other_parts = row_of(other, other_row)
    assert tokens == other_tokens
    for part, other_part in zip(parts, other_parts, strict=True):
        assert torch.equal(part, other_part)


def mask_of(padding: list[int], queries: int, length: int) -> Tensor:
    position = torch.arange(length)
    causal = torch.ones(queries, length, dtype=torch.bool).tril(length - queries)
    return (causal & (position >= torch.tensor(padding).view(-1, 1, 1))).unsqueeze(1)


def fill(layer: KVQLayer, data: Tensor, padding: list[int], steps: list[int]) -> None:
    """Append ``data[2, batch, kv_heads, tokens, dim]`` in steps, each with its attention."""
    length = 0
    for tokens in steps:
        key, value = data[:, :, :, length : length + tokens]
        length += tokens
        layer.update(key, value)
        layer.attend(normal(len(key), 4, tokens, 32), mask_of(padding, tokens, length))


@MODES
@pytest.mark.parametrize("bits", [4, "4/3", 16])
@pytest.mark.parametrize(
    "steps", [[260, 1, 1, 60], [40] * 8, [130] + [1] * 140], ids=["prompt", "chunks", "tokens"]
)
def test_rows_of_a_padded_batch_are_their_solo_runs(
    bits: int | str, mode: dict[str, int], steps: list[int]
) -> None:
    padding, total = [0, 37, 99, 120], sum(steps)
    data, query = normal(2, 4, 2, total, 32), normal(1, 4, 3, 32, seed=1)
    batch = KVQLayer(bits, **SMALL, **mode)
    fill(batch, data, padding, steps)
    batch.state.pack()
    out = batch.attend(query.expand(4, -1, -1, -1), mask_of(padding, 3, total))
    for row, skipped in enumerate(padding):
        ends = torch.tensor(steps).cumsum(0).clamp(min=skipped) - skipped
        own_steps = [step for step in ends.diff(prepend=ends.new_zeros(1)).tolist() if step]
        solo = KVQLayer(bits, **SMALL)
        fill(solo, data[:, row : row + 1, :, skipped:], [0], own_steps)
        assert_same_row(batch, row, solo, 0)
        own = solo.attend(query, mask_of([0], 3, total - skipped))
        torch.testing.assert_close(out[row], own[0], rtol=1e-5, atol=1e-6)


@MODES
def test_row_that_is_masked_in_the_first_chunks_starts_later(mode: dict[str, int]) -> None:
    layer = KVQLayer(4, **SMALL, **mode)
    fill(layer, normal(2, 2, 2, 120, 32), [0, 90], [40, 40, 40])
    assert layer.state is not None
    assert layer.state.lengths.tolist() == [[0, 120, 64], [90, 120, 0]]
    assert layer.tokens == 150


@MODES
def test_selected_rows_share_pages_until_one_is_written(mode: dict[str, int]) -> None:
    layer = KVQLayer(4, **SMALL, **mode)
    data = normal(2, 2, 2, 300, 32)
    fill(layer, data, [0, 30], [300])
    used = layer.state.table.pool.used
    before = [row_of(layer, row) for row in range(2)]
    layer.reorder_cache(torch.tensor([1, 1]))
    for row in range(2):
        assert all(map(torch.equal, row_of(layer, row)[1], before[1][1]))
    if not mode:
        assert layer.state.table.pool.used < used
    key, value = normal(2, 2, 2, 150, 32, seed=5)
    layer.update(key, value)
    solo = KVQLayer(4, **SMALL)
    fill(solo, data[:, 1:, :, 30:], [0], [270])
    solo.update(key[1:], value[1:])
    assert_same_row(layer, 1, solo, 0)


@MODES
def test_partial_page_is_copied_for_the_row_that_writes(mode: dict[str, int]) -> None:
    layer = KVQLayer(4, **SMALL, **mode)
    data = normal(2, 1, 2, 300, 32)
    fill(layer, data, [0], [300])
    layer.crop(-100)
    assert layer.state.lengths.tolist() == [[0, 200, 196]]
    layer.batch_repeat_interleave(3)
    new = normal(2, 3, 2, 120, 32, seed=4)
    layer.update(*new)
    for row in range(3):
        solo = KVQLayer(4, **SMALL)
        fill(solo, data, [0], [300])
        solo.crop(-100)
        solo.update(*new[:, row : row + 1])
        assert_same_row(layer, row, solo, 0)


@MODES
def test_cut_to_the_window_leaves_tiles_alone(mode: dict[str, int]) -> None:
    layer = KVQLayer(4, **SMALL, **mode)
    data = normal(2, 1, 2, 300, 32)
    fill(layer, data, [0], [300])
    tiles = row_of(layer, 0)[1][0].clone()
    layer.crop(-5)
    assert torch.equal(row_of(layer, 0)[1][0], tiles)
    layer.update(*data[:, :, :, 295:])
    other = KVQLayer(4, **SMALL, **mode)
    fill(other, data, [0], [300])
    assert_same_row(layer, 0, other, 0)


@MODES
def test_tokens_that_wait_for_their_attention_can_be_cut(mode: dict[str, int]) -> None:
    layer = KVQLayer(16, **SMALL, **mode)
    data = normal(2, 1, 2, 200, 32)
    layer.update(*data)
    layer.crop(-30)
    assert int(layer.get_seq_length()) == 170
    assert torch.equal(layer.materialize(170)[0], data[0, :, :, :170])


def test_static_tensors_stay_where_they_are() -> None:
    layer = KVQLayer(4, **SMALL, max_cache_len=400)
    fill(layer, normal(2, 2, 2, 200, 32), [0, 30], [200])
    before = [tensor.data_ptr() for tensor in layer.state.tensors]
    layer.reorder_cache(torch.tensor([1, 1]))
    layer.crop(-90)
    layer.update(*normal(2, 2, 2, 150, 32))
    layer.reset()
    assert [tensor.data_ptr() for tensor in layer.state.tensors] == before


def test_crop_gives_pages_back() -> None:
    layer = KVQLayer(4, **SMALL)
    fill(layer, normal(2, 1, 2, 500, 32), [0], [500])
    layer.crop(200)
    assert layer.state.table.pool.used == 4
    layer.crop(3)
    assert layer.state.table.pool.used == 0 and layer.get_seq_length() == 3


@MODES
def test_crop_into_the_padding_empties_a_row(mode: dict[str, int]) -> None:
    layer = KVQLayer(16, **SMALL, **mode)
    fill(layer, normal(2, 2, 2, 100, 32), [0, 60], [100])
    layer.crop(50)
    assert layer.state.lengths.tolist() == [[0, 50, 46], [50, 50, 0]]
    key, value = normal(2, 2, 2, 60, 32, seed=3)
    layer.update(key, value)
    layer.attend(normal(2, 4, 60, 32), mask_of([0, 55], 60, 110))
    assert layer.state.lengths[:, :2].tolist() == [[0, 110], [55, 110]]


@MODES
def test_reset_forgets(mode: dict[str, int]) -> None:
    layer = KVQLayer(4, **SMALL, **mode)
    fill(layer, normal(2, 2, 2, 200, 32), [0, 60], [200])
    layer.reset()
    assert layer.get_seq_length() == 0
    data = normal(2, 2, 2, 200, 32, seed=1)
    fill(layer, data, [10, 0], [150, 50])
    other = KVQLayer(4, **SMALL)
    fill(other, data, [10, 0], [150, 50])
    for row in range(2):
        assert_same_row(layer, row, other, row)


class Model:
    """Rows as plain tensors, the meaning of every operation on a layer."""

    def __init__(self, layer: KVQLayer, dice: random.Random) -> None:
        self.layer, self.dice = layer, dice
        self.rows: list[Tensor] = [torch.zeros(2, 2, 0, 32) for _ in range(2)]
        self.padding = [0, 0]
        self.seed = 0

    @property
    def length(self) -> int:
        return self.rows[0].shape[2]

    def append(self) -> None:
        tokens = self.dice.choice([1, 1, 1, 7, 50, 130])
        if self.length == 0:
            self.padding = [self.dice.choice([0, 5, tokens]) for _ in self.rows]
            self.padding = [min(padding, tokens) for padding in self.padding]
        self.seed += 1
        new = normal(2, len(self.rows), 2, tokens, 32, seed=self.seed)
        self.rows = [torch.cat((row, new[:, i]), 2) for i, row in enumerate(self.rows)]
        self.layer.update(*new)
        query = normal(len(self.rows), 4, tokens, 32, seed=self.seed)
        mask = mask_of(self.padding, tokens, self.length)
        out = self.layer.attend(query, mask)
        key, value = torch.stack(self.rows, 1)
        want = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, mask, enable_gqa=True
        )
        has_keys = mask.any(-1, keepdim=True)
        torch.testing.assert_close(out * has_keys, want * has_keys, rtol=1e-4, atol=1e-5)

    def crop(self) -> None:
        length = self.dice.randint(0, self.length)
        if length:
            self.layer.crop(length)
        else:
            self.layer.crop(-self.length)
        self.rows = [row[:, :, :length] for row in self.rows]
        # A row that is cut into its padding may get its first token anew.
        self.padding = [length if padding >= length else padding for padding in self.padding]

    def select(self) -> None:
        indices = [self.dice.randrange(len(self.rows)) for _ in range(self.dice.choice([1, 2, 3]))]
        self.layer.batch_select_indices(torch.tensor(indices))
        self.rows = [self.rows[i] for i in indices]
        self.padding = [self.padding[i] for i in indices]

    def reorder(self) -> None:
        indices = [self.dice.randrange(len(self.rows)) for _ in self.rows]
        self.layer.reorder_cache(torch.tensor(indices))
        self.rows = [self.rows[i] for i in indices]
        self.padding = [self.padding[i] for i in indices]


@MODES
@pytest.mark.parametrize("seed", range(8))
def test_any_sequence_at_16_bits(seed: int, mode: dict[str, int]) -> None:
    dice = random.Random(seed)
    model = Model(KVQLayer(16, **SMALL, **mode), dice)
    model.append()
    for _ in range(25):
        choices = [model.append] * 3 + [model.select, model.reorder]
        if model.length > 450:
            choices = []
        dice.choice([*choices, model.crop])()
        assert int(model.layer.get_seq_length()) == model.length
        for i, dense in enumerate(model.layer.materialize(model.length)):
            for row, padding, want in zip(dense, model.padding, model.rows, strict=True):
                assert torch.equal(row[:, padding:], want[i][:, padding:])
