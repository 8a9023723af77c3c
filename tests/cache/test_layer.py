"""A layer alone, in a module that knows nothing of Transformers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torch_kvq import KVQLayer

SMALL = {"quantized_start": 80, "residual_length": 10}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


class Attention(nn.Module):
    """Grouped-query attention with a packed layer, or with whole keys and values."""

    def __init__(self, layer: KVQLayer | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.out = nn.Linear(64, 128), nn.Linear(128, 64)
        self.key, self.value = nn.Linear(64, 64), nn.Linear(64, 64)
        self.layer = layer
        self.past: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(x).unflatten(-1, (4, 32)).transpose(1, 2)
        key, value = (
            project(x).unflatten(-1, (2, 32)).transpose(1, 2) for project in (self.key, self.value)
        )
        if self.layer is not None:
            self.layer.update(key, value)
            out = self.layer.attend(query, is_causal=True)
        else:
            self.past.append(torch.stack((key, value)))
            key, value = torch.cat(self.past, 3)
            mask = torch.ones(x.shape[1], key.shape[2], dtype=torch.bool)
            mask = mask.tril(key.shape[2] - x.shape[1])
            out = F.scaled_dot_product_attention(query, key, value, mask, enable_gqa=True)
        return self.out(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("options", [SMALL, SMALL | {"max_cache_len": 320}], ids=["grow", "static"])
@pytest.mark.parametrize("steps", [(150, 1, 1, 90, 5), (1,) * 130, (300,)], ids=str)
def test_pass_through_is_attention(options: dict[str, int], steps: tuple[int, ...]) -> None:
    packed, whole = Attention(KVQLayer(16, **options)), Attention(None)
    for i, tokens in enumerate(steps):
        x = random(2, tokens, 64, seed=i)
        torch.testing.assert_close(packed(x), whole(x), rtol=1e-4, atol=1e-5)
    assert packed.layer is not None and packed.layer.materialized == 0


@pytest.mark.parametrize(("bits", "error"), [(4, 0.12), ("4/3", 0.2), (3, 0.22), (2, 0.4)])
def test_few_bits_are_close(bits: int | str, error: float) -> None:
    packed, whole = Attention(KVQLayer(bits, **SMALL)), Attention(None)
    x = random(2, 300, 64)
    torch.testing.assert_close(packed(x), whole(x))
    x = random(2, 20, 64, seed=1)
    got, want = packed(x) - packed.out.bias, whole(x) - whole.out.bias
    assert (got - want).norm() / want.norm() < error


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"scale": 0.3},
        {"sliding_window": 20},
        {"softcap": 2.0},
        {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
        {"is_causal": True, "attn_mask": torch.arange(120) % 7 != 3},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_options_of_attention(options: dict[str, Any], is_first: bool) -> None:
    """In the first call and behind it, against a reference that knows all of them."""
    key, value = random(2, 1, 2, 120, 32)
    query = random(1, 4, 120, 32, seed=1)
    if is_first:
        layer = KVQLayer(16, **SMALL)
        layer.update(key, value)
    else:
        query = query[:, :, -30:]
        layer = KVQLayer(16, **SMALL)
        layer.update(key[:, :, :90], value[:, :, :90])
        layer.attend(query)
        layer.update(key[:, :, 90:], value[:, :, 90:])
    out = layer.attend(query, **options)
    torch.testing.assert_close(out, attention(query, key, value, **options), rtol=1e-4, atol=1e-5)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention in one piece."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    score = query @ key.mT * (scale or query.shape[3] ** -0.5)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    position = torch.arange(key.shape[2])
    distance = position[-query.shape[2] :].unsqueeze(1) - position
    allowed = torch.ones_like(distance, dtype=torch.bool) if attn_mask is None else attn_mask
    if is_causal:
        allowed = allowed & (distance >= 0)
    if sliding_window is not None:
        allowed = allowed & (distance < sliding_window)
    score = score.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        extra = sinks.view(1, -1, 1, 1).expand(*score.shape[:3], 1)
        return torch.cat((score, extra), -1).softmax(-1)[..., :-1] @ value
    return score.softmax(-1) @ value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_dtypes_and_dims_of_their_own(dtype: torch.dtype) -> None:
    layer = KVQLayer(16, **SMALL)
    key = random(2, 150, 2, 64, dtype=dtype).transpose(1, 2)
    value = random(2, 150, 2, 32, seed=1, dtype=dtype).transpose(1, 2)
    query = random(2, 4, 1, 64, seed=2, dtype=dtype)
    layer.update(key, value)
    layer.flush()
    out = layer.attend(query)
    assert out.dtype == dtype and out.shape == (2, 4, 1, 32)
    want = attention(query.float(), key.float(), value.float())
    torch.testing.assert_close(out.float(), want, rtol=2e-2, atol=2e-2)


def test_first_call_is_exact_at_few_bits() -> None:
    key, value = random(2, 1, 2, 300, 32)
    query = random(1, 4, 300, 32, seed=1)
    layer = KVQLayer(2)
    layer.update(key, value)
    want = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    assert torch.equal(layer.attend(query, is_causal=True), want)


def test_update_without_attention_stores_everything() -> None:
    key, value = random(2, 1, 2, 200, 32)
    layer = KVQLayer(16, **SMALL)
    layer.update(key[:, :, :120], value[:, :, :120])
    layer.update(key[:, :, 120:], value[:, :, 120:])
    assert layer.get_seq_length() == 200
    assert torch.equal(layer.materialize(200)[0], key)


def test_state_is_as_the_format_says() -> None:
    layer = KVQLayer(4)
    key, value = random(2, 2, 3, 400, 64)
    layer.update(key, value)
    layer.flush()
    assert layer.state is not None
    tiles, block_table, balance, exact_key, exact_value, lengths = layer.state.tensors
    assert tiles.shape == (2 * 5, 3, layer.state.layout.record_bytes)
    assert block_table.tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]
    assert balance.shape == (2, 3, 64) and exact_key.shape == exact_value.shape == (2, 3, 132, 64)
    assert lengths.tolist() == [[0, 400, 320]] * 2
    assert all(tensor.data_ptr() % 64 == 0 for tensor in (tiles, exact_key, exact_value))
    assert torch.equal(exact_key[:, :, :4], key[:, :, :4])
    assert torch.equal(exact_value[:, :, 4:80], value[:, :, 324:])


def test_exact_buffers_grow_and_shrink() -> None:
    layer = KVQLayer(4)
    slots = []
    for i in range(330):
        layer.update(*random(2, 1, 1, 1, 32, seed=i))
        assert layer.state is not None
        slots.append(layer.state.slots)
    assert slots[255] == 256 and slots[256] == 132
    assert all(
        n + 1 <= held <= n + 1 + max(64, n // 8) for n, held in enumerate(slots[:200], 0) if n
    )


def test_gradients_stop_at_the_layer() -> None:
    layer = KVQLayer(16, **SMALL)
    for tokens in (100, 1):
        key, value = random(2, 1, 2, tokens, 32).requires_grad_()
        for handle in layer.update(key, value):
            assert not handle.new.requires_grad
        layer.attend(random(1, 4, tokens, 32))
    assert layer.state is not None
    assert not any(tensor.requires_grad for tensor in layer.state.tensors)


def test_filled_in_inference_mode_and_used_outside() -> None:
    layer = KVQLayer(16, **SMALL)
    with torch.inference_mode():
        for tokens in (120, 1, 90):
            layer.update(*random(2, 2, 2, tokens, 32))
            layer.attend(random(2, 4, tokens, 32))
        layer.batch_select_indices(torch.tensor([1, 1]))
        layer.crop(-100)
    layer.update(*random(2, 2, 2, 70, 32))
    layer.attend(random(2, 4, 1, 32))
    layer.reorder_cache(torch.tensor([0, 0]))
    assert layer.get_seq_length() == 181


def test_copies_are_independent() -> None:
    layer = KVQLayer(16, **SMALL)
    key, value = random(2, 1, 2, 200, 32)
    layer.update(key[:, :, :150], value[:, :, :150])
    early = copy.deepcopy(layer)
    layer.flush()
    late = copy.deepcopy(layer)
    layer.update(key[:, :, 150:] + 1, value[:, :, 150:])
    for clone in (early, late):
        clone.update(key[:, :, 150:], value[:, :, 150:])
        assert torch.equal(clone.materialize(200)[0], key)
    assert layer.get_seq_length() == 200
