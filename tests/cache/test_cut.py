"""What a cut leaves, and what comes to be behind it.

Codes depend on the mean of their tile and on the balance of their row, which is that of the first
keys behind the sinks. A cut that leaves both as they were, which is one behind those keys and
between two tiles, is as if the lost tokens had never been there. Else tokens that come later are
packed under the mean of tokens that are gone, or under their balance, and the error of a token is
bound by its distance from that mean, in channels weighted by that balance.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import torch_kvq
from torch_kvq import KVQLayer, formats

RULE: dict[str, int] = {"sink_tokens": 4, "residual_length": 10, "quantized_start": 80}
MODES = pytest.mark.parametrize("mode", [{}, {"max_cache_len": 700}], ids=["grow", "static"])
BALANCE_TOKENS = formats.balance_tokens(RULE["sink_tokens"], RULE["quantized_start"])

ERROR = 0.15
"""Of any packed token, as a part of its balanced distance from the mean of its tile."""


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def packed(layer: KVQLayer, *chunks: Tensor) -> KVQLayer:
    """Append chunks ``[2, 1, kv_heads, tokens, dim]`` and pack what is due."""
    for key, value in chunks:
        layer.update(key, value)
    layer.flush()
    layer.state.pack()
    return layer


def quantized(layer: KVQLayer) -> int:
    return int(layer.state.lengths[0, formats.QUANTIZED])


def records(layer: KVQLayer) -> Tensor:
    return layer.state.table.pool.tiles[layer.state.table.rows[0][: quantized(layer) // 64]]


@MODES
@pytest.mark.parametrize("bits", [4, "4/3", 3, 2])
@pytest.mark.parametrize("tiles", [2, 3, 4])
def test_cut_between_tiles_is_as_if_nothing_had_been_there(
    tiles: int, bits: int | str, mode: dict[str, Any]
) -> None:
    data, other = normal(2, 1, 2, 300, 32), normal(2, 1, 2, 200, 32, seed=1)
    layer = packed(KVQLayer(bits, **RULE, **mode), data)
    layer.crop(4 + 64 * tiles)
    assert quantized(layer) == 64 * tiles
    packed(layer, other)
    fresh = packed(KVQLayer(bits, **RULE), data[:, :, :, : 4 + 64 * tiles], other)
    assert quantized(layer) == quantized(fresh)
    assert torch.equal(records(layer), records(fresh))
    assert torch.equal(layer.state.balance, fresh.state.balance)
    query = normal(1, 4, 3, 32)
    assert torch.equal(layer.attend(query), fresh.attend(query))


@MODES
def test_cut_to_the_sinks_lets_a_row_begin_anew(mode: dict[str, Any]) -> None:
    """The balance, too, is that of the new keys."""
    data, other = normal(2, 1, 2, 300, 32), 5 * normal(2, 1, 2, 200, 32, seed=1)
    layer = packed(KVQLayer(4, **RULE, **mode), data)
    layer.crop(4)
    packed(layer, other)
    fresh = packed(KVQLayer(4, **RULE), data[:, :, :, :4], other)
    assert torch.equal(records(layer), records(fresh))
    assert torch.equal(layer.state.balance, fresh.state.balance)


def assert_near(layer: KVQLayer, key: Tensor, first: int, mean: Tensor) -> None:
    """Keys ``[kv_heads, tokens, dim]`` in tiles are as near as their distance from a mean lets."""
    balance = layer.state.balance[0].unsqueeze(1)
    end = first + key.shape[1]
    decoded = layer.materialize(end)[0][0, :, first:]
    error = ((decoded - key) * balance).norm(dim=-1)
    assert (error < ERROR * ((key - mean) * balance).norm(dim=-1)).all()


@MODES
@pytest.mark.parametrize("shift", [0.0, 20.0])
@pytest.mark.parametrize("kept", [133, 172, 195])
def test_cut_within_a_tile_keeps_its_mean(kept: int, shift: float, mode: dict[str, Any]) -> None:
    """The tile, the third, is completed under it, and those before and behind it are fresh."""
    data = normal(2, 1, 2, 300, 32)
    other = normal(2, 1, 2, 200, 32, seed=1) + shift
    layer = packed(KVQLayer(4, **RULE, **mode), data)
    whole = records(layer).clone()
    layer.crop(kept)
    assert quantized(layer) == kept - 4
    packed(layer, other)
    fresh = packed(KVQLayer(4, **RULE), data[:, :, :, :kept], other)
    others = torch.arange(quantized(fresh) // 64) != 2
    assert torch.equal(records(layer)[others], records(fresh)[others])
    mean_offset = layer.state.layout.mean_offset
    assert torch.equal(records(layer)[2, :, mean_offset:], whole[2, :, mean_offset:])
    tokens = torch.cat((data[0, 0, :, 132:kept], other[0, 0, :, : 196 - kept]), 1)
    assert_near(layer, tokens, 132, mean=data[0, 0, :, 132:196].mean(1, keepdim=True))


@MODES
def test_cut_into_the_first_keys_keeps_their_balance(mode: dict[str, Any]) -> None:
    """Other channels are the large ones now, but they are encoded as if they were not."""
    scale = torch.logspace(-1, 1, 32)
    data, other = normal(2, 1, 2, 300, 32), normal(2, 1, 2, 200, 32, seed=1)
    data[0] *= scale
    other[0] *= scale.flip(0)
    layer = packed(KVQLayer(4, **RULE, **mode), data)
    balance = layer.state.balance.clone()
    layer.crop(68)
    assert quantized(layer) == 64 < BALANCE_TOKENS
    packed(layer, other)
    assert torch.equal(layer.state.balance, balance)
    tile = torch_kvq.quantize_tile(*other[:, :, :, :64], balance)
    assert torch.equal(records(layer)[1:2], tile)
    tokens = other[0, 0, :, :64]
    assert_near(layer, tokens, 68, mean=tokens.mean(1, keepdim=True))


@MODES
@pytest.mark.parametrize("tokens", [1, 10, 63])
@pytest.mark.parametrize("held", [257, 300, 331])
def test_rolled_back_draft_leaves_no_trace(held: int, tokens: int, mode: dict[str, Any]) -> None:
    """Behind `quantized_start`, for a draft of less than a tile, as assisted decoding has it."""
    data, query = normal(2, 1, 2, held + tokens, 32), normal(1, 4, 3, 32)
    layer = packed(KVQLayer(4, **mode), data[:, :, :, :held])
    before, want = copy_of(layer), layer.attend(query)
    layer.update(*data[:, :, :, held:])
    layer.attend(normal(1, 4, tokens, 32))
    layer.crop(-tokens)
    for got, wanted in zip(copy_of(layer), before, strict=True):
        assert torch.equal(got, wanted)
    assert torch.equal(layer.attend(query), want)


def copy_of(layer: KVQLayer) -> list[Tensor]:
    """Everything that a layer holds for its tokens."""
    state = layer.state
    held = int(state.lengths[0, formats.LENGTH]) - quantized(layer)
    return [
        records(layer).clone(),
        *(tensor.clone() for tensor in (state.lengths, state.balance)),
        *(tensor[:, :, :held].clone() for tensor in (state.exact_key, state.exact_value)),
    ]


@MODES
@pytest.mark.parametrize("held", [200, 255, 256, 300])
@pytest.mark.parametrize("tokens", [1, 10, 63, 64])
def test_rolled_back_draft_cuts_no_tile(held: int, tokens: int, mode: dict[str, Any]) -> None:
    """What a draft has pushed into tiles stays there: earlier than without it, but no other."""
    data = normal(2, 1, 2, 700, 32)
    layer = packed(KVQLayer(4, **mode), data[:, :, :, :held])
    layer.update(*data[:, :, :, held : held + tokens])
    layer.attend(normal(1, 4, tokens, 32))
    layer.crop(-tokens)
    assert quantized(layer) % 64 == 0
    fresh = packed(KVQLayer(4), data)
    assert torch.equal(records(layer), records(fresh)[: quantized(layer) // 64])
