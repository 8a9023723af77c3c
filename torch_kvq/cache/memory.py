"""What a cache really allocates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


def tensor_bytes(tensor: Tensor) -> int:
    """Bytes of the elements of a tensor."""
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class MemoryReport:
    """Bytes of a cache.

    Attributes:
        total_bytes: bytes of all tensors that are allocated, used or not.
        fp16_bytes: bytes that the tokens held would take uncompressed, two for each element.
        parts: ``total_bytes`` by what they are for: tiles, exact tokens, balance, block table,
            lengths, tokens that wait for their attention, layers of Transformers; near and far
            tokens, and an archive in memory; pages of layer inputs and their positions.
        tokens: tokens of the longest layer, all rows, without left padding.
        by_layer: the parts of every layer, empty for one that holds nothing.
        disk_bytes: bytes of an archive in a file, which ``total_bytes`` leaves out.

    Example:
        >>> print(MemoryReport.collect([{"tiles": 1 << 20}], fp16_bytes=4 << 20, tokens=8192))
        1.00 MiB for 8192 tokens in 1 layer; fp16 would take 4.00 MiB, 4.00 times as much
          tiles 1.00 MiB
    """

    total_bytes: int
    fp16_bytes: int
    parts: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    by_layer: tuple[dict[str, int], ...] = ()
    disk_bytes: int = 0

    @property
    def layers(self) -> int:
        """Layers that hold something."""
        return sum(bool(layer) for layer in self.by_layer)

    @property
    def ratio(self) -> float:
        """``fp16_bytes / total_bytes``, 0 for an empty cache."""
        return self.fp16_bytes / self.total_bytes if self.total_bytes else 0.0

    @classmethod
    def collect(cls, parts: Iterable[dict[str, int]], fp16_bytes: int, tokens: int) -> MemoryReport:
        """Report on layers from the parts of each."""
        layers = tuple(parts)
        total: dict[str, int] = {}
        for layer in layers:
            for name, size in layer.items():
                total[name] = total.get(name, 0) + size
        return cls(sum(total.values()), fp16_bytes, total, tokens, layers)

    def plot(self, axes: Any = None) -> Any:
        """Draw the bytes of every layer as bars of its parts; needs matplotlib.

        Args:
            axes: matplotlib axes to draw on; those of a new figure when not given.

        Returns:
            The axes; ``axes.figure.savefig("memory.png")`` writes the picture.

        Raises:
            ImportError: matplotlib is not installed.

        Example:
            >>> report = MemoryReport.collect([{"tiles": 3 << 20}], fp16_bytes=9 << 20, tokens=99)
            >>> report.plot().get_ylabel()  # doctest: +SKIP
            'MiB'
        """
        if axes is None:
            import matplotlib.pyplot as plt

            axes = plt.figure(layout="constrained").subplots()
        layers = range(len(self.by_layer))
        below = [0.0] * len(layers)
        for name in self.parts:
            sizes = [layer.get(name, 0) / 2**20 for layer in self.by_layer]
            axes.bar(layers, sizes, bottom=below, label=name)
            below = [low + size for low, size in zip(below, sizes, strict=True)]
        if self.layers:
            fp16 = self.fp16_bytes / self.layers / 2**20
            axes.axhline(fp16, color="black", linestyle="--", label="fp16, mean of the layers")
        axes.set(xlabel="layer", ylabel="MiB", title=str(self).splitlines()[0])
        axes.legend()
        return axes

    def __str__(self) -> str:
        plural = "" if self.layers == 1 else "s"
        lines = [
            f"{_mebibytes(self.total_bytes)} for {self.tokens} tokens in {self.layers} "
            f"layer{plural}; fp16 would take {_mebibytes(self.fp16_bytes)}, {self.ratio:.2f} "
            "times as much"
        ]
        width = max(map(len, self.parts), default=0)
        lines += [f"  {name:{width}} {_mebibytes(size)}" for name, size in self.parts.items()]
        if self.disk_bytes:
            lines.append(f"  and an archive of {_mebibytes(self.disk_bytes)} in a file")
        return "\n".join(lines)


def _mebibytes(size: int) -> str:
    return f"{size / 2**20:.2f} MiB"
