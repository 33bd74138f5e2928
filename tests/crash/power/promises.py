"""What may be found on a mount after a power cut, by what its programs had been promised.

The catalog is a log of transactions, and a cut leaves a prefix of it. What one program did appears
there as two rows, each in the program's order: changes of names, when they are answered, and
versions, after the close (or fsync) that ended them. So after a cut there must be numbers n and c
such that the program's folder is what the first n changes of names and the first c versions make
it: every file whole, in one of its versions, or empty when it was created and never committed.

Not every pair is allowed:

  * What had not begun before the cut is not there.
  * What was made durable before the cut is there: by fsync of a file or folder, fpfs-ctl wait and
    fpfs-ctl flush.
  * A version is there only with all changes of names that were answered before it ended.
  * A rename is there only with all versions that had ended before it. So nobody finds a name that
    was moved into place without what was saved before that.
  * So is the removal of a group. Any other removal is so, too, but what came after it may be there
    without it: what was removed is back then, unless something else that is not empty has its name,
    or it had no content. Versions of other programs count here, too: a removal may be waited with
    for one of them, and so are all that come after it, up to a rename.

A group is an exception: of one that was made and not committed by the rename of its marker nothing
is there, and one that was committed is as it was at its last commit point, whatever came later.

Concurrency: none; plain values.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import msgspec

from tests.crash.power.recording import Event, Kind
from tests.crash.power.workload import MARKER, DevicesWord, Word, digest_of

Digests: TypeAlias = dict[int, str]
"""What the content of each file is known by."""

NEVER = 1 << 62
EMPTY = digest_of(b"")
_CREATED_MODE = 0o644


class Call(NamedTuple):
    """A call of a program: its word, and the events at which it began and had returned."""

    word: Word
    begin: int
    end: int


class Entry(NamedTuple):
    """What a path is: kind is file, folder or symlink; `file` is the program's number of it.

    `may_be_gone`: it was removed, and may be there or not.
    """

    kind: str
    file: int = 0
    mode: int = 0
    may_be_gone: bool = False
    digest: str = ""
    """Of the content that a file in a group had when that was committed last."""


class Found(NamedTuple):
    """What was found at a path."""

    kind: str
    mode: int = 0
    digest: str = ""


class History:
    """The calls of one program, in order."""

    def __init__(self, calls: Sequence[Call]) -> None:
        """Sort them into names, versions and calls that make durable."""
        self.names = [call for call in calls if call.word.name]
        self.versions = [call for call in calls if call.word.ends_version]
        self.durable = [call for call in calls if call.word.durable]
        self._names_before = [_returned(self.names, call.begin) for call in self.versions]
        """For each version: changes of names that were answered before it ended."""
        self._versions_before = [
            _returned(self.versions, call.begin)
            if call.word.name == "rename" or (call.word.name == "rmdir" and call.word.group)
            else 0
            for call in self.names
        ]
        self._others_before = [
            self._others_returned(call)
            if call.word.name in ("remove", "rmdir") and not call.word.group
            else 0
            for call in self.names
        ]

    def _others_returned(self, removal: Call) -> int:
        """How many versions there must be for a removal: up to the last one of another file."""
        file = names_after(self.names[: self.names.index(removal)])[removal.word.path].file
        ended = [
            number
            for number, version in enumerate(self.versions, start=1)
            if version.end < removal.begin and version.word.file != file
        ]
        return max(ended, default=0)

    def withheld(self, names: int, versions: int) -> frozenset[int]:
        """Which of so many changes of names are removals that so many versions do not allow yet."""
        needed = enumerate(self._others_before[:names])
        return frozenset(number for number, others in needed if others > versions)

    def all_withheld(self, names: int, versions: int, pending: int) -> Iterator[frozenset[int]]:
        """The same for all that versions of other programs may do to it.

        The earliest of those that are not current was begun at event `pending`. A rename waits for
        all versions before it, so that no removal before it waits any more.
        """
        withheld = self.withheld(names, versions)
        yield withheld
        for number in reversed(range(names)):
            call = self.names[number]
            if call.word.name == "rename" or call.end < pending:
                break
            if call.word.name in ("remove", "rmdir") and not call.word.group:
                withheld |= {number}
                yield withheld

    def pending(self, cut: int) -> int:
        """When the first version began to end that need not be there after a cut."""
        begun = _begun(self.versions, cut)
        _, current = self.at_least(cut)
        return self.versions[current].begin if current < begun else NEVER

    def at_least(self, cut: int) -> tuple[int, int]:
        """How many changes of names and versions must be there after a cut."""
        names = versions = 0
        for call in self.durable:
            if call.end >= cut:
                break
            names = max(names, _returned(self.names, call.begin))
            for number, version in enumerate(self.versions):
                is_before = version.end < call.begin or version is call
                if is_before and call.word.file in (0, version.word.file):
                    versions = max(versions, number + 1)
        return names, versions

    def allowed(self, cut: int) -> Iterator[tuple[int, int]]:
        """All pairs (n, c) that a cut may leave, by n."""
        names_min, versions_min = self.at_least(cut)
        names_max = _begun(self.names, cut)
        versions_max = _begun(self.versions, cut)
        for names in range(names_min, names_max + 1):
            least = max([versions_min, *self._versions_before[:names]])
            for versions in range(least, versions_max + 1):
                if max([0, *self._names_before[:versions]]) <= names:
                    yield names, versions


def _returned(calls: Sequence[Call], event: int) -> int:
    """How many calls had returned before an event."""
    return sum(call.end < event for call in calls)


def _begun(calls: Sequence[Call], event: int) -> int:
    return sum(call.begin < event for call in calls)


def read_histories(events: Sequence[Event]) -> dict[int, History]:
    """The calls of all programs, from their words in the log, by program."""
    begun: dict[tuple[int, int], tuple[Word, int]] = {}
    calls: dict[int, list[Call]] = {}
    for number, event in enumerate(events):
        if event.operation.kind is not Kind.MARK:
            continue
        word = msgspec.json.decode(event.operation.data, type=Word | DevicesWord)
        if isinstance(word, DevicesWord):
            continue
        key = (word.program, word.number)
        if not word.returned:
            begun[key] = (word, number)
            continue
        first, begin = begun.pop(key)
        digest = word.digest or first.digest
        call = Call(msgspec.structs.replace(first, digest=digest), begin, number)
        calls.setdefault(word.program, []).append(call)
    assert not begun, f"programs ended in the middle of calls: {begun}"
    return {program: History(sorted(made, key=_begin)) for program, made in calls.items()}


def _begin(call: Call) -> int:
    return call.begin


def names_after(
    calls: Sequence[Call],
    *,
    withheld: frozenset[int] = frozenset(),
    digests: Digests | None = None,
    versions: Sequence[Call] | None = None,
) -> dict[str, Entry]:
    """What the changes of names make of an empty mount.

    Entries whose removal is `withheld` (by number) are back at the end; `digests` says which files
    have a content. With all `versions` of the program, groups are as a crash leaves them.
    """
    tree: dict[str, Entry] = {}
    gone: list[tuple[str, Entry]] = []
    groups: dict[str, dict[str, Entry]] = {}
    for number, call in enumerate(calls):
        word = call.word
        match word.name:
            case "create":
                tree[word.path] = Entry("file", word.file, _CREATED_MODE)
            case "mkdir":
                tree[word.path] = Entry("folder")
                if word.group:
                    groups[word.path] = {}
            case "symlink":
                tree[word.path] = Entry("symlink")
            case "rename":
                _rename(tree, word.path, word.other)
                group, _, name = word.other.rpartition("/")
                if group in groups and name == MARKER:
                    groups[group] = _committed(_subtree(tree, group), versions or (), call.begin)
            case "link":
                tree[word.other] = tree[word.path]
            case "chmod":
                file = tree[word.path].file
                for path, entry in tree.items():
                    if entry.kind == "file" and entry.file == file:
                        tree[path] = entry._replace(mode=word.mode)
                gone = [
                    (path, entry._replace(mode=word.mode) if entry.file == file else entry)
                    for path, entry in gone
                ]
            case "remove" | "rmdir":
                entry = tree.pop(word.path)
                gone += [(word.path, entry)] if number in withheld else []
                groups.pop(word.path, None)
            case other:
                raise AssertionError(f"no program changes names by {other}")
    for path, entry in gone:
        present = tree.get(path)
        if present is None or _is_empty(present, digests or {}):
            tree[path] = entry._replace(may_be_gone=_is_empty(entry, digests or {}))
    for group, committed in groups.items() if versions is not None else ():
        for path in _subtree(tree, group):
            del tree[path]
        tree.update(committed)
    return tree


def _is_empty(entry: Entry, digests: Digests) -> bool:
    return entry.kind == "file" and digests.get(entry.file, EMPTY) == EMPTY


def _subtree(tree: dict[str, Entry], path: str) -> dict[str, Entry]:
    """An entry, and what is in it."""
    return {p: entry for p, entry in tree.items() if p == path or p.startswith(f"{path}/")}


def _committed(tree: dict[str, Entry], versions: Sequence[Call], event: int) -> dict[str, Entry]:
    """Entries with the contents that they have at a commit point."""
    digests = {call.word.file: call.word.digest for call in versions if call.end < event}
    return {
        path: entry._replace(digest=digests.get(entry.file, EMPTY) if entry.file else "")
        for path, entry in tree.items()
    }


def _rename(tree: dict[str, Entry], path: str, other: str) -> None:
    """Move an entry, and what is in it."""
    for inside in [found for found in tree if found == path or found.startswith(f"{path}/")]:
        tree[other + inside.removeprefix(path)] = tree.pop(inside)


def look(root: Path, folder: str) -> dict[str, Found]:
    """What is in a program's folder, by path from the mount's root. Reads everything."""
    found: dict[str, Found] = {}
    todo = [root / folder] if (root / folder).exists() else []
    while todo:
        path = todo.pop()
        status = path.lstat()
        key = str(path.relative_to(root))
        if stat.S_ISDIR(status.st_mode):
            found[key] = Found("folder")
            todo += path.iterdir()
        elif stat.S_ISLNK(status.st_mode):
            found[key] = Found("symlink")
        else:
            content = path.read_bytes()
            assert len(content) == status.st_size, f"{key} has another size than stat says"
            found[key] = Found("file", stat.S_IMODE(status.st_mode), digest_of(content))
    return found


def broken_promise(
    history: History, cut: int, found: dict[str, Found], *, others: Sequence[History] = ()
) -> str:
    """Why no allowed pair explains what was found, or an empty string.

    `others`: the histories of the programs that ran beside this one.
    """
    pending = min((other.pending(cut) for other in others), default=NEVER)
    best: tuple[int, str] = (1 << 30, "nothing is allowed at all")
    shapes: dict[tuple[int, frozenset[int]], dict[str, Entry]] = {}
    for names, versions in history.allowed(cut):
        digests = {call.word.file: call.word.digest for call in history.versions[:versions]}
        for withheld in history.all_withheld(names, versions, pending):
            shape = None if withheld else shapes.get((names, withheld))
            if shape is None:
                shape = names_after(
                    history.names[:names],
                    withheld=withheld,
                    digests=digests,
                    versions=history.versions,
                )
                shapes[names, withheld] = shape
            wrong = _differences(shape, digests, found)
            if not wrong:
                return ""
            if len(wrong) < best[0]:
                allowed = f"{names} changes of names and {versions} versions"
                best = (len(wrong), f"nearest allowed: {allowed}; but {'; '.join(wrong[:8])}")
    names_min, versions_min = history.at_least(cut)
    return f"at least {names_min} names and {versions_min} versions were promised; {best[1]}"


def dangling_pointer(
    history: History, found: dict[str, Found], *, pointer: str, content: bytes
) -> str:
    """Why a pointer to a checkpoint names none that is whole, or an empty string.

    The rules above imply this; it is what they are for.
    """
    path = content.decode()
    if not path:
        return ""  # made, and never committed
    files = {call.word.file for call in history.names if call.word.path == path}
    whole = {call.word.digest for call in history.versions if call.word.file in files} - {EMPTY}
    if path in found and found[path].digest in whole:
        return ""
    return f"{pointer} names {path}, which is {found.get(path, 'not there')}"


def broken_former_version(history: History, former: dict[str, Found]) -> str:
    """Why what is kept of contents that were replaced is none of them, or an empty string."""
    whole = {call.word.digest for call in history.versions} - {EMPTY}
    wrong = [f"{path} is {found}" for path, found in former.items() if found.digest not in whole]
    return "; ".join(wrong)


def _differences(
    expected: dict[str, Entry], digests: dict[int, str], found: dict[str, Found]
) -> list[str]:
    wrong = [f"{path} is there" for path in sorted(found.keys() - expected.keys())]
    wrong += [
        f"{path} is missing"
        for path in sorted(expected.keys() - found.keys())
        if not expected[path].may_be_gone
    ]
    for path, entry in expected.items():
        if path not in found:
            continue
        digest = digests.get(entry.file, EMPTY) if entry.kind == "file" else ""
        digest = entry.digest or digest
        if found[path] != Found(entry.kind, entry.mode, digest):
            wrong.append(f"{path} is {found[path]} instead of {entry} {digest}")
    return wrong
