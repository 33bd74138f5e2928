"""A program that saves on a mount, and says in the recorder's log what it was promised.

``python -m tests.crash.power.workload LIBRARY ROOT NUMBER COUNT SEED STEPS`` is program NUMBER of
COUNT, and works in a folder of its own. Its words in the log are JSON (`Word`), one when a call
begins and one when it has returned, so that each promise has its place among what the devices were
asked.

Three kinds of calls matter to what may be found after a power cut (`promises` has the rules):
changes of names; ends of versions (close, fsync, truncation by name), with the content that the
file then has; and calls after which things are durable.

Concurrency: one thread. Several workloads may run side by side: each one's folder is its own.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import io
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any, TypeAlias
from unittest import mock

import msgspec

from fpfs.client.replacement import Replacement
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import ChangePolicy, FlushAll, PolicyChange, Question, WaitDurable
from fpfs.core.refusal import Refused
from fpfs.core.temporary_names import make_temporary

SIZES = (0, 100, 5_000, 16_000, 17_000, 70_000, 300_000, 900_000)
NAMES = 6
CHECKPOINTS_KEPT = 1
MARKER = ".metadata"
SERVERS_MAX = 3
"""Servers that may be killed while one question waits for its answer."""


Devices: TypeAlias = dict[str, str]
"""The devices of a mount: the states by the names of their directories."""


class DevicesWord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="devices"):
    """One word in the log: a change of the devices begins, or has returned (`device_changer`)."""

    number: int
    returned: bool = False
    certain: bool = False
    """Whether it was answered, so that it is durable."""
    devices: Devices = {}
    """Those of after it."""


class Word(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag="call"):
    """One word in the log: call `number` of workload `program` begins, or has returned.

    A call is a change of names, the end of a version, or asks for durability, or two of these.
    """

    program: int
    number: int
    returned: bool = False
    name: str = ""
    """The change of names: create, mkdir, rmdir, remove, rename, link, symlink, chmod."""
    path: str = ""
    other: str = ""
    file: int = 0
    """The workload's own number of a file: of one that is created, or whose version ends."""
    mode: int = 0
    group: bool = False
    """Whether the directory that is made, or removed, commits as a whole."""
    ends_version: bool = False
    digest: str = ""
    """Of the content of the version that ends; may be told when the call has returned."""
    durable: bool = False
    """When it has returned, all names before it are durable, and all versions that ended: the last
    one of `file` if that is told (and those before it, since versions keep their order)."""


def digest_of(content: bytes | bytearray) -> str:
    """What a content is known by."""
    return hashlib.blake2b(content, digest_size=12).hexdigest()


class Recorder:
    """The way into the recorder's log. What cannot be told ends the program."""

    def __init__(self, library: Path, program: int) -> None:
        """Load the recorder; the environment names its log."""
        self._mark = ctypes.CDLL(str(library)).fpfs_recorder_mark
        self._mark.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
        self._program = program
        self._numbers = count(1)

    @contextlib.contextmanager
    def call(self, **about: Any) -> Iterator[dict[str, str]]:
        """Around a call; what is put into the yielded dictionary is told at its return."""
        number = next(self._numbers)
        later: dict[str, str] = {}
        self.tell(Word(program=self._program, number=number, **about))
        yield later
        digest = later.get("digest", "")
        self.tell(Word(program=self._program, number=number, returned=True, digest=digest))

    def tell(self, word: Word | DevicesWord) -> None:
        """Say a word."""
        data = msgspec.json.encode(word)
        self._mark(data, len(data))


class _Told(Replacement):
    """A file that fpfs.save makes; says what is done to it."""

    def __init__(self, program: Workload, returned: contextlib.ExitStack | None, path: str) -> None:
        """returned: ends when a save that is to be durable has returned."""
        self._program, self._returned, self._file = program, returned, program.next_number()
        self._call, self._own = program.recorder.call, ""
        super().__init__(path)

    def _create(self, mode: int) -> None:
        name = make_temporary(os.fsencode(self._name))
        self._own = self._program.path_of(os.fsdecode(name))
        with (
            mock.patch("fpfs.client.replacement.make_temporary", return_value=name),
            self._call(name="create", path=self._own, file=self._file),
        ):
            super()._create(mode)
        self._program.files[self._own] = self._file

    def complete(self, *, durable: bool) -> None:
        with self._call(ends_version=True, file=self._file) as told:
            super().complete(durable=durable)
            content = (self._program.root / self._own).read_bytes()
            told["digest"] = digest_of(content)
        self._program.contents[self._file] = content

    def take_name(self) -> None:
        target, files = self._program.path_of(self._name), self._program.files
        with self._call(name="rename", path=self._own, other=target):
            super().take_name()
        files[target] = files.pop(self._own)
        if self._returned is not None:
            self._returned.enter_context(self._call(durable=True))


class Workload:
    """The program. `contents` is what each file must hold, by its number; `files` by path."""

    def __init__(
        self, *, recorder: Recorder, root: Path, program: int, seed: int, alone: bool
    ) -> None:
        """Make the folder. `alone`: nobody else writes, so that all of the mount may be flushed."""
        self.recorder = recorder
        self.alone = alone
        self.root = root
        self.random = random.Random(f"{seed} {program}")
        self.folder = f"program{program}"
        self.files: dict[str, int] = {}
        self.contents: dict[int, bytes] = {}
        self.checkpoints: list[str] = []
        self.group = ""
        self._numbers = count(1)
        with recorder.call(name="mkdir", path=self.folder):
            (root / self.folder).mkdir()
        self.groups = self.path_of("groups")
        with recorder.call(name="mkdir", path=self.groups):
            (root / self.groups).mkdir()
        with recorder.call(durable=True):
            self._set_policy(self.groups, {"commit": "group"})

    def path_of(self, name: str) -> str:
        return f"{self.folder}/{name}"

    def next_number(self) -> int:
        """Of a file, and of what is named after it."""
        return next(self._numbers)

    def _content(self) -> bytes:
        size = self.random.choice(SIZES)
        return self.random.randbytes(max(0, size + self.random.randint(-size // 3, size // 3)))

    def _any(self) -> str:
        return self.path_of(f"file{self.random.randrange(NAMES)}")

    def _existing(self) -> str | None:
        paths = sorted(path for path in self.files if "/file" in path)
        return self.random.choice(paths) if paths else None

    # The calls.

    def open(self, path: str, flags: int) -> int:
        """open(2); a file that is not there is created."""
        if path in self.files:
            return os.open(self.root / path, flags)
        file = self.next_number()
        with self.recorder.call(name="create", path=path, file=file):
            descriptor = os.open(self.root / path, flags | os.O_CREAT | os.O_EXCL, 0o644)
        self.files[path] = file
        self.contents[file] = b""
        return descriptor

    def fsync(self, path: str, descriptor: int, content: bytes) -> None:
        """fsync(2) of a file that has `content` now."""
        with self.recorder.call(
            ends_version=True, file=self.files[path], digest=digest_of(content), durable=True
        ):
            os.fsync(descriptor)

    def close(self, path: str, descriptor: int, content: bytes) -> None:
        """close(2) of the only handle of a file, whose content is `content` now."""
        file = self.files[path]
        with self.recorder.call(ends_version=True, file=file, digest=digest_of(content)):
            os.close(descriptor)
        self.contents[file] = content

    def rename(self, path: str, target: str) -> None:
        """rename(2), over another file or not."""
        with self.recorder.call(name="rename", path=path, other=target):
            os.rename(self.root / path, self.root / target)
        self.files[target] = self.files.pop(path)

    def remove(self, path: str) -> None:
        """unlink(2)."""
        with self.recorder.call(name="remove", path=path):
            os.unlink(self.root / path)
        del self.files[path]

    def sync_folder(self) -> None:
        """fsync(2) of the folder."""
        descriptor = os.open(self.root / self.folder, os.O_RDONLY | os.O_DIRECTORY)
        with self.recorder.call(durable=True):
            os.fsync(descriptor)
        os.close(descriptor)

    # What programs do.

    def write(self, path: str, content: bytes) -> None:
        """Overwrite a file from its beginning, in pieces, maybe with an fsync in the middle."""
        descriptor = self.open(path, os.O_WRONLY | os.O_TRUNC)
        written = 0
        sync_at = self.random.randrange(len(content) + 1) if self.random.random() < 0.2 else -1
        while written < len(content):
            piece = content[written : written + self.random.choice((4_096, 33_333, 400_000))]
            written += os.write(descriptor, piece)
            if 0 <= sync_at <= written:
                self.fsync(path, descriptor, content[:written])
                sync_at = -1
        if self.random.random() < 0.2:
            self.fsync(path, descriptor, content)
        self.close(path, descriptor, content)

    def save(self) -> None:
        """Overwrite a file, or make one."""
        self.write(self._any(), self._content())

    def save_twice(self) -> None:
        """Overwrite a file again at once: what was closed first holds nothing of the second."""
        path = self._any()
        self.write(path, self._content())
        self.write(path, self._content())

    def sync_any(self) -> None:
        """fsync(2) of a file that nobody has changed since it was closed."""
        path = self._existing()
        if path is None:
            return
        descriptor = os.open(self.root / path, os.O_RDONLY)
        with self.recorder.call(durable=True):
            os.fsync(descriptor)
        os.close(descriptor)

    def save_and_rename(self) -> None:
        """Replace a file as careful programs do, and as careless ones do."""
        target = self._any()
        temporary = f"{target}.tmp"
        self.write(temporary, self._content())
        self.rename(temporary, target)
        if self.random.random() < 0.3:
            self.sync_folder()

    def torch_save(self) -> None:
        """torch.save to a name, as training programs do, with a pointer to the last one.

        Nothing is made durable before an old checkpoint is removed.
        """
        import torch

        path = self.path_of(f"step{self.next_number()}.pt")
        counts = [self.random.choice((100, 20_000, 120_000)) for _ in range(3)]
        state = {f"layer{n}": torch.randn(count) for n, count in enumerate(counts)}
        file = self.next_number()
        with self.recorder.call(name="create", path=path, file=file):
            os.close(os.open(self.root / path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644))
        self.files[path] = file
        with self.recorder.call(ends_version=True, file=file) as told:
            torch.save(state, self.root / path)
            content = (self.root / path).read_bytes()
            found = torch.load(io.BytesIO(content))
            assert all(torch.equal(state[name], found[name]) for name in state)
            told["digest"] = digest_of(content)
        self.contents[file] = content
        self.checkpoints.append(path)
        self.write(self.path_of("latest"), path.encode())
        if len(self.checkpoints) > CHECKPOINTS_KEPT:
            self.remove(self.checkpoints.pop(0))

    def fpfs_save(self) -> None:
        """fpfs.save to a name that an earlier one may have, durable or not."""
        import torch

        from fpfs import client

        path = self.path_of(f"saved{self.random.randrange(2)}.pt")
        state = {"layer": torch.randn(self.random.choice((100, 20_000, 120_000)))}
        durable = self.random.random() < 0.5
        with contextlib.ExitStack() as returned:
            made = functools.partial(_Told, self, returned if durable else None)
            with mock.patch("fpfs.client.saving.Replacement", made):
                client.save(state, self.root / path, durable=durable)
        found = torch.load(io.BytesIO(self.contents[self.files[path]]))
        assert torch.equal(state["layer"], found["layer"])

    def write_synchronously(self) -> None:
        """Write through a descriptor whose writes are answered when they are durable."""
        path = self.path_of("synchronous")
        descriptor = self.open(path, os.O_WRONLY | os.O_DSYNC)
        content = bytearray(self.contents[self.files[path]])
        for _ in range(self.random.randint(1, 3)):
            offset = self.random.randint(0, len(content))
            piece = self.random.randbytes(self.random.choice((10, 5_000, 90_000)))
            content[offset : offset + len(piece)] = piece
            with self.recorder.call(
                ends_version=True, file=self.files[path], digest=digest_of(content), durable=True
            ):
                assert os.pwrite(descriptor, piece, offset) == len(piece)
        self.close(path, descriptor, bytes(content))

    def change(self) -> None:
        """Write in the middle of a file, behind its end, and cut it through the handle."""
        path = self._existing()
        if path is None:
            return
        content = bytearray(self.contents[self.files[path]])
        descriptor = self.open(path, os.O_RDWR)
        for _ in range(self.random.randint(1, 3)):
            offset = self.random.randint(0, len(content) + 1000)
            piece = self.random.randbytes(self.random.choice((1, 600, 70_000, 200_000)))
            os.pwrite(descriptor, piece, offset)
            content.extend(bytes(max(0, offset - len(content))))
            content[offset : offset + len(piece)] = piece
        if self.random.random() < 0.3:
            size = self.random.randint(0, len(content))
            os.ftruncate(descriptor, size)
            del content[size:]
        self.close(path, descriptor, bytes(content))

    def append(self) -> None:
        """Add lines to a log, with fsync or without."""
        path = self.path_of("log")
        descriptor = self.open(path, os.O_WRONLY | os.O_APPEND)
        content = self.contents[self.files[path]]
        for _ in range(self.random.randint(1, 4)):
            line = b"a line %d\n" % self.random.randrange(10**9)
            os.write(descriptor, line)
            content += line
            if self.random.random() < 0.4:
                self.fsync(path, descriptor, content)
        self.close(path, descriptor, content)

    def truncate(self) -> None:
        """truncate(2) by name, shorter or longer."""
        path = self._existing()
        if path is None:
            return
        file = self.files[path]
        before = self.contents[file]
        size = self.random.randint(0, len(before) + 50_000)
        content = before[:size] + bytes(max(0, size - len(before)))
        with self.recorder.call(ends_version=True, file=file, digest=digest_of(content)):
            os.truncate(self.root / path, size)
        self.contents[file] = content

    def rename_any(self) -> None:
        """Rename a file that may have content on its way."""
        path, target = self._existing(), self._any()
        if path is not None and path != target and self.files.get(target) != self.files[path]:
            self.rename(path, target)

    def folder_into_place(self) -> None:
        """Save into a folder that is renamed when it is complete, as transformers does."""
        folder = self.path_of(f"tmp-checkpoint{self.next_number()}")
        with self.recorder.call(name="mkdir", path=folder):
            (self.root / folder).mkdir()
        names = ("weights", "optimizer")
        for name in names:
            self.write(f"{folder}/{name}", self._content())
        target = folder.replace("tmp-", "")
        with self.recorder.call(name="rename", path=folder, other=target):
            (self.root / folder).rename(self.root / target)
        for name in names:
            self.files[f"{target}/{name}"] = self.files.pop(f"{folder}/{name}")
        for name in names:
            self.remove(f"{target}/{name}")
        with self.recorder.call(name="rmdir", path=target):
            (self.root / target).rmdir()

    def save_group(self) -> None:
        """Save shards and a marker into a directory, a new one or the last one again."""
        if self.group and self.random.random() < 0.3:
            self._remove_group()
        if not self.group:
            self.group = f"{self.groups}/step{self.next_number()}"
            with self.recorder.call(name="mkdir", path=self.group, group=True):
                (self.root / self.group).mkdir()
        for number in range(self.random.randint(1, 3)):
            self.write(f"{self.group}/shard{number}", self._content())
        marker = f"{self.group}/{MARKER}"
        self.write(f"{marker}.tmp", self._content())
        if marker in self.files and self.random.random() < 0.5:
            self.remove(marker)
        self.rename(f"{marker}.tmp", marker)

    def _remove_group(self) -> None:
        for path in sorted(path for path in self.files if path.startswith(f"{self.group}/")):
            self.remove(path)
        with self.recorder.call(name="rmdir", path=self.group, group=True):
            (self.root / self.group).rmdir()
        self.group = ""

    def _set_policy(self, path: str, values: dict[str, str]) -> None:
        ino = (self.root / path).stat().st_ino
        self._ask(ChangePolicy(ino=ino, change=PolicyChange(values=values)))

    def remove_any(self) -> None:
        """Remove a file."""
        path = self._existing()
        if path is not None:
            self.remove(path)

    def link(self) -> None:
        """Give a file a second name for a while, or take it away."""
        path = self._existing()
        second = self.path_of("second")
        if second in self.files:
            self.remove(second)
        elif path is not None:
            with self.recorder.call(name="link", path=path, other=second):
                os.link(self.root / path, self.root / second)
            self.files[second] = self.files[path]

    def folders(self) -> None:
        """Make a folder with small files, and sometimes remove it all."""
        folder = self.path_of(f"folder{self.next_number()}")
        with self.recorder.call(name="mkdir", path=folder):
            (self.root / folder).mkdir()
        paths = [f"{folder}/small{number}" for number in range(self.random.randint(0, 5))]
        for path in paths:
            self.write(path, self.random.randbytes(self.random.randint(0, 9_000)))
        with self.recorder.call(name="symlink", path=f"{folder}/link"):
            (self.root / folder / "link").symlink_to("nowhere")
        if self.random.random() < 0.8:
            for path in paths:
                self.remove(path)
            with self.recorder.call(name="remove", path=f"{folder}/link"):
                (self.root / folder / "link").unlink()
            with self.recorder.call(name="rmdir", path=folder):
                (self.root / folder).rmdir()

    def chmod(self) -> None:
        """Change the permissions of a file."""
        path = self._existing()
        if path is not None:
            mode = self.random.choice((0o600, 0o640, 0o644))
            with self.recorder.call(name="chmod", path=path, mode=mode):
                (self.root / path).chmod(mode)

    def wait(self) -> None:
        """``fpfs-ctl wait`` for a file, or ``fpfs-ctl flush``.

        That makes durable what is there of files that others are writing, as sync(2) does, so it is
        for a program that is alone: what it leaves of theirs has no rule.
        """
        path = self._existing()
        if path is None:
            return
        is_flush = self.alone and self.random.choice((False, True))
        wait = WaitDurable(ino=(self.root / path).stat().st_ino)
        with self.recorder.call(durable=True, file=0 if is_flush else self.files[path]):
            self._ask(FlushAll() if is_flush else wait)

    def _ask(self, question: Question[Any]) -> None:
        """Ask until a server answers: one that is killed meanwhile refuses what it was asked."""
        for last in (*[False] * SERVERS_MAX, True):
            try:
                with ControlClient(find_fpfs(str(self.root), asked="test"), asked="test") as client:
                    client.ask(question)
                return
            except Refused:
                if last:
                    raise

    def rest(self) -> None:
        """Do nothing for as long as the catalog waits before it copies its log."""
        time.sleep(self.random.uniform(0.2, 0.6))

    def run(self, steps: int) -> None:
        """Do so many random things."""
        everything: list[Callable[[], None]] = [
            *[self.save] * 3, *[self.save_twice] * 2, *[self.save_and_rename] * 3,
            *[self.torch_save] * 2, *[self.fpfs_save] * 2,
            *[self.save_group] * 3, *[self.change] * 2,
            *[self.append] * 2, self.sync_any,
            self.truncate, self.write_synchronously, self.rename_any, self.remove_any,
            self.link, self.folders, self.folder_into_place, self.chmod, self.sync_folder,
            self.wait, self.rest,
        ]  # fmt: skip
        for _ in range(steps):
            self.random.choice(everything)()


def main() -> None:
    """See the module."""
    library, root = Path(sys.argv[1]), Path(sys.argv[2])
    program, count, seed, steps = (int(word) for word in sys.argv[3:])
    workload = Workload(
        recorder=Recorder(library, program),
        root=root,
        program=program,
        seed=seed,
        alone=count == 1,
    )
    workload.run(steps)


if __name__ == "__main__":
    main()
