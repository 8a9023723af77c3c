"""The operators in plain PyTorch: what they mean, on any device, one file per operator."""

from torch_kvq.reference.append import check_append, quantize_tile_
from torch_kvq.reference.decode import check_records, dequantize_tile
from torch_kvq.reference.encode import key_balance, quantize_tile
from torch_kvq.reference.fwht import fwht
from torch_kvq.reference.lut_attention import lut_attention

__all__ = [
    "check_append",
    "check_records",
    "dequantize_tile",
    "fwht",
    "key_balance",
    "lut_attention",
    "quantize_tile",
    "quantize_tile_",
]
