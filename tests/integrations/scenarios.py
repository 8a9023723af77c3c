"""Ways to use a cache, which give the same tokens with a packed one and with Transformers' own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache

from tests.models import left_padded, token_ids

_SOURCE_TOKENS = 7


@dataclass(frozen=True, eq=False)
class Load:
    """How much a scenario does.

    Attributes:
        tokens: of the prompt.
        new_tokens: to be generated.
        padding: left padding of each row of a batch; the first fills more than a chunk.
        chunk: tokens of a chunk of the prompt.
        short: tokens that are generated where it happens twice.
    """

    tokens: int
    new_tokens: int
    padding: tuple[int, ...]
    chunk: int
    short: int
    prompt: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "prompt", token_ids(1, self.tokens))

    @property
    def greedy(self) -> dict[str, Any]:
        """Options of ``generate``."""
        return {"max_new_tokens": self.new_tokens, "do_sample": False}

    @property
    def briefly(self) -> dict[str, Any]:
        """Options of ``generate`` for the first of two calls."""
        return {"max_new_tokens": self.short, "do_sample": False}

    def padded(self, model: Any) -> dict[str, Tensor]:
        """A batch with left padding."""
        batch = left_padded(self.padding, self.tokens)
        return inputs(model, batch["input_ids"], batch["attention_mask"])


LONG = Load(tokens=150, new_tokens=90, padding=(90, 5, 0), chunk=40, short=20)
"""Tiles, windows and pages all change more than once."""

BRIEF = Load(tokens=132, new_tokens=8, padding=(70, 5, 0), chunk=40, short=3)
"""Where 10 tokens stay exact, a page is packed with the prompt and another while decoding."""

Scenario = Callable[[Any, Any, Load], Tensor]


def inputs(model: Any, ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
    """Arguments for these tokens; those of the decoder where a model has an encoder too."""
    prefix, given = "", {}
    if model.config.is_encoder_decoder:
        prefix, given = "decoder_", {"input_ids": token_ids(ids.shape[0], _SOURCE_TOKENS, seed=7)}
    given[f"{prefix}input_ids"] = ids
    return given if mask is None else given | {f"{prefix}attention_mask": mask}


def for_model(model: Any, cache: Any) -> Any:
    """The cache as the model takes it: with one for cross-attention beside it if there is such."""
    if not model.config.is_encoder_decoder:
        return cache
    return EncoderDecoderCache(cache, DynamicCache(config=model.config))


def forward(model: Any, cache: Any, ids: Tensor) -> Tensor:
    """Logits of a call of the model."""
    return model(**inputs(model, ids), past_key_values=cache, use_cache=True).logits


def greedy(model: Any, cache: Any, load: Load) -> Tensor:
    return model.generate(**inputs(model, load.prompt), past_key_values=cache, **load.greedy)


def from_one_token(model: Any, cache: Any, load: Load) -> Tensor:
    options = {"max_new_tokens": load.new_tokens + 30, "do_sample": False}
    return model.generate(**inputs(model, load.prompt[:, :1]), past_key_values=cache, **options)


def padded(model: Any, cache: Any, load: Load) -> Tensor:
    return model.generate(**load.padded(model), past_key_values=cache, **load.greedy)


def sampling(model: Any, cache: Any, load: Load) -> Tensor:
    torch.manual_seed(3)
    options = {"max_new_tokens": load.new_tokens, "do_sample": True, "num_return_sequences": 2}
    return model.generate(**load.padded(model), past_key_values=cache, **options)


def beams(model: Any, cache: Any, load: Load) -> Tensor:
    return model.generate(**load.padded(model), past_key_values=cache, num_beams=3, **load.greedy)


def two_turns(model: Any, cache: Any, load: Load) -> Tensor:
    first = model.generate(**inputs(model, load.prompt), past_key_values=cache, **load.briefly)
    second = inputs(model, torch.cat((first, load.prompt[:, :50]), 1))
    return model.generate(**second, past_key_values=cache, **load.greedy)


def two_padded_turns(model: Any, cache: Any, load: Load) -> Tensor:
    """The second call comes with a longer mask."""
    first = model.generate(**load.padded(model), past_key_values=cache, **load.briefly)
    ids = torch.cat((first, token_ids(first.shape[0], 20, seed=4)), 1)
    mask = torch.arange(ids.shape[1]) >= torch.tensor(load.padding).unsqueeze(1)
    second = inputs(model, ids, mask.long())
    return model.generate(**second, past_key_values=cache, **load.greedy)


def chunked(model: Any, cache: Any, load: Load) -> Tensor:
    """The first chunk is padding throughout for one row, the second begins within it."""
    options = {"prefill_chunk_size": load.chunk, **load.greedy}
    return model.generate(**load.padded(model), past_key_values=cache, **options)


def prompt_lookup(model: Any, cache: Any, load: Load) -> Tensor:
    prompt = load.prompt[:, :70].repeat(1, 2)
    options = {"prompt_lookup_num_tokens": 12, **load.greedy}
    return model.generate(**inputs(model, prompt), past_key_values=cache, **options)


def assisted(model: Any, cache: Any, load: Load) -> Tensor:
    """The assistant is the model with some noise, so that it is right now and then."""
    draft = copy.deepcopy(model)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        for parameter in draft.parameters():
            parameter.data += 0.2 * parameter.abs().mean() * torch.randn_like(parameter)
    options = {"assistant_model": draft, **load.greedy}
    return model.generate(**inputs(model, load.prompt), past_key_values=cache, **options)


def copied_prefix(model: Any, cache: Any, load: Load) -> Tensor:
    """A copy of the cache goes on, and so does the cache itself behind it."""
    with torch.no_grad():
        forward(model, cache, load.prompt)
    whole = inputs(model, torch.cat((load.prompt, load.prompt.flip(1)), 1))
    copied = model.generate(**whole, past_key_values=copy.deepcopy(cache), **load.greedy)
    return torch.cat((copied, model.generate(**whole, past_key_values=cache, **load.greedy)))


def embeddings(model: Any, cache: Any, load: Load) -> Tensor:
    given = inputs(model, load.prompt)
    given["inputs_embeds"] = model.get_input_embeddings()(given.pop("input_ids"))
    return model.generate(**given, past_key_values=cache, **load.greedy)


def rows(model: Any, cache: Any, load: Load) -> Tensor:
    """Rows are repeated and selected, as contrastive search does."""
    with torch.no_grad():
        forward(model, cache, load.prompt)
        cache.batch_repeat_interleave(4)
        forward(model, cache, token_ids(4, 30))
        cache.batch_select_indices(torch.tensor([3, 0, 2]))
        return forward(model, cache, token_ids(3, 20, seed=2)).argmax(-1)


def cropped(model: Any, cache: Any, load: Load) -> Tensor:
    with torch.no_grad():
        forward(model, cache, load.prompt)
        forward(model, cache, token_ids(1, 30))
        cache.crop(-37)
        return forward(model, cache, token_ids(1, 20, seed=2)).argmax(-1)


def logits(model: Any, cache: Any, load: Load) -> Tensor:
    """A prompt and single tokens, the same whatever the model would choose."""
    with torch.no_grad():
        forward(model, cache, load.prompt)
        steps = token_ids(1, load.new_tokens, seed=5).split(1, 1)
        return torch.cat([forward(model, cache, step) for step in steps], 1)


def attention_weights(model: Any, cache: Any, load: Load) -> Tensor:
    """The weights of all steps; the tokens where an attention implementation gives no weights."""
    options = {"output_attentions": True, "return_dict_in_generate": True, **load.greedy}
    result = model.generate(**inputs(model, load.prompt), past_key_values=cache, **options)
    steps = result.get("decoder_attentions", result.get("attentions"))
    weights = [layer for step in steps or () for layer in step or () if layer is not None]
    # Caches differ in whether columns that a sliding window masks are there.
    return torch.cat([layer[layer > 0] for layer in weights]) if weights else result.sequences


def training(model: Any, cache: Any, load: Load) -> Tensor:
    """A prompt and a step with gradients and, where the model has it, dropout."""
    torch.manual_seed(3)
    model.train()
    try:
        forward(model, cache, load.prompt)
        out = forward(model, cache, token_ids(1, 3, seed=5))
        out.square().mean().backward()
    finally:
        model.eval()
        model.zero_grad()
    return out.argmax(-1)


SCENARIOS = (
    greedy,
    from_one_token,
    padded,
    sampling,
    beams,
    two_turns,
    two_padded_turns,
    chunked,
    prompt_lookup,
    assisted,
    copied_prefix,
    embeddings,
    rows,
    cropped,
)
