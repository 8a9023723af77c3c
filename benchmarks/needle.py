"""Whether a model's own lookups in a long text find the same token in a packed cache.

Pass keys are planted at several depths of a text, and asked for behind it by repeating them. While
it reads the questions, the model's attention looks the pass keys up: its real queries over its real
keys. Values are random vectors here, one per token, so that an output tells which token was found.
A lookup counts when the uncompressed cache finds the token that it weighs most, in the pass key
asked for, and it is decided when that token has half of the weight. So the uncompressed cache
scores 100 % by construction, whatever the model would answer.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torch_kvq import KVQLayer
from torch_kvq.demo import document

from . import environment
from .model import Tokens, biased_keys, quiet_model
from .recipes import PEERS, SAME, Recipe
from .report import Check, Column, Report, Table

LENGTHS = (1024, 2048, 4096, 7680)
BIASED_LENGTHS = LENGTHS[:2]
DEPTHS = 10
CHUNK = 1024
WORDS = (
    "apple river stone eagle copper garden window castle rocket bottle "
    "harbor forest mirror tiger lemon piano island engine silver bridge"
).split()
"""Names of the pass keys, as many at each depth."""

CONTROL = "KVQCache(bits=16)"
CONTROL_LIMIT = 1e-3
"""Greatest share of lookups that the cache without loss may miss, of those at a tie."""

DECIDED = 0.5
"""Weight of the token with which a lookup is decided: no other can have more."""

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""``(query, key, value)`` of a layer to the output, with some cache between."""


@dataclass(frozen=True)
class Reading:
    """A text with pass keys that a model has read, and its questions.

    Attributes:
        tokens: keys and values of the text.
        queries: of every layer while the questions are read, ``[1, heads, questions, dim]``.
        starts: position of each pass key in the text.
        size: tokens of a pass key.
    """

    tokens: Tokens
    queries: list[Tensor]
    starts: list[int]
    size: int

    @property
    def length(self) -> int:
        """Tokens of the text."""
        return self.tokens[0][0].shape[2]


def plant(tokenizer: Any, length: int) -> tuple[Tensor, list[int], int]:
    """A text of ``length`` tokens with pass keys, and the pass keys once more.

    Returns:
        ``int64[1, tokens]``, the positions of the pass keys, and the tokens of each.
    """
    order = random.Random(0)
    facts = [
        tokenizer(
            f"\n\nThe pass key of the {word} is {order.randrange(10**5, 10**6)}.\n\n",
            add_special_tokens=False,
        )["input_ids"]
        for word in WORDS
    ]
    size = len(facts[0])
    assert all(len(fact) == size for fact in facts)
    text = document(tokenizer, length - len(facts) * size)[0].tolist()
    parts: list[int] = []
    starts = []
    for index, fact in enumerate(facts):
        middle, end = (len(text) * (2 * index + i) // (2 * len(facts)) for i in (1, 2))
        parts += text[len(text) * index // len(facts) : middle]
        starts.append(len(parts))
        parts += fact + text[middle:end]
    return torch.tensor([parts + sum(facts, [])]), starts, size


def read(model: Any, tokenizer: Any, length: int) -> Reading:
    """Read a text with pass keys and the questions behind it."""
    from transformers import DynamicCache

    ids, starts, size = plant(tokenizer, length)
    cache = DynamicCache()
    for part in ids[:, :length].split(CHUNK, 1):
        model(part, past_key_values=cache, logits_to_keep=1)
    with recorded_queries(model, torch.arange(length, ids.shape[1])) as queries:
        model(ids[:, length:], past_key_values=cache, logits_to_keep=1)
    tokens = [(layer.keys[:, :, :length], layer.values[:, :, :length]) for layer in cache.layers]
    return Reading(tokens, queries, starts, size)


@contextlib.contextmanager
def recorded_queries(model: Any, positions: Tensor) -> Iterator[list[Tensor]]:
    """Collect the rotated queries of every layer of a Llama, in the order of the layers."""
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    queries: list[Tensor] = []

    def record(module: Any, inputs: Any, output: Tensor) -> None:
        heads = output.unflatten(-1, (-1, model.config.head_dim)).transpose(1, 2)
        cos, sin = model.model.rotary_emb(heads, positions.unsqueeze(0))
        queries.append(apply_rotary_pos_emb(heads, heads, cos, sin)[0])

    hooks = [layer.self_attn.q_proj.register_forward_hook(record) for layer in model.model.layers]
    try:
        yield queries
    finally:
        for hook in hooks:
            hook.remove()


def uncompressed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Attention without loss."""
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=True)


def packed(bits: int | str) -> Attend:
    """Attention of `torch_kvq.KVQLayer`."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layer = KVQLayer(bits)
        layer.update(key, value)
        layer.flush()
        return layer.attend(query)

    return attend


def rounded(recipe: Recipe) -> Attend:
    """Attention over the keys and values that a recipe makes of those that `KVQCache` packs."""

    def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        cache = recipe.cache(SAME)
        cache.update(key, value, 0)
        layer = cache.layers[0]
        layer.flush()
        return uncompressed(query, layer.keys, layer.values)

    return attend


def caches() -> dict[str, Attend]:
    """All caches by the names of the report."""
    ours = {f"KVQCache({bits=})": packed(bits) for bits in (16, 4, "4/3", 3, 2)}
    return {**ours, **{recipe.name: rounded(recipe) for recipe in PEERS}}


def lookups(reading: Reading) -> dict[str, Tensor]:
    """Lookups of every cache: ``int64[any or decided, depth, found or all]``."""
    counts = {name: torch.zeros(2, DEPTHS, 2, dtype=torch.int64) for name in caches()}
    generator = torch.Generator().manual_seed(0)
    for (key, value), query in zip(reading.tokens, reading.queries, strict=True):
        value = F.normalize(torch.randn(value.shape, generator=generator), dim=-1)
        codes = value.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
        wanted = (uncompressed(query, key, value) @ codes).argmax(-1)
        valid = looked_up(reading, query, key, wanted)
        for name, attend in caches().items():
            found = (attend(query, key, value) @ codes).argmax(-1) == wanted
            both = torch.stack([valid & found, valid])
            by_depth = both.unflatten(-1, (DEPTHS, -1)).sum((2, 3, 5))
            counts[name] += by_depth.permute(1, 2, 0)
    return counts


def looked_up(reading: Reading, query: Tensor, key: Tensor, found: Tensor) -> Tensor:
    """Which queries look a pass key up: ``bool[any or decided, 1, heads, questions]``.

    Args:
        reading: where the pass keys are.
        query: of a layer.
        key: of the same layer.
        found: positions of the tokens that the outputs with the exact cache tell.
    """
    scores = query @ key.repeat_interleave(query.shape[1] // key.shape[1], 1).mT
    weight, heaviest = (scores * query.shape[-1] ** -0.5).softmax(-1).max(-1)
    asked = torch.arange(query.shape[2]) // reading.size
    offset = found - torch.tensor(reading.starts)[asked]
    valid = (found == heaviest) & (offset >= 0) & (offset < reading.size)
    return torch.stack([valid, valid & (weight >= DECIDED)])


@torch.inference_mode()
def run(quick: bool = False) -> Report:
    """Look pass keys up in texts of all lengths, with the model as it is and with key biases."""
    torch.set_num_threads(1)
    lengths, biased_lengths = (LENGTHS[:1],) * 2 if quick else (LENGTHS, BIASED_LENGTHS)
    model, tokenizer = quiet_model()
    tables = measure(model, tokenizer, lengths, "plain", "SmolLM2")
    with biased_keys(model):
        title = "SmolLM2 with key biases of norm 300"
        tables += measure(model, tokenizer, biased_lengths, "biased", title)
    settings = {
        "model": "SmolLM2-135M-Instruct, float32: its keys and queries of all layers",
        "text": f"Python's documentation with {len(WORDS)} pass keys, then these once more",
        "exact tokens": f"of all caches: {SAME.exact}",
    }
    checks = [
        Check(f"missed, {table.name}, {CONTROL}", 1 - row["any"], CONTROL_LIMIT)
        for table in tables
        for row in table.rows
        if row["name"] == CONTROL and "any" in row
    ]
    return Report("needle", environment.describe(), settings, checks, tables)


def measure(
    model: Any, tokenizer: Any, lengths: tuple[int, ...], name: str, title: str
) -> list[Table]:
    """The scores by length, and by length and depth."""
    counts = {length: lookups(read(model, tokenizer, length)) for length in lengths}
    rows: list[dict[str, Any]] = []
    cells: list[dict[str, Any]] = []
    for cache in caches():
        everything = torch.stack([counts[length][cache] for length in lengths])
        row: dict[str, Any] = {"name": cache, "lookups": int(everything[:, 1, :, 1].sum())}
        for length, (_, decided) in zip(lengths, everything, strict=True):
            row[str(length)] = _share(decided)
            shares = {str(depth): _share(cell) for depth, cell in enumerate(decided)}
            cells.append({"name": cache, "length": length, **shares})
        row |= {"decided": _share(everything[:, 1]), "any": _share(everything[:, 0])}
        rows.append({**row, "all_lookups": int(everything[:, 0, :, 1].sum())})
    return [
        Table(name, f"Lookups that find their token, {title}", _columns(lengths), rows),
        Table(f"{name}-depths", f"The same by depth, {title}", _depth_columns(), cells),
    ]


def _share(counts: Tensor) -> float | None:
    """Found of all, ``[..., found or all]``; None if there are none."""
    found, total = counts.reshape(-1, 2).sum(0).tolist()
    return found / total if total else None


def _columns(lengths: tuple[int, ...]) -> list[Column]:
    return [
        Column("name", "cache"),
        *[Column(str(length), f"{length} tokens", ".2%") for length in lengths],
        Column("decided", "all lengths", ".2%"),
        Column("lookups", "lookups", ",d"),
        Column("any", "with any weight", ".2%"),
        Column("all_lookups", "lookups", ",d"),
    ]


def _depth_columns() -> list[Column]:
    depths = [
        Column(str(i), f"{i / DEPTHS:.0%} to {(i + 1) / DEPTHS:.0%}", ".1%") for i in range(DEPTHS)
    ]
    return [Column("name", "cache"), Column("length", "tokens", "d"), *depths]
