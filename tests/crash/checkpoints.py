"""Programs that save and load checkpoints with torch, while servers are killed behind them.

``python -m tests.crash.checkpoints ROLE ROOT SEED STOP RECORD``, where ROLE is one of

* ``make``: save what loaders load;
* ``save``: overwrite checkpoints until the file STOP exists, load and compare them;
* ``load``: load what ``make`` has saved, mapped or not, and compare, until STOP exists;
* ``verify``: compare with RECORD what a saver, whose mount was taken away, has left.

A saver says in RECORD, which is not on the mount, when a save begins and when it is done. It and a
loader print ``ready``, and ``ok N`` with the number of operations, and end with an error at the
first answer that is not what a filesystem without failures gives; with ``gone N`` and `EXIT_GONE`
when the mount is there no longer.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from tests.crash.gone import EXIT_GONE, is_gone
from tests.support.contents import random_bytes

NAMES = 3
BASES = 3
VALUES_MAX = 600_000


class Save(NamedTuple):
    """A line of the record."""

    is_done: bool
    name: str
    seed: int


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """The checkpoint with this number: some MB of random values."""
    chance = random.Random(seed)
    content = random_bytes(4 * 4 * VALUES_MAX, seed=seed)
    values = torch.frombuffer(bytearray(content), dtype=torch.int32)
    counts = [chance.randint(1, VALUES_MAX) for _ in range(chance.randint(1, 4))]
    return {
        f"layer{number}": layer.clone()
        for number, layer in enumerate(values[: sum(counts)].split(counts))
    }


def is_checkpoint(path: Path, seed: int, *, mapped: bool) -> bool:
    """Whether a file is the checkpoint with this number."""
    expected = tensors(seed)
    found = torch.load(path, mmap=mapped)
    return found.keys() == expected.keys() and all(
        torch.equal(found[name], expected[name]) for name in expected
    )


class Saver:
    """Overwrites checkpoints and checks them."""

    def __init__(self, root: Path, seed: int, record: Path) -> None:
        """Make the folder, or use the one that is there."""
        self.random = random.Random(seed)
        self.folder = root / f"saver{seed}"
        self.folder.mkdir()
        self.record = record.open("a", buffering=1)
        self.saved: dict[str, int] = {}
        self.count = 0

    def save(self) -> None:
        """Save in one of the ways in which programs do."""
        name, seed = f"step{self.random.randrange(NAMES)}.pt", self.random.randrange(2**31)
        path = self.folder / name
        state = tensors(seed)
        print("begun", name, seed, file=self.record)
        match self.random.randrange(3):
            case 0:
                torch.save(state, path)
            case 1:
                with path.open("wb") as stream:
                    torch.save(state, stream)
                    os.fsync(stream.fileno())
            case _:
                torch.save(state, self.folder / "next.pt")
                (self.folder / "next.pt").rename(path)
        print("done", name, seed, file=self.record)
        self.saved[name] = seed

    def check(self) -> None:
        """Load a checkpoint."""
        if self.saved:
            self.check_one(self.random.choice(sorted(self.saved)))

    def check_one(self, name: str) -> None:
        """Compare a checkpoint with what was saved."""
        mapped = self.random.random() < 0.5
        assert is_checkpoint(self.folder / name, self.saved[name], mapped=mapped), f"{name} differs"

    def run(self, stop: Path) -> None:
        """Work until told to stop."""
        while not stop.exists():
            self.random.choice((self.save, self.check))()
            self.count += 1
        for name in self.saved:
            self.check_one(name)


class Loader:
    """Loads what `make` has saved."""

    def __init__(self, root: Path, seed: int) -> None:
        """Load from the root of the mount."""
        self.root = root
        self.seed = seed
        self.count = 0

    def run(self, stop: Path) -> None:
        """Load until told to stop."""
        chance = random.Random()
        while not stop.exists():
            number = chance.randrange(BASES)
            path = self.root / f"base{number}.pt"
            if chance.random() < 0.7:
                with path.open("rb") as stream:
                    os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            mapped = chance.random() < 0.5
            assert is_checkpoint(path, self.seed + number, mapped=mapped), f"{path.name} differs"
            self.count += 1


def make(root: Path, seed: int) -> None:
    """Save what loaders load."""
    for number in range(BASES):
        torch.save(tensors(seed + number), root / f"base{number}.pt")


def read_record(record: Path) -> list[Save]:
    """What a saver said; a line that it did not finish says nothing."""
    lines = record.read_text().splitlines(keepends=True)
    words = [line.split() for line in lines if line.endswith("\n")]
    return [Save(word == "done", name, int(seed)) for word, name, seed in words]


def verify(root: Path, seed: int, record: Path) -> int:
    """Whether each checkpoint is the last one that was done, or the one that was begun after it."""
    allowed: dict[str, list[int | None]] = {}
    for is_done, name, number in read_record(record):
        before = allowed.setdefault(name, [None])
        allowed[name] = [number] if is_done else [before[0], number]
    for name, numbers in allowed.items():
        path = root / f"saver{seed}" / name
        found = [
            number
            for number in numbers
            if (number is None and not path.exists())
            or (number is not None and path.exists() and is_checkpoint(path, number, mapped=False))
        ]
        assert found, f"{name} is none of the checkpoints {numbers}"
    return len(allowed)


def use(user: Saver | Loader, root: Path, stop: Path) -> None:
    """Let a program use the mount until it is told to stop, or its mount is gone."""
    print("ready", flush=True)
    try:
        user.run(stop)
    except Exception as error:
        print(f"failed: {error}", flush=True)
        if not is_gone(error, root):
            raise
        print(f"gone {user.count}", flush=True)
        sys.exit(EXIT_GONE)
    print(f"ok {user.count}", flush=True)


def main() -> None:
    """See the module."""
    torch.set_num_threads(1)
    role, root, seed, stop, record = sys.argv[1:]
    place, number = Path(root), int(seed)
    match role:
        case "make":
            make(place, number)
        case "save":
            use(Saver(place, number, Path(record)), place, Path(stop))
        case "load":
            use(Loader(place, number), place, Path(stop))
        case "verify":
            print(f"ok {verify(place, number, Path(record))}", flush=True)


if __name__ == "__main__":
    main()
