"""Any sequence of operations on caches of layer inputs, against a model that has no cache."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.models import VOCABULARY, tiny_model
from tests.sequences import SETTINGS
from torch_kvq import XQuantCache
from torch_kvq.cache.pages import PagePool

pytestmark = pytest.mark.filterwarnings("ignore:`past_key_values`:FutureWarning")

LONGEST, MOST_ROWS, MOST_CACHES = 260, 3, 3
WHICH = strategies.integers(0, MOST_CACHES - 1)
ROWS = strategies.integers(1, MOST_ROWS)
SELECTION = strategies.lists(strategies.integers(0, 2), min_size=1, max_size=MOST_ROWS)
PADDING = strategies.tuples(*[strategies.sampled_from([0, 0, 3, 70])] * MOST_ROWS)
MODEL = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 3,
}


class Held:
    """A cache and what it should hold: tokens of every row, and the padding before them."""

    def __init__(self, cache: Any, ids: torch.Tensor, padding: list[int]) -> None:
        self.cache, self.ids, self.padding = cache, ids, padding

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    def mask(self) -> torch.Tensor:
        return (torch.arange(self.length) >= torch.tensor(self.padding).unsqueeze(1)).long()

    def take(self, rows: list[int]) -> None:
        self.ids, self.padding = self.ids[rows], [self.padding[row] for row in rows]


class Caches(RuleBasedStateMachine):
    """Up to three caches of one model, some of which are copies of others.

    Pools are watched beyond the caches that they belonged to: those have to give all pages back.
    """

    mode = "x"

    def __init__(self) -> None:
        super().__init__()
        self.model = tiny_model("llama", **MODEL)
        self.held: list[Held] = []
        self.pools: list[PagePool] = []
        self.generator = torch.Generator().manual_seed(0)

    @initialize(rows=ROWS, tokens=strategies.sampled_from([1, 80, 150]), padding=PADDING)
    def begin(self, rows: int, tokens: int, padding: tuple[int, ...]) -> None:
        cache = XQuantCache(
            16,
            mode=self.mode,
            residual_length=10,
            first_layers=1,
            accumulator_bits=16,
            strict=True,
            model=self.model,
        )
        starts = [min(start, tokens - 1) for start in padding[:rows]]
        self.held.append(Held(cache, torch.empty(rows, 0, dtype=torch.int64), starts))
        self.forward(0, tokens)

    def pick(self, which: int) -> Held:
        return self.held[which % len(self.held)]

    @rule(which=WHICH, tokens=strategies.sampled_from([1, 2, 9, 60, 100]))
    def forward(self, which: int, tokens: int) -> None:
        held = self.pick(which)
        tokens = min(tokens, LONGEST - held.length)
        if tokens < 1:
            return
        shape = (len(held.padding), tokens)
        new = torch.randint(2, VOCABULARY, shape, generator=self.generator)
        held.ids = torch.cat((held.ids, new), 1)
        mask = held.mask()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        given = {"attention_mask": mask, "position_ids": positions}
        with torch.no_grad():
            want = self.model(held.ids, **given, use_cache=False).logits[:, -tokens:]
            given["position_ids"] = positions[:, -tokens:]
            got = self.model(new, **given, past_key_values=held.cache).logits
        seen = mask[:, -tokens:].bool()
        torch.testing.assert_close(got[seen], want[seen], rtol=1e-3, atol=1e-3)

    @rule(which=WHICH, tokens=strategies.sampled_from([1, 70]), layer=strategies.integers(0, 2))
    def fail_between_layers(self, which: int, tokens: int, layer: int) -> None:
        """An error ends a call of the model; what went in is cut."""
        held = self.pick(which)
        if held.length + tokens > LONGEST:
            return

        def fail(*args: Any) -> None:
            raise KeyboardInterrupt

        hook = self.model.model.layers[layer].mlp.register_forward_pre_hook(fail)
        new = torch.ones(len(held.padding), tokens, dtype=torch.int64)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            self.model(new, past_key_values=held.cache)
        hook.remove()
        if layer < 2:
            with pytest.raises(ValueError, match="was interrupted"), torch.no_grad():
                self.model(new, past_key_values=held.cache)
        held.cache.crop(held.length)

    @rule(which=WHICH, depth=strategies.sampled_from([1, 5, 40, 64, 120, 400]))
    def crop(self, which: int, depth: int) -> None:
        held = self.pick(which)
        length = max(held.length - depth, max(held.padding) + 1)
        if length < held.length:
            held.cache.crop(length - held.length)
            held.ids = held.ids[:, :length]

    @rule(which=WHICH, rows=SELECTION, is_reorder=strategies.booleans())
    def select(self, which: int, rows: list[int], is_reorder: bool) -> None:
        held = self.pick(which)
        rows = [row % len(held.padding) for row in rows]
        change = held.cache.reorder_cache if is_reorder else held.cache.batch_select_indices
        change(torch.tensor(rows))
        held.take(rows)

    @rule(which=WHICH, repeats=strategies.integers(1, 3))
    def repeat(self, which: int, repeats: int) -> None:
        held = self.pick(which)
        if len(held.padding) * repeats <= MOST_ROWS:
            held.cache.batch_repeat_interleave(repeats)
            held.take([row for row in range(len(held.padding)) for _ in range(repeats)])

    @precondition(lambda self: len(self.held) < MOST_CACHES)
    @rule(which=WHICH, way=strategies.sampled_from(["fork", "fork", "copy", "pickle"]))
    def another(self, which: int, way: str) -> None:
        held = self.pick(which)
        if way == "fork":
            cache = held.cache.fork()
        elif way == "copy":
            cache = copy.deepcopy(held.cache)
        else:
            cache = pickle.loads(pickle.dumps(held.cache))
            cache.bind(self.model)
        self.held.append(Held(cache, held.ids, held.padding))

    @rule(which=WHICH, rows=ROWS, padding=PADDING)
    def reset(self, which: int, rows: int, padding: tuple[int, ...]) -> None:
        held = self.pick(which)
        if held.length > LONGEST // 2:
            held.cache.reset()
            held.ids, held.padding = torch.empty(rows, 0, dtype=torch.int64), list(padding[:rows])
            self.forward(which, 90)

    @precondition(lambda self: len(self.held) > 1)
    @rule(which=WHICH)
    def drop(self, which: int) -> None:
        del self.held[which % len(self.held)]

    @invariant()
    def check(self) -> None:
        """Check lengths, and that pages belong to whoever has them, and to nobody else."""
        states = []
        for held in self.held:
            assert held.cache.get_seq_length() == held.length
            states += [layer.state for layer in held.cache.packed_layers]
        known = {id(pool) for pool in self.pools}
        pools = {id(state.table.pool): state.table.pool for state in states}
        self.pools += [pool for key, pool in pools.items() if key not in known]
        for pool in self.pools:
            check_pages(pool, [state for state in states if state.table.pool is pool])


def check_pages(pool: PagePool, states: list[Any]) -> None:
    """Every page has as many owners as there are rows that name it."""
    counts = [0] * pool.tiles.shape[0]
    for state in states:
        for row, pages in enumerate(state.table.rows):
            assert state.table.tensor[row, : len(pages)].tolist() == pages
            assert len(pages) * 64 == state.quantized
            for page in pages:
                counts[page] += 1
    assert pool._counts == counts
    assert sorted(pool._free) == [page for page, count in enumerate(counts) if not count]


class Differences(Caches):
    mode = "cl"


class Latents(Caches):
    mode = "latent"


TestInputs = Caches.TestCase
TestDifferences = Differences.TestCase
TestLatents = Latents.TestCase
TestInputs.settings = TestDifferences.settings = TestLatents.settings = settings(
    SETTINGS, max_examples=10, stateful_step_count=25
)
