"""A program that uses a mount in every way and checks it, while servers are killed behind it.

``python -m tests.crash.worker ROOT SEED STOP RECORD`` works in a folder of its own until the file
STOP exists. It prints ``ready``; at the end it checks everything and prints ``ok N`` with how many
operations it made. It ends with an error at the first answer that is not what a filesystem without
failures gives. When the mount is there no longer it says in RECORD what has to be found by the next
one, and ends with ``gone N`` and `EXIT_GONE`.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import msgspec

from tests.crash.gone import EXIT_GONE, is_gone

NAMES = 12
SIZES = (0, 100, 5_000, 20_000, 300_000, 3_000_000, 12_000_000)
PIECES = (4_096, 70_000, 333_333, 1_000_000, 4_000_000)


class Worker:
    """One program: the content that every name must have, and the operations."""

    def __init__(self, root: Path, seed: int) -> None:
        """Make the folder."""
        self.random = random.Random(seed)
        self.folder = root / f"worker{seed}"
        self.folder.mkdir()
        self.expected: dict[str, bytes] = {}
        """Digest of each file, by name."""
        self.count = 0
        self.touched: set[str] = set()
        """Names that the operation under way may change."""
        self.open_unnamed = (self.folder / "unnamed").open("w+b", buffering=0)
        self.open_unnamed.write(b"kept by its handle alone")
        (self.folder / "unnamed").unlink()
        self.locked = (self.folder / "locked").open("w+b", buffering=0)
        fcntl.flock(self.locked, fcntl.LOCK_EX)
        self.expected["locked"] = hashlib.sha256(b"").digest()

    def content(self) -> bytes:
        """Random bytes of a random size: inline, a part of a chunk, several chunks."""
        size = self.random.choice(SIZES)
        return self.random.randbytes(max(0, size + self.random.randint(-size // 3, size // 3)))

    def any_name(self) -> str:
        """A name that may exist."""
        return self.touch(f"file{self.random.randrange(NAMES)}")

    def existing(self) -> str | None:
        """A name that exists."""
        names = sorted(name for name in self.expected if name.startswith("file"))
        return self.touch(self.random.choice(names)) if names else None

    def touch(self, name: str) -> str:
        """Note that the operation under way may change a name."""
        self.touched.add(name)
        return name

    def save(self) -> None:
        """Overwrite a file in pieces, as a checkpoint is."""
        name, content = self.any_name(), self.content()
        with (self.folder / name).open("wb", buffering=0) as stream:
            rest = memoryview(content)
            while rest:
                rest = rest[stream.write(rest[: self.random.choice(PIECES)]) :]
            if self.random.random() < 0.2:
                os.fsync(stream.fileno())
        self.expected[name] = hashlib.sha256(content).digest()

    def append(self) -> None:
        """Write at the end."""
        name = self.existing()
        if name is None:
            return
        path = self.folder / name
        before = path.read_bytes()
        with path.open("ab", buffering=0) as stream:
            stream.write(b"appended")
        self.expected[name] = hashlib.sha256(before + b"appended").digest()

    def truncate(self) -> None:
        """Cut a file."""
        name = self.existing()
        if name is None:
            return
        path = self.folder / name
        before = path.read_bytes()
        size = self.random.randint(0, 2 * len(before) + 1)
        os.truncate(path, size)
        after = before[:size] + bytes(max(0, size - len(before)))
        self.expected[name] = hashlib.sha256(after).digest()

    def rename(self) -> None:
        """Move a file, over another one or not."""
        name, target = self.existing(), self.any_name()
        if name is not None and name != target:
            (self.folder / name).rename(self.folder / target)
            self.expected[target] = self.expected.pop(name)

    def remove(self) -> None:
        """Remove a file."""
        name = self.existing()
        if name is not None:
            (self.folder / name).unlink()
            del self.expected[name]

    def make_and_remove(self) -> None:
        """Everything that cannot be done twice."""
        folder = self.folder / self.touch(f"folder{self.count}")
        folder.mkdir()
        (folder / "link").symlink_to("target")
        assert (folder / "link").readlink() == Path("target")
        os.mkfifo(folder / "fifo")
        os.close(os.open(folder / "new", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
        os.link(folder / "new", folder / "second")
        os.setxattr(folder / "new", "user.mark", b"1", os.XATTR_CREATE)
        os.removexattr(folder / "new", "user.mark")
        os.chmod(folder / "new", 0o600)
        os.rename(folder / "new", folder / "moved")
        assert sorted(os.listdir(folder)) == ["fifo", "link", "moved", "second"]
        for name in os.listdir(folder):
            (folder / name).unlink()
        folder.rmdir()

    def save_and_be_killed(self) -> None:
        """Let a child overwrite a checkpoint, and kill it at some moment.

        Unless it had begun to close the file, the checkpoint before has to be there.
        """
        name, content = self.touch(f"step{self.random.randrange(3)}.pt"), self.content()
        told, tell = os.pipe()
        child = os.fork()
        if child == 0:
            overwrite_and_say(self.folder / name, content, tell)
        os.close(tell)
        time.sleep(self.random.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        with open(told, "rb") as stream:
            said = stream.read()
        if said.endswith(b"e"):
            os.listdir(self.folder)  # which fails, too, where the mount is gone
            raise AssertionError(f"the writer of {name} got an error")
        before, after = self.expected.get(name), hashlib.sha256(content).digest()
        allowed = {b"": [before], b"w": [before, after], b"wc": [after]}[said]
        try:
            shown = (self.folder / name).read_bytes()
        except FileNotFoundError:
            found, size = None, None
        else:
            found, size = hashlib.sha256(shown).digest(), len(shown)
        assert found in allowed, f"{name} shows what a killed writer left: {size} bytes, {said!r}"
        if found is not None:
            self.expected[name] = found

    def check(self) -> None:
        """Read a file, and list the folder."""
        name = self.existing()
        if name is not None:
            self.check_file(name)
        assert sorted(os.listdir(self.folder)) == sorted(self.expected)

    def check_file(self, name: str) -> None:
        """Compare a file with what was written."""
        content = (self.folder / name).read_bytes()
        digest = hashlib.sha256(content).digest()
        assert digest == self.expected[name], f"{name} has wrong content, {len(content)} bytes"

    def check_handles(self) -> None:
        """Handles, positions, locks and files without a name are as they were."""
        assert self.open_unnamed.seek(0) == 0
        assert self.open_unnamed.read() == b"kept by its handle alone"
        assert os.fstat(self.open_unnamed.fileno()).st_nlink == 0
        with (self.folder / "locked").open("rb") as other:
            try:
                fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return
        raise AssertionError("the lock is gone")

    def run(self, stop: Path) -> int:
        """Work until told to stop; returns the number of operations."""
        operations: list[Callable[[], None]] = [
            *[self.save] * 5,
            self.append,
            self.truncate,
            self.rename,
            self.remove,
            self.save_and_be_killed,
            self.make_and_remove,
            self.check,
            self.check_handles,
        ]
        while not stop.exists():
            self.count += 1
            self.touched = set()
            self.random.choice(operations)()
        for name in self.expected:
            self.check_file(name)
        self.check_handles()
        return self.count


def overwrite_and_say(path: Path, content: bytes, told: int) -> NoReturn:
    """Be the child: say ``w`` when all is written, and ``c`` when the file is closed."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        for first in range(0, len(content), 100_000):
            os.write(descriptor, content[first : first + 100_000])
        os.write(told, b"w")
        os.close(descriptor)
        os.write(told, b"c")
    except OSError:
        os.write(told, b"e")
    finally:
        os._exit(0)


class Left(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker whose mount is gone says: digests by name, and names that may be anything."""

    expected: dict[str, bytes]
    touched: set[str]


def verify(root: Path, seed: int, record: Path) -> None:
    """Compare what a worker whose mount was taken away has left with what it said."""
    left = msgspec.json.decode(record.read_bytes(), type=Left)
    folder = root / f"worker{seed}"
    certain = {name: digest for name, digest in left.expected.items() if name not in left.touched}
    assert set(os.listdir(folder)) - left.touched == set(certain)
    for name, digest in certain.items():
        content = (folder / name).read_bytes()
        assert hashlib.sha256(content).digest() == digest, f"{name}: {len(content)} bytes"


def main() -> None:
    """See the module."""
    root, seed, stop, record = sys.argv[1:]
    worker = Worker(Path(root), int(seed))
    print("ready", flush=True)
    try:
        count = worker.run(Path(stop))
    except Exception as error:
        print(f"failed at operation {worker.count}: {error}", flush=True)
        if not is_gone(error, Path(root)):
            raise
        left = Left(expected=worker.expected, touched=worker.touched)
        Path(record).write_bytes(msgspec.json.encode(left))
        print(f"gone {worker.count}", flush=True)
        sys.exit(EXIT_GONE)
    print(f"ok {count}", flush=True)


if __name__ == "__main__":
    main()
