"""What a server opens and how: the kernel's options, the catalog, the engine's configuration.

Concurrency: plain functions; those that block say so.
"""

from __future__ import annotations

import grp
import os
import socket
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from fpfs.core.addresses import parse_listen_address
from fpfs.core.engine import DeviceConfig, EngineConfig
from fpfs.core.errors import CatalogError
from fpfs.core.options import Checksums, Idle, MountOptions
from fpfs.core.policy import Policy
from fpfs.core.policy_rules import DeviceFacts, MountFacts
from fpfs.daemon.catalog.database import Catalog, DeviceRecord, RootOwner
from fpfs.daemon.catalog.schema import CATALOG_NAME, DeviceUse
from fpfs.daemon.control.server import Access
from fpfs.daemon.devices.arena import arena_path
from fpfs.daemon.mount import fusermount
from fpfs.daemon.mount.paths import CPU_LATENCY

if TYPE_CHECKING:
    from fpfs.core.options import ServerConfig
    from fpfs.daemon.devices.members import DeviceRegistry
    from fpfs.daemon.devices.opened_set import DeviceSet


def mount_options(options: MountOptions, *, filesystem_id: str) -> list[str]:
    """Options for fusermount3; what the user chose comes last and so wins."""
    source = options.source or f"fpfs-{filesystem_id}"
    chosen = [
        f"fsname={fusermount.escape_option(source)}",
        "subtype=fpfs",
        "default_permissions",
        f"max_read={fusermount.MAX_READ_BYTES}",
    ]
    if allows_others(options):
        chosen.append("allow_other")
    if os.geteuid() == 0:
        # Root's own filesystems honour set-user-id and device files; fusermount3 would not.
        chosen += ["suid", "dev"]
    return [*chosen, *options.for_fusermount]


def open_metrics(config: ServerConfig) -> socket.socket | None:
    """The place where a new mount serves metrics, if it is to. Raises `Refused` if it is taken."""
    text = config.options.metrics
    if not text:
        return None
    from fpfs.daemon.telemetry.http import listen_or_refuse

    return listen_or_refuse(
        parse_listen_address(text, name="metrics"),
        asked=config.asked,
        text=text,
        open_to_others=allows_others(config.options),
    )


def allows_others(options: MountOptions) -> bool:
    """Whether other users may use the mount: as chosen, else for root's mounts."""
    return os.geteuid() == 0 if options.allow_other is None else options.allow_other


def control_access(options: MountOptions) -> Access:
    """Who may ask the server what."""
    group = grp.getgrnam(options.control_group).gr_gid if options.control_group else None
    return Access(allows_others(options), group)


def open_catalog(devices: DeviceSet) -> Catalog:
    """The catalog of a set of devices, made first where nothing was ever mounted. Blocks.

    Raises `CatalogMissing` where there was one, which names what lies on the devices.
    """
    paths = [Path(folder, CATALOG_NAME) for folder in devices.catalog_directories]
    absent = [Path(folder, CATALOG_NAME) for folder in devices.missing_catalog_directories]
    is_new = not (devices.was_used or devices.missing or any(path.exists() for path in paths))
    if is_new:
        Catalog.format(
            paths[0],
            filesystem_id=devices.filesystem_id,
            devices=[
                DeviceRecord(number=device.number, device_id=device.device_id, path=device.path)
                for device in devices.devices
            ],
            root=RootOwner(uid=os.geteuid(), gid=os.getegid()),
        )
    return Catalog.open(*paths, filesystem_id=devices.filesystem_id, is_new=is_new, absent=absent)


def check_identity(catalog: Catalog, devices: DeviceSet) -> None:
    """Raise `CatalogError` unless the catalog is that of the devices, as their stamps have them."""
    missing = {device.number for device in devices.missing}
    known = {
        device.number: device.device_id
        for device in catalog.devices
        if device.number not in missing and device.use is not DeviceUse.REMOVED
    }
    found = {device.number: device.device_id for device in devices.devices}
    if catalog.filesystem_id != devices.filesystem_id:
        ours, theirs = f"filesystem {catalog.filesystem_id}", f"filesystem {devices.filesystem_id}"
    elif known != found:
        ours, theirs = f"devices {known}", f"devices {found}"
    else:
        return
    raise CatalogError(
        f"catalog {catalog.path} is of {ours}, the stamps of the devices are of {theirs}",
        remedy="put back the catalog and the stamps that belong together",
    )


def engine_config(config: ServerConfig, devices: DeviceSet, *, object_base: int) -> EngineConfig:
    """How the engine of this mount starts."""
    options = config.options
    arena = arena_path(devices.filesystem_id)
    return EngineConfig(
        devices=tuple(
            DeviceConfig(number=device.number, path=device.objects_path)
            for device in devices.devices
        ),
        arena_path=arena,
        take_over=os.path.exists(arena),
        filesystem_id=devices.filesystem_id,
        staging_bytes=options.staging_bytes,
        slot_bytes=options.slot_bytes,
        depth=options.depth,
        channel_threads=options.receivers,
        backend=options.backend,
        object_base=object_base,
        kept_percent=options.reuse // _devices_on_one_filesystem(devices),
        ack=options.ack,
        cpu_latency_path=CPU_LATENCY if options.idle is Idle.SHALLOW else "",
        checksums=options.checksums is Checksums.ON,
    )


def _devices_on_one_filesystem(devices: DeviceSet) -> int:
    """How many devices share a filesystem, at most."""
    counts = Counter(os.stat(device.objects_path).st_dev for device in devices.devices)
    return max(counts.values(), default=1)


def default_policy(options: MountOptions) -> Policy:
    """What holds in directories for which nothing is set."""
    return Policy(chunk_bytes=options.chunk_bytes, ack=options.ack, whole=options.whole)


def mount_facts(options: MountOptions, registry: DeviceRegistry) -> MountFacts:
    """The mount as policies see it. What is meant for a device that is missing goes elsewhere."""
    return MountFacts(
        devices=[
            DeviceFacts(member.number, tuple(sorted(member.tags)), not member.is_draining)
            for member in registry.members
        ],
        slot_bytes=options.slot_bytes,
        staging_bytes=options.staging_bytes,
        depth=options.depth,
    )
