"""The name plane without a mount: a real catalog and commit over the memory engine.

`Rig` has what the kernel does besides sending requests: `resolve` walks paths and gives references
back, `write_file` opens, writes and closes. A rig started again on the same folder and devices is
the next mount; without `Rig.flush` before the end it is a mount after kill -9.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import AsyncIterator
from pathlib import Path

import trio

from fpfs.core.engine import EngineConfig
from fpfs.core.policy import Acknowledge, Policy
from fpfs.core.policy_rules import DeviceFacts, MountFacts
from fpfs.daemon.catalog.database import Catalog, DeviceRecord, RootOwner
from fpfs.daemon.commit.groups import Groups
from fpfs.daemon.commit.pipeline import Commit
from fpfs.daemon.commit.versions import Versions
from fpfs.daemon.inodes.policies import Policies
from fpfs.daemon.inodes.replay_log import Requests
from fpfs.daemon.inodes.table import Inode, InodeTable
from fpfs.daemon.maintenance.crash_resume import TakeOver
from fpfs.daemon.names.entries import Caller
from fpfs.daemon.names.namespace import Namespace
from fpfs.daemon.names.open_dirs import Listed
from fpfs.testing.memory_engine import MemoryDevices, MemoryEngine

ROOT = 1
SUPERUSER = Caller(0, 0)
USER = Caller(1000, 1000)
LARGE = 300_000
"""A content that does not fit the catalog, in bytes: five blocks, on two devices."""


MOUNT = MountFacts(
    devices=(DeviceFacts(0, ("fast",)), DeviceFacts(1, ("slow",))),
    slot_bytes=1024 * 1024,
    staging_bytes=64 * 1024 * 1024,
    depth=16,
)


class Rig:
    """One mount's parts, joined as the server joins them."""

    def __init__(
        self,
        folder: Path,
        devices: MemoryDevices,
        *,
        ack: Acknowledge = Acknowledge.EARLY,
        durable_within_s: float = 1.0,
    ) -> None:
        self.folder = folder
        self.catalog = Catalog.open(folder / "catalog.db")
        config = EngineConfig(
            devices=(),
            arena_path="",
            filesystem_id="test",
            staging_bytes=0,
            object_base=self.catalog.object_base,
        )
        self.engine = MemoryEngine(config, devices=devices)
        self.inodes = InodeTable(catalog=self.catalog, engine=self.engine)
        self.policies = Policies(
            self.catalog, defaults=Policy(chunk_bytes=65536, ack=ack), mount=lambda: MOUNT
        )
        self.versions = Versions(
            catalog=self.catalog, engine=self.engine, inodes=self.inodes, policies=self.policies
        )
        self.commit = Commit(
            catalog=self.catalog,
            engine=self.engine,
            inodes=self.inodes,
            versions=self.versions,
            policies=self.policies,
            durable_within_s=durable_within_s,
        )
        self.groups = Groups(
            catalog=self.catalog, inodes=self.inodes, policies=self.policies, commit=self.commit
        )
        self.requests = Requests(self.catalog)
        self.namespace = Namespace(
            catalog=self.catalog,
            engine=self.engine,
            inodes=self.inodes,
            commit=self.commit,
            requests=self.requests,
            groups=self.groups,
            policies=self.policies,
            versions=self.versions,
            device_paths=lambda: {0: str(folder), 1: str(folder)},
        )

    async def look_up(self, parent: int, name: bytes) -> Inode:
        """Look a name up that must exist."""
        inode = await self.namespace.look_up(parent, name)
        if inode is None:
            raise FileNotFoundError(name)
        return inode

    async def resolve(self, path: str) -> Inode:
        """Return the inode at a path, with one reference for the caller to forget."""
        inode = await self.look_up(ROOT, b".")
        for name in Path(path).parts:
            following = await self.look_up(inode.ino, os.fsencode(name))
            self.namespace.forget(inode.ino, 1)
            inode = following
        return inode

    async def create(self, path: str, *, flags: int = os.O_RDWR, mode: int = 0o644) -> int:
        """Make and open a file; returns the handle. The kernel's reference is given back."""
        parent = await self.resolve(str(Path(path).parent))
        inode, opened = await self.namespace.entries.create(
            parent.ino,
            os.fsencode(Path(path).name),
            mode=mode,
            flags=flags | os.O_CREAT,
            exclusive=bool(flags & os.O_EXCL),
            caller=SUPERUSER,
        )
        self.namespace.forget(inode.ino, 1)
        self.namespace.forget(parent.ino, 1)
        return opened.handle

    async def open(self, path: str, *, flags: int = os.O_RDWR) -> int:
        """Open a file; returns the handle."""
        inode = await self.resolve(path)
        opened = await self.namespace.open_file(inode.ino, flags=flags, caller=SUPERUSER)
        self.namespace.forget(inode.ino, 1)
        return opened.handle

    async def write_file(self, path: str, content: bytes) -> None:
        """Replace a file's content, making it if need be, as `open(path, "w")` does."""
        handle = await self.create(path, flags=os.O_WRONLY | os.O_TRUNC)
        self.engine.write(handle, 0, content)
        self.namespace.files.release(handle)

    async def read_file(self, path: str) -> bytes:
        """Return a file's whole content."""
        handle = await self.open(path, flags=os.O_RDONLY)
        try:
            return self.engine.read(handle, 0, 1 << 40)
        finally:
            self.namespace.files.release(handle)

    async def make_directory(self, path: str, *, mode: int = 0o755) -> None:
        """Make a directory."""
        parent = await self.resolve(str(Path(path).parent))
        made = await self.namespace.entries.make_directory(
            parent.ino, os.fsencode(Path(path).name), mode=stat.S_IFDIR | mode, caller=SUPERUSER
        )
        self.namespace.forget(made.ino, 1)
        self.namespace.forget(parent.ino, 1)

    async def names(self, path: str) -> set[str]:
        """Return the names in a directory, with "." and ".."."""
        directory = await self.resolve(path)
        handle = await self.namespace.directories.open(directory.ino)
        found: list[Listed] = []

        def emit(entry: Listed) -> bool:
            found.append(entry)
            return True

        await self.namespace.directories.read(handle, 0, emit)
        for entry in found:
            if entry.name not in (b".", b".."):
                self.namespace.forget(entry.inode.ino, 1)
        self.namespace.directories.release(handle)
        self.namespace.forget(directory.ino, 1)
        return {os.fsdecode(entry.name) for entry in found}

    async def take_over(self, *, is_successor: bool) -> None:
        """Begin as a server does: with or without the kernel's connection of the one before."""
        await self.policies.load()
        await self.versions.load()
        work = TakeOver(
            catalog=self.catalog,
            engine=self.engine,
            inodes=self.inodes,
            namespace=self.namespace,
            commit=self.commit,
            requests=self.requests,
            groups=self.groups,
        )
        await self.groups.load()
        taken = await work.run(with_handles=is_successor)
        await self.commit.recover(keep=taken.kept, took_over=is_successor)

    def call_names(self) -> list[str]:
        """Return the names of the engine's recorded calls, in order."""
        return [str(call[0]) for call in self.engine.calls]

    async def flush(self) -> None:
        """End as an orderly unmount does."""
        self.namespace.close()
        failures = await self.commit.flush_all()
        assert not failures


@contextlib.asynccontextmanager
async def rig(
    folder: Path,
    *,
    devices: MemoryDevices | None = None,
    ack: Acknowledge = Acknowledge.EARLY,
    durable_within_s: float = 1.0,
    is_successor: bool = False,
) -> AsyncIterator[Rig]:
    """Start a mount in `folder`, formatted if it is empty. Ends as by kill -9: nothing is flushed.

    What was answered survives, since it is in the catalog's log; so do drained bytes, and open
    handles for one that `is_successor`: it serves the kernel's connection of the one before.
    """
    if not (folder / "catalog.db").exists():
        Catalog.format(
            folder / "catalog.db",
            filesystem_id="test",
            devices=[
                DeviceRecord(number=number, device_id=name, path=str(folder))
                for number, name in enumerate("ab")
            ],
            root=RootOwner(uid=0, gid=0),
        )
    made = Rig(folder, devices or MemoryDevices(), ack=ack, durable_within_s=durable_within_s)
    try:
        async with trio.open_nursery() as nursery:
            await made.take_over(is_successor=is_successor)
            nursery.start_soon(made.commit.run)
            nursery.start_soon(_answer_sync_writes, made)
            # The tasks are running before the first request.
            await trio.testing.wait_all_tasks_blocked()
            yield made
            nursery.cancel_scope.cancel()
    finally:
        await made.catalog.close()


async def _answer_sync_writes(made: Rig) -> None:
    async for event in made.engine.events():
        made.commit.sync_write(event)  # type: ignore[arg-type]
