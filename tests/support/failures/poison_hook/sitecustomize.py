"""Servers that die of requests, or at points of their way, as a test's folder says.

Python imports this by itself in every process that has this folder in PYTHONPATH; it does something
in servers only. A request for the extended attribute ``user.NAME`` meets what the file NAME in the
folder FPFS_TEST_POISON says, if there is one. So does a server that comes to the point NAME (see
`mark_points`) meet the file ``at-NAME``. Each task comes to the point ``task-NAME`` when it begins,
where NAME is trio's for it.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    Handler = Callable[..., Awaitable[object]]


def die(how: str) -> NoReturn:
    """End this process by a fault, or by an error of its own code."""
    if how == "error":
        raise RuntimeError("as it was ordered")
    if how == "memory":
        raise MemoryError("as it was ordered")
    faulthandler.disable()  # the log's lines would look like those of a fault of the test's
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if how == "exit":
        os._exit(1)
    if how != "SIGKILL":
        signal.signal(signal.Signals[how], signal.SIG_DFL)
    os.kill(os.getpid(), signal.Signals[how])
    while True:
        signal.pause()  # the signal comes in a moment


def order_about(name: bytes) -> Path:
    """Where it would stand what is to become of a request for an attribute."""
    return Path(os.environ["FPFS_TEST_POISON"], os.fsdecode(name).removeprefix("user."))


def read(order: Path) -> str:
    """What is to become of it; nothing special where nothing is said."""
    try:
        return order.read_text()
    except FileNotFoundError:  # never given, or taken back
        return ""


def wait_until_taken_back(order: Path) -> None:
    """Return when the order is there no longer. Blocks."""
    while order.exists():
        time.sleep(0.01)  # another process takes it back, which nothing tells


async def meet(name: bytes) -> None:
    """Do what is to become of a request."""
    order = order_about(name)
    how = read(order)
    if how.startswith("once "):
        order.unlink()
    if how:
        order.with_name(f"{order.name}.met").touch()
    if how == "wait":
        await trio.to_thread.run_sync(wait_until_taken_back, order)
    elif how == "block":
        wait_until_taken_back(order)  # nothing else is answered meanwhile
    elif how == "list":
        names = sorted({task.name for task in tasks()})
        order.with_name(f"{order.name}.names").write_text("\n".join(names))
    elif how.startswith("once end "):
        end_task(how.removeprefix("once end "))
        await trio.sleep_forever()  # the next server answers
    elif how:
        die(how.removeprefix("once "))


def tasks() -> Iterator[trio.lowlevel.Task]:
    """All tasks of this process."""
    root = trio.lowlevel.current_root_task()
    assert root is not None
    found = [root]
    while found:
        task = found.pop()
        yield task
        for nursery in task.child_nurseries:
            found.extend(nursery.child_tasks)


def end_task(name: str) -> None:
    """Let what a task waits for end with an error, as trio lets it end with Cancelled."""

    def fail() -> NoReturn:
        raise RuntimeError("as it was ordered")

    mine = trio.lowlevel.current_task()
    task = next(each for each in tasks() if each.name.startswith(name) and each is not mine)
    task._attempt_abort(fail)


def mark_tasks() -> None:
    """Let each task that begins come to a point of its name."""
    start_soon = trio.Nursery.start_soon

    def started(self: trio.Nursery, call: Handler, *arguments: object, name: object = None) -> None:
        async def begin(*given: object) -> None:
            come_to(f"task-{trio.lowlevel.current_task().name}")
            await call(*given)

        start_soon(self, begin, *arguments, name=name or call)

    trio.Nursery.start_soon = started


def come_to(point: str) -> None:
    """Do what is to become of a server that comes to a point; ``once`` holds for the first."""
    order = order_about(f"at-{point}".encode())
    how = read(order)
    if how.startswith("once "):
        order.unlink()
    if how:
        order.with_name(f"{order.name}.met").touch()
    if how == "block":
        wait_until_taken_back(order)
    elif how:
        die(how.removeprefix("once "))


def mark_points() -> None:
    """Let servers come to points: after each of these calls, but before those at the end."""
    from fpfs.daemon.catalog.executor import Worker
    from fpfs.daemon.catalog.replicas import Copies
    from fpfs.daemon.commit.pipeline import Commit
    from fpfs.daemon.control.handlers import ControlledServer
    from fpfs.daemon.control.server import ControlServer
    from fpfs.daemon.devices.keeper_link import KeeperLink
    from fpfs.daemon.maintenance.membership import DeviceChanges
    from fpfs.daemon.mount import fusermount

    def after(where: object, name: str, point: str) -> None:
        call = getattr(where, name)

        def pointed(*arguments: object, **named: object) -> object:
            result = call(*arguments, **named)
            come_to(point)
            return result

        setattr(where, name, pointed)

    after(Copies, "commit", "committed")
    after(fusermount, "mount", "mounted")
    after(KeeperLink, "hold", "held")
    after(KeeperLink, "serving", "serving")
    after(KeeperLink, "ending", "ending")
    DeviceChanges._take = before_the_answer(DeviceChanges._take, point="taken")
    DeviceChanges._join = before_the_answer(DeviceChanges._join, point="joined")
    flush_at_end = ControlledServer.flush_at_end

    async def flush(self: ControlledServer) -> object:
        come_to("draining")
        return await flush_at_end(self)

    ControlledServer.flush_at_end = flush
    converse = ControlServer._converse

    @functools.wraps(converse)  # tasks are named by it
    async def conversation(self: ControlServer, connection: trio.socket.SocketType) -> None:
        come_to("asked")
        await converse(self, connection)

    ControlServer._converse = conversation
    checkpoint = Worker._checkpoint

    def checkpointing(self: Worker, mode: str) -> bool:
        come_to("checkpoint")
        return checkpoint(self, mode)

    Worker._checkpoint = checkpointing
    closed = Commit.closed

    def closing(self: Commit, *arguments: object, **named: object) -> None:
        come_to("closed")
        closed(self, *arguments, **named)

    Commit.closed = closing


def bound_faults() -> None:
    """Let a mount be given up after fewer servers, where the file ``faults-max`` says how many."""
    from fpfs.daemon.mount import supervisor

    supervisor.FAULTS_MAX = int(read(order_about(b"faults-max")) or supervisor.FAULTS_MAX)


def lose_programs() -> None:
    """Let a keeper not find the program that it is to execute, where ``program-gone`` says which.

    That is the version that it says it is of when it is asked before.
    """
    import fpfs
    from fpfs.daemon.mount import live_upgrade

    execute, order = live_upgrade.execute, order_about(b"program-gone")

    def executing(*arguments: object) -> None:
        found = sys.executable
        if read(order):
            sys.executable = f"{found} was here"
        try:
            execute(*arguments)
        finally:
            sys.executable = found

    live_upgrade.execute = executing
    if "--check" in sys.orig_argv:
        fpfs.__version__ = read(order) or fpfs.__version__


def poison() -> None:
    """Let requests for attributes meet what is to become of them first."""
    from fpfs.daemon.names.fuse_ops import Operations

    getxattr = Operations.getxattr

    async def poisoned(self: Operations, inode: int, name: bytes, ctx: object) -> bytes:
        await meet(name)
        return await getxattr(self, inode, name, ctx)

    Operations.getxattr = poisoned
    for name in ("open", "create", "opendir", "mkdir", "unlink", "rename"):
        setattr(
            Operations, name, before_the_answer(getattr(Operations, name), point=f"{name}-done")
        )


def before_the_answer(operation: Handler, *, point: str) -> Handler:
    """An operation that comes to a point when it has been carried out, and is not answered."""

    async def pointed(*arguments: object, **named: object) -> object:
        result = await operation(*arguments, **named)
        come_to(point)
        return result

    return pointed


if "fpfs.daemon.mount.main" in sys.orig_argv:
    bound_faults()
    lose_programs()
    poison()
    mark_points()
    mark_tasks()
