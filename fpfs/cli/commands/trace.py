"""``fpfs-ctl trace``: one save as a timeline for Perfetto or Chrome."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Annotated, BinaryIO

import msgspec
from cyclopts import Parameter

from fpfs.cli.entry import EXIT_INTERRUPTED
from fpfs.cli.show import check_timeout, ending_by_signal
from fpfs.core.chrome_trace import Traced, chrome_trace
from fpfs.core.paths import show_text
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.questions import BeginTrace, EndTrace, ReadTrace
from fpfs.core.protocol.trace import EventKind, TraceState, TransferKind
from fpfs.core.refusal import Refused, refuse_empty

WAITING = "waiting for a save of"
BEGUN = "a save began of"


def trace(
    file: str,
    /,
    *,
    output: Annotated[str, Parameter(name=["--output", "-o"])],
    timeout: float | None = None,
) -> int:
    """Trace the next save of FILE, from its opening until it is durable, as a timeline.

    FILE need not exist yet: the command waits until somebody opens it for writing, or fpfs.save
    writes it. Of another program that writes another name first and renames it (FILE.tmp), name
    that one. The output is read by
    ui.perfetto.dev and chrome://tracing: requests, chunks in staging, what each device had in its
    queue, flushes, commit steps. Ctrl-C ends it; a save under way is written as far as it was seen.

    Parameters
    ----------
    output
        The JSON file to write.
    timeout
        Give up after so many seconds, with exit status 1.
    """
    check_timeout(timeout)
    asked = f"trace of {file}"
    refuse_empty(file, what="path", asked=asked)
    folder, name = os.path.split(file)
    if not name or os.path.isdir(file):
        raise Refused(asked=asked, wrong="this is a directory", remedy="name a file in it")
    entry = find_fpfs(folder or ".", asked=asked)
    with ControlClient(entry, asked=asked) as client, _written_whole(output, asked) as stream:
        try:
            directory = os.stat(folder or ".").st_ino
        except OSError as error:
            raise Refused(
                asked=asked, wrong=f"{error.strerror}", remedy="name a file on the mount"
            ) from None
        begun = client.ask(BeginTrace(directory=directory, name=os.fsencode(name)))
        deadline_s = None if timeout is None else time.monotonic() + timeout
        traced = Traced(
            path=show_text(file), opened_ns=0, ended_ns=0, state="", lost=0, device_paths={}
        )
        interrupted = False
        try:
            with ending_by_signal():
                _read(client, begun.trace, traced, deadline_s=deadline_s, asked=asked)
        except KeyboardInterrupt:
            interrupted = True
            if not traced.opened_ns:
                raise
        finally:
            # On another connection: an answer may be under way on this one. The server may be gone,
            # and the trace with it.
            with contextlib.suppress(Refused), ControlClient(entry, asked=asked) as other:
                other.ask(EndTrace(trace=begun.trace))
        stream.write(msgspec.json.encode(chrome_trace(traced)))
    return _tell(traced, output, interrupted=interrupted)


def _read(
    client: ControlClient, number: int, traced: Traced, *, deadline_s: float | None, asked: str
) -> None:
    """Read until the save is over."""
    # Always: who starts the save by a script has to know that it is waited for.
    sys.stderr.write(f"{WAITING} {traced.path}\n")
    sys.stderr.flush()
    has_begun = False
    while True:
        read = client.ask(ReadTrace(trace=number))
        traced.opened_ns, traced.device_paths = read.opened_ns, read.device_paths
        traced.lost, traced.state = read.lost, str(read.state)
        traced.ended_ns = read.ended_ns or time.monotonic_ns()
        traced.events += read.events
        traced.steps += read.steps
        # Only now: who is told of it may interrupt at once, and is owed what was seen.
        if not has_begun and any(event.kind is EventKind.REQUEST for event in read.events):
            has_begun = True
            sys.stderr.write(f"{BEGUN} {traced.path}\n")
            sys.stderr.flush()
        if read.state.is_over and not read.has_more:
            return
        if deadline_s is not None and time.monotonic() > deadline_s:
            is_waiting = read.state is TraceState.WAITING
            raise Refused(
                asked=asked,
                wrong="nobody opened it for writing in time"
                if is_waiting
                else f"its save was not durable in time ({read.state})",
                remedy="wait longer with --timeout",
            )


@contextlib.contextmanager
def _written_whole(output: str, asked: str) -> Iterator[BinaryIO]:
    """A file that takes its place when the block ends well, and is gone when it does not."""
    made = ""
    try:
        descriptor, made = tempfile.mkstemp(
            prefix=f".{os.path.basename(output)}.", dir=os.path.dirname(output) or "."
        )
        if os.path.isdir(output):
            raise IsADirectoryError(21, "it is a directory")
    except OSError as error:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made)
        raise Refused(
            asked=asked,
            wrong=f"{output} cannot be written ({error.strerror})",
            remedy="name a file in a directory that you can write to",
        ) from None
    try:
        with open(descriptor, "wb") as stream:
            umask = os.umask(0)
            os.umask(umask)
            os.fchmod(stream.fileno(), 0o666 & ~umask)
            yield stream
        os.replace(made, output)
    except BaseException:
        os.unlink(made)
        raise


def _tell(traced: Traced, output: str, *, interrupted: bool) -> int:
    """Say what was traced; returns the exit status."""
    count = {
        kind: sum(event.kind is kind for event in traced.events)
        for kind in (EventKind.REQUEST, EventKind.CHUNK)
    }
    devices = {
        event.device
        for event in traced.events
        if event.kind is EventKind.TRANSFER and event.op == TransferKind.WRITE
    }
    took_s = (traced.ended_ns - traced.opened_ns) / 1e9
    how = "interrupted" if interrupted else traced.state
    sys.stdout.write(
        f"{output}: {traced.path}, {how} after {took_s:.3f} s; {count[EventKind.REQUEST]} requests,"
        f" {count[EventKind.CHUNK]} chunks, {len(devices)} devices; ui.perfetto.dev shows it\n"
    )
    if traced.lost:
        sys.stderr.write(f"warning: {traced.lost} events came too fast and are missing\n")
    return EXIT_INTERRUPTED if interrupted else 0
