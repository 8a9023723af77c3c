"""The archive: every token bit for bit, through rows, cuts, budgets, failures and processes."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_kvq import _extension
from torch_kvq.cache.archive import Archive, ArchiveLayer

if not _extension.is_compiled:
    pytest.skip("the compiled part is not built", allow_module_level=True)

PAGE = 64
MODES = pytest.mark.parametrize("in_memory", [True, False], ids=["memory", "file"])
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def tokens_of(batch: int, tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Random bits of 2 heads, NaN and infinities among them; dims 32 and 48."""
    integers = torch.int32 if dtype.itemsize == 4 else torch.int16
    limit = torch.iinfo(integers)

    def bits(dim: int) -> Tensor:
        shape = (batch, 2, tokens, dim)
        return torch.randint(limit.min, limit.max, shape, dtype=integers).view(dtype)

    return bits(32), bits(48)


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def read_all(layer: ArchiveLayer) -> tuple[Tensor, Tensor, Tensor]:
    """Keys, values and what was found, ``[rows, heads, tokens, ...]``."""
    shape = (layer.rows, 2, layer.tokens)
    places = torch.cartesian_prod(*(torch.arange(size) for size in shape)).view(-1, 3)
    key, value, found = layer.read(*places.unbind(1))
    return key.view(*shape, -1), value.view(*shape, -1), found.view(shape)


def assert_holds(layer: ArchiveLayer, key: Tensor, value: Tensor) -> None:
    got_key, got_value, found = read_all(layer)
    assert found.all()
    assert same_bits(got_key, key)
    assert same_bits(got_value, value)


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


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
    page = PAGE * 2 * (32 + 48) * 4
    assert (archive.nbytes, archive.memory_nbytes) == (11 * page, page)


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
    page = PAGE * 2 * (32 + 48) * 4
    archive = Archive(in_memory=in_memory, budget=4 * page)
    layer = archive.layer(0)
    key, value = tokens_of(1, 4 * PAGE)
    layer.append(key, value)
    zero = torch.tensor([0])
    layer.read(zero, zero, zero)
    layer.append(*tokens_of(1, 1))
    got_key, got_value, found = read_all(layer)
    assert archive.nbytes == 4 * page
    assert found[0, 0].view(-1)[::PAGE].tolist() == [True, False, True, True, True]
    assert not got_key[~found].any() and not got_value[~found].any()
    assert same_bits(got_key[:, :, :PAGE], key[:, :, :PAGE])
    assert not archive.failed


def test_layers_share_the_budget() -> None:
    page = PAGE * 2 * (32 + 48) * 4
    archive = Archive(budget=8 * page)
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


def test_full_disk_warns_once_and_goes_on() -> None:
    run = run_python(
        """
        import resource, torch, warnings
        from torch_kvq.cache.archive import Archive
        archive = Archive()
        layer = archive.layer(0)
        key = torch.randn(1, 2, 64, 32)
        layer.append(key, key)
        archive.flush()
        resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(4):
                layer.append(key, key)
                archive.flush()
            at = torch.tensor([0])
            assert not layer.read(at, at, at)[2].any()
            layer.reorder(torch.tensor([0, 0])); layer.crop(10); layer.reset()
        assert archive.failed and archive.nbytes == 0
        print([str(warning.message) for warning in caught])
        """
    )
    assert run.returncode == 0, run.stderr
    (message,) = eval(run.stdout)
    assert "File too large" in message


def test_lost_file_is_not_found(tmp_path: Path) -> None:
    archive = Archive(tmp_path / "archive")
    layer = archive.layer(0)
    layer.append(*tokens_of(1, 3 * PAGE))
    archive.flush()
    os.truncate(tmp_path / "archive", 4096)
    with pytest.warns(RuntimeWarning, match="out of use: reading its file failed"):
        found = read_all(layer)[2]
    assert not found.any() and archive.failed
    layer.append(*tokens_of(1, 1))
    with pytest.warns(RuntimeWarning, match="is not kept"):
        archive.close()


def test_lost_folder(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    archive = Archive(folder / "archive")
    layer = archive.layer(0)
    key, value = tokens_of(1, 3 * PAGE)
    layer.append(key, value)
    (folder / "archive").unlink()
    folder.rmdir()
    assert_holds(layer, key, value)
    with pytest.warns(RuntimeWarning, match="is not kept"):
        archive.close()


@DTYPES
def test_kept_file_opens_again(dtype: torch.dtype, tmp_path: Path) -> None:
    path = tmp_path / "archive"
    archive = Archive(path)
    first, second = tokens_of(2, 200, dtype), tokens_of(1, 64, dtype)
    archive.layer(0).append(*first)
    archive.layer(7).append(*second)
    archive.layer(9)
    archive.layer(0).reorder(torch.tensor([1, 1, 0]))
    want = [tensor[[1, 1, 0]] for tensor in first]
    for pages in (9, 10, 10):  # the last one of rows that went on is no longer shared
        archive.close()
        archive = Archive.open(path)
        assert_holds(archive.layer(0), *want)
        assert_holds(archive.layer(7), *second)
        assert archive.nbytes == pages * PAGE * 2 * (32 + 48) * dtype.itemsize
        new = tokens_of(3, 70, dtype)
        archive.layer(0).append(*new)
        want = [torch.cat(pair, 2) for pair in zip(want, new, strict=True)]
        assert_holds(archive.layer(0), *want)
        archive.layer(0).crop(200)
        want = [tensor[:, :, :200] for tensor in want]


def test_kept_file_outlives_forks(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    archive = Archive(path)
    key, value = tokens_of(1, 300)
    archive.layer(0).append(key, value)
    fork = archive.fork()
    archive.close()
    fork.layer(0).crop(10)
    fork.layer(0).append(*tokens_of(1, 600))
    fork.flush()
    assert_holds(Archive.open(path).layer(0), key, value)


def test_kept_file_with_a_budget(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    page = PAGE * 2 * (32 + 48) * 4
    archive = Archive(path, budget=3 * page)
    archive.layer(0).append(*tokens_of(1, 5 * PAGE))
    found = read_all(archive.layer(0))[2]
    archive.close()
    archive = Archive.open(path, budget=3 * page)
    assert torch.equal(read_all(archive.layer(0))[2], found)
    archive.close()
    assert int(read_all(Archive.open(path, budget=page).layer(0))[2].sum()) == 2 * PAGE


def test_files_that_are_no_archives(tmp_path: Path) -> None:
    path = tmp_path / "archive"
    path.write_bytes(b"")
    with pytest.raises(FileExistsError):
        Archive(path)
    with pytest.raises(ValueError, match="must be the file of an archive"):
        Archive.open(path)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        Archive(tmp_path / "nowhere" / "archive")
    archive = Archive(path)
    with pytest.raises(ValueError, match="that was closed"):
        Archive.open(path)
    archive.layer(0).append(*tokens_of(1, 70))
    archive.close()
    kept = path.read_bytes()
    broken = kept.replace(b'"kv_heads": 2', b'"kv_heads":-2')
    assert json.loads(broken[broken.index(b'{"page') :])
    path.write_bytes(broken)
    with pytest.raises(ValueError, match="extent must not be negative"):
        Archive.open(path)
    assert path.read_bytes() == broken


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_temporary_files_are_gone_after_any_end(tmp_path: Path) -> None:
    """Threads at work keep no process from its end, and no file outlives it."""
    run = run_python(
        """
        import os, signal, sys, torch
        from torch_kvq.cache.archive import Archive
        from torch_kvq.cache.promoter import Promoter

        def work():
            global archives, promoters
            archives = [Archive() for _ in range(2)]
            promoters = [Promoter(archive) for archive in archives]
            key = torch.randn(1, 2, 5000, 32)
            for archive in archives:
                archive.layer(0).append(key, key)
            index = torch.arange(16, dtype=torch.int32).view(1, 2, 8)
            for promoter in promoters:
                promoter.submit(0, index, torch.zeros(1, 2, 8), torch.full((1, 2), -1.0))

        def kill():
            os.kill(os.getpid(), signal.SIGKILL)

        for end, code in ((sys.exit, 0), (lambda: os._exit(0), 0), (kill, -9)):
            child = os.fork()
            if child == 0:
                work()
                end()
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code
        work()
        """,
        TMPDIR=str(tmp_path),
    )
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("torch_kvq")]


def test_exit_without_close_keeps_the_file(tmp_path: Path) -> None:
    run = run_python(
        f"""
        import torch
        from torch_kvq.cache.archive import Archive
        archive = Archive({str(tmp_path / "archive")!r})
        key = torch.arange(6400.).view(1, 2, 100, 32)
        archive.layer(0).append(key, key)
        """
    )
    assert run.returncode == 0 and run.stderr == "", run.stderr
    key = torch.arange(6400.0).view(1, 2, 100, 32)
    assert_holds(Archive.open(tmp_path / "archive").layer(0), key, key)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_child_of_a_fork_goes_on_without(tmp_path: Path) -> None:
    """Also while the threads of the parent are at work, which the child does not have."""
    run = run_python(
        f"""
        import copy, os, sys, torch, warnings
        from torch_kvq.cache.archive import Archive
        from torch_kvq.cache.promoter import Promoter
        archive = Archive({str(tmp_path / "archive")!r})
        layer = archive.layer(0)
        promoter = Promoter(archive)
        key = torch.randn(1, 2, 20000, 32)
        index = torch.arange(16, dtype=torch.int32).view(1, 2, 8)
        score, near = torch.zeros(1, 2, 8), torch.full((1, 2), -1.0)
        layer.append(key, key)
        promoter.submit(0, index, score, near)
        for step in range(6):
            layer.append(key[:, :, :3000], key[:, :, :3000])
            child = os.fork()
            if child == 0:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    for _ in range(2):
                        layer.append(key[:, :, :1], key[:, :, :1])
                        promoter.submit(0, index, score, near)
                        assert promoter.collect(0) is None
                    layer.crop(3); layer.reorder(torch.tensor([0, 0])); layer.reset()
                    assert archive.failed and archive.nbytes == 0
                    other = copy.deepcopy(archive)
                    Promoter(other).submit(0, index, score, near)
                messages = [str(w.message) for w in caught]
                assert ["process" in message for message in messages] == [True, True], messages
                fresh = Archive().layer(0)
                fresh.append(key, key)
                fresh.archive.flush()
                assert fresh.read(*torch.tensor([[0], [1], [70]]))[2].all()
                os._exit(0) if step % 2 else sys.exit(0)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        promoter.wait()
        assert len(promoter.collect(0).row) == 8
        assert layer.tokens == 38000
        """
    )
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert Archive.open(tmp_path / "archive").layer(0).tokens == 38000


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


def test_temporary_archives_have_no_name() -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    archive = Archive()
    new = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in new if name.startswith("torch_kvq")]
    assert not archive.failed
