"""The recipes that the benchmarks compare with, against where they come from."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from benchmarks.recipes import PEERS, RULE, SAME, Recipe, fp8, kivi_key, min_max, q4_0, q8_0
from torch_kvq import KVQCache, formats


@pytest.fixture
def vectors() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    scale = torch.rand(1, 1, 1, 64, generator=generator) * 20
    return torch.randn(1, 3, 512, 64, generator=generator) * scale


@pytest.mark.parametrize(("name", "rounding"), (("Q8_0", q8_0), ("Q4_0", q4_0)))
def test_llama_cpp_types_equal_those_of_gguf(name: str, rounding, vectors: torch.Tensor) -> None:
    quants = pytest.importorskip("gguf.quants")
    kind = getattr(pytest.importorskip("gguf").GGMLQuantizationType, name)
    wanted = quants.dequantize(quants.quantize(vectors.numpy(), kind), kind)
    torch.testing.assert_close(rounding(vectors), torch.from_numpy(wanted), rtol=0, atol=0)


@pytest.mark.parametrize("bits", (4, 2))
def test_quanto_equals_the_package(bits: int, vectors: torch.Tensor) -> None:
    package = pytest.importorskip("optimum.quanto")
    kind = {4: package.qint4, 2: package.qint2}[bits]
    scale, shift = package.MaxOptimizer()(vectors, kind, 0, 64)
    wanted = package.quantize_weight(vectors, kind, 0, scale, shift, 64).dequantize()
    # The package keeps scales in float32 where the tensor is.
    step = (vectors.amax(-1, keepdim=True) - vectors.amin(-1, keepdim=True)) / (2**bits - 1)
    error = ((min_max(vectors, bits) - wanted) / step).abs()
    assert error.mean() < 1e-2
    assert error.max() < 1.1


def test_kivi_keys_have_levels_per_channel(vectors: torch.Tensor) -> None:
    rounded = kivi_key(vectors, 2)
    for start in (0, 32):
        levels = {len(rounded[0, 0, start : start + 32, c].unique()) for c in range(64)}
        assert max(levels) <= 4


def test_fp8_saturates() -> None:
    assert fp8(torch.tensor([1e4, -1e4, 1.0])).tolist() == [448.0, -448.0, 1.0]


@pytest.mark.parametrize("recipe", PEERS, ids=lambda recipe: recipe.name)
def test_calls_of_many_tokens_see_what_single_tokens_see(
    recipe: Recipe, vectors: torch.Tensor
) -> None:
    prompt = 64 * 5 - 61
    caches = recipe.cache(SAME), recipe.cache(SAME)
    for cache in caches:
        cache.update(vectors[:, :, :prompt], vectors[:, :, :prompt], 0)
    for start, size in ((prompt, 1), (prompt + 1, 63), (prompt + 64, 1), (prompt + 65, 63)):
        new = vectors[:, :, start : start + size]
        together = caches[0].update(new, new, 0)
        for token in new.split(1, 2):
            alone = caches[1].update(token, token, 0)
            for x, y in zip(alone, together, strict=True):
                assert torch.equal(x, y[:, :, : x.shape[2]])


def test_windows_keep_exact_what_they_say(vectors: torch.Tensor) -> None:
    exact = {
        "llama.cpp q4_0": ([], []),
        "KIVI, 4 bits": (range(384, 401), range(272, 401)),
        "quanto int4": (range(300, 401), range(300, 401)),
    }
    for recipe in (peer for peer in PEERS if peer.name in exact):
        cache = recipe.cache()
        cache.update(vectors[:, :, :300], vectors[:, :, :300], 0)
        for position in range(300, 401):
            new = vectors[:, :, position : position + 1]
            seen = cache.update(new, new, 0)
        for x, positions in zip(seen, exact[recipe.name], strict=True):
            same = (x == vectors[:, :, : x.shape[2]]).all(-1).all(1)[0]
            assert same.nonzero().flatten().tolist() == list(positions)


def test_packed_cache_rounds_the_same_tokens(vectors: torch.Tensor) -> None:
    recipe, packed = PEERS[0].cache(SAME), KVQCache(4)
    for size in (259, *(1,) * 70):
        new = vectors[:, :, :size]
        recipe.update(new, new, 0)
        packed.update(new, new, 0)
        if size == 1:
            lengths = packed.layers[0].state.tensors[-1]
            in_tiles = int(lengths[0, formats.QUANTIZED])
            assert recipe.layers[0].rounded_keys == RULE["sink_tokens"] + in_tiles
