"""Exact keys and values of every token, behind the decode thread in a file or in memory."""

from __future__ import annotations

import json
import os
import struct
import tempfile
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_kvq import _checks, _extension
from torch_kvq.formats import TILE_TOKENS

_library = torch.library.Library("kvq", "FRAGMENT")
for _schema in (
    "_archive_create(int file, int budget, int end) -> int",
    "_archive_fork(int archive) -> int",
    "_archive_close(int archive) -> ()",
    "_archive_error(int archive) -> str",
    "_archive_bytes(int archive) -> (int, int)",
    "_archive_append(int archive, int layer, Tensor key, Tensor value) -> bool",
    "_archive_read(int archive, int layer, Tensor row, Tensor head, Tensor token) -> Tensor[]",
    "_archive_crop(int archive, int layer, int tokens) -> ()",
    "_archive_reorder(int archive, int layer, int[] index) -> ()",
    "_archive_reset(int archive, int layer) -> ()",
    "_archive_flush(int archive) -> ()",
    "_archive_keep(int archive) -> bool",
    "_archive_reserve(int archive, int bytes) -> int",
    "_archive_extent(int archive, int layer) -> int[]",
    "_archive_offsets(int archive, int layer) -> int[]",
    "_archive_restore(int archive, int layer, int[] extent, int[] offsets) -> ()",
):
    _library.define(_schema)

_MAGIC = b"KVQARCH1"
_HEADER = struct.Struct("<8sQQ")
_FIRST_PAGE = 4096
_EXTENT = ("rows", "tokens", "kv_heads", "key_dim", "value_dim", "dtype")
_DTYPES = tuple(str(dtype).removeprefix("torch.") for dtype in _checks.FLOATS)


class Archive:
    """Exact keys and values of every token of one cache, in their own dtype.

    Tokens are held in pages of 64, for each layer and row. `ArchiveLayer.append` copies into a page
    in memory and returns; a thread writes pages that are full to the file. Rows share pages, and a
    page that others share is copied for the row that goes on in it.

    A file that cannot be written or read (the disk is full or gone) sets ``failed`` and warns once.
    Nothing is raised then: appended tokens are dropped, and none is found. It is the same in a
    child process after a fork, which has no thread that writes.

    One thread at a time appends, cuts and reorders; any may read meanwhile.

    Args:
        path: a new file that is kept: it can be opened again once the archive is closed. Without
            one, the file is temporary and has no name, so that nothing is left behind however the
            process ends; the variable ``TMPDIR`` says where it is.
        budget: bytes that pages may take, with all layers and rows. Beyond, the layer with the most
            bytes gives up the page that was used the longest ago. None for no limit.
        in_memory: hold pages in memory, without a file.

    Raises:
        FileExistsError: there is a file at ``path``; see `Archive.open`.
        OSError: the file cannot be created.
        RuntimeError: the compiled part of the package is missing.
        ValueError: a negative budget, or a path of an archive in memory.

    Example:
        >>> archive = Archive(in_memory=True)
        >>> layer = archive.layer(0)
        >>> key, value = torch.randn(2, 1, 8, 100, 64, dtype=torch.bfloat16)
        >>> layer.append(key, value)
        >>> row, head, token = torch.tensor([[0], [5], [99]])
        >>> read_key, read_value, found = layer.read(row, head, token)
        >>> torch.equal(read_key[0], key[0, 5, 99]), found.tolist()
        (True, [True])
    """

    def __init__(
        self, path: str | Path | None = None, *, budget: int | None = None, in_memory: bool = False
    ) -> None:
        _check_options(path, budget, in_memory)
        if in_memory:
            self._start(torch.ops.kvq._archive_create(-1, _limit(budget), 0))
            return
        with (
            tempfile.TemporaryFile(prefix="torch_kvq-") if path is None else open(path, "xb+") as (
                file
            )
        ):
            file.write(_HEADER.pack(_MAGIC, 0, 0))
            file.flush()
            self._start(
                torch.ops.kvq._archive_create(file.fileno(), _limit(budget), _FIRST_PAGE), path
            )

    @classmethod
    def open(cls, path: str | Path, *, budget: int | None = None) -> Archive:
        """Open the file of an archive that was closed, to read it and to go on.

        Args:
            path: the file, which is kept again.
            budget: as in the class; the last layers are held where it is too small.

        Raises:
            ValueError: not the file of an archive, or one that was not closed.

        Example:
            >>> path = Path(tempfile.mkdtemp()) / "archive"
            >>> archive = Archive(path)
            >>> archive.layer(3).append(*torch.randn(2, 1, 8, 100, 64))
            >>> archive.close()
            >>> Archive.open(path).layer(3).tokens
            100
        """
        _check_options(path, budget, False)
        with open(path, "rb+") as file:
            index, end = _read_index(file, path)
            handle = torch.ops.kvq._archive_create(file.fileno(), _limit(budget), end)
            try:
                for number, layer in index.items():
                    extent = [layer[name] for name in _EXTENT[:-1]]
                    extent.append(_DTYPES.index(layer["dtype"]))
                    torch.ops.kvq._archive_restore(handle, int(number), extent, layer["offsets"])
            except Exception:
                torch.ops.kvq._archive_close(handle)
                raise
            self = cls.__new__(cls)
            self._start(handle, path)
            self._layers.update(map(int, index))
            # Pages are now written in any place: until it is closed the file has no index.
            file.seek(0)
            file.write(_HEADER.pack(_MAGIC, 0, 0))
        return self

    def _start(self, handle: int, path: str | Path | None = None) -> None:
        self._handle = handle
        self._layers: set[int] = set()
        self._warned = False
        self._close = weakref.finalize(
            self,
            _close,
            handle,
            None if path is None else Path(path).absolute(),
            self._layers,
            os.getpid(),
        )

    def layer(self, index: int) -> ArchiveLayer:
        """The tokens of a layer, of which there may be none yet."""
        if index < 0:
            raise ValueError(f"index must not be negative, got {index}")
        self._layers.add(index)
        return ArchiveLayer(self, index)

    @property
    def failed(self) -> bool:
        """Whether the file is lost or full: nothing more is written or read."""
        return bool(torch.ops.kvq._archive_error(self._handle))

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that are held, on disk or in memory."""
        held: int = torch.ops.kvq._archive_bytes(self._handle)[0]
        return held

    @property
    def memory_nbytes(self) -> int:
        """Bytes of those in memory: of an archive in a file, pages that are not written yet."""
        held: int = torch.ops.kvq._archive_bytes(self._handle)[1]
        return held

    def fork(self) -> Archive:
        """An archive that has the same tokens and goes on by itself.

        Both share pages, the file, the budget and a failure. What a fork adds is never kept.

        Example:
            >>> archive = Archive(in_memory=True)
            >>> archive.layer(0).append(*torch.randn(2, 1, 8, 100, 64))
            >>> fork = archive.fork()
            >>> fork.layer(0).append(*torch.randn(2, 1, 8, 1, 64))
            >>> archive.layer(0).tokens, fork.layer(0).tokens
            (100, 101)
        """
        fork = type(self).__new__(type(self))
        fork._start(torch.ops.kvq._archive_fork(self._handle))
        fork._layers |= self._layers
        return fork

    def flush(self) -> None:
        """Wait until all full pages are written."""
        torch.ops.kvq._archive_flush(self._handle)

    def close(self) -> None:
        """Give up all pages; with a path, write what is missing in the file and its index.

        Happens by itself when the archive is deleted or the interpreter exits.
        """
        self._close()

    def check(self) -> bool:
        """Whether the archive works; warns the first time it does not."""
        error = torch.ops.kvq._archive_error(self._handle)
        if error and not self._warned:
            self._warned = True
            warnings.warn(
                f"the archive of exact tokens is out of use: {error}; nothing is promoted from it",
                RuntimeWarning,
                stacklevel=3,
            )
        return not error

    def __deepcopy__(self, memo: dict[int, Any]) -> Archive:
        return self.fork()

    def __reduce__(self) -> Any:
        raise TypeError("an archive cannot be pickled; give it a path and open the file again")


class ArchiveLayer:
    """The exact tokens of one layer of an archive; see `Archive`.

    Tokens of a row are numbered from 0 in the order of appending, padding included.
    """

    def __init__(self, archive: Archive, index: int) -> None:
        self.archive = archive
        self.index = index

    @property
    def tokens(self) -> int:
        """Tokens of each row."""
        extent = torch.ops.kvq._archive_extent(self.archive._handle, self.index)
        return extent[1] if extent else 0

    @property
    def rows(self) -> int:
        """Rows, 0 before the first tokens."""
        extent = torch.ops.kvq._archive_extent(self.archive._handle, self.index)
        return extent[0] if extent else 0

    def append(self, key: Tensor, value: Tensor) -> None:
        """Append tokens to every row. Waits for the disk when 64 MiB are still to be written.

        Args:
            key: ``[batch, kv_heads, tokens, key_dim]``, float32, float16 or bfloat16.
            value: ``[batch, kv_heads, tokens, value_dim]`` in the same dtype.

        Raises:
            ValueError: shapes or dtypes outside the above, or others than those of the layer.
        """
        archive = self.archive
        if archive._warned:
            return
        if key.requires_grad or not key.is_cpu:
            key, value = key.detach().cpu(), value.detach().cpu()
        if not torch.ops.kvq._archive_append(archive._handle, self.index, key, value):
            archive.check()

    def read(self, row: Tensor, head: Tensor, token: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Read single tokens.

        Args:
            row: int64 ``[n]``.
            head: int64 ``[n]``, KV heads.
            token: int64 ``[n]``.

        Returns:
            ``(key, value, found)``: ``[n, key_dim]`` and ``[n, value_dim]`` in the dtype that was
            appended, and bool ``[n]``. What the budget gave up or a failure took is not found, and
            its key and value are 0.

        Raises:
            IndexError: a token that the layer does not have.
            RuntimeError: in a child process, after a fork.
            ValueError: shapes or dtypes outside the above, or nothing was ever appended.
        """
        read = torch.ops.kvq._archive_read(self.archive._handle, self.index, row, head, token)
        if not read:
            self.archive.check()
            raise RuntimeError("an archive cannot be read in a forked process")
        key, value, found = read
        if not found.all():
            self.archive.check()
        return key, value, found

    def crop(self, tokens: int) -> None:
        """Keep the first ``tokens`` of every row.

        Raises:
            ValueError: a negative number.
        """
        torch.ops.kvq._archive_crop(self.archive._handle, self.index, tokens)

    def reorder(self, index: Tensor) -> None:
        """Let row i be what row ``index[i]`` was; there may be repeats, and more or fewer rows.

        Args:
            index: integers ``[rows]``.

        Raises:
            IndexError: a row that the layer does not have.
        """
        _checks.check_rank(1, index=index)
        torch.ops.kvq._archive_reorder(self.archive._handle, self.index, index.tolist())

    def reset(self) -> None:
        """Give up all tokens; the next may come in another number of rows."""
        torch.ops.kvq._archive_reset(self.archive._handle, self.index)


def _check_options(path: str | Path | None, budget: int | None, in_memory: bool) -> None:
    if not _extension.is_compiled:
        raise RuntimeError("an archive needs the compiled part of torch_kvq")
    if budget is not None:
        _checks.check_not_negative(budget=budget)
    if in_memory and path is not None:
        raise ValueError(f"an archive in memory has no path, got {path}")


def _limit(budget: int | None) -> int:
    return -1 if budget is None else budget


def _read_index(file: Any, path: str | Path) -> tuple[dict[str, Any], int]:
    """The index of a file (docs/formats.md, "Archive file"), and where it begins."""
    header = file.read(_HEADER.size)
    magic, offset, size = _HEADER.unpack(header) if len(header) == _HEADER.size else (b"", 0, 0)
    if magic != _MAGIC:
        raise ValueError(f"path must be the file of an archive, got {path}")
    if not offset:
        raise ValueError(f"path must be an archive that was closed, got {path}")
    file.seek(offset)
    index = json.loads(file.read(size))
    if index["page_tokens"] != TILE_TOKENS:
        raise ValueError(f"pages must have {TILE_TOKENS} tokens, got {index['page_tokens']}")
    return index["layers"], offset


def _close(handle: int, path: Path | None, layers: set[int], process: int) -> None:
    if path is not None and process == os.getpid():
        try:
            if not torch.ops.kvq._archive_keep(handle):
                raise OSError(torch.ops.kvq._archive_error(handle))
            _write_index(handle, path, layers)
        except OSError as error:
            warnings.warn(f"the archive {path} is not kept: {error}", RuntimeWarning, stacklevel=2)
    torch.ops.kvq._archive_close(handle)


def _write_index(handle: int, path: Path, layers: set[int]) -> None:
    index = {}
    for layer in sorted(layers):
        if extent := torch.ops.kvq._archive_extent(handle, layer):
            described: dict[str, Any] = dict(zip(_EXTENT, extent, strict=True))
            described["dtype"] = _DTYPES[extent[-1]]
            index[layer] = described
            described["offsets"] = torch.ops.kvq._archive_offsets(handle, layer)
    text = json.dumps({"page_tokens": TILE_TOKENS, "layers": index}).encode()
    offset = torch.ops.kvq._archive_reserve(handle, len(text))
    with open(path, "rb+") as file:
        file.seek(offset)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        file.seek(0)
        file.write(_HEADER.pack(_MAGIC, offset, len(text)))
