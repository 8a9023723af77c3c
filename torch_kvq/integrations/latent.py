"""Projections split by their singular values, once for each weight, kept on disk."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from tqdm.auto import tqdm

from torch_kvq._files import cache_dir, write_once
from torch_kvq.cache.x_source import Latent
from torch_kvq.reference.latent import latent_factors


def split_all(sources: Iterable[Any], heads: Iterable[tuple[int, tuple[int, int]]]) -> None:
    """Split the projections of attention modules, or load what was split before.

    Args:
        sources: attention modules, `torch_kvq.integrations.projections.AttentionSource`.
        heads: KV heads of each, and channels of a key and of a value.
    """
    pairs = list(zip(sources, heads, strict=True))
    missing = [pair for pair in pairs if pair[0].latent is None]
    with tqdm(missing, desc="Splitting key and value weights", delay=1, leave=False) as progress:
        for source, (kv_heads, dims) in progress:
            own = source.projection(kv_heads, dims)
            source.latent = split(own.key_weight, own.value_weight)


@torch.no_grad()
def split(key_weight: Tensor, value_weight: Tensor) -> Latent:
    """Split two weights, in their own dtype, from the user's cache if they were split before."""
    path = cache_dir() / "latent" / f"{_digest(key_weight, value_weight)}.safetensors"
    if not path.exists():
        parts = (*latent_factors(key_weight), *latent_factors(value_weight))
        made = {name: part.cpu() for name, part in zip(Latent._fields, parts, strict=True)}
        write_once(path, lambda target: save_file(made, target))
    loaded = load_file(path)
    return Latent(*(loaded[name].to(key_weight) for name in Latent._fields))


def _digest(*weights: Tensor) -> str:
    """A name for weights: the same for the same bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for weight in weights:
        digest.update(f"{weight.dtype} {tuple(weight.shape)}".encode())
        plain = weight.detach().cpu().contiguous().flatten()
        digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()
