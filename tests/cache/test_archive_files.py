"""Files of archives: full, lost and kept ones, and what is left of them after the process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest
import torch

from tests.archives import DTYPES, PAGE, PAGE_BYTES, assert_holds, read_all, tokens_of
from torch_kvq import _extension
from torch_kvq.cache.archive import Archive

if not _extension.is_compiled:
    pytest.skip("the compiled part is not built", allow_module_level=True)

FORKS = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=100,
        env={**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1", **environment},
        check=False,
    )


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
            layer.crop(10)
            layer.reset()
            layer.append(torch.randn(3, 2, 64, 32), torch.randn(3, 2, 64, 32))
            layer.reorder(torch.tensor([2, 0, 2]))
            assert not layer.read(torch.tensor([2]), at, torch.tensor([63]))[2].any()
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
    archive = Archive(path, budget=3 * PAGE_BYTES)
    archive.layer(0).append(*tokens_of(1, 5 * PAGE))
    found = read_all(archive.layer(0))[2]
    archive.close()
    archive = Archive.open(path, budget=3 * PAGE_BYTES)
    assert torch.equal(read_all(archive.layer(0))[2], found)
    archive.close()
    assert int(read_all(Archive.open(path, budget=PAGE_BYTES).layer(0))[2].sum()) == 2 * PAGE


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


@FORKS
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


@FORKS
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


def test_temporary_archives_have_no_name() -> None:
    before = set(os.listdir(tempfile.gettempdir()))
    archive = Archive()
    new = set(os.listdir(tempfile.gettempdir())) - before
    assert not [name for name in new if name.startswith("torch_kvq")]
    assert not archive.failed
