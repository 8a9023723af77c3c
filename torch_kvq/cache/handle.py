"""What `KVQLayer.update` returns: keys or values that attention can read packed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from torch_kvq.cache.packed import PackedLayer


class KVQHandle:
    """Stands for all keys, or all values, of a layer: ``[batch, kv_heads, length, dim]``.

    Attention that knows handles reads the layer packed: `KVQLayer.attend`, Transformers' attention
    functions and ``F.scaled_dot_product_attention``. Whatever else is done with one decodes the
    layer first; `PackedLayer.materialized` counts these, and ``strict`` turns them into errors.

    Attributes:
        layer: the layer.
        new: the newest keys or values, exact, ``[batch, kv_heads, tokens, dim]``.
        is_key: keys or values.
        length: positions, left padding included; all that are allocated in a static layer.
        decoded: the decoded keys and values once they were asked for, shared by the two handles.
        is_first: there is nothing but ``new``, which attention should read then.
    """

    # No __slots__: with __getattr__ they make dynamo recurse.
    def __init__(
        self,
        layer: PackedLayer,
        new: Tensor,
        is_key: bool,
        length: int,
        decoded: list[Tensor],
        is_first: bool = False,
    ) -> None:
        self.layer = layer
        self.new = new
        self.is_key = is_key
        self.length = length
        self.decoded = decoded
        self.is_first = is_first

    @property
    def shape(self) -> torch.Size:
        """``[batch, kv_heads, length, dim]``."""
        batch, kv_heads, _, dim = self.new.shape
        return torch.Size((batch, kv_heads, self.length, dim))

    @property
    def dtype(self) -> torch.dtype:
        """The model's dtype."""
        return self.new.dtype

    @property
    def device(self) -> torch.device:
        """The model's device."""
        return self.new.device

    @property
    def ndim(self) -> int:
        """Four."""
        return 4

    def dim(self) -> int:
        """Four."""
        return 4

    def size(self, dim: int | None = None) -> torch.Size | int:
        """The shape or one dimension of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """Elements of the tensor that the handle stands for."""
        return self.shape.numel()

    def dense(self) -> Tensor:
        """The keys or values as a tensor ``[batch, kv_heads, length, dim]``, zero in padding.

        Raises:
            RuntimeError: the layer is strict and has packed tokens.
        """
        if self.is_first:
            return F.pad(self.new, (0, 0, 0, self.length - self.new.shape[2]))
        if not self.decoded:
            self.decoded += self.layer.materialize(self.length)
        return self.decoded[0 if self.is_key else 1]

    def matches(self, value: object) -> bool:
        """Whether this and ``value`` are the current keys and values of one layer."""
        return (
            type(value) is KVQHandle
            and value.layer is self.layer
            and self.is_key
            and not value.is_key
            and self.length == self.layer.visible_length
        )

    def __repr__(self) -> str:
        kind = "keys" if self.is_key else "values"
        return f"KVQHandle({kind}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def __getattr__(self, name: str) -> Any:
        # copy and pickle ask for hooks that a tensor would answer in the handle's place.
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.dense(), name)

    def __getitem__(self, index: Any) -> Tensor:
        return self.dense()[index]

    def __len__(self) -> int:
        return self.shape[0]

    def __neg__(self) -> Tensor:
        return -self.dense()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Attend packed, or decode the handles among the arguments."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **kwargs)
        return func(*_dense(args), **{name: _dense(value) for name, value in kwargs.items()})


def _dense(value: Any) -> Any:
    if isinstance(value, KVQHandle):
        return value.dense()
    if isinstance(value, (tuple, list)):
        return type(value)(_dense(item) for item in value)
    return value


def _attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Tensor:
    """``F.scaled_dot_product_attention`` with a handle among its arguments."""
    is_packed = isinstance(key, KVQHandle) and key.matches(value)
    # The causal mask of scaled_dot_product_attention starts at the first key, not at the query's.
    if not is_packed or dropout_p or (is_causal and not key.is_first):
        query, key, value = _dense((query, key, value))
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, **options
        )
    scale = options.get("scale")
    return key.layer.attend(query, attn_mask, scale=scale, is_causal=is_causal)


def _operator(name: str) -> Callable[..., Any]:
    def apply(self: KVQHandle, *args: Any) -> Any:
        return getattr(self.dense(), name)(*_dense(args))

    return apply


for _name in ("add", "sub", "mul", "truediv", "matmul"):
    for _prefix in ("", "r"):
        setattr(KVQHandle, f"__{_prefix}{_name}__", _operator(f"__{_prefix}{_name}__"))
