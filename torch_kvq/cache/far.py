"""The far tier's format: which operators encode and decode its tiles."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torch_kvq.cache.tier_options import TierOptions
from torch_kvq.formats import TILE_TOKENS, balance_tokens


@dataclass(frozen=True)
class FarTier:
    """Tiles of ``"fp8-int4"`` or ``"tile4"``.

    Attributes:
        format: name of the format.
        key_dim: channels of a key.
        value_dim: channels of a value.
        dtype: of decoded tokens.

    Example:
        >>> far = FarTier("fp8-int4", 64, 64, torch.float32)
        >>> records = far.encode(*torch.randn(2, 3, 128, 64), torch.empty(3, 0))
        >>> records.shape, far.decode(records, torch.empty(3, 0))[0].shape
        (torch.Size([2, 3, 6528]), torch.Size([3, 128, 64]))
    """

    format: str
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    def balance(self, key: Tensor, options: TierOptions) -> Tensor:
        """Balance of a row from its first far keys, float32 ``[kv_heads, key_dim]``.

        Args:
            key: ``[kv_heads, tokens, key_dim]``.
            options: of the layer.
        """
        tokens = balance_tokens(options.sink_tokens, options.quantized_start)
        balance: Tensor = torch.ops.kvq.key_balance(key[None, :, :tokens])[0]
        return balance

    def encode(self, key: Tensor, value: Tensor, balance: Tensor) -> Tensor:
        """Records of whole tiles.

        Args:
            key: ``[kv_heads, tokens, key_dim]``, tokens a multiple of 64.
            value: ``[kv_heads, tokens, value_dim]``.
            balance: of the row, ``[kv_heads, key_dim]``; without channels for ``"fp8-int4"``.

        Returns:
            uint8 ``[tiles, kv_heads, record_bytes]``.
        """
        tiles = [
            x.unflatten(1, (-1, TILE_TOKENS)).transpose(0, 1).contiguous() for x in (key, value)
        ]
        if self.format == "tile4":
            records: Tensor = torch.ops.kvq.quantize_tile(*tiles, balance.unsqueeze(0), 4, 4)
        else:
            records = torch.ops.kvq.quantize_far(*tiles)
        return records

    def decode(self, records: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[kv_heads, tokens, dim]``, the inverse of `encode`."""
        if self.format == "tile4":
            tiles = torch.ops.kvq.dequantize_tile(
                records, balance.unsqueeze(0), 4, 4, self.value_dim, self.dtype
            )
        else:
            tiles = torch.ops.kvq.dequantize_far(records, self.key_dim, self.value_dim, self.dtype)
        key, value = (x.transpose(0, 1).flatten(1, 2) for x in tiles)
        return key, value
