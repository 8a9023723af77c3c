"""Timing of calls that compete for one noisy machine."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

import torch_kvq

from .environment import last_level_cache

T = TypeVar("T")

REPEAT_SECONDS = 3e-3
"""Shortest repeat, so that what happens once at its start does not count."""


@dataclass(frozen=True)
class Timing:
    """Microseconds of a call over the repeats.

    Attributes:
        median: middle of the repeats.
        iqr: distance of the quartiles, the spread.
        minimum: fastest repeat.
        repeats: their number.
    """

    median: float
    iqr: float
    minimum: float
    repeats: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Statistics of the durations of the repeats."""
        sample = torch.tensor(seconds, dtype=torch.float64) * 1e6
        low, median, high = torch.quantile(sample, torch.tensor([0.25, 0.5, 0.75]).double())
        return cls(float(median), float(high - low), float(sample.min()), len(seconds))


@dataclass(frozen=True)
class Contestant:
    """A computation to be timed.

    Attributes:
        name: what the report calls it.
        calls: the same computation, once for each copy of its data.
        capability: instruction set of the kernels, None for calls without kernels of torch_kvq.
    """

    name: str
    calls: Sequence[Callable[[], object]]
    capability: str | None = None

    def seconds(self, first: int, calls: int = 1) -> float:
        """Duration of a call, the mean of some calls in a row.

        Args:
            first: number of the first call; each has its turn on the copies of the data.
            calls: calls to take the mean of.
        """
        with self._capability():
            start = time.perf_counter()
            for call in range(first, first + calls):
                self.calls[call % len(self.calls)]()
            return (time.perf_counter() - start) / calls

    def result(self) -> Any:
        """What the first call gives."""
        with self._capability():
            return self.calls[0]()

    def _capability(self) -> contextlib.AbstractContextManager[Any]:
        name = self.capability
        return torch_kvq.cpu_capability(name) if name else contextlib.nullcontext()


def interleaved(contestants: Sequence[Contestant], repeats: int) -> dict[str, Timing]:
    """Time every contestant once per repeat, so that a slow moment of the machine hits all.

    The order changes from repeat to repeat: what runs before a call changes its caches and clocks.
    A repeat of a short call is several in a row, as many as fill `REPEAT_SECONDS`: their data are
    cold and their code is warm, as in a model of many layers.
    """
    order = random.Random(0)
    calls: dict[str, int] = {}
    done: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    with torch.inference_mode():
        for contestant in contestants:
            calls[contestant.name] = max(1, int(REPEAT_SECONDS / contestant.seconds(0)))
            done[contestant.name], seconds[contestant.name] = 1, []
        for _ in range(repeats):
            for contestant in order.sample(contestants, len(contestants)):
                name = contestant.name
                seconds[name].append(contestant.seconds(done[name], calls[name]))
                done[name] += calls[name]
    return {name: Timing.of(values) for name, values in seconds.items()}


def cold_copies(make: Callable[[], T], size: int) -> list[T]:
    """So many copies of data that none is cached when its turn comes again.

    Args:
        make: gives one copy.
        size: bytes of a copy.
    """
    return [make() for _ in range(2 + 2 * last_level_cache() // size)]


def read_bandwidth(repeats: int = 15) -> float:
    """Bytes per second of the fastest plain read of memory that PyTorch has, on its threads."""
    data = torch.ones(8 * last_level_cache() // 4)
    other = torch.ones_like(data)
    readers = (
        Contestant("sum", [data.sum]),
        Contestant("dot", [lambda: torch.dot(data, other)]),
    )
    times = interleaved(readers, repeats)
    return max(data.nbytes / times["sum"].median, 2 * data.nbytes / times["dot"].median) * 1e6
