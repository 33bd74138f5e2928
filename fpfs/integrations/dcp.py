"""torch.distributed.checkpoint by fpfs: `Writer`, `Reader`, `Stager`.

A checkpoint is what torch's own FileSystemWriter makes: a directory with files of each rank, which
hold a torch.save archive for each tensor, and ``.metadata``, which says where they are. So torch's
FileSystemReader reads what `Writer` writes, and `Reader` what torch has written.

Invariants:
  * A directory has its former checkpoint or the new one: files have names that no checkpoint had
    before, and ``.metadata``, which names them, takes its place by one rename when all are there.
    What it no longer names is removed afterwards, also what a save has left that was killed.
  * `Stager` lends memory to one staged state at a time, for as long as anybody has a tensor of it.

Concurrency: as torch.distributed.checkpoint uses them, one call after another. Two saves into one
directory at once are not supported: one of them may fail.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import gc
import io
import os
import pickle
import re
import secrets
import threading
import traceback
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint import filesystem as torchs
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
)
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from fpfs.client.accelerators import Copies, now
from fpfs.client.archives import check_archive, is_dense, is_located, lay_out_each
from fpfs.client.boxes import Box
from fpfs.client.container import Container
from fpfs.client.filling import Filling, read
from fpfs.client.parallel_file import ParallelFile
from fpfs.client.paths import (
    DCP_METADATA,
    check_flag,
    check_threads,
    default_threads,
    flush,
    is_on_fpfs,
    make_directories,
    name_file,
    ranks_here,
    resolve,
)
from fpfs.client.plan import Piece, Share
from fpfs.client.replacement import Replacement, locked_directory
from fpfs.client.sharding import is_dtensor
from fpfs.client.snapshot import ALIGNMENT, TouchedMemory, Uncopied, bytes_of_tensor, copy_rest
from fpfs.client.topology import TIMEOUT_S
from fpfs.client.updates import Held, Updates
from fpfs.client.writing import write
from fpfs.core.transfers import moved_bytes, reserve_file

SUFFIX = ".distcp"
_TOKEN_BYTES = 8


class Writer(StorageWriter):  # type: ignore[misc]
    """Writes checkpoints of torch.distributed.checkpoint, whole or not at all.

    path: the directory, which is made. None: `checkpoint_id` of each save says it.
    threads: how many write, for each rank. None: as many as there are processors, 2 to 8, shared
        by the ranks.
    durable: return when the checkpoint survives power loss, as FileSystemWriter does with
        `sync_files`.
    overwrite: replace a checkpoint that is there; otherwise RuntimeError.

    Elsewhere than on a mount of fpfs it works as well, and says so once in the log.

    Raises, in what torch.distributed.checkpoint raises for all ranks: OSError as open(2) and
    write(2) do (ENOSPC before the first byte is written, where the filesystem can reserve room),
    FileNotFoundError of ranks that do not see one directory, TypeError of what is no path,
    ValueError of an address, as s3://bucket/file.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        threads: int | None = None,
        durable: bool = True,
        overwrite: bool = True,
    ) -> None:
        super().__init__()
        check_threads(threads)
        check_flag("durable", durable)
        check_flag("overwrite", overwrite)
        self._path = None if path is None else resolve(path)
        self._threads = threads
        self._durable = durable
        self._overwrite = overwrite
        self._rank = 0
        self._collective = True
        self._removes = False
        """Whether this rank removes what is left of other saves."""
        self.save_id = secrets.token_hex(_TOKEN_BYTES)
        """Of the save, as the metadata has it."""

    @property
    def checkpoint_id(self) -> str | None:
        """The directory; None: no save has said it yet."""
        return self._path

    @property
    def _directory(self) -> str:
        if self._path is None:
            raise ValueError("where to save? give Writer a path, or the save a checkpoint_id")
        return self._path

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint."""
        if checkpoint_id:
            self._path = resolve(checkpoint_id)
        self.save_id = secrets.token_hex(_TOKEN_BYTES)

    def set_up_storage_writer(
        self,
        is_coordinator: bool,
        *_args: Any,
        **kwargs: Any,
    ) -> None:
        """Learn which rank this is."""
        self._rank = kwargs.get("rank", dist.get_rank() if dist.is_initialized() else 0)
        self._collective = kwargs.get("use_collectives", True)
        self._removes = is_coordinator or not self._collective

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory, with room for what comes."""
        parents = make_directories(self._directory)
        if self._durable:
            flush(*parents)
        if not self._overwrite:
            for name in (DCP_METADATA, self._metadata_name):
                if os.path.exists(os.path.join(self._directory, name)):
                    raise RuntimeError(
                        f"Checkpoint already exists in {self._directory}, and overwrite is False"
                    )
        # No rank writes before all have done this.
        if self._removes:
            with locked_directory(self._directory):
                self._remove_unnamed()
        return plan

    @property
    def _metadata_name(self) -> str:
        return DCP_METADATA if self._collective else f"__{self._rank}{DCP_METADATA}"

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Names need not be agreed upon."""
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write what this rank has to."""
        resolved = [planner.resolve_data(item) for item in plan.items]
        container, archives = lay_out_each(
            data.getbuffer() if isinstance(data, io.BytesIO) else data for data in resolved
        )
        name = ""
        if container.bytes > 0:
            name = f"__{self._rank}_{secrets.token_hex(_TOKEN_BYTES)}{SUFFIX}"
            self._write_file(os.path.join(self._directory, name), container)
        results = [
            WriteResult(item.index, size, torchs._StorageInfo(name, offset, size))  # noqa: SLF001
            for item, (offset, size) in zip(plan.items, archives, strict=True)
        ]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def _write_file(self, path: str, container: Container) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            try:
                reserve_file(fd, container.bytes)
                threads = self._threads or default_threads(ranks_here())
                write(_all_of(container), container, fd=fd, threads=threads)
                # Elsewhere than on fpfs the rename of the metadata may come before these bytes.
                if self._durable or not is_on_fpfs(os.path.dirname(path)):
                    os.fsync(fd)
            finally:
                os.close(fd)
        except BaseException as error:
            with contextlib.suppress(OSError):  # the next save removes it
                os.unlink(path)
            name_file(error, path)
            raise

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Let the directory have the checkpoint."""
        written = [each for rank in results for each in rank]
        metadata.version = torchs.CURRENT_DCP_VERSION
        metadata.storage_data = {each.index: each.storage_data for each in written}
        metadata.storage_meta = self.storage_meta()
        ends = dict[str, int]()
        for each in written:
            info = each.storage_data
            end = info.offset + info.length
            ends[info.relative_path] = max(end, ends.get(info.relative_path, 0))
        path = os.path.join(self._directory, self._metadata_name)
        with Replacement(path) as replacement:
            with open(replacement.fd, "wb", closefd=False) as stream:
                pickle.dump(metadata, stream)
            # Another save may not remove them between.
            with locked_directory(self._directory):
                self._check(ends)
                replacement.commit(durable=self._durable)
                self._remove_unnamed()

    def _check(self, ends: Mapping[str, int]) -> None:
        """All ranks' files are here: they see this directory, and nobody else has removed them."""
        for name, end in ends.items():
            path = os.path.join(self._directory, name)
            if not os.path.exists(path) or os.path.getsize(path) < end:
                raise FileNotFoundError(
                    f"{path}, which a rank has written, is not there: all ranks must see one"
                    " directory, and save into it one after the other"
                )

    def _remove_unnamed(self) -> None:
        """Remove files of this rank, or of all, that no metadata names: other saves' remains."""
        rank = r"\d+" if self._collective else str(self._rank)
        pattern = re.compile(rf"__{rank}_[0-9a-f]+{re.escape(SUFFIX)}")
        names = os.listdir(self._directory)
        named = set[str]()
        for name in names:
            # Not one that was being written when its save was killed.
            if re.fullmatch(rf"(__\d+)?{re.escape(DCP_METADATA)}", name):
                with open(os.path.join(self._directory, name), "rb") as file:
                    # A pickle has strings as they are. To load it would run what it says.
                    found = re.findall(
                        rb"__\d+_[0-9a-f]+" + re.escape(SUFFIX.encode()), file.read()
                    )
                named |= {each.decode() for each in found}
        for name in names:
            if name not in named and pattern.fullmatch(name):
                # What cannot be removed takes room, and is nobody's.
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self._directory, name))

    def storage_meta(self) -> StorageMeta:
        """What the metadata says of this save."""
        return StorageMeta(checkpoint_id=self._directory, save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this can save to it: to a path."""
        return bool(FileSystemWriter.validate_checkpoint_id(checkpoint_id))


def _all_of(container: Container) -> Share:
    """All of a file, to be written by one rank."""
    count = len(container.parts) // 2
    records = [container.record(number) for number in range(count)]
    table = np.array(
        [(each.offset, each.bytes, number, 0, 1, 0) for number, each in enumerate(records)],
        dtype=np.int64,
    ).reshape(count, len(Piece._fields))
    return Share(table, list(range(count + 1)))


class Reader(FileSystemReader):  # type: ignore[misc]
    """Reads checkpoints of torch.distributed.checkpoint straight to where their tensors stay.

    Of a tensor only what the plan asks for is read. On a mount of fpfs, bytes that several ranks of
    a machine need are read from a device once.

    path: the directory. Raises as `fpfs.load` does of what is no path.
    """

    def __init__(self, path: str | os.PathLike[str], *arguments: Any, **options: Any) -> None:
        resolve(path)
        super().__init__(path, *arguments, **options)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin to read another checkpoint."""
        if checkpoint_id:
            resolve(checkpoint_id)
        super().reset(checkpoint_id)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fill what the plan asks for.

        Raises OSError as read(2) does, ValueError of metadata and archives that claim more than
        there is, and what torch's does.
        """
        size = dist.get_world_size() if dist.is_initialized() else 1
        rank = dist.get_rank() if dist.is_initialized() else 0
        files = dict[str, list[ReadItem]]()
        others = []
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            if info.transform_descriptors:
                others.append(item)
            else:
                files.setdefault(info.relative_path, []).append(item)
        for name, items in files.items():
            path = os.path.join(self.path, name)
            on_fpfs = is_on_fpfs(os.path.realpath(path))
            with ParallelFile(path, past_cache=on_fpfs and size == 1) as file:
                others += self._read_file(file, items, planner, begin=rank / size)
        if others:
            # What is transformed, and what only torch can load.
            return super().read_data(dataclasses.replace(plan, items=others), planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read_file(
        self, file: ParallelFile, items: list[ReadItem], planner: LoadPlanner, *, begin: float
    ) -> list[ReadItem]:
        """Fill what lies in one file; returns what was left out."""
        fillings, filled, others = [], list[tuple[ReadItem, torch.Tensor]](), []
        for item in items:
            info = self.storage_data[item.storage_index]
            if item.type == LoadItemType.BYTE_IO:
                file.seek(info.offset)
                planner.load_bytes(item, io.BytesIO(file.read(info.length)))
                continue
            archive: Any = io.BufferedReader(_Slice(file.fileno(), info.offset, info.length))
            entries = check_archive(archive)
            source = _without_memory(archive)
            if source is None:
                others.append(item)
                continue
            name = item.storage_index.fqn
            entries.check(source, name)
            target = planner.resolve_tensor(item).detach()
            if tuple(target.shape) != tuple(item.lengths):
                raise ValueError(
                    f"{name}: {tuple(item.lengths)} is to be read, the state has"
                    f" {tuple(target.shape)}"
                )
            box = Box(tuple(item.storage_offsets), tuple(item.lengths))
            if not box.is_within(source.shape):
                raise ValueError(
                    f"{name}: {box.shape} from {box.offsets} on is to be read, the file has"
                    f" {tuple(source.shape)}: {DCP_METADATA} is damaged, or of other files"
                )
            fillings.append(Filling(name, target, box, source, info.offset))
            filled.append((item, target))
        read(file, fillings, begin=begin)
        for item, target in filled:
            planner.commit_tensor(item, target)
        return others


def _without_memory(archive: Any) -> torch.Tensor | None:
    """The tensor of an archive, which knows where in it its bytes are; None: torch alone does."""
    try:
        found: torch.Tensor = torch.load(archive, map_location="meta", weights_only=True)
    except NotImplementedError:  # of a type that is always in memory
        return None
    return found if is_dense(found) and is_located(found) else None


class _Slice(io.RawIOBase):
    """Part of a file that is open, as a file."""

    def __init__(self, fd: int, offset: int, size: int) -> None:
        super().__init__()
        self._fd, self._offset, self._size = fd, offset, size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        with memoryview(buffer).cast("B") as wanted:
            count = max(0, min(len(wanted), self._size - self._at))
            got = os.preadv(self._fd, [wanted[:count]], self._offset + self._at)
        self._at += got
        return got


class Stager(AsyncStager):  # type: ignore[misc]
    """Copies a state for `async_save`, into memory that is used again.

    memory_bytes: taken and touched now; what is missing, the first save adds, which takes ten times
        as long then.

    optimizers: their parameters and states are copied after `async_save` has returned, and their
        next step waits for that. What else changes them must do so after `wait_before_update`.
        `async_save` is called between steps, not within one, and returns torch's AsyncSaveResponse.

    Tensors of any device are copied to the processor's memory, those that are one in memory once,
    without attributes that they have been given. A state that is staged while another
    one is still being saved has memory of its own, which is kept for later, too. Give the same
    stager to each save, and `close` it after the last one.

    Concurrency: several threads may stage, with `optimizers` the one that trains.
    """

    def __init__(
        self,
        *,
        memory_bytes: int = 0,
        optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    ) -> None:
        if not isinstance(memory_bytes, int) or memory_bytes < 0:
            raise ValueError(f"memory_bytes is {memory_bytes!r}: give a number of bytes, or 0")
        self._updates = Updates(optimizers, timeout_s=TIMEOUT_S)
        self._copying = ThreadPoolExecutor(1, thread_name_prefix="fpfs-copy")
        self._pid = os.getpid()
        self._lending = threading.Lock()
        self._spaces: list[_Space] | None = []
        if memory_bytes > 0:
            self._spaces.append(_Space(memory_bytes))

    @property
    def should_synchronize_after_execute(self) -> bool:
        """No: `stage` returns when all is copied, or steps wait for it."""
        return False

    def stage(
        self, state_dict: dict[str, Any], **_options: Any
    ) -> dict[str, Any] | concurrent.futures.Future[dict[str, Any]]:
        """Return a copy of the state, which may change then.

        With `optimizers` a future of it: until that is done, what these have may not change.

        Raises MemoryError if there is no room for it, ValueError if this is closed or of a DTensor
        that is still to be summed up, and what copy.deepcopy raises of objects; with `optimizers`
        RuntimeError in another process.
        """
        # In this order: the second one would enable gradients.
        with torch.inference_mode(mode=False), torch.no_grad():
            held = self._hold()
            found = _Found(state_dict, held)
            try:
                staged = found.copied_to(self._lend(found.bytes, found.devices))
                if not self._updates.optimizers:
                    found.uncopied.copies.wait()
            except BaseException as error:
                # The memory may be the next state's.
                found.uncopied.copies.wait()
                # The error would keep the memory.
                traceback.clear_frames(error.__traceback__)
                raise
        if not self._updates.optimizers:
            return cast("dict[str, Any]", staged)
        future: concurrent.futures.Future[dict[str, Any]] = concurrent.futures.Future()
        # Who gives up waiting for it cannot cancel it.
        future.set_running_or_notify_cancel()
        reading = _Reading()
        # Before steps wait for it: who is interrupted here may step, which is noticed.
        self._copying.submit(_copy_later, future, reading, staged, found.uncopied)
        self._updates.savings = (
            *(each for each in self._updates.savings if not each.staged.done()),
            reading,
        )
        return future

    def _hold(self) -> Held:
        if self._updates.optimizers and os.getpid() != self._pid:
            raise RuntimeError(
                "a Stager with optimizers is for the process that made it: make one here"
            )
        return self._updates.hold()

    def wait_before_update(self) -> None:
        """Return when what `optimizers` have may change: all states that are staged have it.

        Raises TimeoutError if no byte is moved for 5 minutes, as do steps of `optimizers`.
        """
        self._updates.wait()

    def _lend(self, size: int, devices: Iterable[torch.device]) -> torch.Tensor:
        with self._lending:
            if self._spaces is None:
                raise ValueError("the Stager is closed: make another one")
            if not self._fitting(size) and self._spaces:
                # What a save that failed has left may be garbage in cycles.
                gc.collect()
            fitting = self._fitting(size)
            if not fitting:
                # Released first: both together may be too much.
                self._spaces = [space for space in self._spaces if not space.is_free]
                fitting = [_Space(size)]
                self._spaces += fitting
            return min(fitting, key=lambda space: space.size).lend(devices)

    def _fitting(self, size: int) -> list[_Space]:
        """Those that are large enough, and that nobody uses."""
        return [space for space in self._spaces or () if space.is_free and space.size >= size]

    def synchronize_staging(self) -> None:
        """The same, by the name that torch has for it."""
        self.wait_before_update()

    def close(self) -> None:
        """Give the memory back, of states that are being saved when they are.

        Waits as `wait_before_update` does; then no step waits any more.
        """
        self.wait_before_update()
        self._copying.shutdown(wait=False)
        self._updates.close()
        self._spaces = None


class _Reading:
    """A staged state that is still to be copied."""

    path = "what a Stager copies"
    update_wait_s = 0.0

    def __init__(self) -> None:
        self.staged: concurrent.futures.Future[None] = concurrent.futures.Future()

    def moved(self) -> object:
        """Return another value than before if this process has moved bytes since."""
        return moved_bytes()


def _copy_later(
    future: concurrent.futures.Future[dict[str, Any]],
    reading: _Reading,
    state: dict[str, Any],
    uncopied: Uncopied,
) -> None:
    """What the one thread does with a state: what its optimizers' next step waits for."""
    try:
        copy_rest(uncopied)
    except Exception as error:  # noqa: BLE001 told by planning
        # The memory may be the next state's.
        uncopied.copies.wait()
        # The trace's frames would keep the memory.
        state = {"state": _NotStaged(error.with_traceback(None))}
    reading.staged.set_result(None)
    future.set_result(state)


class _NotStaged(Mapping[str, Any]):
    """In the place of a state that was not copied.

    Its rank takes part in the save, whose plan raises the error: so all ranks learn of it. A rank
    that did not come would be waited for.
    """

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __getitem__(self, key: str) -> Any:
        raise self._error

    def __iter__(self) -> Iterator[str]:
        raise self._error

    def __len__(self) -> int:
        raise self._error

    def __reduce__(self) -> Any:
        raise self._error


class _Space:
    """Memory for one staged state at a time."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._mapping = TouchedMemory(max(1, size))
        self._lent: weakref.ref[Any] | None = None

    @property
    def is_free(self) -> bool:
        """Whether no tensor is left of what was lent."""
        return self._lent is None or self._lent() is None

    def lend(self, devices: Iterable[torch.device]) -> torch.Tensor:
        """All of it, for copies from these. Tensors that are made of this one keep it."""
        self._mapping.pin_for(devices)
        array = np.frombuffer(self._mapping, dtype=np.uint8)
        self._lent = weakref.ref(array)
        return torch.from_numpy(array)


class _Part(NamedTuple):
    """A tensor to copy."""

    tensor: torch.Tensor
    local: torch.Tensor
    """What this rank has of it."""
    at: int
    """Where its copy begins."""
    is_again: bool
    """Another part of the same bytes has it."""
    is_held: bool
    """Its bytes do not change before the next step, and may be copied later."""


class _Found:
    """The tensors of a state."""

    def __init__(self, state: Any, later: Held) -> None:
        self._state = state
        self._later = later
        self._parts: dict[int, _Part] = {}
        """By the tensors' identities."""
        self._places: dict[tuple[Any, ...], int] = {}
        """Where the copies of those begin that are the same bytes in the same way: tied weights."""
        self.bytes = 0
        """That all take."""
        self._find(state)
        self.devices = {part.local.device for part in self._parts.values()}
        self.uncopied = Uncopied(now(self.devices), later)
        """What `copied_to` has left."""

    def _find(self, value: Any) -> None:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._parts and _is_copied(value):
                local = value.to_local() if is_dtensor(value) else value
                key = _same_bytes(local)
                is_again = key in self._places
                at = self._places.setdefault(key, self.bytes)
                is_held = _is_plain(local) and self._later.has(local.untyped_storage())
                self._parts[id(value)] = _Part(value, local, at, is_again, is_held)
                if not is_again:
                    self.bytes += -(-local.nbytes // ALIGNMENT) * ALIGNMENT
        elif isinstance(value, Mapping):
            for each in value.values():
                self._find(each)
        elif isinstance(value, list | tuple):
            for each in value:
                self._find(each)

    def copied_to(self, lent: torch.Tensor) -> Any:
        """The state, with copies in `lent`: devices' when `uncopied` says so.

        What is queued on current streams after this call is done when those are made.
        """
        try:
            return self._copied(self._state, lent, {})
        finally:
            self.uncopied.copies.hold_back(self.devices)

    def _copied(self, value: Any, lent: torch.Tensor, memo: dict[int, Any]) -> Any:
        """memo: as copy.deepcopy has it, so what is one stays one, within objects, too."""
        if isinstance(value, torch.Tensor):
            if id(value) not in memo:
                part = self._parts.get(id(value))
                if part is not None and part.is_held and not part.is_again:
                    self.uncopied.add(_place_of(part, lent), bytes_of_tensor(part.local))
                memo[id(value)] = (
                    _copied_by_torch(value)
                    if part is None
                    else _copied(part, lent, self.uncopied.copies)
                )
                memo.setdefault(id(memo), []).append(value)  # or its identity were another's
            return memo[id(value)]
        if isinstance(value, dict):
            # Of its type, with its attributes.
            made = copy.copy(value)
            for key, each in value.items():
                made[key] = self._copied(each, lent, memo)
            return made
        if isinstance(value, Mapping):
            return {key: self._copied(each, lent, memo) for key, each in value.items()}
        if isinstance(value, list):
            items = copy.copy(value)
            items[:] = [self._copied(each, lent, memo) for each in value]
            return items
        if isinstance(value, tuple):
            return tuple.__new__(type(value), [self._copied(each, lent, memo) for each in value])
        return copy.deepcopy(value, memo)


def _same_bytes(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What is the same for tensors whose copies may be one."""
    layout = (tensor.dtype, tensor.shape, tensor.stride(), tensor.is_conj(), tensor.is_neg())
    return (tensor.device, tensor.data_ptr(), *layout)


def _is_copied(tensor: torch.Tensor) -> bool:
    """Whether a tensor is copied into the memory; torch alone knows how to copy others."""
    if is_dtensor(tensor):
        given: Any = tensor
        if any(each.is_partial() for each in given.placements):
            raise ValueError("the sum of a DTensor is still to be made: redistribute() it")
        return _is_copied(given.to_local())
    has_bytes = is_dense(tensor) and tensor.device.type != "meta"
    return has_bytes and type(tensor.detach()) is torch.Tensor


def _copied_by_torch(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_quantized:  # which clone() knows some of
        return copy.deepcopy(tensor.detach())
    made = tensor.detach().clone()
    left = {name: value for name, value in vars(tensor).items() if name not in vars(made)}
    vars(made).update(copy.deepcopy(left))
    return made


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has bytes, which are the copy's, in their order in memory."""
    is_whole = tensor.nbytes > 0 and torch.ops.aten.is_non_overlapping_and_dense(tensor)
    return is_whole and not tensor.is_conj() and not tensor.is_neg()


def _place_of(part: _Part, lent: torch.Tensor) -> torch.Tensor:
    return lent[part.at : part.at + part.local.nbytes]


def _copied(part: _Part, lent: torch.Tensor, copies: Copies) -> torch.Tensor:
    """Copy what this rank has of a tensor, now or later; returns the same as a tensor."""
    local = part.local
    made = _place_of(part, lent).view(local.dtype)
    if torch.ops.aten.is_non_overlapping_and_dense(local):
        made = made.as_strided(local.shape, local.stride(), made.storage_offset())
    else:
        made = made.view(local.shape)
    if part.is_again or part.is_held:
        pass
    elif local.device.type != "cpu" and _is_plain(local):
        copies.begin(_place_of(part, lent), bytes_of_tensor(local))
    else:
        made.copy_(local)
    if not is_dtensor(part.tensor):
        return made
    given: Any = part.tensor
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        made,
        given.device_mesh,
        given.placements,
        run_check=False,
        shape=given.shape,
        stride=given.stride(),
    )


__all__ = ["Reader", "Stager", "Writer"]
