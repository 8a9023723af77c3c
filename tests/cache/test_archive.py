"""The archive: every token bit for bit, through appends, cuts, other rows and budgets."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.archives import DTYPES, PAGE, PAGE_BYTES, assert_holds, read_all, same_bits, tokens_of
from torch_kvq import _extension
from torch_kvq.cache.archive import Archive

if not _extension.is_compiled:
    pytest.skip("the compiled part is not built", allow_module_level=True)

MODES = pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "file"])


@MODES
@DTYPES
def test_every_bit_comes_back(dtype: torch.dtype, in_memory: bool) -> None:
    archive = Archive(in_memory=in_memory)
    layer = archive.layer(2)
    parts = [tokens_of(2, count, dtype) for count in (150, 1, 1, 63, 64, 300)]
    for key, value in parts:
        layer.append(key, value)
    key, value = (torch.cat(tensors, 2) for tensors in zip(*parts, strict=True))
    assert_holds(layer, key, value)
    archive.flush()
    assert_holds(layer, key, value)
    assert layer.read(*torch.zeros(3, 0, dtype=torch.int64))[0].shape == (0, 32)


@MODES
def test_any_layout_of_the_input(in_memory: bool) -> None:
    key, value = tokens_of(3, 70)
    layer = Archive(in_memory=in_memory).layer(0)
    layer.append(key.transpose(1, 2).contiguous().transpose(1, 2), value.mT.contiguous().mT)
    assert_holds(layer, key, value)
    layer.append(key[:, :, :0], value[:, :, :0])
    layer.append(key.clone().requires_grad_(), value)
    assert layer.tokens == 140


def test_pages_leave_memory_for_the_file() -> None:
    archive = Archive()
    layer = archive.layer(0)
    layer.append(*tokens_of(1, 10 * PAGE + 1))
    archive.flush()
    assert (archive.nbytes, archive.memory_nbytes) == (11 * PAGE_BYTES, PAGE_BYTES)


@MODES
@pytest.mark.parametrize("seed", range(4))
def test_any_sequence(seed: int, in_memory: bool) -> None:
    dice = random.Random(seed)
    archive = Archive(in_memory=in_memory)
    layer = archive.layer(0)
    want = tokens_of(2, 100)
    layer.append(*want)
    for _ in range(40):
        batch, _, tokens, _ = want[0].shape
        action = dice.choice(["append", "step", "crop", "reorder", "fork"])
        if action in ("append", "step"):
            new = tokens_of(batch, 1 if action == "step" else dice.randrange(150))
            layer.append(*new)
            want = tuple(torch.cat(pair, 2) for pair in zip(want, new, strict=True))
        elif action == "crop":
            kept = dice.randint(tokens // 2, tokens + 3)
            layer.crop(kept)
            want = tuple(tensor[:, :, :kept] for tensor in want)
        elif action == "fork":
            archive, origin = archive.fork(), layer
            layer = archive.layer(0)
            origin.append(*tokens_of(batch, 70))
        else:
            index = torch.tensor([dice.randrange(batch) for _ in range(dice.choice([batch, 1, 3]))])
            layer.reorder(index)
            want = tuple(tensor[index] for tensor in want)
        if dice.random() < 0.3:
            assert_holds(layer, *want)
    assert_holds(layer, *want)
    layer.reset()
    assert layer.rows == layer.tokens == 0


@MODES
def test_rows_share_pages(in_memory: bool) -> None:
    archive = Archive(in_memory=in_memory)
    layer = archive.layer(0)
    layer.append(*tokens_of(1, 5 * PAGE + 7))
    alone = archive.nbytes
    layer.reorder(torch.zeros(4, dtype=torch.int64))
    assert archive.nbytes == alone
    layer.append(*tokens_of(4, 1))
    assert archive.nbytes == alone // 6 * (5 + 4)
    fork = archive.fork()
    assert archive.nbytes == alone // 6 * (5 + 4)
    layer.reset()
    assert archive.nbytes == alone // 6 * (5 + 4)
    del fork
    assert archive.nbytes == 0


@MODES
def test_budget_evicts_what_was_used_the_longest_ago(in_memory: bool) -> None:
    archive = Archive(in_memory=in_memory, budget=4 * PAGE_BYTES)
    layer = archive.layer(0)
    key, value = tokens_of(1, 4 * PAGE)
    layer.append(key, value)
    zero = torch.tensor([0])
    layer.read(zero, zero, zero)
    layer.append(*tokens_of(1, 1))
    got_key, got_value, found = read_all(layer)
    assert archive.nbytes == 4 * PAGE_BYTES
    assert found[0, 0].view(-1)[::PAGE].tolist() == [True, False, True, True, True]
    assert not got_key[~found].any() and not got_value[~found].any()
    assert same_bits(got_key[:, :, :PAGE], key[:, :, :PAGE])
    assert not archive.failed


def test_layers_share_the_budget() -> None:
    archive = Archive(budget=8 * PAGE_BYTES)
    for index in range(4):
        archive.layer(index).append(*tokens_of(1, 6 * PAGE))
    counts = [int(read_all(archive.layer(index))[2].sum()) for index in range(4)]
    assert counts == [2 * 2 * PAGE] * 4


@MODES
def test_budget_below_one_page(in_memory: bool) -> None:
    archive = Archive(in_memory=in_memory, budget=100)
    layer = archive.layer(0)
    layer.append(*tokens_of(2, 100))
    layer.append(*tokens_of(2, 1))
    layer.crop(30)
    assert not read_all(layer)[2].any()
    assert archive.nbytes == 0 and not archive.failed


@MODES
def test_rows_that_are_all_gone(in_memory: bool) -> None:
    layer = Archive(in_memory=in_memory).layer(0)
    layer.append(*tokens_of(2, 70))
    layer.reorder(torch.zeros(0, dtype=torch.int64))
    layer.append(*tokens_of(0, 5))
    assert layer.rows == layer.tokens == 0
    key, value = tokens_of(3, 70)
    layer.append(key, value)
    assert_holds(layer, key, value)


def test_copies() -> None:
    archive = Archive(in_memory=True)
    key, value = tokens_of(1, 70)
    archive.layer(0).append(key, value)
    clone = copy.deepcopy(archive)
    archive.layer(0).reset()
    assert_holds(clone.layer(0), key, value)
    with pytest.raises(TypeError, match="cannot be pickled"):
        pickle.dumps(archive)


def test_closed_archive() -> None:
    archive = Archive(in_memory=True)
    layer = archive.layer(0)
    archive.close()
    archive.close()
    with pytest.raises(ValueError, match="the archive is closed"):
        layer.append(*tokens_of(1, 1))


ERRORS: dict[str, tuple[type[Exception], str, Any]] = {
    "rank": (ValueError, "key must have 4 dimensions", lambda a: a.append(*torch.zeros(2, 3, 32))),
    "dtype": (ValueError, "value must be", lambda a: a.append(*tokens_cast(torch.float16))),
    "double": (ValueError, "key must be float32", lambda a: a.append(*tokens_cast(None))),
    "batch": (ValueError, r"key.shape\[0\] must be 2", lambda a: a.append(*tokens_of(3, 1))),
    "other": (
        ValueError,
        "kv heads, dims and dtype of layer 0",
        lambda a: a.append(*tokens_of(2, 1, torch.float16)),
    ),
    "row": (IndexError, r"row must be in \[0, 2\), got 2", lambda a: a.read(*place(2, 0, 0))),
    "head": (IndexError, r"head must be in \[0, 2\), got -1", lambda a: a.read(*place(0, -1, 0))),
    "token": (
        IndexError,
        r"token must be in \[0, 70\), got 70",
        lambda a: a.read(*place(0, 0, 70)),
    ),
    "length": (
        ValueError,
        "row.shape",
        lambda a: a.read(*place(0, 0, 0)[:2], torch.zeros(2, dtype=torch.int64)),
    ),
    "int32": (
        ValueError,
        "token must be",
        lambda a: a.read(*place(0, 0, 0)[:2], torch.tensor([0.0])),
    ),
    "empty": (ValueError, "layer 1 .* empty", lambda a: a.archive.layer(1).read(*place(0, 0, 0))),
    "crop": (ValueError, "tokens must not be negative", lambda a: a.crop(-1)),
    "index": (
        IndexError,
        r"index must be in \[0, 2\), got 2",
        lambda a: a.reorder(torch.tensor([2])),
    ),
    "layer": (ValueError, "index must not be negative", lambda a: a.archive.layer(-1)),
    "budget": (ValueError, "budget must not be negative", lambda a: Archive(budget=-1)),
    "path": (ValueError, "has no path", lambda a: Archive("x", in_memory=True)),
}


def place(*numbers: int) -> list[Tensor]:
    return [torch.tensor([number]) for number in numbers]


def tokens_cast(dtype: torch.dtype | None) -> tuple[Tensor, Tensor]:
    key, value = tokens_of(2, 1)
    return (key, value.to(dtype)) if dtype else (key.double(), value.double())


@pytest.mark.parametrize("name", ERRORS)
def test_errors_change_nothing(name: str) -> None:
    kind, message, call = ERRORS[name]
    layer = Archive(in_memory=True).layer(0)
    key, value = tokens_of(2, 70)
    layer.append(key, value)
    with pytest.raises(kind, match=message):
        call(layer)
    assert_holds(layer, key, value)
