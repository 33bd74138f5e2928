"""Export: copies files out of device directories, without a server and without FUSE.

What is copied is what a mount would show: names, permissions, times, extended attributes, symbolic
and hard links, holes, and owners where the caller may set them. Every block is compared with its
checksum. A file of which a block is lost is there under its name with `.damaged` behind it, with
zeros in place of what is lost; so is one that is being copied.

Invariants:
  * Nothing on the devices is changed.
  * Nothing is made outside of the destination: every name is checked, and made in a directory that
    this program has open, never through a symbolic link.
  * A file has its own name only when all of it was copied and fitted its checksums, whatever ends
    the copy.

Concurrency: plain blocking functions of one thread.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import stat
from typing import TYPE_CHECKING, NamedTuple

from fpfs.core.engine import BLOCK_BYTES, SEGMENT_BLOCKS, ObjectId, checksum_blocks
from fpfs.core.errors import DamagedData
from fpfs.core.fsck import Exported
from fpfs.core.layout import UNVERIFIED, UNWRITTEN
from fpfs.core.limits import FILE_BYTES_MAX, NAME_BYTES_MAX
from fpfs.core.mounts import is_below
from fpfs.core.paths import show_name
from fpfs.core.refusal import Refused, refuse_empty
from fpfs.daemon.catalog.schema import FPFS_INO, ROOT_INO, row_crc
from fpfs.daemon.devices.arena import arena_path
from fpfs.daemon.devices.directory import find_devices
from fpfs.daemon.devices.trusted_path import check_trusted
from fpfs.daemon.offline.contents import SegmentRow
from fpfs.daemon.offline.crash_view import see_to_it
from fpfs.daemon.offline.fsck import image_folder, open_image, refusing_image
from fpfs.daemon.offline.names import is_name
from fpfs.daemon.offline.objects import READ_BLOCKS, Objects

if TYPE_CHECKING:
    import sqlite3
    from collections.abc import Callable, Iterator, Sequence

    from fpfs.core.layout import Run
    from fpfs.daemon.devices.opened_set import DeviceSet

DAMAGED_SUFFIX = b".damaged"
DEPTH_MAX = 1_000
"""Directories within each other that are followed; each is open while what is in it is copied."""

NO_LINK = frozenset(
    {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.ENAMETOOLONG, errno.EXDEV}
)
"""What a destination says that cannot have a link: there is a copy instead."""

MODE_END = 1 << 16

ENDING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS})
"""What a destination says that takes nothing more."""


class _Inode(NamedTuple):
    """What is copied of an inode."""

    ino: int
    mode: int
    uid: int
    gid: int
    size: int
    atime_ns: int
    mtime_ns: int
    rdev: int
    target: bytes | None

    @property
    def kind(self) -> int:
        """What the mode says that it is; 0 for one that cannot be."""
        return stat.S_IFMT(self.mode) if 0 <= self.mode < MODE_END else 0


class _Piece(NamedTuple):
    """A part of a run, from its block `first` on: bytes, and which blocks are lost, and why."""

    first: int
    content: bytes
    lost: list[tuple[int, str]]


class _Folder(NamedTuple):
    """A directory under way: its inode (0: none), and where what is in it is copied to."""

    ino: int
    fd: int
    path: bytes
    depth: int

    def path_of(self, name: bytes) -> bytes:
        """Where an entry is in the destination."""
        return self.path + b"/" + name if self.path else name


def export(
    paths: Sequence[str],
    destination: str,
    *,
    subtree: str,
    progress: Callable[[int, int], None],
) -> Exported:
    """Copy everything, or what is at the path `subtree`, into an empty or new directory.

    `progress` is told the bytes that were copied, and about how many there are. Raises `Refused`.
    """
    asked = f"export to {destination}"
    refuse_empty(destination, what="destination", asked=asked)
    if not paths:
        raise Refused(
            asked=asked,
            wrong="no device directory is named",
            remedy="name all device directories of a filesystem, and then an empty directory",
        )
    with contextlib.ExitStack() as stack:
        # As root, what a device says makes set-user-id programs and device nodes.
        for path in paths if os.geteuid() == 0 else ():
            check_trusted(path, asked=asked)
        devices = stack.enter_context(find_devices(paths, asked=asked))
        folder = stack.enter_context(image_folder(asked))
        image = open_image(devices, folder, asked=asked)
        _check_outside(destination, devices, asked=asked)
        destination_fd = _open_destination(destination, asked=asked)
        stack.callback(os.close, destination_fd)
        notes = []
        if os.path.lexists(arena_path(devices.filesystem_id)):
            notes.append(
                "its server died in this boot of the machine: what was acknowledged and not"
                " committed is not copied; a mount recovers it"
            )
        if image is None:
            notes.append("it was formatted, and nothing was ever stored in it")
            return Exported(
                files=0, directories=0, others=0, bytes_copied=0, problems=(), notes=tuple(notes)
            )
        stack.callback(image.close)
        notes += [f"catalog {path} is not used: {why}" for path, why in image.troubles.items()]
        with refusing_image(asked):
            notes += see_to_it(image.connection)
        objects = Objects(devices.devices)
        stack.callback(objects.close)
        copy = _Export(image.connection, objects, progress)
        with refusing_image(asked), _refusing_destination(destination, asked=asked):
            ino = copy.find(subtree, asked=asked)
            copy.run(ino, os.path.basename(os.fsencode(subtree).rstrip(b"/")), destination_fd)
        return copy.result(notes)


@contextlib.contextmanager
def _refusing_destination(path: str, *, asked: str) -> Iterator[None]:
    """Turn the error of a destination that takes nothing more into `Refused`."""
    try:
        yield
    except OSError as error:
        if error.errno not in ENDING:
            raise
        raise Refused(
            asked=asked,
            wrong=f"{path}: {error.strerror}; what is there under its own name is whole",
            remedy="export to a larger one, or less at a time with --path",
        ) from error


def _check_outside(destination: str, devices: DeviceSet, *, asked: str) -> None:
    """Refuse a destination on the devices, where nothing is changed."""
    place = os.path.realpath(destination)
    for device in devices.devices:
        if is_below(place, device.path):
            raise Refused(
                asked=asked,
                wrong=f"the destination lies in the device directory {device.path}",
                remedy="name a directory elsewhere",
            )


def _open_destination(path: str, *, asked: str) -> int:
    """Make the directory or check that it is empty; returns a descriptor."""
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        is_empty = not os.listdir(descriptor)
    except OSError as error:
        raise Refused(
            asked=asked,
            wrong=f"{path}: {error.strerror}",
            remedy="name an empty directory, or one that does not exist in one that does",
        ) from None
    if not is_empty:
        os.close(descriptor)
        raise Refused(
            asked=asked, wrong=f"{path} is not empty", remedy="name an empty or new directory"
        )
    return descriptor


class _Export:
    """One export under way."""

    def __init__(
        self,
        connection: sqlite3.Connection,
        objects: Objects,
        progress: Callable[[int, int], None],
    ) -> None:
        self._connection = connection
        self._objects = objects
        self._progress = progress
        self._problems: list[str] = []
        self._links: dict[int, str] = {}
        """Where an inode was copied to, from the destination on."""
        self._damaged: set[int] = set()
        self._directories_seen: set[int] = set()
        self._files = self._directories = self._others = 0
        self._bytes_copied = 0
        self._bytes_total = int(
            connection.execute("SELECT coalesce(sum(allocated_bytes), 0) FROM inodes").fetchone()[0]
        )
        self._sets_owners = os.geteuid() == 0

    def result(self, notes: Sequence[str]) -> Exported:
        """What came of it."""
        return Exported(
            files=self._files,
            directories=self._directories,
            others=self._others,
            bytes_copied=self._bytes_copied,
            problems=tuple(self._problems),
            notes=tuple(notes),
        )

    def find(self, subtree: str, *, asked: str) -> int:
        """The inode at a path from the root. Raises `Refused`."""
        ino = ROOT_INO
        for part in os.fsencode(subtree).split(b"/"):
            if part in (b"", b"."):
                continue
            row = self._connection.execute(
                "SELECT ino FROM names WHERE parent = ? AND name = ?", (ino, part)
            ).fetchone()
            if row is None:
                raise Refused(
                    asked=asked,
                    wrong=f"there is no {show_name(os.fsencode(subtree))} in the filesystem",
                    remedy="name a path as it is below the mountpoint",
                )
            ino = row[0]
        return ino

    def run(self, ino: int, name: bytes, destination_fd: int) -> None:
        """Copy an inode: the content of a directory, or anything else under its name."""
        inode = self._inode(ino)
        self._destination_fd = destination_fd
        if inode is not None and inode.kind == stat.S_IFDIR:
            self._directories_seen.add(ino)
            self._copy_entries(_Folder(ino, destination_fd, b"", depth=0))
            self._set_attributes(destination_fd, inode, b".")
        else:
            self._copy(ino, name, _Folder(0, destination_fd, b"", depth=0))

    def _problem(self, path: bytes, text: str) -> None:
        self._problems.append(f"{show_name(path)}: {text}")

    def _inode(self, ino: int) -> _Inode | None:
        row = self._connection.execute(
            "SELECT ino, mode, uid, gid, size, atime_ns, mtime_ns, rdev, target FROM inodes"
            " WHERE ino = ?",
            (ino,),
        ).fetchone()
        return None if row is None else _Inode._make(row)

    def _copy_entries(self, folder: _Folder) -> None:
        entries = self._connection.execute(
            "SELECT name, ino FROM names WHERE parent = ? ORDER BY cookie", (folder.ino,)
        )
        while batch := entries.fetchmany(1000):
            for name, child in batch:
                if folder.ino == ROOT_INO and child == FPFS_INO and name == b".fpfs":
                    continue
                self._copy(child, name, folder)

    def _copy(self, ino: int, name: bytes, folder: _Folder) -> None:
        path = folder.path_of(name)
        if not is_name(name):
            self._problem(path, "left out: this is no name of a file")
            return
        inode = self._inode(ino)
        if inode is None:
            self._problem(path, f"left out: its inode {ino} is not there")
            return
        try:
            if not self._link(inode, name, folder):
                self._make(inode, name, folder)
        except OSError as error:
            if error.errno in ENDING:
                raise
            self._problem(path, f"left out: {error.strerror}")

    def _link(self, inode: _Inode, name: bytes, folder: _Folder) -> bool:
        """Link what was copied under another name. False: it was not, or cannot be linked."""
        first = self._links.get(inode.ino)
        if first is None:
            return False
        path = folder.path_of(name)
        if inode.ino in self._damaged:
            self._problem(path, "damaged, as its other name is")
            name = self._damaged_name(name, folder)
        try:
            os.link(
                first,
                name,
                src_dir_fd=self._destination_fd,
                dst_dir_fd=folder.fd,
                follow_symlinks=False,
            )
        except OSError as error:
            if error.errno not in NO_LINK:
                raise
            self._problem(path, f"a copy, and no link: {error.strerror}")
            return False
        return True

    def _make(self, inode: _Inode, name: bytes, folder: _Folder) -> None:
        """Make one thing in the destination. Raises OSError."""
        path = folder.path_of(name)
        match inode.kind:
            case stat.S_IFDIR:
                self._make_directory(inode, name, folder)
                return
            case stat.S_IFREG:
                path = self._make_file(inode, name, folder)
                self._files += 1
            case stat.S_IFLNK:
                os.symlink(inode.target or b"", name, dir_fd=folder.fd)
                self._set_link_attributes(inode, name, folder)
                self._others += 1
            case stat.S_IFIFO | stat.S_IFSOCK | stat.S_IFCHR | stat.S_IFBLK:
                self._make_node(inode, name, folder)
                self._others += 1
            case _:
                raise OSError(errno.EINVAL, f"its mode {inode.mode:o} is impossible")
        self._links[inode.ino] = os.fsdecode(path)

    def _make_directory(self, inode: _Inode, name: bytes, folder: _Folder) -> None:
        if inode.ino in self._directories_seen:
            raise OSError(errno.ELOOP, f"directory inode {inode.ino} was copied already")
        if folder.depth >= DEPTH_MAX:
            raise OSError(errno.ELOOP, f"more than {DEPTH_MAX} directories within each other")
        self._directories_seen.add(inode.ino)
        os.mkdir(name, 0o700, dir_fd=folder.fd)
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(name, flags, dir_fd=folder.fd)
        path = folder.path_of(name)
        try:
            self._copy_entries(_Folder(inode.ino, descriptor, path, folder.depth + 1))
            self._set_attributes(descriptor, inode, path)
        finally:
            os.close(descriptor)
        self._directories += 1

    def _make_node(self, inode: _Inode, name: bytes, folder: _Folder) -> None:
        os.mknod(name, stat.S_IFMT(inode.mode) | 0o600, inode.rdev, dir_fd=folder.fd)
        self._set_link_attributes(inode, name, folder)
        with self._noting(folder.path_of(name), "its permissions"):
            os.chmod(name, stat.S_IMODE(inode.mode), dir_fd=folder.fd)

    def _set_link_attributes(self, inode: _Inode, name: bytes, folder: _Folder) -> None:
        """Owner and times of what is not opened."""
        path = folder.path_of(name)
        if self._sets_owners:
            with self._noting(path, "its owner"):
                os.chown(name, inode.uid, inode.gid, dir_fd=folder.fd, follow_symlinks=False)
        with self._noting(path, "its times"):
            times = (inode.atime_ns, inode.mtime_ns)
            os.utime(name, ns=times, dir_fd=folder.fd, follow_symlinks=False)

    @contextlib.contextmanager
    def _noting(self, path: bytes, what: str) -> Iterator[None]:
        """Note what a destination cannot have of an attribute: contents matter more."""
        try:
            yield
        except (OSError, OverflowError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            self._problem(path, f"{what} cannot be set: {why}")

    def _set_attributes(self, descriptor: int, inode: _Inode, path: bytes) -> None:
        """Owner, extended attributes, permissions and times, in the order that keeps them all."""
        has_owner = False
        if self._sets_owners:
            # It takes capabilities away, and set-user-id.
            with self._noting(path, "its owner"):
                os.fchown(descriptor, inode.uid, inode.gid)
                has_owner = True
        rows = self._connection.execute(
            "SELECT name, value FROM xattrs WHERE ino = ?", (inode.ino,)
        ).fetchall()
        for name, value in rows:
            with self._noting(path, f"its attribute {show_name(name)}"):
                os.setxattr(descriptor, name, value)
        permissions = stat.S_IMODE(inode.mode)
        if not has_owner:
            # For another owner these would mean something else.
            permissions &= ~(stat.S_ISUID | stat.S_ISGID)
        with self._noting(path, "its permissions"):
            os.fchmod(descriptor, permissions)
        with self._noting(path, "its times"):
            os.utime(descriptor, ns=(inode.atime_ns, inode.mtime_ns))

    def _make_file(self, inode: _Inode, name: bytes, folder: _Folder) -> bytes:
        """Copy a file; returns the path that it has."""
        if not 0 <= inode.size <= FILE_BYTES_MAX:
            raise OSError(errno.EFBIG, f"its size {inode.size} is impossible")
        path = folder.path_of(name)
        made = self._damaged_name(name, folder)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(made, flags, 0o600, dir_fd=folder.fd)
        try:
            damage = self._copy_content(inode, descriptor)
            os.ftruncate(descriptor, inode.size)
            self._set_attributes(descriptor, inode, path)
            if not damage:
                _rename(made, name, folder.fd)
        except BaseException:
            os.unlink(made, dir_fd=folder.fd)
            raise
        finally:
            os.close(descriptor)
        if not damage:
            return path
        for text in damage:
            self._problem(path, text)
        self._damaged.add(inode.ino)
        return folder.path_of(made)

    def _damaged_name(self, name: bytes, folder: _Folder) -> bytes:
        """A name for what is not whole, which nothing has or is to have."""
        for number in itertools.count():
            suffix = DAMAGED_SUFFIX + (b"%d" % number if number else b"")
            damaged = name[: NAME_BYTES_MAX - len(suffix)] + suffix
            row = self._connection.execute(
                "SELECT 1 FROM names WHERE parent = ? AND name = ?", (folder.ino, damaged)
            ).fetchone()
            if row is None and not _is_there(damaged, folder.fd):
                return damaged
        raise AssertionError("numbers do not end")

    def _copy_content(self, inode: _Inode, descriptor: int) -> list[str]:
        """Copy what a file holds; returns what of it is lost, in words."""
        inline = self._connection.execute(
            "SELECT content, crc FROM inline WHERE ino = ?", (inode.ino,)
        ).fetchone()
        if inline is not None:
            content, crc = inline
            if row_crc(inode.ino, content=content) != crc:
                return ["its content in the catalog fails its checksum"]
            _write_data(descriptor, content[: inode.size], 0)
            self._bytes_copied += min(len(content), inode.size)
            return []
        damage: list[str] = []
        lost: list[tuple[int, int, str]] = []
        for fields in self._connection.execute(
            "SELECT ino, segment, blob, crc FROM segments WHERE ino = ? ORDER BY segment",
            (inode.ino,),
        ):
            row = SegmentRow(*fields)
            try:
                segment = row.decode()
            except DamagedData as error:
                first = row.index * SEGMENT_BLOCKS * BLOCK_BYTES
                damage.append(f"what lies from byte {first} on is unknown: {error.strerror}")
                continue
            start = row.index * SEGMENT_BLOCKS
            verified = dict(segment.verified())
            for run in segment.runs:
                if run.flags != UNWRITTEN:
                    wanted = verified.get(run, ())
                    assert run.flags == UNVERIFIED or len(wanted) == run.count
                    pieces = self._pieces(run, wanted)
                    lost += self._copy_run(pieces, start + run.block, inode.size, descriptor)
        return [*damage, *_lost_lines(lost)]

    def _pieces(self, run: Run, checksums: Sequence[int]) -> Iterator[_Piece]:
        """Yield parts of a run; without `checksums` nobody knows what its blocks should hold."""
        for first in range(0, run.count, READ_BLOCKS):
            count = min(READ_BLOCKS, run.count - first)
            content, why = self._read(run, checksums, first, count)
            if not why:
                yield _Piece(first, content, [])
                continue
            parts: list[bytes] = []
            lost: list[tuple[int, str]] = []
            for i in range(count):
                content, why = self._read(run, checksums, first + i, 1)
                if why:
                    lost.append((i, why))
                parts.append(bytes(BLOCK_BYTES) if why else content)
            yield _Piece(first, b"".join(parts), lost)

    def _read(
        self, run: Run, checksums: Sequence[int], first: int, count: int
    ) -> tuple[bytes, str]:
        """Some blocks of a run, and in what way not all of them are sound, if they are not."""
        place = ObjectId(run.device, run.object)
        begin = run.object_block + first
        try:
            content = self._objects.read_blocks(place, begin, count)
            if checksums:
                is_sound = checksum_blocks(content) == list(checksums[first : first + count])
                return content, "" if is_sound else "fails its checksum"
            is_there = begin + count <= self._objects.count_blocks(place)
            return content, "" if is_there else "the object ends before"
        except OSError as error:
            return b"", f"cannot be read: {error.strerror}"

    def _copy_run(
        self,
        pieces: Iterator[_Piece],
        block: int,
        size: int,
        descriptor: int,
    ) -> list[tuple[int, int, str]]:
        """Write the parts of a run, from a file's block on; returns what is lost: bytes, why."""
        ranges: list[tuple[int, int, str]] = []
        for first, content, lost in pieces:
            offset = (block + first) * BLOCK_BYTES
            kept = content[: max(0, size - offset)]
            if kept:
                _write_data(descriptor, kept, offset)
                self._bytes_copied += len(kept)
            for i, why in lost:
                at = offset + i * BLOCK_BYTES
                if at < size:
                    ranges.append((at, min(size, at + BLOCK_BYTES), why))
            self._progress(self._bytes_copied, max(self._bytes_total, self._bytes_copied))
        return ranges


def _write_data(descriptor: int, content: bytes, offset: int) -> None:
    done = 0
    while done < len(content):
        with memoryview(content)[done:] as rest:
            done += os.pwrite(descriptor, rest, offset + done)


def _lost_lines(lost: Sequence[tuple[int, int, str]]) -> Iterator[str]:
    """Lines for ranges of bytes (begin, end, why) in order, those that adjoin as one."""
    first = 0
    for i, (_begin, end, why) in enumerate(lost):
        if i + 1 == len(lost) or lost[i + 1][::2] != (end, why):
            yield f"bytes {lost[first][0]} to {end - 1} are lost: {why}"
            first = i + 1


def _is_there(name: bytes, folder_fd: int) -> bool:
    try:
        os.stat(name, dir_fd=folder_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _rename(made: bytes, name: bytes, folder_fd: int) -> None:
    """Rename without replacing: who exports has the destination for himself."""
    if _is_there(name, folder_fd):
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
    os.rename(made, name, src_dir_fd=folder_fd, dst_dir_fd=folder_fd)
