"""What a layer is expected to take, by what it is for: as `memory_parts` has it after a prompt.

Prompts have no padding and come in one call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch_kvq.cache.options import LayerOptions
from torch_kvq.cache.room import grown, pages_behind_window, pages_of, pages_of_prompt, widened
from torch_kvq.cache.tier_options import TierOptions
from torch_kvq.cache.x_options import XOptions
from torch_kvq.cache.x_state import Stream
from torch_kvq.formats import TILE_TOKENS, TileFormat, far_record_bytes


class Prompt(NamedTuple):
    """Keys and values of a layer after a prompt.

    Attributes:
        batch: rows.
        tokens: tokens of each row.
        kv_heads: heads of keys and values.
        key_dim: channels of a key.
        value_dim: channels of a value.
        itemsize: bytes of an element of the model's dtype.
    """

    batch: int
    tokens: int
    kv_heads: int
    key_dim: int
    value_dim: int
    itemsize: int

    @property
    def row_bytes(self) -> int:
        """Bytes of one exact token of all rows."""
        return self.batch * self.kv_heads * (self.key_dim + self.value_dim) * self.itemsize

    @property
    def fp16_bytes(self) -> int:
        """Bytes of all tokens uncompressed, two for each element."""
        return self.tokens * self.row_bytes * 2 // self.itemsize


def packed_parts(options: LayerOptions, prompt: Prompt) -> dict[str, int]:
    """Bytes of a `torch_kvq.KVQLayer`.

    Args:
        options: how the layer stores tokens.
        prompt: what it holds.

    Example:
        >>> packed_parts(LayerOptions.parse(4), Prompt(1, 2000, 8, 128, 128, 2))["exact"]
        540672
    """
    layout = TileFormat(
        prompt.key_dim, prompt.value_dim, options.key_bits, options.value_bits, prompt.itemsize
    )
    batch, tokens = prompt.batch, prompt.tokens
    if options.max_cache_len is not None:
        columns = pages_of(options.quantized(options.max_cache_len, 0))
        pages, slots = batch * columns, min(options.max_cache_len, options.exact_slots)
    else:
        pages, columns = pages_of_prompt(options, batch, tokens)
        most = options.window_slots if columns else options.exact_slots
        slots = max(min(tokens, most), min(tokens + max(tokens // 8, TILE_TOKENS), most))
    return {
        "tiles": pages * prompt.kv_heads * layout.record_bytes,
        "exact": slots * prompt.row_bytes,
        "balance": batch * prompt.kv_heads * prompt.key_dim * 4,
        "block table": batch * columns * 4,
        "lengths": batch * 3 * 4,
    }


def tiered_parts(options: TierOptions, prompt: Prompt) -> dict[str, int]:
    """Bytes of a `torch_kvq.TieredLayer`, its archive left out.

    Args:
        options: how the layer stores tokens.
        prompt: what it holds.

    Example:
        >>> tiered_parts(TierOptions(), Prompt(1, 2000, 8, 128, 128, 2))["far"]
        3041280
    """
    batch, tokens = prompt.batch, prompt.tokens
    heads = batch * prompt.kv_heads
    far = options.quantized(tokens, 0)
    freed = pages_behind_window(options, tokens, far)
    behind = freed * TILE_TOKENS
    kept = options.kept_slots(options.chosen(tokens - behind, far - behind)) if far else 0
    recent = tokens - (options.sink_tokens + far if far else 0)
    slots = kept + recent + options.spare_slots(recent, options.next_tile(far) - tokens)
    record = far_record_bytes(options.far, prompt.key_dim, prompt.value_dim)
    columns = widened(pages_of(far))
    # A slot has its token, its use and whether it came back; a KV head its median use.
    return {
        "near": slots * (prompt.row_bytes + heads * (4 + 4 + 1)) + heads * 4,
        "far": _pool_pages(batch, pages_of(far) - freed) * prompt.kv_heads * record,
        "balance": heads * prompt.key_dim * 4 if options.far == "tile4" else 0,
        "block table": batch * columns * 4 + heads * columns * 8,
        "lengths": batch * 3 * 4 + heads * 4,
    }


def archive_bytes(prompts: Sequence[Prompt], budget: int | None) -> tuple[int, int]:
    """Bytes of an archive, and those of its pages that are not full yet.

    Args:
        prompts: what each layer holds.
        budget: bytes that its pages may take; no limit when None.

    Example:
        >>> archive_bytes([Prompt(1, 100, 8, 128, 128, 2)] * 2, budget=None)
        (1048576, 524288)
    """
    held = is_open = 0
    for prompt in prompts:
        page = TILE_TOKENS * prompt.row_bytes
        held += pages_of(prompt.tokens) * page
        is_open += page if prompt.tokens % TILE_TOKENS else 0
    if budget is not None and held > budget:
        page = TILE_TOKENS * prompts[0].row_bytes // prompts[0].batch
        held = budget // page * page
    return held, min(is_open, held)


def input_parts(
    options: XOptions, streams: Sequence[Stream], batch: int, tokens: int, itemsize: int
) -> dict[str, int]:
    """Bytes of a layer that stores its input; what all layers share is left out.

    Args:
        options: how the layer stores tokens.
        streams: what is stored of a token.
        batch: rows.
        tokens: tokens of each row.
        itemsize: bytes of an element of the model's dtype.

    Example:
        >>> input_parts(XOptions(), [Stream(1024, 4, "token")], batch=1, tokens=2000, itemsize=2)
        {'pages': 1009664, 'exact': 401408, 'block table': 128}
    """
    columns = options.due(tokens) // TILE_TOKENS
    exact = options.sink_tokens + options.residual_length + TILE_TOKENS if columns else tokens
    return {
        "pages": _pool_pages(batch, columns)
        * sum(stream.record_bytes(itemsize) for stream in streams),
        "exact": batch * exact * sum(stream.channels for stream in streams) * itemsize,
        "block table": batch * widened(columns) * 4,
    }


def _pool_pages(batch: int, pages: int) -> int:
    """Pages of a pool once every row has taken so many."""
    held = 0
    for row in range(batch):
        missing = (row + 1) * pages - held
        held = grown(held, missing) if missing > 0 else held
    return held
