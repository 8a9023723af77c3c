"""Transformers' attention functions: packed where they can be, else as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from transformers import DynamicCache
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, AttentionInterface
from transformers.models.llama import modeling_llama

from tests.models import left_padded, tiny_model, token_ids
from torch_kvq import KVQCache
from torch_kvq.integrations import transformers_attention

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

PROMPT = token_ids(1, 120)
PADDED = left_padded((70, 0), 120)
GREEDY = {"max_new_tokens": 20, "do_sample": False}


def packed(**options: Any) -> Any:
    return KVQCache(16, quantized_start=80, residual_length=10, **options)


def same_tokens(model: Any, inputs: dict[str, Any], cache: Any) -> bool:
    expected = model.generate(**inputs, past_key_values=DynamicCache(config=model.config), **GREEDY)
    return torch.equal(model.generate(**inputs, past_key_values=cache, **GREEDY), expected)


def test_a_lost_mask_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parity tests would fail if packed attention ignored the padding."""
    monkeypatch.setattr(transformers_attention, "_whole_mask", lambda *_: None)
    assert not same_tokens(tiny_model("llama"), PADDED, packed())


def test_lost_beams_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch_kvq.KVQLayer.reorder_cache", lambda *_: None)
    assert not same_tokens(tiny_model("llama"), PADDED | {"num_beams": 3}, packed())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_attention_weights_are_those_of_the_model(name: str, attention: str) -> None:
    """Packed attention has no weights to give: these steps decode.

    GPT-2 is one that does not tell its attention function of them.
    """
    model = tiny_model(name, attention)
    options = {"output_attentions": True, "return_dict_in_generate": True, **GREEDY}
    cache = packed()
    got = model.generate(PROMPT, past_key_values=cache, **options).attentions
    want = model.generate(PROMPT, **options).attentions
    for step, wanted_step in zip(got, want, strict=True):
        for weights, wanted in zip(step, wanted_step, strict=True):
            torch.testing.assert_close(weights, wanted)
    assert cache.materialized == 19 * 2
    with pytest.raises(RuntimeError, match="strict=True"):
        model.generate(PROMPT, past_key_values=packed(strict=True), **options)


def test_attention_weights_that_the_configuration_asks_for() -> None:
    model, cache = tiny_model("llama", "eager", output_attentions=True), packed()
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        got = model(PROMPT[:, :1], past_key_values=cache).attentions
        want = model(torch.cat((PROMPT, PROMPT[:, :1]), 1)).attentions
    for weights, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(weights, wanted[:, :, -1:])


def test_dropout_decodes() -> None:
    model, cache = tiny_model("llama"), packed()
    with torch.no_grad():
        model(PROMPT, past_key_values=cache)
        attention = model.model.layers[0].self_attn
        attention.attention_dropout = 0.5
        try:
            model.train()
            model(PROMPT[:, :1], past_key_values=cache)
        finally:
            model.eval()
            attention.attention_dropout = 0.0
    assert cache.materialized == 1


@pytest.mark.parametrize(("name", "attention"), [("bloom", "eager"), ("falcon", "eager")])
def test_models_with_their_own_maths_decode(name: str, attention: str) -> None:
    model, cache = tiny_model(name, attention), packed()
    assert same_tokens(model, {"input_ids": PROMPT}, cache)
    assert cache.materialized == 19 * 2
    with pytest.raises(RuntimeError, match="strict=True"):
        model.generate(PROMPT, past_key_values=packed(strict=True), **GREEDY)


def test_models_that_call_torch_are_packed() -> None:
    cache = packed(strict=True)
    assert same_tokens(tiny_model("falcon"), {"input_ids": PROMPT}, cache)
    assert cache.layers[0].state.lengths[0, 2] > 0


def test_names_are_registered_once() -> None:
    KVQCache()
    before = dict(AttentionInterface._global_mapping)
    KVQCache()
    assert before == AttentionInterface._global_mapping
    for name in ("sdpa", "flex_attention", "flash_attention_2"):
        function = ALL_ATTENTION_FUNCTIONS[name]
        assert not hasattr(function._kvq_original, "_kvq_original")
    eager = modeling_llama.eager_attention_forward
    found = ALL_ATTENTION_FUNCTIONS.get_interface("eager", eager)
    assert found._kvq_original is eager
    assert found is ALL_ATTENTION_FUNCTIONS.get_interface("eager", eager)


def test_function_that_is_registered_later_is_packed() -> None:
    calls = []

    def counting(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        calls.append(type(key))
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, mask, **kwargs)

    AttentionInterface.register("counting", counting)
    try:
        model = tiny_model("llama")
        model.config._attn_implementation = "counting"
        cache = packed()
        model.generate(PROMPT, past_key_values=cache, **GREEDY)
        assert calls == [torch.Tensor] * 2 and cache.materialized == 0
    finally:
        model.config._attn_implementation = "sdpa"
        del AttentionInterface._global_mapping["counting"]


def test_caches_of_transformers_are_unchanged() -> None:
    """The name "kvq" alone does not change a result either."""
    model, other = tiny_model("llama"), tiny_model("llama", "kvq")
    expected = model.generate(**PADDED, **GREEDY)
    assert torch.equal(other.generate(**PADDED, **GREEDY), expected)
    assert torch.equal(other(PROMPT, use_cache=False).logits, model(PROMPT).logits)


def test_mask_of_flash_attention_is_padding_alone() -> None:
    """Two dimensions; causality and the sliding window come as arguments."""
    cache = packed()
    layer = cache._new_layer()
    key, value = torch.randn(2, 2, 2, 120, 32)
    query = torch.randn(2, 4, 120, 32)
    padding = torch.arange(120) >= torch.tensor([[30], [0]])
    module = torch.nn.Module()

    def flash(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
        assert mask.shape == (2, 120)
        return torch.zeros(1), None

    attention = transformers_attention.aware(flash)
    attention(module, query, *layer.update(key, value), padding, is_causal=True)
    assert layer.state.lengths[:, 0].tolist() == [30, 0]

    new = torch.randn(2, 2, 2, 10, 32)
    out, _ = attention(
        module,
        query[:, :, :10],
        *layer.update(*new),
        torch.nn.functional.pad(padding, (0, 10), value=True),
        is_causal=True,
        sliding_window=50,
        scaling=0.3,
    )
    assert out.shape == (2, 10, 4, 32) and out.is_contiguous()
    position = torch.arange(130)
    distance = position[120:].unsqueeze(1) - position
    mask = (distance >= 0) & (distance < 50)
    want = torch.nn.functional.scaled_dot_product_attention(
        query[:, :, :10],
        torch.cat((key, new[0]), 2),
        torch.cat((value, new[1]), 2),
        mask,
        scale=0.3,
        enable_gqa=True,
    )
    torch.testing.assert_close(out, want.transpose(1, 2), rtol=1e-4, atol=1e-5)
    assert layer.materialized == 0


@pytest.mark.parametrize("name", ["sdpa", "kvq"])
def test_arguments_reach_packed_attention(name: str) -> None:
    """But for those that ``"sdpa"`` ignores without a packed cache too."""
    layer = packed()._new_layer()
    layer.update(*torch.randn(2, 1, 2, 120, 32))
    layer.attend(torch.randn(1, 4, 1, 32))
    query, sinks = torch.randn(1, 4, 3, 32), torch.randn(4, requires_grad=True)
    handles = layer.update(*torch.randn(2, 1, 2, 3, 32))
    out, weights = ALL_ATTENTION_FUNCTIONS[name](
        torch.nn.Module(), query, *handles, None, scaling=0.5, softcap=2.0, s_aux=sinks, dropout=0.0
    )
    options = {"scale": 0.5, "is_causal": True}
    if name != "sdpa":
        options |= {"softcap": 2.0, "sinks": sinks}
    want = layer.attend(query, **options)
    assert weights is None and torch.equal(out, want.transpose(1, 2))
    for option in options:
        others = options | {option: False if option == "is_causal" else None}
        assert not torch.allclose(layer.attend(query, **others), want, atol=1e-3)


@pytest.mark.parametrize("padded", [False, True])
def test_compiled_decoding_is_one_graph(padded: bool) -> None:
    model = tiny_model("llama")
    inputs = PADDED if padded else {"input_ids": PROMPT.repeat(2, 1)}
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    step = torch.compile(model.forward, fullgraph=True, backend=backend)
    tokens: list[list[torch.Tensor]] = [[], []]
    with torch.no_grad():
        for forward, out in zip((model.forward, step), tokens, strict=True):
            cache = packed(config=model.config, max_cache_len=192)
            mask = inputs.get("attention_mask", torch.ones(2, 120))
            next_token = model(**inputs, past_key_values=cache).logits[:, -1:].argmax(-1)
            for _ in range(70):
                mask = torch.nn.functional.pad(mask, (0, 1), value=1)
                options = {"attention_mask": mask.long()} if padded else {}
                logits = forward(input_ids=next_token, past_key_values=cache, **options).logits
                next_token = logits[:, -1:].argmax(-1)
                out.append(next_token)
    assert torch.equal(torch.cat(tokens[0], 1), torch.cat(tokens[1], 1))
    # A mask that gets longer is a new shape, once.
    assert len(graphs) == (2 if padded else 1)
