"""The promoter: its rules against a plain model of them, with and without its thread."""

from __future__ import annotations

import math
import random
from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_kvq import _extension
from torch_kvq.cache.archive import Archive
from torch_kvq.cache.promoter import Promoter, Promotions

if not _extension.is_compiled:
    pytest.skip("the compiled part is not built", allow_module_level=True)

THREADS = pytest.mark.parametrize("synchronous", [True, False], ids=["sync", "thread"])
DIM = 32

Token = namedtuple("Token", "row head token score retries")


class Model:
    """What the docstring of `Promoter` says, for one layer."""

    def __init__(self, cooldown: int, budget: int, margin: float, retries: int) -> None:
        self.cooldown, self.budget = cooldown, budget
        self.margin, self.retries = margin, retries
        self.step = 0
        self.last: dict[tuple[int, int], int] = {}  # the step of a row and head's last token
        self.under_way: list[Token] = []
        self.collected: list[Token] = []

    def submit(self, index: Any, score: Any, near_score: Any, start: Any) -> None:
        last = dict(self.last)
        for row, heads in enumerate(index):
            candidates = [
                Token(row, head, token + start[row], score[row][head][rank], 0)
                for head, tokens in enumerate(heads)
                for rank, token in enumerate(tokens)
                if token != -1
                and score[row][head][rank] > near_score[row][head] + self.margin
                and self.step - last.get((row, head), -math.inf) >= self.cooldown
            ]
            for candidate in sorted(candidates, key=lambda token: -token.score):
                places = [token[:3] for token in self.under_way]
                if (
                    candidate[:3] in places
                    or len([p for p in places if p[0] == row]) >= self.budget
                ):
                    continue
                self.under_way.append(candidate)
                self.last[row, candidate.head] = self.step
        self.step += 1

    def collect(self) -> list[Token]:
        self.collected, self.under_way = self.under_way, []
        return self.collected

    def retry(self, places: list[int]) -> None:
        again = [self.collected[place] for place in places]
        again = [token for token in again if token.retries < self.retries]
        self.under_way += [token._replace(retries=token.retries + 1) for token in again]
        self.collected = []

    def reorder(self, rows: list[int]) -> None:
        self.under_way = [
            token._replace(row=row)
            for row, index in enumerate(rows)
            for token in self.under_way
            if token.row == index
        ]
        self.last = {
            (row, head): step
            for row, index in enumerate(rows)
            for (old, head), step in self.last.items()
            if old == index
        }

    def crop(self, tokens: int) -> None:
        self.under_way = [token for token in self.under_way if token.token < tokens]


def numbered(rows: list[list[int]], heads: int, first: int) -> Tensor:
    """Keys or values of tokens whose channels name the token and the head."""
    tokens = torch.tensor(rows, dtype=torch.float32)[:, None, :, None]
    head = torch.arange(heads, dtype=torch.float32)[:, None, None]
    return (tokens * heads + head) * 100 + torch.arange(first, first + DIM)


def exact(values: list[Any]) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


@THREADS
@pytest.mark.parametrize("seed", range(8))
def test_rules(seed: int, synchronous: bool) -> None:
    dice = random.Random(seed)
    heads, width = dice.choice([1, 3]), dice.choice([1, 4])
    options: dict[str, Any] = {
        "cooldown": dice.choice([0, 1, 2, 5]),
        "budget": dice.choice([1, 2, 8]),
        "margin": dice.choice([0.0, 0.5]),
        "retries": dice.choice([0, 1, 3]),
    }
    archive = Archive(in_memory=seed % 2 == 0)
    layer = archive.layer(4)
    promoter = Promoter(archive, synchronous=synchronous, **options)
    model = Model(**options)
    numbers = iter(range(10**6))
    rows: list[list[int]] = [[], []]
    served = 0

    def append(tokens: int) -> None:
        new = [[next(numbers) for _ in range(tokens)] for _ in rows]
        layer.append(numbered(new, heads, 0), numbered(new, heads, 50))
        for row, more in zip(rows, new, strict=True):
            row += more

    append(100)
    for _ in range(80):
        action = dice.random()
        if action < 0.7:
            start = [dice.randrange(3) for _ in rows]
            shape = [[range(width)] * heads] * len(rows)
            # A few tokens, so that some are under way already.
            index = [[[dice.choice([-1, 7, 8, 70, 71]) for _ in k] for k in r] for r in shape]
            score = [[[-dice.randrange(5) / 2 for _ in k] for k in r] for r in shape]
            near = [[-dice.randrange(4) / 2 for _ in r] for r in shape]
            model.submit(index, score, near, start)
            promoter.submit(
                4,
                torch.tensor(index, dtype=torch.int32),
                exact(score),
                exact(near),
                torch.tensor(start, dtype=torch.int32),
            )
            append(1)
        if action < 0.5:
            promoter.wait()
            ready, want = promoter.collect(4), model.collect()
            served += len(want)
            assert (ready is None) == (not want)
            if ready is not None:
                check(ready, want, rows, heads)
                places = [place for place in range(len(want)) if dice.random() < 0.4]
                promoter.retry(4, torch.tensor(places, dtype=torch.int64))
                model.retry(places)
        elif action > 0.9:
            order = [dice.randrange(len(rows)) for _ in range(dice.choice([1, 2, 3]))]
            layer.reorder(torch.tensor(order))
            model.reorder(order)
            rows = [list(rows[i]) for i in order]
        elif action > 0.85:
            layer.crop(72)
            model.crop(72)
            rows = [row[:72] for row in rows]
            append(8)
    assert served > 10


def check(ready: Promotions, want: list[Token], rows: list[list[int]], heads: int) -> None:
    assert ready.row.tolist() == [token.row for token in want]
    assert ready.head.tolist() == [token.head for token in want]
    assert ready.score.tolist() == [token.score for token in want]
    for place, token in enumerate(want):
        number = [[rows[token.row][token.token]]]
        assert torch.equal(ready.key[place], numbered(number, heads, 0)[0, token.head, 0])
        assert torch.equal(ready.value[place], numbered(number, heads, 50)[0, token.head, 0])


def promoting(synchronous: bool = True, **options: Any) -> tuple[Archive, Promoter]:
    """One row of 200 tokens with two heads, in half precision."""
    archive = Archive(budget=options.pop("budget_bytes", None))
    layer = archive.layer(0)
    layer.append(*torch.randn(2, 1, 2, 200, 64, dtype=torch.float16))
    return archive, Promoter(archive, synchronous=synchronous, **options)


def submit(promoter: Promoter, *tokens: int, near_score: float = -9.0, score: float = -1.0) -> None:
    """Offer tokens to the first head."""
    index = torch.full((1, 2, len(tokens)), -1, dtype=torch.int32)
    index[0, 0] = torch.tensor(tokens)
    promoter.submit(0, index, torch.full(index.shape, score), torch.full((1, 2), near_score))


def collected(promoter: Promoter) -> list[int]:
    promoter.wait()
    ready = promoter.collect(0)
    return [] if ready is None else ready.token.tolist()


@THREADS
def test_cooldown_is_the_paper_s(synchronous: bool) -> None:
    _, promoter = promoting(synchronous)
    steps = []
    for step in range(12):
        submit(promoter, step)
        steps += collected(promoter)
    assert steps == [0, 5, 10]


def test_budget_is_per_step() -> None:
    _, promoter = promoting(cooldown=0)
    submit(promoter, *range(20))
    assert collected(promoter) == list(range(8))
    submit(promoter, *range(20))
    assert collected(promoter) == list(range(8))


def test_scores_that_are_no_numbers() -> None:
    _, promoter = promoting(cooldown=0)
    submit(promoter, 3, score=math.nan)
    submit(promoter, 3, near_score=math.nan)
    submit(promoter, 3, score=-math.inf, near_score=-math.inf)
    assert collected(promoter) == []
    submit(promoter, 3, near_score=-math.inf)
    assert collected(promoter) == [3]


def test_padding_is_added_and_taken_off() -> None:
    archive, promoter = promoting()
    index = torch.tensor([[[3], [4]]], dtype=torch.int32)
    start = torch.tensor([100], dtype=torch.int32)
    promoter.submit(0, index, torch.zeros(1, 2, 1), torch.full((1, 2), -1.0), start)
    ready = promoter.collect(0)
    assert ready is not None and ready.token.tolist() == [3, 4]
    zero = torch.zeros(2, dtype=torch.int64)
    key, value, _ = archive.layer(0).read(zero, torch.tensor([0, 1]), torch.tensor([103, 104]))
    assert torch.equal(ready.key, key) and torch.equal(ready.value, value)
    assert ready.key.dtype == torch.float16


def test_evicted_tokens_take_no_budget() -> None:
    page = 64 * 2 * 128 * 2
    _, promoter = promoting(budget_bytes=2 * page, cooldown=0, budget=1)
    submit(promoter, 3, 70, 150, 199)
    assert collected(promoter) == [150]


def test_rows_that_changed_are_not_tried_again() -> None:
    archive, promoter = promoting()
    submit(promoter, 3)
    assert collected(promoter) == [3]
    archive.layer(0).crop(100)
    promoter.retry(0, torch.tensor([0]))
    assert collected(promoter) == []


@THREADS
def test_reset_drops_what_is_under_way(synchronous: bool) -> None:
    archive, promoter = promoting(synchronous)
    submit(promoter, 3)
    archive.layer(0).reset()
    archive.layer(0).append(*torch.randn(2, 1, 2, 10, 64, dtype=torch.float16))
    assert collected(promoter) == []
    submit(promoter, 3)
    assert collected(promoter) == [3]


@THREADS
def test_many_changes_at_once(synchronous: bool) -> None:
    """More than the archive remembers."""
    archive, promoter = promoting(synchronous)
    submit(promoter, 3)
    for _ in range(100):
        archive.layer(0).reorder(torch.tensor([0, 0]))
        archive.layer(0).reorder(torch.tensor([0]))
    assert collected(promoter) == []
    submit(promoter, 3)
    assert collected(promoter) == [3]


@THREADS
def test_lost_file_ends_promotion(synchronous: bool, tmp_path: Any) -> None:
    path = tmp_path / "archive"
    archive = Archive(path)
    archive.layer(0).append(*torch.randn(2, 1, 2, 256, 64))
    promoter = Promoter(archive, cooldown=0, synchronous=synchronous)
    archive.flush()
    path.write_bytes(b"")
    with pytest.warns(RuntimeWarning, match="nothing is promoted") as caught:
        for _ in range(3):
            submit(promoter, 3, 70)
            assert collected(promoter) == []
        with pytest.warns(RuntimeWarning, match="is not kept"):
            archive.close()
    assert len([w for w in caught if "nothing is promoted" in str(w.message)]) == 1


def test_the_archive_outlives_its_name() -> None:
    """Whichever is closed first."""
    archive, promoter = promoting(synchronous=False)
    submit(promoter, 3, 4)
    archive.close()
    assert collected(promoter) == [3, 4]
    promoter.close()
    promoter.close()
    with pytest.raises(ValueError, match="the promoter is closed"):
        promoter.collect(0)


ERRORS: dict[str, tuple[type[Exception], str, Any]] = {
    "token": (IndexError, "index must name tokens below 200, got 200", lambda p: submit(p, 200)),
    "rows": (
        ValueError,
        "index must have 1 rows and 2 kv heads",
        lambda p: p.submit(0, *candidates(2)),
    ),
    "layer": (ValueError, "layer 1 of the archive is empty", lambda p: p.submit(1, *candidates(1))),
    "dtype": (
        ValueError,
        "index must be torch.int32",
        lambda p: p.submit(0, candidates(1)[0].long(), *candidates(1)[1:]),
    ),
    "score": (
        ValueError,
        r"score.shape\[2\] must be 3",
        lambda p: p.submit(0, candidates(1)[0], candidates(1)[1][..., :2], candidates(1)[2]),
    ),
    "start": (
        ValueError,
        "start must be torch.int32",
        lambda p: p.submit(0, *candidates(1), torch.zeros(1)),
    ),
    "places": (
        IndexError,
        r"places must be in \[0, 0\)",
        lambda p: p.retry(0, torch.tensor([0])),
    ),
    "cooldown": (
        ValueError,
        "cooldown must not be negative",
        lambda p: Promoter(p.archive, cooldown=-1),
    ),
}


def candidates(batch: int) -> tuple[Tensor, Tensor, Tensor]:
    index = torch.zeros(batch, 2, 3, dtype=torch.int32)
    return index, torch.zeros(index.shape), torch.full((batch, 2), -1.0)


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name: str) -> None:
    kind, message, call = ERRORS[name]
    _, promoter = promoting()
    with pytest.raises(kind, match=message):
        call(promoter)
    assert collected(promoter) == []
