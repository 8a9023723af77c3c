"""The memory report is what is allocated."""

from __future__ import annotations

import copy
import gc
import re
from pathlib import Path

import matplotlib
import pytest
import torch

from torch_kvq import KVQLayer, MemoryReport
from torch_kvq._memory import empty_buffer
from torch_kvq.cache.cache import KVQCache


def allocated(cache: KVQCache) -> int:
    """Bytes of the storages of all tensors that the cache's objects hold."""
    storages = {}
    seen, queue = set(), [cache]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, type):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor) and item.dim():  # a ticket of a layer is none
            storages[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes()
        elif isinstance(item, (list, tuple, dict)) or hasattr(item, "__dict__"):
            queue += [
                child
                for child in gc.get_referents(item)
                if not callable(child) or isinstance(child, torch.Tensor)
            ]
    return sum(storages.values())


@pytest.mark.parametrize("options", [{}, {"max_cache_len": 1000}], ids=["grow", "static"])
@pytest.mark.parametrize("tokens", [5, 200, 700])
@pytest.mark.parametrize("bits", [4, "4/2", 16])
def test_report_is_the_sum_of_all_tensors(
    bits: int | str, tokens: int, options: dict[str, int]
) -> None:
    cache = KVQCache(bits, **options)
    for layer_idx in range(3):
        cache.update(*torch.randn(2, 2, 2, tokens, 64).bfloat16(), layer_idx=layer_idx)
        cache.layers[layer_idx].attend(torch.randn(2, 4, 1, 64))
    for layer_idx in range(3):
        cache.update(*torch.randn(2, 2, 2, 90, 64).bfloat16(), layer_idx=layer_idx)
    report = cache.memory_report()
    assert report.total_bytes == sum(report.parts.values()) == allocated(cache)
    assert report.tokens == 2 * (tokens + 90) and report.layers == 3
    assert report.fp16_bytes == 3 * report.tokens * 2 * (64 + 64) * 2
    assert report.ratio == report.fp16_bytes / report.total_bytes


def test_padding_is_not_a_token() -> None:
    cache = KVQCache(4)
    cache.update(*torch.randn(2, 2, 2, 100, 32), layer_idx=0)
    mask = torch.arange(100) >= torch.tensor([[40], [0]])
    cache.layers[0].attend(torch.randn(2, 2, 1, 32), mask[:, None, None])
    assert cache.memory_report().tokens == 200, "one query does not show who is padding"
    cache.reset()
    cache.update(*torch.randn(2, 2, 2, 100, 32), layer_idx=0)
    cache.layers[0].attend(torch.randn(2, 2, 100, 32), mask[:, None, None])
    assert cache.memory_report().tokens == 160


def test_prompt_that_waits_for_its_attention_is_counted() -> None:
    layer = KVQLayer(4)
    layer.update(*torch.randn(2, 1, 2, 100, 32))
    assert layer.memory_parts()["pending"] == 2 * 2 * 100 * 32 * 4


def test_long_context_is_small() -> None:
    cache = KVQCache(4)
    cache.update(*torch.randn(2, 1, 2, 8192, 128).half(), layer_idx=0)
    cache.layers[0].flush()
    assert 3.5 < cache.memory_report().ratio < 3.8


def test_text() -> None:
    layers = [{"tiles": 2 << 20}, {"exact": 1 << 20}]
    report = MemoryReport.collect(layers, 6 << 20, 100)
    assert str(report).splitlines() == [
        "3.00 MiB for 100 tokens in 2 layers; fp16 would take 6.00 MiB, 2.00 times as much",
        "  tiles 2.00 MiB",
        "  exact 1.00 MiB",
    ]
    assert MemoryReport(0, 0).ratio == 0


def test_repr() -> None:
    cache = KVQCache("4/3")
    assert repr(cache) == "KVQCache(bits=4/3, layers=0, tokens=0, bytes=0)"
    cache.update(*torch.randn(2, 1, 2, 300, 32), layer_idx=0)
    cache.layers[0].flush()
    size = cache.memory_report().total_bytes
    assert repr(cache) == f"KVQCache(bits=4/3, layers=1, tokens=300, bytes={size})"


def heap_bytes() -> int:
    """Resident bytes of the C library's heap."""
    mappings = Path("/proc/self/smaps").read_text().split("VmFlags")
    heap = next((text for text in mappings if "[heap]" in text), "Rss: 0 kB")
    match = re.search(r"^Rss:\s*(\d+) kB$", heap, re.MULTILINE)
    assert match is not None
    return int(match[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="reads Linux's list of mappings")
def test_growing_buffers_leave_no_holes_in_the_heap() -> None:
    key, value = torch.randn(2, 1, 8, 64, 128)
    cache = KVQCache(4)
    before = heap_bytes()
    for _ in range(16):
        for layer in range(8):
            cache.update(key, value, layer)
            cache.layers[layer].flush()
    total = cache.memory_report().total_bytes
    assert total > 12 << 20
    assert heap_bytes() - before < total / 8


def test_buffers_are_usable_like_others() -> None:
    for size in [(0, 3), (2, 3), (40, 1000)]:
        buffer = empty_buffer(size, torch.zeros(1, dtype=torch.bfloat16))
        assert (buffer.shape, buffer.dtype, buffer.is_contiguous()) == (size, torch.bfloat16, True)
        buffer.fill_(2)
        assert torch.equal(copy.deepcopy(buffer), torch.full(size, 2, dtype=torch.bfloat16))


def test_every_layer_is_reported_and_drawn() -> None:
    matplotlib.use("Agg")
    cache = KVQCache(4)
    for layer, tokens in ((0, 700), (2, 700)):
        cache.update(*torch.randn(2, 1, 2, tokens, 32), layer_idx=layer)
        cache.layers[layer].flush()
    report = cache.memory_report()
    assert report.by_layer[1] == {}
    assert report.by_layer[0] == report.by_layer[2] == cache.layers[0].memory_parts()
    axes = report.plot()
    heights = sum(bar.get_height() for bars in axes.containers for bar in bars)
    assert heights * 2**20 == pytest.approx(report.total_bytes)
    assert report.plot(axes) is axes
