"""`TieredCache` for Transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch_kvq.cache.policy import LayerPolicy
from torch_kvq.cache.promotion import Promotion
from torch_kvq.cache.tiered_cache import TieredCore, tier_options
from torch_kvq.integrations.transformers import install
from torch_kvq.integrations.transformers_layout import TransformersCache


class TieredCache(TieredCore, TransformersCache):
    """A Transformers cache of two tiers: exact near tokens, compressed far ones.

    Hand it to ``generate`` or to a model's forward call. Attention over the prompt is the model's
    own, on exact keys and values; its last queries choose, for each KV head, the tokens that stay
    near. Later steps read both tiers by one operator and count each token once. New tokens are near
    until they leave the window, then the most used stay. With an archive, far tokens that are
    attended to more than the median of the chosen near ones come back exactly.

    Layers with full attention have tiers, and those with a sliding window of more than
    ``window + 64`` tokens, which give up what has left it. Shorter windows, linear and latent
    attention, and head dims that are not a multiple of 16 from 32 to 512 keep Transformers' own, as
    in `torch_kvq.KVQCache`. The cache grows; there is none that is allocated at once.

    Forks and copies have an archive of their own, which shares the pages of this one; a cache that
    was pickled has none, and its far tokens stay far.

    Args:
        near_ratio: share of a row's tokens that each KV head has near, sinks and window included.
        far: format of the far tier, ``"fp8-int4"`` or ``"tile4"``, which takes two thirds of it.
        sink_tokens: first tokens of a sequence that stay near.
        window: recent tokens that stay near; up to 63 more do.
        quantized_start: tokens up to which all are near.
        observed_queries: last queries of a prompt by whose attention its near tokens are chosen.
        promote: let far tokens that suddenly matter come back exactly; ``"sync"``: always by the
            next step, so that results repeat; False: no archive is kept.
        archive: path of the archive, which is kept; a temporary file when None.
        archive_budget: bytes of the archive; what was not used for longest is given up first.
        archive_in_memory: keep it in memory instead of a file.
        cooldown: steps between two tokens that come back to a layer and KV head.
        promotions: tokens that come back to a layer in a step.
        margin: by which a log weight has to exceed the median use of the chosen near tokens, their
            greatest log weight, which is halved with every tile.
        config: configuration of the model, for a cache that is not handed to ``generate``.
        strict: raise a RuntimeError where keys or values would have to be decoded.
        skip_layers: layers that keep Transformers' own, such as ``(0, -1)``.

    Raises:
        ValueError: an option outside the above, or a layer that the model does not have.
        TypeError: an option of another type.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> model = LlamaForCausalLM(LlamaConfig(
        ...     hidden_size=128, intermediate_size=128, num_attention_heads=4, vocab_size=100,
        ...     num_hidden_layers=2, num_key_value_heads=2, eos_token_id=None, pad_token_id=0))
        >>> cache = TieredCache(promote=False)
        >>> _ = model.generate(torch.ones(1, 300, dtype=torch.long), past_key_values=cache,
        ...                    max_new_tokens=5, do_sample=False)
        >>> cache
        TieredCache(near_ratio=0.1, far='fp8-int4', layers=2, tokens=304, bytes=174232)
        >>> cache.materialized
        0
    """

    def __init__(
        self,
        near_ratio: float = 0.1,
        far: str = "fp8-int4",
        *,
        sink_tokens: int = 4,
        window: int = 32,
        quantized_start: int = 256,
        observed_queries: int = 32,
        promote: bool | Literal["sync"] = True,
        archive: str | Path | None = None,
        archive_budget: int | None = None,
        archive_in_memory: bool = False,
        cooldown: int = 5,
        promotions: int = 8,
        margin: float = 1.0,
        config: Any = None,
        strict: bool = False,
        skip_layers: Sequence[int] = (),
    ) -> None:
        install()
        options = tier_options(
            near_ratio, far, sink_tokens, window, quantized_start, observed_queries, strict
        )
        policy = LayerPolicy.parse(skip_layers)
        self.promotion = Promotion.make(
            promote,
            archive,
            budget=archive_budget,
            in_memory=archive_in_memory,
            cooldown=cooldown,
            promotions=promotions,
            margin=margin,
        )
        self._set_up(options, policy, config=config)
