"""Projections split by their singular values, once for each weight, kept on disk."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from torch_kvq._files import cache_dir, write_once
from torch_kvq.cache.x_source import Latent
from torch_kvq.reference.latent import latent_factors

_log = logging.getLogger("torch_kvq")


def split_all(sources: Iterable[Any], heads: Iterable[tuple[int, tuple[int, int]]]) -> None:
    """Split the projections of attention modules, or load what was split before.

    Args:
        sources: attention modules, `torch_kvq.integrations.projections.AttentionSource`.
        heads: KV heads of each, and channels of a key and of a value.
    """
    pairs = list(zip(sources, heads, strict=True))
    missing = [pair for pair in pairs if not pair[0].is_split]
    with tqdm(missing, desc="Splitting key and value weights", delay=1, leave=False) as progress:
        for source, (kv_heads, dims) in progress:
            own = source.projection(kv_heads, dims)
            source.keep_split(split(own.key_weight, own.value_weight))


@torch.no_grad()
def split(key_weight: Tensor, value_weight: Tensor) -> Latent:
    """Split two weights, in their own dtype, from the user's cache if they were split before.

    A file there that is damaged is made anew. Where none can be written, a warning says so.
    """
    path = cache_dir() / "latent" / f"{_digest(key_weight, value_weight)}.safetensors"
    latent = _load(path)
    if latent is None:
        parts = (*latent_factors(key_weight), *latent_factors(value_weight))
        latent = Latent(*(part.cpu() for part in parts))
        _keep(path, latent)
    return Latent(*(part.to(key_weight) for part in latent))


def _load(path: Path) -> Latent | None:
    """What a file holds, None without one that is whole."""
    try:
        if not path.is_file():
            return None
        with safe_open(path, "pt") as file:
            latent = Latent(*(file.get_tensor(name) for name in Latent._fields))
            kept = (file.metadata() or {}).get("digest")
        if kept == _digest(*latent):
            return latent
        reason = "its content is not what was written"
    except (OSError, SafetensorError) as error:
        reason = str(error)
    _log.warning("%s is damaged and is made anew: %s", path, reason)
    return None


def _keep(path: Path, latent: Latent) -> None:
    """Write a file, in the place of a damaged one."""
    metadata = {"digest": _digest(*latent)}
    try:
        path.unlink(missing_ok=True)
        write_once(path, lambda target: save_file(latent._asdict(), target, metadata))
    except (OSError, SafetensorError) as error:
        _log.warning(
            "key and value weights that were split cannot be kept in %s, and are split again by "
            "the next process: %s; TORCH_KVQ_CACHE names another folder",
            path.parent,
            error,
        )


def _digest(*tensors: Tensor) -> str:
    """A name for tensors: the same for the same bytes."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        plain = tensor.detach().cpu().contiguous().flatten()
        digest.update(plain.view(torch.uint8).numpy().data)
    return digest.hexdigest()
