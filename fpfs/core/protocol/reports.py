"""What a server tells, by the control protocol and so by ``--json``: one struct for each answer.

Sizes are bytes, times seconds since 1970; `_unix_s` and `_bytes` say so where a name does not.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Iterable, Mapping
from typing import Annotated, TypeAlias

import msgspec


class Failure(msgspec.Struct, kw_only=True, frozen=True):
    """A file whose last version could not be kept; its previous version stays."""

    ino: int
    errno: int
    message: str


class Flushed(msgspec.Struct, kw_only=True, frozen=True):
    """Everything that was asked for is durable, but for the `failures`."""

    failures: tuple[Failure, ...] = ()


class Renewing(msgspec.Struct, kw_only=True, frozen=True):
    """The server makes room for a program of this version."""

    version: str


class FileState(enum.StrEnum):
    """How far what was written to a file has come."""

    WRITING = "writing"
    """Somebody has it open for writing."""
    WAITING = "waiting"
    """It was closed, renamed or made, and is on its way: power loss may still take that back."""
    DURABLE = "durable"
    NOT_KEPT = "not kept"
    """The last version could not be kept on any device; the one before stays."""


class FileStatus(msgspec.Struct, kw_only=True, frozen=True):
    """What is known of a file, or of whatever else has an inode.

    `version` is the number of the content that was committed last: of two versions, of whatever
    files of the filesystem, the later one has the larger number. 0: nothing was committed since
    format 5 of the catalog. The sizes are bytes: `size_acknowledged` is what stat(2) shows,
    `size_committed` what `version` has, and `size_durable` how much of what reads see now would be
    there, as it is, after power loss. `writers` are handles that are open for writing.

    Only of regular files: where new chunks go (`chunk_bytes`, and `devices` in turn, whose number
    is the `width`); whether the content is `inline`, in the catalog, and not on devices; how many
    `former_versions` of its names are kept.
    """

    ino: int
    is_regular: bool
    state: FileState
    durable: bool
    """Whether what reads see now, content and names, survives power loss."""
    version: int = 0
    size_acknowledged: int = 0
    size_committed: int = 0
    size_durable: int = 0
    writers: int = 0
    failure: str = ""
    """Why the last version could not be kept."""
    chunk_bytes: int = 0
    width: int = 0
    devices: tuple[int, ...] = ()
    inline: bool = False
    former_versions: int = 0


class FilesShown(msgspec.Struct, kw_only=True, frozen=True):
    """What is known of inodes: of those that there are, and that who asks may see."""

    files: tuple[FileStatus, ...]


class FileRun(msgspec.Struct, kw_only=True, frozen=True):
    """Bytes of a committed content that lie behind each other in one object of a device.

    `offset_bytes` is counted in the file, `object_offset_bytes` in the object; both, and
    `size_bytes`, are whole blocks of 64 KiB. Preallocated blocks are not `written`: they read as
    zeros. Blocks have a checksum each, or were written without (`checksums`).
    """

    offset_bytes: int
    size_bytes: int
    device: int
    object: str
    object_offset_bytes: int
    written: bool = True
    checksums: bool = True


def join_runs(runs: list[FileRun], others: Iterable[FileRun]) -> None:
    """Put runs behind others; what goes on in the same object becomes one with what was before."""
    for run in others:
        last = runs[-1] if runs else None
        if last is not None and run == msgspec.structs.replace(
            last,
            offset_bytes=last.offset_bytes + last.size_bytes,
            object_offset_bytes=last.object_offset_bytes + last.size_bytes,
            size_bytes=run.size_bytes,
        ):
            runs[-1] = msgspec.structs.replace(last, size_bytes=last.size_bytes + run.size_bytes)
        else:
            runs.append(run)


class RunsShown(msgspec.Struct, kw_only=True, frozen=True):
    """Where some of a file lies. `next_segment` says where to go on; without one it is over.

    `version` is the content that this is of: one that differs from page to page was replaced
    meanwhile.
    """

    version: int
    runs: tuple[FileRun, ...]
    next_segment: int | None = None


class PolicySetting(msgspec.Struct, kw_only=True, frozen=True):
    """What holds in a directory. `set_at` is the directory that it was set for.

    It is a path from the mountpoint, and empty for a default.
    """

    key: str
    value: str
    is_default: bool
    set_at: str


class PolicyShown(msgspec.Struct, kw_only=True, frozen=True):
    """All settings that hold in a directory."""

    settings: tuple[PolicySetting, ...]


class DirectorySettings(msgspec.Struct, kw_only=True, frozen=True):
    """What was set for one directory; `path` starts at the mountpoint, with a slash."""

    path: str
    settings: Mapping[str, str]


class PoliciesListed(msgspec.Struct, kw_only=True, frozen=True):
    """The directories for which something was set, by path."""

    directories: tuple[DirectorySettings, ...]


class PresentPlacement(msgspec.Struct, kw_only=True, frozen=True):
    """Where the committed content of a file lies, and the layout that it was written by.

    `bytes_by_device` counts blocks on devices; a small content is in the catalog and on none.
    """

    size: int
    chunk_bytes: int
    devices: tuple[int, ...]
    bytes_by_device: Mapping[int, int]
    follows_policy: bool


class PolicyExplained(msgspec.Struct, kw_only=True, frozen=True):
    """What holds for a file, or would for one of this name.

    The next version of it goes to `width` of `devices`; `rank` is that in its name, if the policy
    asks for one. `is_all_or_nothing`: the name never shows what a killed writer left.
    `present` is what is there now, if anything is.
    """

    settings: tuple[PolicySetting, ...]
    devices: tuple[int, ...]
    width: int
    rank: int | None
    is_all_or_nothing: bool
    present: PresentPlacement | None


class FormerVersion(msgspec.Struct, kw_only=True, frozen=True):
    """A former version of a name; `path` is where it can be read, from the mountpoint.

    `time_unix_s` is when it was last written, `replaced_unix_s` when another took its place.
    """

    number: int
    size: int
    time_unix_s: float
    replaced_unix_s: float
    path: str


class VersionsShown(msgspec.Struct, kw_only=True, frozen=True):
    """The former versions of a name that are kept, the oldest first."""

    versions: tuple[FormerVersion, ...]


class ScrubStage(enum.StrEnum):
    """What a scrub looks at: first at contents in the catalog, then at those on devices."""

    INLINE = "inline"
    SEGMENTS = "segments"


Place: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number that a client sends back: as large as SQLite's integers."""


class ScrubCursor(msgspec.Struct, kw_only=True, frozen=True):
    """Where a scrub goes on: a block of a layout segment of an inode."""

    stage: ScrubStage = ScrubStage.INLINE
    ino: Place = 0
    segment: Place = 0
    block: Place = 0


class DamagedContent(msgspec.Struct, kw_only=True, frozen=True):
    """A part of a file, `size_bytes` long, that is not what was written there; `error` says why.

    `path` starts at the mountpoint; it is empty for a file without a name. What is damaged in the
    catalog lies on no device (-1), and in no object.
    """

    ino: int
    path: str = ""
    offset_bytes: int = 0
    size_bytes: int = 0
    device: int = -1
    device_path: str = ""
    object: str = ""
    object_block: int = 0
    errno: int = errno.EIO
    error: str = ""

    def at(self, path: str) -> DamagedContent:
        """The same, with its path."""
        return msgspec.structs.replace(self, path=path)


class Scrubbed(msgspec.Struct, kw_only=True, frozen=True):
    """What a step of a scrub came to. `cursor` says where to go on; without one it is over.

    `bytes_unverified` were written without checksums and are not looked at. `bytes_total` is what
    there is to look at, in the first reply of a scrub of all files.
    """

    bytes_checked: int
    bytes_unverified: int
    bytes_total: int
    damage: tuple[DamagedContent, ...]
    cursor: ScrubCursor | None


class DeviceState(enum.StrEnum):
    """How a device does."""

    OK = "ok"
    DAMAGED = "damaged"
    """Something on it could not be read, or was not what was written there."""
    FAILED = "failed"
    """It refused what must not fail, or cannot be looked at: new chunks avoid it."""
    MISSING = "missing"
    """The mount does without it."""
    DRAINING = "draining"
    """It takes no new chunks: what it holds is to be moved elsewhere."""


class DeviceStatus(msgspec.Struct, kw_only=True, frozen=True):
    """One device directory.

    `bytes_used` is what it holds of committed contents, also if it is missing; not what is being
    written, nor what was replaced or removed and is still to be given back; 0 where the catalog
    cannot be read. `bytes_free` and `bytes_total` are its filesystem's.
    """

    number: int
    path: str
    bytes_used: int
    bytes_free: int
    bytes_total: int
    bytes_written: int
    bytes_read: int
    requests_in_flight: int
    backend: str
    direct: bool
    checksum_errors: int = 0
    """How often a block was found not to be what was written there, since the server started."""
    read_errors: int = 0
    """How often it did not deliver what was to be read, since the server started."""
    state: DeviceState = DeviceState.OK
    error: str = ""
    """What is wrong with it; its other figures may be missing (0) then."""
    tags: tuple[str, ...] = ()
    has_catalog: bool = False
    """Whether a copy of the catalog is on it, or should be."""


class DrainStage(enum.StrEnum):
    """What a drain moves: first contents, then it gives back the objects that they were in."""

    CONTENTS = "contents"
    OBJECTS = "objects"


class DrainCursor(msgspec.Struct, kw_only=True, frozen=True):
    """Where a drain goes on: a block of a layout segment of an inode, or behind an object."""

    stage: DrainStage = DrainStage.CONTENTS
    ino: Place = 0
    segment: Place = 0
    block: Place = 0
    object: Place = 0


class DrainStarted(msgspec.Struct, kw_only=True, frozen=True):
    """A device takes no new chunks any more; it holds about `bytes_total`."""

    number: int
    path: str
    bytes_total: int


class DeviceRemoved(msgspec.Struct, kw_only=True, frozen=True):
    """A device that the filesystem does without from now on.

    `is_empty`: its directory can be used for anything.
    """

    number: int
    path: str
    is_empty: bool


class Drained(msgspec.Struct, kw_only=True, frozen=True):
    """What a step of a drain came to. `cursor` says where to go on; without one a round is over.

    `bytes_busy` were being changed, and `damage` stays where it is. `left` counts what is on the
    device then, in words of nobody: it is empty when that is 0. `refused` says why the device does
    not give its space back, if nothing else is left. Told at the end of a round.
    """

    bytes_moved: int = 0
    bytes_busy: int = 0
    damage: tuple[DamagedContent, ...] = ()
    cursor: DrainCursor | None
    left: int = 0
    refused: str = ""


class DeviceTags(msgspec.Struct, kw_only=True, frozen=True):
    """A device and its tags, in the order of letters."""

    number: int
    path: str
    tags: tuple[str, ...]


class StagingStatus(msgspec.Struct, kw_only=True, frozen=True):
    """The staging arena, in buffers of `buffer_bytes`.

    `bytes_used` are those with acknowledged bytes, and one kept ready.
    """

    buffer_bytes: int
    bytes_used: int
    bytes_total: int
    pinned: bool


class CommitStatus(msgspec.Struct, kw_only=True, frozen=True):
    """Versions that wait to become current, and what was done since the mount."""

    pending: int
    committed: int
    transactions: int
    failures: tuple[Failure, ...]


class CatalogCopyStatus(msgspec.Struct, kw_only=True, frozen=True):
    """One copy of the catalog. `trouble` says why it is out of service, if it is."""

    path: str
    trouble: str = ""


class CatalogStatus(msgspec.Struct, kw_only=True, frozen=True):
    """The catalog's copies, of which `copies_in_service` hold everything."""

    copies_in_service: int
    copies: tuple[CatalogCopyStatus, ...]


class RecoveryStatus(msgspec.Struct, kw_only=True, frozen=True):
    """What the server found and did when it began.

    `catalog` says, in words, which copies of the catalog were made anew. `inodes_deleted` had no
    name any more. `objects_removed` were of no version; they are looked for in the background,
    until which it is None.
    """

    catalog: tuple[str, ...] = ()
    handles_taken_over: int = 0
    files_taken_over: int = 0
    files_lost: int = 0
    """Files whose changes were lost with a damaged staging arena; versions before stay."""
    inodes_deleted: int = 0
    objects_removed: int | None = 0


class QuarantinedStatus(msgspec.Struct, kw_only=True, frozen=True):
    """A content whose writer was cut off: the path it was for, and its name in .fpfs/partial.

    `killed_by` is a signal, "a full device", or "the end of the mount".
    """

    path: str
    name: str
    killed_by: str
    time_unix_s: float
    size: int


class UncommittedStatus(msgspec.Struct, kw_only=True, frozen=True):
    """A group that is not committed: its path, and its name in .fpfs/uncommitted once it is there.

    `time_unix_s` is when it was made, or taken away after a crash.
    """

    path: str
    name: str
    time_unix_s: float


class Status(msgspec.Struct, kw_only=True, frozen=True):
    """What a mount is and has; ``fpfs-ctl status --json`` prints it, with what the mount does."""

    version: str
    server_pid: int
    keeper_pid: int
    restarts: int
    filesystem_id: str
    mountpoint: str
    started_unix_s: float
    ack: str
    chunk_bytes: int
    depth: int
    """Requests in flight on each device at most."""
    log: str
    devices: tuple[DeviceStatus, ...]
    staging: StagingStatus
    commit: CommitStatus
    quarantined: tuple[QuarantinedStatus, ...]
    uncommitted: tuple[UncommittedStatus, ...]
    catalog: CatalogStatus
    recovery: RecoveryStatus
    channel: Mapping[str, int]
