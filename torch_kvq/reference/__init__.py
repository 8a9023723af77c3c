"""The operators in plain PyTorch: what they mean, on any device, one file per operator."""

from torch_kvq.reference.append import check_append, quantize_tile_
from torch_kvq.reference.attention_mass import attention_mass
from torch_kvq.reference.decode import check_records, dequantize_tile
from torch_kvq.reference.encode import key_balance, quantize_tile
from torch_kvq.reference.far import dequantize_far, quantize_far
from torch_kvq.reference.fwht import fwht
from torch_kvq.reference.lut_attention import lut_attention
from torch_kvq.reference.remat import remat_kv
from torch_kvq.reference.remat_attention import remat_attention
from torch_kvq.reference.tiered_attention import tiered_attention
from torch_kvq.reference.x import dequantize_x, quantize_x, sum_x

__all__ = [
    "attention_mass",
    "check_append",
    "check_records",
    "dequantize_far",
    "dequantize_tile",
    "dequantize_x",
    "fwht",
    "key_balance",
    "lut_attention",
    "quantize_far",
    "quantize_tile",
    "quantize_tile_",
    "quantize_x",
    "remat_attention",
    "remat_kv",
    "sum_x",
    "tiered_attention",
]
