"""What can be asked of a server by the control protocol: one struct for each question.

On the wire a question is one line of JSON: its fields, the protocol's `version`, and the `verb`
that says which question it is.

Invariants:
  * A question that may be asked twice (`asked_again`) comes to the same when it is.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Annotated, Any, ClassVar, Generic, TypeAlias, TypeVar

import msgspec

from fpfs.core.protocol.activity import Activity, FilesInProgress
from fpfs.core.protocol.reports import (
    DeviceRemoved,
    DeviceTags,
    DrainCursor,
    Drained,
    DrainStarted,
    FilesShown,
    Flushed,
    PoliciesListed,
    PolicyExplained,
    PolicyShown,
    Renewing,
    RunsShown,
    Scrubbed,
    ScrubCursor,
    Status,
    VersionsShown,
)
from fpfs.core.protocol.trace import TraceBegun, TraceRead

PROTOCOL_VERSION = 3

INODES_MAX = 1000
"""Inodes that one question may be about."""

Number: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""What counts or names something: as large as SQLite's integers."""

Answer = TypeVar("Answer")


class Question(msgspec.Struct, Generic[Answer], kw_only=True, frozen=True, tag_field="verb"):
    """One line to the server, which is answered with an `Answer`."""

    answer: ClassVar[type]
    """What decodes the answer."""

    owners: ClassVar[bool] = False
    """Whether only root and the mount's owner may ask: it names files that others may not see, or
    changes the mount."""

    owner_alone: ClassVar[bool] = False
    """Whether members of the `control_group` may not ask either: it changes which directories the
    contents of all files are written to, with the rights of the server's user."""

    asked_again: ClassVar[bool] = False
    """Whether a client asks the next server where one ends without an answer."""

    ended_well: ClassVar[bool] = False
    """Whether it has come true when a mount has ended in good order, but for what that left."""

    given_up: ClassVar[bool] = False
    """Whether it may be given up in its middle when who asked has gone: it may wait long."""

    version: int = PROTOCOL_VERSION

    @property
    def needs_owner(self) -> bool:
        """Whether this very question is the owners'."""
        return self.owners

    @classmethod
    def verb(cls) -> str:
        """How the question is called on the wire."""
        return str(cls.__struct_config__.tag)


class AnyVersion(msgspec.Struct, frozen=True):
    """What is read first of a question, which may be of another version of the protocol."""

    version: int = PROTOCOL_VERSION


class AskStatus(Question[Status], kw_only=True, frozen=True, tag="status"):
    """Figures of now."""

    answer = Status
    asked_again = True


class WaitDurable(Question[Flushed], kw_only=True, frozen=True, tag="wait"):
    """Wait until an inode is durable, or a directory with everything `below` it.

    What is made there after the question is not waited for.
    """

    answer = Flushed
    asked_again = True
    ended_well = True
    given_up = True

    ino: Number
    below: bool = False


class DescribeFiles(Question[FilesShown], kw_only=True, frozen=True, tag="describe"):
    """Tell what is known of inodes, at most `INODES_MAX`."""

    answer = FilesShown
    asked_again = True

    inos: Annotated[tuple[Number, ...], msgspec.Meta(max_length=INODES_MAX)]


class ListRuns(Question[RunsShown], kw_only=True, frozen=True, tag="runs"):
    """Tell where a file lies, from a segment (64 MiB each) on."""

    answer = RunsShown
    asked_again = True

    ino: Number
    segment: Number = 0


class FlushAll(Question[Flushed], kw_only=True, frozen=True, tag="flush"):
    """Make everything durable."""

    answer = Flushed
    asked_again = True
    ended_well = True


class RestartServer(Question[Renewing], kw_only=True, frozen=True, tag="restart"):
    """Go on with the program that is installed by now.

    Answered before the server makes room for the next one.
    """

    answer = Renewing
    owners = True


class ScrubStep(msgspec.Struct, kw_only=True, frozen=True):
    """What to look at next: from a cursor on, reading at most `bytes_max` from the devices."""

    cursor: ScrubCursor = ScrubCursor()
    bytes_max: Number = 0


class ScrubNext(Question[Scrubbed], kw_only=True, frozen=True, tag="scrub"):
    """Look at some of an inode's contents, or of all (0)."""

    answer = Scrubbed
    owners = True
    asked_again = True

    ino: Number = 0
    step: ScrubStep = ScrubStep()


class PolicyChange(msgspec.Struct, kw_only=True, frozen=True):
    """What to set for a directory, and which settings of its own it is to lose."""

    values: Mapping[str, str] = {}
    unset: tuple[str, ...] = ()


class ChangePolicy(Question[PolicyShown], kw_only=True, frozen=True, tag="policy"):
    """Change the policy of a directory, and tell what holds there then."""

    answer = PolicyShown
    asked_again = True

    ino: Number
    change: PolicyChange = PolicyChange()

    @property
    def needs_owner(self) -> bool:
        """Who may see a directory may ask what holds there."""
        return self.change != PolicyChange()


class ListPolicies(Question[PoliciesListed], kw_only=True, frozen=True, tag="policies"):
    """List what was set for a directory and for those below it."""

    answer = PoliciesListed
    owners = True
    asked_again = True

    ino: Number


class ApplyPolicies(Question[PoliciesListed], kw_only=True, frozen=True, tag="apply"):
    """Change the policies of several directories, all or none; tells what is set in all then."""

    answer = PoliciesListed
    owners = True
    asked_again = True

    changes: tuple[tuple[Number, PolicyChange], ...]


class ExplainPolicy(Question[PolicyExplained], kw_only=True, frozen=True, tag="explain"):
    """Tell what holds for a name in a directory, which need not exist."""

    answer = PolicyExplained
    asked_again = True

    directory: Number
    name: bytes


class ListVersions(Question[VersionsShown], kw_only=True, frozen=True, tag="versions"):
    """List the former versions of a name in a directory."""

    answer = VersionsShown
    asked_again = True

    directory: Number
    name: bytes


class RestoreVersion(Question[VersionsShown], kw_only=True, frozen=True, tag="restore"):
    """Make a former version of a name in a directory the present one, durably."""

    answer = VersionsShown
    owners = True

    directory: Number
    name: bytes
    number: Number


class CommitGroup(Question[Flushed], kw_only=True, frozen=True, tag="commit"):
    """Commit the group that a directory is, durably."""

    answer = Flushed
    owners = True

    ino: Number


class TagDevice(Question[DeviceTags], kw_only=True, frozen=True, tag="tag"):
    """Give tags to the device with a name (a number, a directory, a tag), and take others away."""

    answer = DeviceTags
    owners = True
    asked_again = True

    device: str
    added: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()


class BeginTrace(Question[TraceBegun], kw_only=True, frozen=True, tag="trace"):
    """Trace the next save of a name in a directory; it need not exist yet."""

    answer = TraceBegun
    owners = True

    directory: Number
    name: bytes


class ReadTrace(Question[TraceRead], kw_only=True, frozen=True, tag="read trace"):
    """Tell what happened since the last answer; waits a moment where nothing did."""

    answer = TraceRead
    owners = True

    trace: Number


class EndTrace(Question[Flushed], kw_only=True, frozen=True, tag="end trace"):
    """Trace no more."""

    answer = Flushed
    owners = True

    trace: Number


class AddDevice(Question[DeviceTags], kw_only=True, frozen=True, tag="add"):
    """Add an empty directory, given by its absolute path, as a device."""

    answer = DeviceTags
    owners = True
    owner_alone = True

    path: str


class AskActivity(Question[Activity], kw_only=True, frozen=True, tag="activity"):
    """What the mount does now: cheap enough to be asked every second."""

    answer = Activity
    asked_again = True


class ListInProgress(Question[FilesInProgress], kw_only=True, frozen=True, tag="in progress"):
    """Files that are written, or are not durable yet."""

    answer = FilesInProgress
    owners = True
    asked_again = True


class StartDrain(Question[DrainStarted], kw_only=True, frozen=True, tag="start drain"):
    """Let no new chunk go to the device with a name."""

    answer = DrainStarted
    owners = True
    owner_alone = True
    asked_again = True

    device: str


class DrainNext(Question[Drained], kw_only=True, frozen=True, tag="drain"):
    """Move at most `bytes_max` of what a device holds that drains, from a cursor on."""

    answer = Drained
    owners = True
    owner_alone = True
    asked_again = True

    number: Number
    cursor: DrainCursor = DrainCursor()
    bytes_max: Number = 0


class EndDrain(Question[DeviceTags], kw_only=True, frozen=True, tag="end drain"):
    """Let new chunks go to the device with a name again."""

    answer = DeviceTags
    owners = True
    owner_alone = True
    asked_again = True

    device: str


class RemoveDevice(Question[DeviceRemoved], kw_only=True, frozen=True, tag="remove"):
    """Do without the device with a name, which holds nothing."""

    answer = DeviceRemoved
    owners = True
    owner_alone = True

    device: str


class WaitForEnd(Question[Flushed], kw_only=True, frozen=True, tag="end"):
    """Wait until the server ends: then nothing more can be lost or saved."""

    answer = Flushed
    asked_again = True
    ended_well = True
    given_up = True


AnyQuestion: TypeAlias = (
    AskStatus
    | WaitDurable
    | DescribeFiles
    | ListRuns
    | FlushAll
    | RestartServer
    | ScrubNext
    | ChangePolicy
    | ListPolicies
    | ApplyPolicies
    | ExplainPolicy
    | ListVersions
    | RestoreVersion
    | CommitGroup
    | TagDevice
    | AskActivity
    | ListInProgress
    | BeginTrace
    | ReadTrace
    | EndTrace
    | AddDevice
    | StartDrain
    | DrainNext
    | EndDrain
    | RemoveDevice
    | WaitForEnd
)
"""What a line to the server is decoded as."""


Handler: TypeAlias = Callable[[Any], Awaitable[msgspec.Struct]]
"""Answers one kind of question. OSError when what is asked for cannot be."""
