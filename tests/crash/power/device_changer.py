"""A program that changes the devices of a mount while others save, and what a cut may leave of it.

``python -m tests.crash.power.device_changer LIBRARY ROOT SEED FOLDER…`` adds directories as
devices, drains devices a little at a time, takes drains back, and removes what is drained, at
random, until its input ends. Before and after each change it says in the recorder's log which
devices there are.

The rule. Changes are made one after the other, and each is durable when it is answered. So after a
cut there are the devices of after the last change that was answered, or of after the one that had
begun. A change that was refused, as by a server that was killed, may have been made and not be
durable: what was there before it is allowed, too, until another one is answered.

Concurrency: one thread; one such program on a mount.
"""

from __future__ import annotations

import random
import re
import select
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import (
    AddDevice,
    AskStatus,
    DrainNext,
    EndDrain,
    Question,
    RemoveDevice,
    StartDrain,
)
from fpfs.core.protocol.reports import DeviceState, DrainCursor
from fpfs.core.refusal import Refused
from tests.crash.power.recording import Event, Kind
from tests.crash.power.workload import Devices, DevicesWord, Recorder, Word

STEP_BYTES = (64 * 1024, 300_000, 2_000_000)
STEPS_MAX = 12
"""Of a drain, before something else may be done."""
REST_S_MAX = 0.05
SERVER_DIED = r"mount ended before|server .*(died|ended)"
NOT_YET = (
    r"holds contents of files|still being given back"
    # A server was killed in the middle of a change; what it left is not for it to empty.
    r"|is, or was, device \d+ of this filesystem"
    r"|no device is called|does not drain any more|was removed"
)
EXPECTED = re.compile(f"{NOT_YET}|{SERVER_DIED}")
"""What a change may be refused with."""


def devices_of(root: Path) -> Devices:
    """The devices of a mount: the names of their directories, and their states."""
    with ControlClient(find_fpfs(str(root), asked="devices"), asked="devices") as client:
        devices = client.ask(AskStatus()).devices
    return {Path(device.path).name: str(device.state) for device in devices}


class DeviceChanger:
    """The program. `devices` are those of now."""

    def __init__(self, recorder: Recorder, *, root: Path, folders: Sequence[Path], seed: int):
        """Say which devices there are; `folders` are those that may be."""
        self._recorder = recorder
        self._root = root
        self._folders = {folder.name: folder for folder in folders}
        self._random = random.Random(f"{seed} devices")
        self._numbers = count(1)
        self._cursors: dict[str, DrainCursor] = {}
        self._unusable: set[str] = set()
        self.devices: Devices = {}
        self._note(next(self._numbers), is_certain=True, begins=True)

    def _note(self, number: int, *, is_certain: bool, begins: bool = False) -> None:
        self.devices = devices_of(self._root)
        if begins:
            self._recorder.tell(DevicesWord(number=number))
        self._recorder.tell(
            DevicesWord(number=number, returned=True, certain=is_certain, devices=self.devices)
        )

    def _ask(self, question: Question[Any]) -> Any:
        """Ask; returns None when it is refused in a way that happens."""
        try:
            asked = type(question).__name__
            with ControlClient(find_fpfs(str(self._root), asked=asked), asked=asked) as client:
                return client.ask(question)
        except Refused as refused:
            if not EXPECTED.search(str(refused)):
                raise
            sys.stdout.write(f"{question}: {refused}\n")
            return None

    def _change(self, question: Question[Any]) -> Any:
        number = next(self._numbers)
        self._recorder.tell(DevicesWord(number=number))
        answer = self._ask(question)
        self._note(number, is_certain=answer is not None)
        return answer

    def _in(self, state: DeviceState) -> list[str]:
        return sorted(name for name, found in self.devices.items() if found == state)

    def _restarts(self) -> int:
        with ControlClient(find_fpfs(str(self._root), asked="status"), asked="status") as client:
            return client.ask(AskStatus()).restarts

    def _path(self, names: Sequence[str]) -> str:
        return str(self._folders[self._random.choice(names)])

    def add(self) -> None:
        """Add a directory that is none of the devices."""
        free = sorted(self._folders.keys() - self.devices.keys() - self._unusable)
        if free:
            path = self._path(free)
            if self._change(AddDevice(path=path)) is None and Path(path, "fpfs.json").exists():
                self._unusable.add(Path(path).name)

    def start_drain(self) -> None:
        """Let no new chunk go to a device, as long as there is another one."""
        used = self._in(DeviceState.OK)
        if len(used) > 1:
            path = self._path(used)
            self._cursors.pop(path, None)
            self._change(StartDrain(device=path))

    def drain(self) -> None:
        """Move some of what a draining device holds."""
        draining = self._in(DeviceState.DRAINING)
        if not draining:
            return
        path = self._path(draining)
        started = self._change(StartDrain(device=path))
        cursor: DrainCursor | None = self._cursors.get(path, DrainCursor())
        for _ in range(self._random.randint(1, STEPS_MAX)):
            if started is None or cursor is None:
                break
            size = self._random.choice(STEP_BYTES)
            done = self._ask(DrainNext(number=started.number, cursor=cursor, bytes_max=size))
            cursor = None if done is None else done.cursor
        self._cursors[path] = cursor or DrainCursor()

    def keep(self) -> None:
        """Take a drain back."""
        draining = self._in(DeviceState.DRAINING)
        if draining:
            self._change(EndDrain(device=self._path(draining)))

    def remove(self) -> None:
        """Remove a device that may be empty."""
        draining = self._in(DeviceState.DRAINING)
        if draining:
            path = self._path(draining)
            removed = self._change(RemoveDevice(device=path))
            if removed is not None and not removed.is_empty:
                # What a killed server left there may have content, and is kept.
                assert self._restarts(), f"{path} is not empty"
                self._unusable.add(Path(path).name)

    def run(self) -> None:
        """Add a device and drain one, and go on with any change until the input ends."""
        everything: list[Callable[[], None]] = [
            *[self.add] * 2, *[self.start_drain] * 2, *[self.drain] * 6, self.keep,
            *[self.remove] * 3,
        ]  # fmt: skip
        self.add()
        self.start_drain()
        while not select.select([sys.stdin], [], [], 0)[0]:
            self._random.choice(everything)()
            time.sleep(self._random.uniform(0, REST_S_MAX))  # any moment will do


_CHANGES = {
    ("", "ok"): "added",
    ("ok", "draining"): "drained",
    ("draining", "ok"): "kept",
    ("draining", ""): "removed",
}


class DeviceChange(NamedTuple):
    """A change: the events at which it began and had returned, and the devices of after it."""

    begin: int
    end: int
    is_certain: bool
    devices: Devices


def read_device_changes(events: Sequence[Event]) -> list[DeviceChange]:
    """The changes of the devices in a recording, in order."""
    begun: dict[int, int] = {}
    changes = []
    for number, event in enumerate(events):
        if event.operation.kind is not Kind.MARK or event.is_end:
            continue
        word = msgspec.json.decode(event.operation.data, type=Word | DevicesWord)
        if not isinstance(word, DevicesWord):
            continue
        if not word.returned:
            begun[word.number] = number
            continue
        begin = begun.pop(word.number)
        changes.append(DeviceChange(begin, number, word.certain, word.devices))
    assert not begun, f"changes of the devices never ended: {begun}"
    return changes


def count_changes(changes: Sequence[DeviceChange]) -> Counter[str]:
    """How often devices were added, drained, kept after all, and removed."""
    done: Counter[str] = Counter()
    for before, after in pairwise(change.devices for change in changes):
        for name in before.keys() | after.keys():
            if before.get(name) != after.get(name):
                done[_CHANGES[before.get(name, ""), after.get(name, "")]] += 1
    return done


def broken_devices(changes: Sequence[DeviceChange], cut: int, found: Devices) -> str:
    """Why these devices are not what a cut may leave, or an empty string."""
    sure = [n for n, change in enumerate(changes) if change.is_certain and change.end < cut]
    if not sure:
        return ""
    allowed = [change.devices for change in changes[sure[-1] :] if change.begin < cut]
    if found in allowed:
        return ""
    return f"the devices are {found}, and may be {' or '.join(map(str, allowed))}"


def main() -> None:
    """See the module."""
    library, root, seed, *folders = sys.argv[1:]
    DeviceChanger(
        Recorder(Path(library), 0),
        root=Path(root),
        folders=[Path(folder) for folder in folders],
        seed=int(seed),
    ).run()


if __name__ == "__main__":
    main()
