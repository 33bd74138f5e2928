"""``fpfs-ctl plan``: which ranks would write what of a checkpoint, and to which device."""

from __future__ import annotations

import math
import os
import stat
import struct
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, BinaryIO, NamedTuple

import msgspec
from cyclopts import Parameter

from fpfs.cli.asking import Json, print_json
from fpfs.cli.show import add_figures, add_texts, new_table, open_console, say
from fpfs.core.lazy import NUMPY
from fpfs.core.mounts import mount_containing
from fpfs.core.paths import encodable
from fpfs.core.policy import CHUNK_BYTES_DEFAULT
from fpfs.core.protocol.control import ControlClient, find_fpfs
from fpfs.core.protocol.reports import FileRun
from fpfs.core.protocol.whereabouts import describe_one, locate
from fpfs.core.refusal import Refused, refuse_empty
from fpfs.core.units import format_size, parse_size_bytes

if TYPE_CHECKING:
    from fpfs.client.plan import Plan

RANKS_SHOWN = 16
"""Rows of the table, unless all are asked for."""
COLUMNS = 32
"""Of the picture of the file."""
TENSORS_SIMULATED = 400
_LOCAL_HEADER = struct.Struct("<26x2H")
_ALIGNED_BYTES = 64
_HEADER_BYTES = 128
"""About what stands between two tensors, and in the directory of one."""


class RankReport(msgspec.Struct, kw_only=True, frozen=True):
    """What one rank writes.

    `ranges` are offsets and bytes in the file; `device_bytes` are what goes to each device.
    """

    rank: int
    node: int
    socket: int
    bytes: int
    ranges: tuple[tuple[int, int], ...]
    device_bytes: dict[int, int]


class PlanReport(msgspec.Struct, kw_only=True, frozen=True):
    """What ``fpfs-ctl plan --json`` prints. Without a `file` it is a simulated one."""

    file: str | None
    bytes: int
    tensors: int
    chunk_bytes: int
    writers: str
    ranks: tuple[RankReport, ...]


class _File(NamedTuple):
    """A checkpoint: what a plan needs to know of it, and where it lies."""

    path: str | None
    bytes: int
    offsets: list[int]
    """Of the tensors' bytes."""
    sizes: list[int]
    runs: Sequence[FileRun] = ()
    """None: chunks go to devices in turn."""
    chunk_bytes: int = CHUNK_BYTES_DEFAULT


def plan(
    file: str | None = None,
    /,
    *,
    ranks: int,
    per_node: int | None = None,
    sockets: int = 1,
    devices: int | None = None,
    writers: str = "replica",
    shards: int = 1,
    simulate: str | None = None,
    tensors: int = TENSORS_SIMULATED,
    every: Annotated[bool, Parameter(name="--all", negative="", show_default=False)] = False,
    json: Json = False,
) -> int:
    """Show which ranks of a group would write what of a checkpoint, and to which device.

    FILE is one that torch.save or fpfs.save has written; on a mount the devices are those that have
    it. Instead, --simulate takes one of a size. Nothing is written.

    Parameters
    ----------
    file
        A checkpoint.
    ranks
        How many save together.
    per_node
        How many of them each machine has (default: all).
    sockets
        How many sockets each machine has.
    devices
        Over how many devices the file is striped (default: those of FILE, or 1).
    writers
        Which of the ranks that have the same bytes write them: replica (all), socket or node (one
        of each), device (as many on each machine as there are devices).
    shards
        In how many parts each tensor is, each with as many ranks: 1 as data-parallel training has
        it, as many as ranks for FSDP, fewer for HSDP.
    simulate
        The size of a state, such as 14G.
    tensors
        How many tensors the simulated state has.
    every
        Show all ranks, however many there are.
    """
    found = _simulated(simulate, tensors) if file is None else _read(file, simulate)
    made = _planned(
        found,
        ranks=ranks,
        per_node=per_node,
        sockets=sockets,
        devices=len({run.device for run in found.runs}) or 1 if devices is None else devices,
        writers=writers,
        shards=shards,
    )
    if json:
        print_json(_report(found, made, range(ranks)))
        return 0
    writing = [rank for rank, load in enumerate(made.loads) if load > 0]
    shown = writing if every else writing[:RANKS_SHOWN]
    _show(_report(found, made, shown), str(made), hidden=len(writing) - len(shown))
    return 0


def _simulated(simulate: str | None, tensors: int) -> _File:
    if simulate is None:
        raise Refused(asked="plan", wrong="no file is named", remedy="name one, or --simulate 14G")
    size = parse_size_bytes(simulate, name="--simulate")
    if not 0 < tensors <= size:
        raise Refused(
            asked=f"plan --tensors {tensors}",
            wrong=f"{simulate} is not enough for as many",
            remedy="take fewer, and 1 at least",
        )
    sizes = [size // tensors + (number < size % tensors) for number in range(tensors)]
    at, offsets = _HEADER_BYTES * tensors, []
    for count in sizes:
        at = -(-(at + _HEADER_BYTES) // _ALIGNED_BYTES) * _ALIGNED_BYTES
        offsets.append(at)
        at += count
    return _File(None, at + _HEADER_BYTES * tensors, offsets, sizes)


def _read(path: str, simulate: str | None) -> _File:
    """Return what the archive's directory tells of a file of torch.save."""
    asked = f"plan of {path}"
    refuse_empty(path, what="path", asked="plan")
    if simulate is not None:
        raise Refused(asked=asked, wrong="there is a file", remedy="leave --simulate out")
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise Refused(asked=asked, wrong="this is no file", remedy="name a checkpoint")
        with open(path, "rb") as stream, zipfile.ZipFile(stream) as archive:
            size = os.fstat(stream.fileno()).st_size
            found = list(_records(stream, archive))
        ends = [0, *(offset + count for offset, count in sorted(found))]
        if any(offset < end for (offset, _), end in zip(sorted(found), ends, strict=False)):
            raise ValueError("tensors lie in each other")
        if ends[-1] > size:
            raise ValueError("tensors lie behind its end")
    except (zipfile.BadZipFile, struct.error, ValueError, NotImplementedError) as error:
        raise Refused(
            asked=asked,
            wrong=f"it is no archive of torch.save ({error})",
            remedy="name a checkpoint that torch 1.6 or later has written",
        ) from None
    except OSError as error:
        raise Refused(
            asked=asked, wrong=error.strerror or str(error), remedy="name a checkpoint"
        ) from None
    if not found:
        raise Refused(asked=asked, wrong="it has no tensors", remedy="name a checkpoint")
    found.sort()
    offsets, sizes = (list(each) for each in zip(*found, strict=True))
    made = _File(encodable(path), size, offsets, sizes)
    if not mount_containing(path).is_fpfs:
        return made
    with ControlClient(find_fpfs(path, asked=asked), asked=asked) as client:
        ino = os.stat(path).st_ino
        runs = locate(client, ino, asked=asked).runs
        chunk_bytes = describe_one(client, ino, asked=asked).chunk_bytes
    return made._replace(runs=runs, chunk_bytes=chunk_bytes)


def _records(stream: BinaryIO, archive: zipfile.ZipFile) -> Iterator[tuple[int, int]]:
    """Offset and bytes of each record."""
    entries = archive.infolist()
    root = next(
        (e.filename[: -len("data.pkl")] for e in entries if e.filename.endswith("/data.pkl")), None
    )
    if root is None:
        raise ValueError("it has no data.pkl")
    for entry in entries:
        key = entry.filename.removeprefix(f"{root}data/")
        if key == entry.filename or not (key.isascii() and key.isdigit()) or not entry.file_size:
            continue
        if entry.compress_type != zipfile.ZIP_STORED:
            raise ValueError("it is compressed")
        stream.seek(entry.header_offset)
        header = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
        yield entry.header_offset + _LOCAL_HEADER.size + sum(header), entry.file_size


def _planned(
    found: _File,
    *,
    ranks: int,
    per_node: int | None,
    sockets: int,
    devices: int,
    writers: str,
    shards: int,
) -> Plan:
    # Imported late: only this command needs numpy.
    try:
        import numpy as np

        from fpfs.client.boxes import Mesh, Sharding
        from fpfs.client.plan import Plan, Records
        from fpfs.client.topology import WRITERS, Topology
    except ModuleNotFoundError as error:
        raise Refused(asked="plan", wrong=f"{error.name} is missing", remedy=NUMPY) from None
    if shards < 1 or ranks % shards:
        raise Refused(
            asked=f"plan --shards {shards}",
            wrong=f"{ranks} ranks cannot have as many of each part",
            remedy="take a divisor of --ranks",
        )
    try:
        topology = Topology.regular(
            ranks,
            ranks_per_node=per_node,
            sockets_per_node=sockets,
            devices=devices,
            chunk_bytes=found.chunk_bytes,
        )
        chosen = next((each for each in WRITERS if each == writers), None)
        if chosen is None:
            raise ValueError(f"--writers is one of {', '.join(WRITERS)}, not {writers}")
    except ValueError as error:
        raise Refused(asked="plan", wrong=str(error), remedy="see --help") from None
    # Rows are not known, so a part is of bytes.
    mesh = Mesh((ranks // shards, shards), range(ranks))
    sharding_of, shardings = [-1] * len(found.sizes), list[Sharding]()
    if shards > 1:
        numbers = {size: number for number, size in enumerate(dict.fromkeys(found.sizes))}
        shardings = [Sharding((size,), 1, mesh, ((1, 0),)) for size in numbers]
        sharding_of = [numbers[size] for size in found.sizes]
    records = Records(
        offsets=np.array(found.offsets, dtype=np.int64),
        sizes=np.array(found.sizes, dtype=np.int64),
        file_bytes=found.bytes,
        shardings=tuple(shardings),
        sharding_of=np.array(sharding_of, dtype=np.int64),
        digest=b"",
    )
    return Plan(records, topology, chosen)


def _report(found: _File, made: Plan, ranks: Iterable[int]) -> PlanReport:
    topology = made.topology
    reports = []
    for rank in ranks:
        # Parts of one dimension are of one run.
        ranges = tuple((offset, count) for offset, count, _, _ in made.ranges(rank))
        device_bytes = dict.fromkeys(
            sorted({run.device for run in found.runs}) or range(topology.devices), 0
        )
        for offset, count in ranges:
            for device, on_it in _devices(found, topology.devices, offset, count):
                device_bytes[device] += on_it
        reports.append(
            RankReport(
                rank=rank,
                node=topology.nodes[rank],
                socket=topology.sockets[rank],
                bytes=sum(count for _, count in ranges),
                ranges=ranges,
                device_bytes=device_bytes,
            )
        )
    return PlanReport(
        file=found.path,
        bytes=found.bytes,
        tensors=len(found.sizes),
        chunk_bytes=topology.chunk_bytes,
        writers=made.writers,
        ranks=tuple(reports),
    )


def _devices(found: _File, devices: int, offset: int, count: int) -> Iterator[tuple[int, int]]:
    """How many bytes of a range are on which device."""
    end = offset + count
    if found.runs:
        for run in found.runs:
            both = min(end, run.offset_bytes + run.size_bytes) - max(offset, run.offset_bytes)
            if both > 0:
                yield run.device, both
        return
    chunk_bytes = found.chunk_bytes
    stripe = devices * chunk_bytes
    for device in range(devices):

        def before(position: int, begin: int = device * chunk_bytes) -> int:
            rest = min(max(position % stripe - begin, 0), chunk_bytes)
            return position // stripe * chunk_bytes + rest

        yield device, before(end) - before(offset)


def _show(report: PlanReport, line: str, *, hidden: int) -> None:
    console = open_console()
    say(console, f"{report.file or 'a simulated state'}: {line}")
    table = new_table()
    add_figures(table, "rank", "node", "socket", "bytes")
    add_texts(table, "of the file")
    devices = list(report.ranks[0].device_bytes)
    add_figures(table, *(f"device {device}" for device in devices))
    for rank in report.ranks:
        table.add_row(
            str(rank.rank),
            str(rank.node),
            str(rank.socket),
            format_size(rank.bytes),
            _picture(rank, report.bytes),
            *(format_size(rank.device_bytes[device]) for device in devices),
        )
    console.print(table)
    if hidden:
        say(console, f"  and {hidden} more ranks: --all shows them")


def _picture(rank: RankReport, file_bytes: int) -> str:
    """The file from its begin to its end: how much of each part the rank writes."""
    written = [0.0] * COLUMNS
    for offset, count in rank.ranges:
        first, end = offset * COLUMNS / file_bytes, (offset + count) * COLUMNS / file_bytes
        for cell in range(int(first), min(math.ceil(end), COLUMNS)):
            written[cell] += min(end, cell + 1) - max(first, cell)
    # What is less than a hundredth is headers.
    return "".join("·" if part < 0.01 else "░▒▓█"[min(3, int(4 * part))] for part in written)


__all__ = ["PlanReport", "plan"]
