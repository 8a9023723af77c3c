"""Pages: ownership, growth and the block table that follows."""

from __future__ import annotations

import random

import pytest
import torch

from torch_kvq.cache.pages import FREED, BlockTable, PagePool


def table_of(rows: list[int], width: int | None = None) -> BlockTable:
    table = BlockTable(PagePool(2, 128), len(rows), width)
    for row, count in enumerate(rows):
        table.extend(row, count)
    return table


def assert_consistent(table: BlockTable) -> None:
    """Every page has as many owners as rows name it, and the tensor says what the rows say."""
    pool = table.pool
    counts = [0] * pool.tiles.shape[0]
    for row, pages in enumerate(table.rows):
        assert table.tensor[row, : len(pages)].tolist() == pages
        for page in pages:
            counts[page] += 1
    assert pool._counts == counts
    assert sorted(pool._free) == [page for page, count in enumerate(counts) if not count]


def test_pool_grows_by_an_eighth_and_keeps_records() -> None:
    pool = PagePool(2, 128)
    pool.allocate(80)
    pool.tiles.random_()
    before = pool.tiles.clone()
    assert pool.allocate(1) == [80]
    assert pool.tiles.shape == (90, 2, 128)
    assert torch.equal(pool.tiles[:80], before)
    assert pool.tiles.data_ptr() % 64 == 0


def test_pool_allocates_no_more_than_a_prompt_needs() -> None:
    pool = PagePool(2, 128)
    pool.allocate(37)
    assert pool.tiles.shape[0] == 37


def test_freed_pages_are_used_again() -> None:
    pool = PagePool(2, 128)
    pages = pool.allocate(3)
    pool.release(pages[1:2])
    assert pool.allocate(1) == pages[1:2]
    assert pool.used == 3


def test_static_table_counts_up() -> None:
    table = table_of([0, 0, 0], width=4)
    assert table.tensor.tolist() == torch.arange(12).view(3, 4).tolist()
    assert table.pool.tiles.shape[0] == 12


def test_shared_page_is_copied_for_its_writer() -> None:
    table = table_of([2, 1])
    table.pool.tiles.random_()
    table.select([0, 0], [2, 1])
    assert table.rows[0] == table.rows[1]
    table.own(1, 1)
    assert_consistent(table)
    old, new = table.rows[0][1], table.rows[1][1]
    assert old != new
    assert torch.equal(table.pool.tiles[old], table.pool.tiles[new])
    table.own(0, 1)
    assert table.rows[0][1] == old


@pytest.mark.parametrize("width", [None, 6])
@pytest.mark.parametrize("seed", range(5))
def test_any_sequence_keeps_counts(seed: int, width: int | None) -> None:
    dice = random.Random(seed)
    table = table_of([0, 0], width)
    used = [0, 0]
    for _ in range(60):
        batch = len(used)
        row = dice.randrange(batch)
        action = dice.choice(["extend", "own", "truncate", "select"])
        if action == "extend":
            used[row] = min(used[row] + dice.randrange(3), 6)
            table.extend(row, used[row])
        elif action == "own" and used[row]:
            table.own(row, dice.randrange(used[row]))
        elif action == "truncate":
            used = [dice.randint(0, count) for count in used]
            table.truncate(used)
        else:
            indices = [dice.randrange(batch) for _ in range(dice.choice([batch, 1, 2, 4]))]
            table.select(indices, used)
            used = [used[index] for index in indices]
        assert_consistent(table)
        for count, pages in zip(used, table.rows, strict=True):
            assert len(pages) >= count if width is None else len(pages) == width


def test_static_table_keeps_its_address() -> None:
    table = table_of([0, 0], width=4)
    address = table.tensor.data_ptr()
    table.select([1, 1], [2, 3])
    table.truncate([1, 0])
    assert table.tensor.data_ptr() == address
    assert_consistent(table)


def test_sparse_pools_give_memory_back() -> None:
    table = table_of([60, 3])
    table.pool.tiles[:] = torch.arange(len(table.pool.tiles)).view(-1, 1, 1)
    fork = table.fork([1, 3])
    records = [table.pool.tiles[pages] for pages in fork.rows]
    table.free(0, 59)
    table.pool.shrink()
    assert len(table.pool.tiles) == table.pool.used == 5
    for pages, wanted in zip(fork.rows, records, strict=True):
        assert torch.equal(table.pool.tiles[pages], wanted)
    assert table.rows[0][:59] == [FREED] * 59
    assert table.tensor[1, :3].tolist() == fork.tensor[1, :3].tolist() == fork.rows[1]


def test_pools_of_static_tables_do_not_move() -> None:
    table = table_of([0, 0], width=40)
    tiles = table.pool.tiles
    table.truncate([0, 0])
    table.pool.shrink()
    assert table.pool.tiles is tiles
