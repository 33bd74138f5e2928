"""Meta's torch_checkpointing by fpfs: `FpfsStorageConfig`, for ``CheckpointManager.Config``.

The files are the ones that torch_checkpointing writes to its own storage, so each reads what the
other has written. What torch.save would write of a tensor, native threads write from where the
tensor lies; torch.save lays the file out, and its bytes go nowhere.

Invariants:
  * A file has its name when all of it is there. torch_checkpointing gives a checkpoint its name by
    a rename of the directory.
  * With `durable`, that rename returns when all files and all names survive power loss.

Concurrency: a storage is used by several threads at once, each of which writes another file, in the
process that trains or in one that torch_checkpointing has started.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from fpfs.core.lazy import needing

with needing("fpfs.integrations.torch_checkpointing", extra="torch_checkpointing"):
    import torch
    from torch_checkpointing.storage.base_storage import ReadArgs, StorageConfig
    from torch_checkpointing.storage.filesystem import (
        LocalFileSystemStorage,
        LocalFileSystemStorageConfig,
    )

from fpfs.client.agreement import LayOut
from fpfs.client.container import lay_out
from fpfs.client.parallel_file import ParallelFile
from fpfs.client.paths import (
    check_flag,
    check_threads,
    flush,
    is_on_fpfs,
    make_directories,
    resolve,
)
from fpfs.client.peers import ALONE
from fpfs.client.safetensors import lay_out_text
from fpfs.client.saving import Save


@dataclass
class FpfsStorageConfig(StorageConfig):
    """Where checkpoints go: directories on a mount of fpfs, or on any filesystem.

    durable: a checkpoint survives power loss when its save has ended. False: when it has its name,
        which on fpfs survives any process, and power loss after about a second.
    threads: how many write each file. None: as many as there are processors, 2 to 8.
    """

    durable: bool = True
    threads: int | None = None

    def __post_init__(self) -> None:
        check_threads(self.threads)
        check_flag("durable", self.durable)

    def create_storage(self) -> FpfsStorage:
        """Return one, as torch_checkpointing asks for it, in whichever process."""
        return FpfsStorage(self)


class FpfsStorage(LocalFileSystemStorage):
    """Names are the filesystem's, as torch_checkpointing has them; bytes are moved by fpfs.

    Raises what `fpfs.save` and `fpfs.load` raise.
    """

    def __init__(self, config: FpfsStorageConfig) -> None:
        super().__init__(LocalFileSystemStorageConfig(use_direct_io=False))
        self._durable = config.durable
        self._threads = config.threads

    @property
    def mmap_fill_workers(self) -> int:
        """One reader: what it reads, several threads do already."""
        return 1

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> Any:
        """Open a file, of which large pieces are read by several threads."""
        del read_args
        name = resolve(path)
        return ParallelFile(name, past_cache=is_on_fpfs(name))

    def stream_write(self, path: Path) -> io.IOBase:
        """Open a file to be written, which is as durable as others are when it is closed."""
        return io.BufferedWriter(_File(path, durable=self._durable))

    def get_write_stream(self, path: Path, data: object) -> _Stream:
        """Return what ``torch.save(data, stream)`` saves `data` by."""
        return _Stream(path, data, self)

    def write(self, path: Path, data: Any) -> None:
        """Write a file of `data`."""
        with self.saving(path, data, lay_out_text):
            pass

    @contextlib.contextmanager
    def saving(self, path: Path, data: Any, lay_out: LayOut) -> Iterator[int]:
        """Write a file, which gets its name at the end of this; gives its bytes."""
        with Save(ALONE) as steps:
            steps.agree(data, path, None, lay_out=lay_out)
            written = steps.write(durable=self._durable, threads=self._threads, commit=False)
            yield written.total_bytes
            steps.commit(durable=self._durable)

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Make a directory, if it is not there; and those above it."""
        if recursive:
            parents = make_directories(path)
        else:
            super().mkdir(path, recursive)
            parents = [str(path.parent)]
        if self._durable:
            flush(*parents)

    def rename(
        self,
        src_path: Path,
        dst_path: Path,
        is_directory: bool = False,
        background_cleanup: bool = False,
    ) -> None:
        """Give what is at `src_path` the name `dst_path`, as `Storage.rename` asks."""
        super().rename(src_path, dst_path, is_directory, background_cleanup)
        if self._durable:
            flush(dst_path.parent)


class _File(io.FileIO):
    """A new file, which is flushed when it is closed if it is to be durable."""

    def __init__(self, path: Path, *, durable: bool) -> None:
        super().__init__(path, "wb")
        self._durable = durable

    def close(self) -> None:
        """Close it; OSError of what cannot be flushed."""
        try:
            if self._durable and not self.closed:
                os.fsync(self.fileno())
        finally:
            super().close()


class _Stream(io.RawIOBase):
    """Takes what torch.save writes of `data`, which `storage` saves meanwhile."""

    def __init__(self, path: Path, data: object, storage: FpfsStorage) -> None:
        super().__init__()
        self._path = path
        self._data = data
        self._storage = storage
        self._at = 0
        self._skipping = contextlib.ExitStack()
        self._saving = storage.saving(path, data, lay_out)
        self._saved: Future[int] | None = None

    def __enter__(self) -> _Stream:
        executor = ThreadPoolExecutor(1, thread_name_prefix="fpfs-save")
        # torch's settings are the context's.
        context = contextvars.copy_context()
        self._saved = executor.submit(context.run, self._saving.__enter__)
        executor.shutdown(wait=False)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._skipping.close()
        self.close()
        assert self._saved is not None
        with contextlib.ExitStack() as stack:
            saved_bytes = self._saved.result()
            stack.push(self._saving)
            if error is not None:
                raise error
            if saved_bytes != self._at:
                raise RuntimeError(
                    f"{self._path} would have {saved_bytes} bytes, and by torch.save"
                    f" {self._at}: was the state changed while it was saved?"
                )

    def write(self, content: Any) -> int:
        if self._at == 0:
            # From here on no bytes of tensors come. Not before: torch.save has pickled by now, and
            # some tensors could not be pickled so.
            self._skipping.enter_context(torch.serialization.skip_data())
        count = memoryview(content).nbytes
        self._at += count
        return count

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (self._at if whence == os.SEEK_CUR else 0)
        return self._at

    def tell(self) -> int:
        return self._at

    def writable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


__all__ = ["FpfsStorage", "FpfsStorageConfig"]
