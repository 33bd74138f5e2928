"""Where contenders write: the plain filesystem, an fpfs mount over it, the naive peer's mount.

Invariants:
  * All places of a group lie on the same disk; everything lives under one temporary directory and
    is gone at the end.

Concurrency: used by the benchmark's only thread.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.framework import Unavailable
from benchmarks.worker import TENSOR_BYTES, Worker
from fpfs.testing import lab

GIB = 1024 * 1024 * 1024
MEMORY_AT_HAND_BYTES = 6 * GIB
"""More than any group takes at once, or half of what is free."""
MADV_POPULATE_WRITE = 23  # Linux 5.14
REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = {"fpfs": "fpfs.cli.main", "fpfs-ctl": "fpfs.cli.ctl"}


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much is written; the quick scale is for trying things out, not for figures."""

    rounds: int
    tensors: int
    tensors_large: int
    tensors_lab: int
    small_files: int
    stream_bytes: int


FULL = Scale(
    rounds=5,
    tensors=16,
    tensors_large=64,
    tensors_lab=32,
    small_files=20_000,
    stream_bytes=20 * GIB,
)
QUICK = Scale(
    rounds=3,
    tensors=8,
    tensors_large=24,
    tensors_lab=8,
    small_files=2_000,
    stream_bytes=3 * GIB,
)


class FpfsMount:
    """A mounted fpfs and its tools, used as a user would."""

    def __init__(
        self, devices: Sequence[Path], mountpoint: Path, *, log: Path, options: Sequence[str]
    ) -> None:
        self.path = mountpoint
        self._log = log
        arguments = [text for device in devices for text in ("-d", str(device))]
        run_tool("fpfs", "mount", *arguments, "--log", str(log), *options, str(mountpoint))

    def flush(self) -> None:
        """Wait until everything is durable."""
        run_tool("fpfs-ctl", "flush", str(self.path))

    def status(self) -> dict[str, Any]:
        """What ``fpfs-ctl status --json`` says."""
        found: dict[str, Any] = json.loads(run_tool("fpfs-ctl", "status", "--json", str(self.path)))
        return found

    def unmount(self) -> None:
        """Returns when all is durable."""
        try:
            run_tool("fpfs", "umount", str(self.path))
        finally:
            for line in self._log.read_text().splitlines():
                if " INFO " not in line:
                    print(f"{self._log.name}: {line}", file=sys.stderr)
            self._log.unlink()


class Bench:
    """The stage of a run: a temporary directory, the scale, and what can be put up in it."""

    def __init__(self, parent: Path, *, scale: Scale) -> None:
        parent.mkdir(parents=True, exist_ok=True)
        self.scale = scale
        self.directory = Path(tempfile.mkdtemp(prefix="fpfs-bench-", dir=parent))
        self.arena_bytes: int | None = None

    def close(self) -> None:
        """Remove everything."""
        shutil.rmtree(self.directory)

    @contextlib.contextmanager
    def plain(self, name: str = "plain", *, parent: Path | None = None) -> Iterator[Path]:
        """A fresh directory on the plain filesystem."""
        path = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=parent or self.directory))
        try:
            yield path
        finally:
            shutil.rmtree(path)

    @contextlib.contextmanager
    def fpfs(
        self,
        *,
        filesystems: Sequence[Path] | None = None,
        options: Sequence[str] = (),
        catalog_copies: int = 2,
    ) -> Iterator[FpfsMount]:
        """A fresh fpfs, one device directory in each of `filesystems` (default: the plain one).

        With fewer `catalog.replicas` a folder stands where the second one would be.
        """
        with contextlib.ExitStack() as stack:
            parents = filesystems or [self.directory]
            devices = [stack.enter_context(self.plain("device", parent=p)) for p in parents]
            mountpoint = stack.enter_context(self.plain("mount"))
            log = mountpoint.with_suffix(".log")
            mount = FpfsMount(devices, mountpoint, log=log, options=options)
            if catalog_copies < len(devices[:2]):
                mount.unmount()
                (devices[1] / "catalog.db").unlink()
                (devices[1] / "catalog.db").mkdir()
                mount = FpfsMount(devices, mountpoint, log=log, options=options)
            stack.callback(mount.unmount)
            self.arena_bytes = mount.status()["staging"]["bytes_total"]
            yield mount

    @contextlib.contextmanager
    def naive(self) -> Iterator[Path]:
        """The naive peer, mounted over a plain directory."""
        with self.plain("backing") as backing, self.plain("naive") as mountpoint:
            command = [
                sys.executable,
                "-m",
                "benchmarks.peers.naive_fs",
                str(backing),
                str(mountpoint),
            ]
            server = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=REPOSITORY)
            try:
                assert server.stdout is not None
                if server.stdout.readline() != b"mounted\n":
                    raise Unavailable("the naive peer did not mount: see its message above")
                yield mountpoint
            finally:
                if os.path.ismount(mountpoint):
                    subprocess.run(["fusermount3", "-u", str(mountpoint)], check=True)
                server.wait()
                server.stdout.close()  # type: ignore[union-attr]

    @contextlib.contextmanager
    def worker(self, *, tensors: int = 0) -> Iterator[Worker]:
        """A worker process with a state of `tensors` x 64 MiB, ready to be timed."""
        worker = Worker()
        try:
            if tensors:
                worker.call("state", tensors=tensors)
            yield worker
        finally:
            worker.close()

    @contextlib.contextmanager
    def lab(self, *, device_count: int, mib_per_s: int, size_bytes: int) -> Iterator[lab.Lab]:
        """Throttled devices. Unavailable where they cannot be made."""
        reason = lab.unavailable_reason()
        if reason is not None:
            raise Unavailable(reason)
        with lab.lab(
            device_count=device_count,
            mib_per_s=mib_per_s,
            size_bytes=size_bytes,
            parent=self.directory,
        ) as made:
            yield made


def state_bytes(tensors: int) -> int:
    """Payload of a state of `tensors` tensors."""
    return tensors * TENSOR_BYTES


def drop_caches() -> None:
    """Write dirty data and empty the page cache, and have memory at hand. Unavailable without root.

    What is touched here is what is given out next: otherwise a virtual machine's host may have
    taken it back, and finding it again takes longer than reading from the disk.
    """
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except PermissionError as error:
        raise Unavailable("emptying the page cache needs root") from error
    free_bytes = os.sysconf("SC_AVPHYS_PAGES") * mmap.PAGESIZE
    size_bytes = min(MEMORY_AT_HAND_BYTES, free_bytes // 2)
    with mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        memory.madvise(MADV_POPULATE_WRITE)


def sync() -> None:
    """Write all dirty data of the machine, so that the next round does not pay for it."""
    os.sync()


def remove(path: Path) -> None:
    """Remove a file if it is there, and let the filesystem finish with it."""
    path.unlink(missing_ok=True)
    os.sync()


def run_tool(name: str, *arguments: str) -> str:
    """Run a tool of this checkout; returns what it prints. RuntimeError when it fails."""
    module = TOOLS[name]
    result = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        stdin=subprocess.DEVNULL,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    if result.returncode != 0:
        command = " ".join((name, *arguments))
        raise RuntimeError(f"`{command}` failed ({result.returncode}): {result.stderr.strip()}")
    return result.stdout
