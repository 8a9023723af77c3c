"""What caches of layer inputs store in each mode, and what it costs."""

from __future__ import annotations

import copy
import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache

from tests.models import tiny_config, tiny_model, token_ids
from torch_kvq import XQuantCache, cross_layer_similarity
from torch_kvq.cache import x_cross, x_embedded, x_source
from torch_kvq.cache.x_cross import CrossLayer
from torch_kvq.cache.x_embedded import EmbeddedLayer
from torch_kvq.reference.cross_layer import quantize_difference

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

MODES = ["x", "cl", "latent"]
PROMPT = token_ids(1, 200)
STEPS = token_ids(1, 8, seed=3)


@pytest.fixture(autouse=True)
def own_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_KVQ_CACHE", str(tmp_path))


def deep(name: str = "llama") -> Any:
    return tiny_model(name, num_hidden_layers=4)


def short(bits: int, mode: str, **options: Any) -> Any:
    return XQuantCache(bits, mode=mode, residual_length=10, **{"first_layers": 2} | options)


@torch.no_grad()
def logits(model: Any, cache: Any) -> torch.Tensor:
    model(PROMPT, past_key_values=cache)
    return torch.cat([model(step, past_key_values=cache).logits for step in STEPS.split(1, 1)], 1)


@pytest.mark.parametrize("axis", ["token", "channel"])
@pytest.mark.parametrize("mode", MODES)
def test_more_bits_are_nearer(mode: str, axis: str) -> None:
    model = deep()
    exact = logits(model, DynamicCache())
    caches = [short(bits, mode, axis=axis, model=model) for bits in (2, 3, 4, 8)]
    errors = [float((logits(model, cache) - exact).norm() / exact.norm()) for cache in caches]
    assert errors == sorted(errors, reverse=True)
    # Of "cl", the first layers and the sums stay at 4 bits.
    assert 0 < errors[-1] < (0.1 if mode == "cl" else 0.05)


def test_errors_do_not_add_up() -> None:
    """What a layer is rebuilt to depends on what was handed on to it, with all its errors."""
    model = tiny_model("llama", num_hidden_layers=8)
    cache = short(3, "cl", model=model, accumulator_bits=2)
    inputs: dict[int, torch.Tensor] = {}

    def note(module: Any, args: Any, kwargs: Any) -> None:
        inputs[module.layer_idx] = kwargs["hidden_states"]

    hooks = [
        layer.self_attn.register_forward_pre_hook(note, with_kwargs=True)
        for layer in model.model.layers
    ]
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
    for hook in hooks:
        hook.remove()
    errors = []
    for index, layer in enumerate(cache.layers[2:], start=2):
        x, got = inputs[index][:, 4:132], layer.decode(0, 128)[0]
        errors.append(float((got - x).norm() / x.norm()))
    assert max(errors) < 0.3 and errors[-1] < 1.5 * errors[0]


@pytest.mark.parametrize("chunk", [200, 70])
@pytest.mark.parametrize("bits", [2, 4, 16])
def test_differences_are_to_what_decoding_sees(
    bits: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, whenever a page was packed and however many are read at once."""
    model = deep()
    cache = short(2, "cl", model=model, first_layers=1, accumulator_bits=bits)
    used: dict[int, list[torch.Tensor]] = {}
    encode = CrossLayer._encode

    def noted(layer: CrossLayer, oldest: list[torch.Tensor]) -> list[torch.Tensor]:
        def difference(x: Any, records: Any, *args: Any) -> torch.Tensor:
            used.setdefault(layer.ordinal, []).append(records[0].clone())
            return quantize_difference(x, records, *args)

        monkeypatch.setattr(x_cross, "quantize_difference", difference)
        return encode(layer, oldest)

    monkeypatch.setattr(CrossLayer, "_encode", noted)
    read: dict[int, torch.Tensor] = {}
    attend = x_source.remat_attention

    def read_records(query: Any, records: Any, *args: Any, **options: Any) -> Any:
        if len(records) == 2:
            read[len(read) % 3 + 1] = records[0]
        return attend(query, records, *args, **options)

    monkeypatch.setattr(x_source, "remat_attention", read_records)
    with torch.no_grad():
        for ids in (*PROMPT.split(chunk, 1), STEPS, PROMPT[:, :60]):
            model(ids, past_key_values=cache)
        read.clear()
        model(STEPS[:, :1], past_key_values=cache)
    assert sorted(used) == sorted(read) == [1, 2, 3]
    for ordinal, parts in used.items():
        assert len(parts) > 1 and torch.equal(torch.cat(parts, 1), read[ordinal])


@pytest.mark.parametrize("mode", MODES)
def test_rows_are_edited_like_those_of_a_batch(mode: str) -> None:
    model = deep()
    prompt = token_ids(3, 200, seed=8)
    selected, whole = short(4, mode, model=model), short(4, mode, model=model)
    with torch.no_grad():
        model(prompt, past_key_values=selected)
        selected.batch_select_indices(torch.tensor([2, 0]))
        selected.batch_repeat_interleave(2)
        model(prompt[[2, 2, 0, 0]], past_key_values=whole)
        got, want = (
            model(STEPS[:, :3].expand(4, -1), past_key_values=cache).logits
            for cache in (selected, whole)
        )
    torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)
    assert selected.get_seq_length() == 203


@pytest.mark.parametrize("mode", MODES)
def test_first_tokens_stay_exact(mode: str) -> None:
    """Every layer was given the same in both caches: nothing was packed ahead of the prompt."""
    model = deep()
    # Sums of differences are rounded even at 16 bits.
    plain = "x" if mode == "cl" else mode
    kept, exact = short(2, mode, model=model), short(16, plain, model=model, sink_tokens=0)
    for cache in (kept, exact):
        logits(model, cache)
    for cut in (208, 150, 2):
        for cache in (kept, exact):
            cache.crop(cut)
        for layer, whole in zip(kept.layers[1:], exact.layers[1:], strict=True):
            packed = layer.state.quantized
            assert [part.shape[1] for part in layer.state.sinks] == len(layer.state.sinks) * [
                4 if packed else 0
            ]
            for part, want in zip(layer._whole(), whole._whole(), strict=True):
                assert torch.equal(part[:, :4], want[:, :4])
                assert torch.equal(part[:, 4:68], want[:, 4:68]) == (not packed)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sinks", [0, 1, 70])
def test_any_number_of_first_tokens(mode: str, sinks: int) -> None:
    model = deep()
    exact = logits(model, DynamicCache())
    cache = short(16, mode, model=model, sink_tokens=sinks)
    torch.testing.assert_close(logits(model, cache), exact, rtol=1e-4, atol=1e-4)
    assert cache.layers[2].state.packed_end == sinks + (208 - sinks - 10) // 64 * 64


@pytest.mark.parametrize("mask", [None, torch.bool, torch.float32])
@pytest.mark.parametrize("window", [3, 100, 206, 300])
def test_windows_that_first_tokens_leave(
    window: int, mask: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window is that of the whole row, in whatever parts it is attended to."""
    monkeypatch.setattr(x_embedded, "_BLOCK_TOKENS", 64)
    model = deep()
    cache = short(4, "x", model=model)
    logits(model, cache)
    query = torch.randn(1, 4, 1, 32)
    columns = torch.arange(208)
    within = columns > 207 - window
    given = None
    if mask is not None:
        attended = (columns % 5 > 0) | (columns == 207)
        within = within & attended
        given = attended[None, None, None]
        if mask == torch.float32:
            given = torch.zeros(given.shape).masked_fill(~given, -torch.inf)
    for layer in cache.layers:
        got = layer.attend(query, given, sliding_window=window)
        torch.testing.assert_close(got, layer.attend(query, within[None, None, None]))


@pytest.mark.parametrize("mode", MODES)
def test_cut_tokens_come_back(mode: str) -> None:
    """What is cut within a page and stored again is as near as before."""
    model = deep()
    exact = logits(model, DynamicCache())
    cache = short(4, mode, model=model)
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        cache.crop(90)
        assert cache.get_seq_length() == 90
        model(PROMPT[:, 90:], past_key_values=cache)
        steps = [model(step, past_key_values=cache).logits for step in STEPS.split(1, 1)]
    want = float((logits(model, short(4, mode, model=model)) - exact).norm())
    assert float((torch.cat(steps, 1) - exact).norm()) < 2 * want


@pytest.mark.parametrize("mode", MODES)
def test_copies_go_on_by_themselves(mode: str) -> None:
    model = deep()
    cache = short(4, mode, model=model)
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        copies = [cache.fork(), copy.deepcopy(cache)]
        want = model(STEPS, past_key_values=cache).logits
        for clone in copies:
            assert torch.equal(model(STEPS, past_key_values=clone).logits, want)
            assert clone.get_seq_length() == 208
    cache.reset()
    assert cache.memory_report().total_bytes == 0


def test_first_layer_by_token() -> None:
    model = deep()
    cache = short(4, "x", model=model)
    logits(model, cache)
    first, second = cache.layers[:2]
    assert first.memory_parts()["pages"] == 0 and second.memory_parts()["pages"] > 0
    embedded = model.get_input_embeddings()(PROMPT)
    with torch.no_grad():
        want = model(inputs_embeds=0.5 * embedded, past_key_values=copy.deepcopy(cache)).logits
        got = model(inputs_embeds=0.5 * embedded, past_key_values=cache).logits
        assert torch.equal(got, want)
    assert first.state.length == 408 and first.memory_parts()["pages"] > 0
    gpt2 = short(4, "x", model=deep("gpt2"))
    logits(deep("gpt2"), gpt2)
    assert gpt2.layers[0].memory_parts()["pages"] > 0


@pytest.mark.parametrize("queries", [1, 40])
def test_inputs_of_token_numbers_exist_in_blocks(
    queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which gives what all of them at once give."""
    model = deep()
    mask = torch.ones(2, 200 + queries, dtype=torch.int64)
    mask[0, :70] = 0
    logits, sizes = [], []
    inputs = EmbeddedLayer._inputs

    def noted(layer: EmbeddedLayer, *args: Any) -> torch.Tensor:
        made = inputs(layer, *args)
        sizes.append(made.shape[1])
        return made

    monkeypatch.setattr(EmbeddedLayer, "_inputs", noted)
    for block in (10_000, 64):
        monkeypatch.setattr(x_embedded, "_BLOCK_TOKENS", block)
        cache = short(4, "x", model=model)
        with torch.no_grad():
            model(PROMPT.repeat(2, 1), attention_mask=mask[:, :200], past_key_values=cache)
            sizes.clear()
            ids = PROMPT[:, :queries].repeat(2, 1)
            logits.append(model(ids, attention_mask=mask, past_key_values=cache).logits)
    assert sizes == [64, 64, 64, 8 + queries]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_mode_of_fewest_bytes(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "torch_kvq")
    shape = {"hidden_size": 512, "num_attention_heads": 8, "num_hidden_layers": 30}
    many = tiny_config("llama", num_key_value_heads=8, **shape)
    few = tiny_config("llama", num_key_value_heads=2, **shape)
    assert XQuantCache(4, config=many).mode == "x"
    assert "mode 'x' at 4 bits, which takes the fewest bytes" in caplog.messages[-1]
    assert XQuantCache(4, config=few).mode == "latent"
    caplog.clear()
    XQuantCache(4, mode="x", config=few)
    assert "a KVQCache is smaller" in caplog.messages[-1]


@pytest.mark.parametrize(
    ("kv_heads", "bits", "mode", "least"),
    [
        (9, 4, "x", 7.4),
        (9, 3, "cl", 9),
        (9, 2, "cl", 12),
        (3, 4, "latent", 3.7),
        (3, 3, "latent", 4.8),
        (3, 2, "latent", 6.9),
    ],
)
def test_factors_against_fp16(kv_heads: int, bits: int, mode: str, least: float) -> None:
    """At 30 layers of SmolLM2's size, all metadata included."""
    config = tiny_config(
        "llama",
        hidden_size=576,
        num_attention_heads=9,
        num_key_value_heads=kv_heads,
        num_hidden_layers=30,
    )
    sizes = XQuantCache(bits, mode=mode, config=config).bytes_per_token
    assert sizes["fp16"] / sizes[mode] >= least


@pytest.mark.parametrize("mode", MODES)
def test_bytes_are_those_of_the_tensors(mode: str) -> None:
    """What a page takes, of the pages that are there."""
    model = tiny_model("gpt2", num_hidden_layers=4)
    cache = short(4, mode, model=model)
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
    pages = sum(layer.memory_parts()["pages"] for layer in cache.layers)
    shared = 4 + 4 * 4 / 64
    accumulator = cache.layers[-1].state.streams[0].record_bytes(4) / 64 if mode == "cl" else 0
    want = cache.bytes_per_token[mode] - shared - accumulator
    assert math.isclose(pages / cache.layers[0].state.quantized, want, rel_tol=1e-6)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bits": 5}, "bits must be one of 2, 3, 4, 8, 16, got 5"),
        ({"mode": "svd"}, "mode must be one of 'auto', 'x', 'cl', 'latent', got 'svd'"),
        ({"axis": "row"}, "axis must be one of"),
        ({"accumulator_bits": 1}, "accumulator_bits must be one of"),
        ({"first_layers": 0}, "first_layers must be at least 1, got 0"),
        ({"residual_length": -1}, "residual_length must be at least 0, got -1"),
    ],
)
def test_options(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        XQuantCache(**options)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"nbits": 4}, "say bits=4"),
        ({"q_group_size": 64}, "every 64 elements have a scale"),
        ({"quantized_start": 9}, r"see help\(XQuantCache\)"),
    ],
)
def test_the_constructor_says_what_to_use(given: dict[str, Any], words: str) -> None:
    with pytest.raises(TypeError, match=rf"XQuantCache\(\) has no argument .*{words}"):
        XQuantCache(**given)


def test_similarity() -> None:
    model = deep()
    similarity = cross_layer_similarity(model, PROMPT)
    assert similarity.cosine.shape == (4, 4) and similarity.difference.shape == (3,)
    torch.testing.assert_close(similarity.cosine.diagonal(), torch.ones(4))
    torch.testing.assert_close(similarity.cosine, similarity.cosine.T)
    assert 1 <= similarity.first_layers <= 4
    assert sum(similarity.groups(), []) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="tokenizer"):
        cross_layer_similarity(model, "a text")
    pytest.importorskip("matplotlib")
    assert similarity.plot().get_xlabel() == "layer"
