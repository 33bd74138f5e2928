"""Every error injected one by one: saves on a mount, of which one call below fails.

``python -m tests.crash.injection [--only FAULT] [--every N]`` counts the calls of two saves, a new
file and one that replaces another, then repeats them with the first call failing, the second, and
so on, each with every error that it may have. After each the file has its new content, or the
program was told and it has the old one; nothing is left over. `--only` repeats one.

Concurrency: one thread.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from fpfs.testing.mounted import CommandFailed, Mount, live_mounts, mounted
from tests.support.contents import assert_same, random_bytes
from tests.support.failures.damage import unknown_objects
from tests.support.failures.injection import ERRORS, Call, Fault, Injector
from tests.support.servers import wait_collected

CHUNK_BYTES = 256 * 1024
OLD = random_bytes(5 * CHUNK_BYTES + 1000, seed=41)
NEW = random_bytes(7 * CHUNK_BYTES + 77, seed=42)
PIECE_BYTES = 100_000
PATIENCE_S = 60.0
SLOTS_KEPT = 2
"""Slots that are in use without anybody's writing: kept ready by a channel thread."""
ALLOWED = r" (WARNING|ERROR) "
"""Any complaint: what matters is what comes of it."""


class Outcome(NamedTuple):
    """What came of a save: whether the fault happened, and whom it reached."""

    fired: bool
    reported: bool


class Saver:
    """Saves on a mount whose calls may fail."""

    def __init__(self, mount: Mount, injector: Injector) -> None:
        """Start with a file that is durable."""
        self.mount = mount
        self.injector = injector
        self.old = mount.root / "old.bin"
        self.fresh = mount.root / "fresh"
        self.old.write_bytes(OLD)
        mount.flush()
        self.handles = self._figures()[0]

    def path(self, name: str) -> Path:
        """The file of a save, `SAVES` has their names."""
        return self.fresh if name == SAVES[0] else self.old

    def save(self, path: Path) -> bool:
        """Write, fsync and close; whether all of it was said to have worked."""
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        except OSError:
            return False
        worked = True
        try:
            for at in range(0, len(NEW), PIECE_BYTES):
                os.write(descriptor, NEW[at : at + PIECE_BYTES])
            os.fsync(descriptor)
        except OSError:
            worked = False
        try:
            os.close(descriptor)
        except OSError:
            worked = False
        return worked

    def run(self, path: Path, fault: Fault | None) -> Outcome:
        """One save with one fault, checked, and everything as at the start again."""
        self.injector.begin(fault)
        worked = self.save(path)
        failures = self.mount.flush().failures
        fired = self.injector.end()
        if worked:
            assert_same(path.read_bytes(), NEW)
        if worked and not failures:
            # The kernel tells of a close some time after it.
            self._wait(
                lambda: self._figures() <= (self.handles, SLOTS_KEPT), "handles or slots stay"
            )
        self._remount(may_fail=not worked or bool(failures))
        self._check(path, worked=worked)
        self._start_over(path)
        return Outcome(fired, not worked)

    def _wait(self, condition: Callable[[], bool], complaint: str) -> None:
        """Return when a condition holds; fail when it does not for long."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"{complaint}: {self._figures()}"

    def _figures(self) -> tuple[int, int]:
        """Open handles, and slots in use."""
        status = self.mount.status()
        return status.channel["handles"], status.staging.bytes_used // (1 << 20)

    def _remount(self, *, may_fail: bool) -> None:
        """End and begin again; nothing may be left on the devices that nobody knows."""
        try:
            self.mount.unmount()
        except CommandFailed:
            assert may_fail, "an unmount lost something that nobody was told of"
            if self.mount in live_mounts:
                self.mount.forget()
        assert self.mount.entry() is None
        left = unknown_objects(self.mount)
        assert not left or may_fail, f"objects are left over: {left}"
        self.mount.mount()
        # What a version had that was not kept goes in the background, also after an orderly end.
        wait_collected(self.mount)

    def _check(self, path: Path, *, worked: bool) -> None:
        """The new content, or the one before and the program was told."""
        content = path.read_bytes() if path.exists() else b""
        if worked or content == NEW:
            assert_same(content, NEW)
        else:
            assert_same(content, OLD if path == self.old else b"")
        assert not [copy for copy in self.mount.status().catalog.copies if copy.trouble]

    def _start_over(self, path: Path) -> None:
        if path == self.old:
            path.write_bytes(OLD)
        else:
            path.unlink(missing_ok=True)
        self.mount.flush()


@contextlib.contextmanager
def saver(parent: Path, kind: type[Saver] = Saver) -> Iterator[Saver]:
    """A mount on two devices whose calls may fail."""
    injector = Injector(parent / "faults")
    with mounted(
        devices=2,
        parent=parent,
        staging="16M",
        options=("chunk=256K",),
        environment=injector.environment([parent]),
    ) as mount:
        mount.allow_log(ALLOWED)
        yield kind(mount, injector)


def faults_of(counts: dict[Call, int], *, every: int = 1, start: int = 0) -> list[Fault]:
    """Every fault that can be, or each `every`-th of them."""
    found = [
        Fault(call, number, error)
        for call, count in counts.items()
        for number in range(1, count + 1)
        for error in ERRORS[call]
    ]
    return found[start % every :: every]


SAVES = ("new", "overwrite")


def inject(parent: Path, *, every: int = 1, start: int = 0) -> Counter[str]:
    """Inject faults into both saves; returns how often what came of it."""
    faults: list[tuple[str, Fault]] = []
    with saver(parent) as saves:
        for name in SAVES:
            assert saves.run(saves.path(name), None) == Outcome(fired=False, reported=False)
            counts = saves.injector.counts()
            print(f"{name}: {', '.join(f'{n} {c.name.lower()}' for c, n in counts.items())}")
            faults += [(name, fault) for fault in faults_of(counts, every=every, start=start)]
    totals: Counter[str] = Counter()
    while faults:
        count = len(faults)
        # A mount at which a promise was broken is given up; the others are tried nevertheless.
        try:
            with saver(parent) as saves:
                while faults:
                    inject_one(saves, *faults.pop(0), totals)
        except AssertionError as error:
            # At a fault, which has been named, or at the mount's end: what it lost, and its log.
            totals["violations"] += 1
            print(f"violation: {error}", file=sys.stderr)
            if len(faults) == count:
                raise  # there is no mount
    print(summary(totals))
    return totals


def inject_one(saves: Saver, name: str, fault: Fault, totals: Counter[str]) -> None:
    """Inject one fault and count what came of it."""
    try:
        outcome = saves.run(saves.path(name), fault)
    except BaseException:
        print(f"violation at {name}:{fault}", file=sys.stderr)
        raise
    if not outcome.fired:
        totals["not reached"] += 1
    else:
        totals["injections"] += 1
        totals["reported" if outcome.reported else "retried"] += 1


def summary(totals: Counter[str]) -> str:
    """One line of counts."""
    return (
        f"{totals['injections']} injections, errors reported to caller: {totals['reported']},"
        f" retried or without effect: {totals['retried']} ({totals['not reached']} not reached),"
        f" violations: {totals['violations']}"
    )


def main() -> int:
    """Inject all faults, or one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="save:call:number:errno, such as new:ring_write:3:EIO")
    parser.add_argument("--every", type=int, default=1, help="each N-th only")
    parser.add_argument("--start", type=int, default=0, help="the first of them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if not arguments.only:
            totals = inject(Path(folder), every=arguments.every, start=arguments.start)
            return 1 if totals["violations"] or not totals["injections"] else 0
        name, call, number, error = arguments.only.split(":")
        code = 0 if error == "short" else getattr(errno, error)
        with saver(Path(folder)) as saves:
            fault = Fault(Call[call.upper()], int(number), code)
            print(saves.run(saves.path(name), fault))
            sys.stdout.write(saves.mount.log_text())
    return 0


if __name__ == "__main__":
    sys.exit(main())
