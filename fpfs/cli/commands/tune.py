"""``fpfs-ctl tune``: measures what the devices of a mount give, and proposes a policy.

Each measurement writes a file of its own through the mount, as a program would, by the policy of a
directory that is made for that, and waits until it is durable.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from fpfs.cli.asking import Flag, Json, ask, print_json
from fpfs.cli.show import (
    add_figures,
    byte_progress,
    ending_by_signal,
    new_table,
    open_console,
    say,
)
from fpfs.core.paths import inode_of_directory
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import (
    AskStatus,
    ChangePolicy,
    ExplainPolicy,
    FlushAll,
    PolicyChange,
)
from fpfs.core.refusal import Refused
from fpfs.core.tuning import BudgetSpent, Climb, Measured, Setting, Space, space_of, sweep
from fpfs.core.units import format_exact, format_rate, format_size, parse_size_bytes

PREFIX = ".fpfs-tune-"
WRITE_BYTES = 8 * 1024 * 1024
SAMPLE_BYTES_MIN = 16 * 1024 * 1024
SAMPLES_EXPECTED = 16
"""Measurements that the bytes and the time have to do for, the first one included."""


class Sample(msgspec.Struct, kw_only=True, frozen=True):
    """One measurement."""

    chunk_bytes: int
    depth: int
    width: int
    bytes_per_s: float


class TuneReport(msgspec.Struct, kw_only=True, frozen=True):
    """What was measured, each with `sample_bytes`, and the settings that are proposed."""

    sample_bytes: int
    bytes_written: int
    samples: tuple[Sample, ...]
    proposed: dict[str, str]
    applied: bool


def tune(
    directory: str = ".",
    /,
    *,
    apply: Flag = False,
    exhaustive: Flag = False,
    bytes: str = "8G",  # noqa: A002 (the option's name)
    time: float = 60.0,
    sample: str | None = None,
    json: Json = False,
) -> int:
    """Measure chunk sizes, depths and widths on the mount of DIRECTORY; propose a policy for it.

    Files are written in a directory .fpfs-tune-* in DIRECTORY, which is removed at the end. Others
    that use the devices meanwhile make the figures smaller.

    Parameters
    ----------
    apply
        Set what is proposed.
    exhaustive
        Measure all combinations, not only those that lead to faster ones.
    bytes
        Bytes to write at most.
    time
        Seconds to measure at most.
    sample
        Bytes that each measurement writes (default: what these bytes and seconds allow).
    """
    asked = f"tune {directory}"
    bytes_max = parse_size_bytes(bytes, name="--bytes")
    sample_bytes = 0 if sample is None else parse_size_bytes(sample, name="--sample")
    if bytes_max < SAMPLES_EXPECTED * SAMPLE_BYTES_MIN or not 1 <= time <= 86_400:
        raise Refused(
            asked=f"--bytes {bytes} --time {time:g}",
            wrong="this is too little, or too much, to measure anything",
            remedy=f"take {format_exact(SAMPLES_EXPECTED * SAMPLE_BYTES_MIN)} or more, and 1 to"
            " 86400 seconds",
        )
    with ending_by_signal(), _Bench(directory, bytes_max, time, sample_bytes, asked=asked) as bench:
        samples, best = _measure(bench, exhaustive=exhaustive)
    report = _report(bench, samples, best, apply=apply)
    if apply:
        _apply(directory, report.proposed, asked=asked)
    if json:
        print_json(report)
    else:
        _show(report, directory)
    return 0


def _measure(bench: _Bench, *, exhaustive: bool) -> tuple[list[Measured], Setting]:
    """Return what was measured, and the best of it."""
    if exhaustive:
        measured = list(sweep(bench.space, bench.measure))
        if not measured:
            raise bench.nothing_measured()
        return measured, max(measured, key=lambda each: each.bytes_per_s).setting
    climb = Climb(bench.space, bench.measure)
    try:
        best = climb.run()
    except BudgetSpent:
        raise bench.nothing_measured() from None
    return climb.measured, best


class _Bench:
    """A directory in which files are written by any setting; gone after the block."""

    def __init__(
        self, directory: str, bytes_max: int, time_s: float, sample_bytes: int, *, asked: str
    ) -> None:
        """`sample_bytes` is what each measurement writes; 0: what fits the other two."""
        self._asked = asked
        self._bytes_max = bytes_max
        self._time_s = time_s
        self._client = ControlClient(find_fpfs(directory, asked=asked), asked=asked)
        top = inode_of_directory(directory, asked=asked)
        status = self._client.ask(AskStatus())
        found = self._client.ask(ExplainPolicy(directory=top, name=b"sample"))
        self.space: Space = space_of(
            slot_bytes=status.staging.buffer_bytes,
            depth=status.depth,
            device_count=len(found.devices),
        )
        self.sample_bytes = -(-sample_bytes // WRITE_BYTES) * WRITE_BYTES
        self.bytes_written = 0
        self._folder = Path(directory, f"{PREFIX}{os.getpid()}")
        self._progress = byte_progress()

    def __enter__(self) -> _Bench:
        try:
            self._remove_left()
            self._folder.mkdir()
            self._ino = self._folder.stat().st_ino
            # Anonymous memory that was touched, as a program's tensors are.
            self._buffer = mmap.mmap(-1, WRITE_BYTES)
            self._buffer.write(os.urandom(WRITE_BYTES))
            self._progress.start()
            self._task = self._progress.add_task("tune", total=self._bytes_max)
            self._began_s = time.monotonic()
            self._size_samples()
        except OSError as error:
            self._close()
            raise self._refused(error) from None
        except BaseException:
            self._close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def _remove_left(self) -> None:
        """Remove what a command left that was killed."""
        for left in self._folder.parent.glob(f"{PREFIX}*"):
            pid = left.name.removeprefix(PREFIX)
            if pid.isdecimal() and not Path("/proc", pid).exists():
                shutil.rmtree(left)

    def _close(self) -> None:
        self._progress.stop()
        shutil.rmtree(self._folder, ignore_errors=not self._folder.exists())
        self._client.close()

    def _size_samples(self) -> None:
        """Choose how much each measurement writes, by what a small one takes."""
        first_bytes = max(SAMPLE_BYTES_MIN, min(self._bytes_max // SAMPLES_EXPECTED // 4, 1 << 28))
        rate = self._write(self.space.start, self.sample_bytes or first_bytes)
        if self.sample_bytes:
            return
        by_time = int(rate * self._time_s / SAMPLES_EXPECTED)
        whole = min(self._bytes_max // SAMPLES_EXPECTED, by_time) // WRITE_BYTES * WRITE_BYTES
        self.sample_bytes = max(SAMPLE_BYTES_MIN, whole)

    def measure(self, setting: Setting) -> float:
        """Return the bytes that a setting writes durably in a second. Raises `BudgetSpent`."""
        if self.bytes_written + self.sample_bytes > self._bytes_max:
            raise BudgetSpent
        if time.monotonic() - self._began_s > self._time_s:
            raise BudgetSpent
        try:
            return self._write(setting, self.sample_bytes)
        except OSError as error:
            raise self._refused(error) from None

    def _write(self, setting: Setting, size_bytes: int) -> float:
        values = settings_of(setting, self.space) | {"ack": "early", "commit": "close"}
        values |= {"versions": "0", "first": "rotate", "buffers": "auto"}
        self._client.ask(ChangePolicy(ino=self._ino, change=PolicyChange(values=values)))
        path = self._folder / "sample"
        with self._opened(path) as descriptor:
            began_s = time.monotonic()
            for _ in range(size_bytes // WRITE_BYTES):
                os.write(descriptor, self._buffer)
                self._progress.advance(self._task, WRITE_BYTES)
            os.fsync(descriptor)
            took_s = time.monotonic() - began_s
        self.bytes_written += size_bytes
        # The next one is not to meet what this one leaves behind.
        self._client.ask(FlushAll())
        return size_bytes / took_s

    @contextlib.contextmanager
    def _opened(self, path: Path) -> Iterator[int]:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
            path.unlink()

    def nothing_measured(self) -> Refused:
        """Tell that the budget was too small for one measurement."""
        return Refused(
            asked=self._asked,
            wrong=f"{self._time_s:g} s and {format_size(self._bytes_max)} were not enough",
            remedy="allow more with --time and --bytes",
        )

    def _refused(self, error: OSError) -> Refused:
        return Refused(
            asked=self._asked,
            wrong=f"{error.filename or self._folder}: {error.strerror}",
            remedy="name a directory on the mount that you can write to, with room",
        )


def settings_of(setting: Setting, space: Space) -> dict[str, str]:
    """Return the policy that a setting is; the most that there is needs no number."""
    return {
        "width": "all" if setting.width == space.widths[-1] else str(setting.width),
        "chunk": format_exact(setting.chunk_bytes),
        "depth": "auto" if setting.depth == space.depths[-1] else str(setting.depth),
    }


def _report(bench: _Bench, measured: list[Measured], best: Setting, *, apply: bool) -> TuneReport:
    return TuneReport(
        sample_bytes=bench.sample_bytes,
        bytes_written=bench.bytes_written,
        samples=tuple(
            Sample(
                chunk_bytes=each.setting.chunk_bytes,
                depth=each.setting.depth,
                width=each.setting.width,
                bytes_per_s=each.bytes_per_s,
            )
            for each in measured
        ),
        proposed=settings_of(best, bench.space),
        applied=apply,
    )


def _apply(directory: str, values: dict[str, str], *, asked: str) -> None:
    ino = inode_of_directory(directory, asked=asked)
    ask(directory, ChangePolicy(ino=ino, change=PolicyChange(values=values)), asked=asked)


def percent_of(figure: float, best: float) -> int:
    """A figure in percent of the best one, rounded down: the best one alone has all.

    Divided first: of a float, times 100 and divided by itself may be less than 100.
    """
    return int(100 * (figure / best))


def _show(report: TuneReport, directory: str) -> None:
    table = new_table()
    add_figures(table, "width", "chunk", "depth", "durable", "of the best")
    most = max(sample.bytes_per_s for sample in report.samples)
    for sample in report.samples:
        table.add_row(
            str(sample.width),
            format_exact(sample.chunk_bytes),
            str(sample.depth),
            format_rate(sample.bytes_per_s),
            f"{percent_of(sample.bytes_per_s, most)}%",
        )
    console = open_console()
    console.print(table)
    words = " ".join(f"{key}={value}" for key, value in report.proposed.items())
    say(console, f"each of {format_size(report.sample_bytes)}, written by one process")
    if report.applied:
        say(console, f"set: {words}")
    else:
        say(console, f"proposed: fpfs-ctl policy set {directory} {words}")
