"""Cuts the power of recorded runs, again and again, and mounts what is left: ``make crash``.

``python -m tests.crash.power.cuts [--cuts N] [--seed S]`` records programs on a mount (`workload`)
below SQLite and the rings, replays cuts (`disk`), mounts each (`image`) and checks what the
programs had been promised (`promises`). In every third recording the devices change, too
(`device_changer`); ``--changes`` says so of all or of none. It prints what was done; the exit
status is 1 if a promise was broken. Then the recording and the image stay, and ``--replay FOLDER
--cut SEED`` repeats it.

Concurrency: the mount is recorded with its programs side by side; cuts are replayed one by one.
"""

from __future__ import annotations

import argparse
import enum
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from fpfs.core.refusal import Refused
from fpfs.daemon.devices.arena import ARENA_FOLDER
from tests.crash.power.device_changer import (
    DeviceChange,
    broken_devices,
    count_changes,
    devices_of,
    read_device_changes,
)
from tests.crash.power.disk import Disk, Names, write_image
from tests.crash.power.disk_file import Tally
from tests.crash.power.image import (
    MountedImage,
    MountRefused,
    Violation,
    check_at_rest,
    check_left_out,
    check_log,
    named_devices,
)
from tests.crash.power.promises import (
    Found,
    History,
    broken_former_version,
    broken_promise,
    dangling_pointer,
    look,
    read_histories,
)
from tests.crash.power.recorded import LOG_NAME, Course, device_folders, record
from tests.crash.power.recording import (
    Event,
    Kind,
    Operation,
    read_log,
)

STEPS = 120
"""Random things that each program does in a recording."""
CUTS_A_RECORDING = 200
AT_THE_END = 0.02
"""Share of the cuts that come after the clean end."""
KILLS = 2
IMAGES_BYTES_MAX = 2 << 30
"""More than an image, and the arena of its mount, take."""

FORGETTABLE: dict[str, Callable[[Operation], bool]] = {
    "objects": lambda sync: sync.kind is Kind.SYNC_FILE and "/objects/" in sync.path,
    "log": lambda sync: sync.kind is Kind.SYNC_FILE and sync.path.endswith("catalog.db-wal"),
    "catalog": lambda sync: sync.kind is Kind.SYNC_FILE and sync.path.endswith("catalog.db"),
    "folders": lambda sync: sync.kind is Kind.SYNC_FOLDER,
    "object-folders": lambda sync: sync.kind is Kind.SYNC_FOLDER and "/objects" in sync.path,
}
"""Flushes that the simulated disk can be told to ignore, as if they had not been asked for."""


class Cut(NamedTuple):
    """Where the power is cut (a number of events), and what chooses among what may be left."""

    event: int
    choice: int

    def __str__(self) -> str:
        """As on the command line."""
        return f"{self.event}:{self.choice}"

    @classmethod
    def parse(cls, text: str) -> Cut:
        """The reverse."""
        event, choice = text.split(":")
        return cls(int(event), int(choice))


class Totals:
    """What was done, for the report."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.cuts = 0
        self.refused = 0
        """Cuts in the first mount, whose half-made filesystem had to be made anew."""
        self.tally = Tally()
        self.recorded: Counter[str] = Counter()
        self.kept = 0
        """Removed objects that were kept for new bytes, under another name."""
        self.devices: Counter[str] = Counter()
        """How often devices were added, drained, kept and removed in recordings."""
        self.violations = 0

    def report(self) -> str:
        """The figures."""
        kinds = ", ".join(
            f"{self.recorded[kind.name]} {kind.name}" for kind in Kind if self.recorded[kind.name]
        )
        done = self.tally.counts
        return (
            f"recorded: {kinds}\n{self.kept} removed objects were kept\n"
            f"devices: {dict(self.devices)}\n"
            f"{self.cuts} cuts, each mounted through the kernel; of the uncertain operations"
            f" {done['kept']} were kept, {done['dropped']} dropped, {done['torn']} torn,"
            f" {done['reordered']} kept although an earlier one was not;"
            f" {self.refused} cuts fell into the format; {self.violations} violations"
        )


class Changes(enum.StrEnum):
    """In which recordings the devices of the mount change."""

    SOMETIMES = "sometimes"
    ALWAYS = "always"
    NEVER = "never"

    def in_recording(self, number: int) -> bool:
        """Whether they do in that one."""
        return self is Changes.ALWAYS or (self is Changes.SOMETIMES and number % 3 == 1)


class Run(NamedTuple):
    """What is recorded, and how cuts are replayed.

    `forget` names flushes that the disk ignores, `images` is a folder.
    """

    order: Names
    forget: str
    images: Path
    changes: Changes = Changes.SOMETIMES


def count_kept(events: Sequence[Event]) -> int:
    """How often a removed object got another name."""
    return sum(
        event.is_end
        and event.operation.kind is Kind.RENAME
        and not event.operation.failed
        and "/objects/" in event.operation.path
        for event in events
    )


def choose_cuts(events: Sequence[Event], *, count: int, chance: random.Random) -> list[Cut]:
    """Cuts in order.

    Half of them are anywhere, half close to a flush or to a word of a program, and a few after the
    clean end.
    """
    close = [
        number
        for number, event in enumerate(events)
        if event.operation.kind in (Kind.SYNC_FILE, Kind.SYNC_FOLDER, Kind.MARK)
    ]
    cuts = []
    for _ in range(count):
        event = chance.randint(1, len(events))
        if chance.random() < 0.5:
            event = min(max(chance.choice(close) + chance.randint(-2, 3), 1), len(events))
        if chance.random() < AT_THE_END:
            event = len(events)
        cuts.append(Cut(event, chance.randrange(2**31)))
    return sorted(cuts)


class Promised(NamedTuple):
    """What programs were told, and what devices there were, in a recording."""

    histories: dict[int, History]
    changes: list[DeviceChange]


def replay(
    folder: Path, events: list[Event], cuts: Sequence[Cut], run: Run, totals: Totals
) -> Iterator[tuple[Cut, str]]:
    """Replay cuts, which are in order; yields those that broke a promise, and which."""
    promised = Promised(read_histories(events), read_device_changes(events))
    answered = next(n for n, event in enumerate(events) if event.operation.kind is Kind.MARK)
    forgets = FORGETTABLE[run.forget] if run.forget else lambda _: False
    disk = Disk(device_folders(folder), order=run.order, forgets=forgets, tally=totals.tally)
    done = 0
    for cut in cuts:
        disk.advance(events[done : cut.event])
        done = cut.event
        images = device_folders(run.images)
        for image in images:
            shutil.rmtree(image, ignore_errors=True)
            image.mkdir()
        for left, image in zip(disk.lose_power(random.Random(cut.choice)), images, strict=True):
            write_image(left, image)
        totals.cuts += 1
        broken = find_broken(images, run.images, promised=promised, cut=cut.event)
        if isinstance(broken, MountRefused) and cut.event <= answered:
            totals.refused += 1
        elif broken is not None:
            totals.violations += 1
            yield cut, str(broken)


def find_broken(
    images: Sequence[Path], folder: Path, *, promised: Promised, cut: int
) -> Exception | None:
    """What is wrong with an image, if anything: a promise, or that something fails at all."""
    try:
        check(images, folder, promised=promised, cut=cut)
    except (Violation, Refused, OSError) as error:
        return error
    return None


def check(images: Sequence[Path], folder: Path, *, promised: Promised, cut: int) -> None:
    """Mount an image and check every promise; raises `Violation`."""
    histories = promised.histories
    with MountedImage(named_devices(images), folder) as image:
        devices = devices_of(image.root)
        if broken := broken_devices(promised.changes, cut, devices):
            raise Violation(broken)
        free = check_left_out(images, devices) if promised.changes else []
        strange = set(os.listdir(image.root)) - {f"program{program}" for program in histories}
        if strange:
            raise Violation(f"nobody made {sorted(strange)}")
        for program, history in histories.items():
            found = look(image.root, f"program{program}")
            others = [other for other in histories.values() if other is not history]
            broken = broken_promise(history, cut, found, others=others)
            pointer = f"program{program}/latest"
            if not broken and pointer in found:
                content = (image.root / pointer).read_bytes()
                broken = dangling_pointer(history, found, pointer=pointer, content=content)
            broken = broken or broken_former_version(history, look_at_former(image.root, program))
            if broken:
                raise Violation(f"program {program}: {broken}")
        new = image.root / "new"
        new.write_bytes(b"after the cut")
        for folder in free[:1]:
            image.add(folder)
        image.flush()
        assert new.read_bytes() == b"after the cut"
    check_log(image)
    check_at_rest(images)


def look_at_former(root: Path, program: int) -> dict[str, Found]:
    """The former versions of a program's names, by path from the mount's root."""
    found = look(root, f".fpfs/versions/program{program}")
    return {path: each for path, each in found.items() if each.kind == "file"}


def images_folder() -> Path:
    """A fresh folder for images: in memory where there is room, which is much faster."""
    shared = os.statvfs(ARENA_FOLDER)
    is_roomy = shared.f_bavail * shared.f_frsize > IMAGES_BYTES_MAX
    return Path(tempfile.mkdtemp(prefix="fpfs-image-", dir=ARENA_FOLDER if is_roomy else None))


def cut_again_and_again(*, cuts: int, seed: int, steps: int, run: Run, totals: Totals) -> str:
    """Record, and cut; returns what was broken first and how to repeat it, or an empty string."""
    for first in range(0, cuts, CUTS_A_RECORDING):
        folder = Path(tempfile.mkdtemp(prefix="fpfs-power-"))
        number = first // CUTS_A_RECORDING
        chance = random.Random(f"{seed} {number}")
        events = record(
            folder,
            programs=1 + number % 2,
            seed=chance.randrange(2**31),
            steps=steps,
            course=Course(
                kills=KILLS if number % 3 == 2 else 0,
                changes_devices=run.changes.in_recording(number),
                small_objects=number % 3 != 1,
            ),
        )
        totals.devices.update(count_changes(read_device_changes(events)))
        totals.recorded.update(e.operation.kind.name for e in events if not e.is_end)
        totals.kept += count_kept(events)
        count = min(CUTS_A_RECORDING, cuts - first)
        chosen = choose_cuts(events, count=count, chance=chance)
        print(f"{len(events)} events recorded, {totals.cuts} cuts so far", flush=True)
        for cut, broken in replay(folder, events, chosen, run, totals):
            forget = f" --forget {run.forget}" if run.forget else ""
            return (
                f"{broken}\nafter {totals.cuts} cuts; the image is in {run.images}; repeat:"
                f" python -m tests.crash.power.cuts --replay {folder} --cut {cut}"
                f" --names {run.order}{forget}"
            )
        shutil.rmtree(folder)
    return ""


def main() -> int:
    """See the module; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cuts", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.randrange(2**31))
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--names", type=Names, default=Names.POSIX, choices=list(Names))
    parser.add_argument("--forget", default="", choices=["", *FORGETTABLE])
    parser.add_argument("--changes", type=Changes, default=Changes.SOMETIMES, choices=list(Changes))
    parser.add_argument("--replay", type=Path)
    parser.add_argument("--cut", type=Cut.parse)
    chosen = parser.parse_args()
    run = Run(chosen.names, chosen.forget, images_folder(), chosen.changes)
    totals = Totals()
    if chosen.replay:
        events = read_log(chosen.replay / LOG_NAME).events
        found = list(replay(chosen.replay, events, [chosen.cut], run, totals))
        broken = found[0][1] if found else ""
        print(broken or "no promise is broken", f"the image is in {run.images}", sep="\n")
        return bool(broken)
    print(f"seed {chosen.seed}", flush=True)
    begun_s = time.monotonic()
    broken = cut_again_and_again(
        cuts=chosen.cuts, seed=chosen.seed, steps=chosen.steps, run=run, totals=totals
    )
    print(f"{totals.report()} ({time.monotonic() - begun_s:.0f} s)")
    if broken:
        print(broken)
        return 1
    shutil.rmtree(run.images)
    return 0


if __name__ == "__main__":
    sys.exit(main())
