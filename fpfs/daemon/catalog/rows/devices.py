"""Catalog operations on devices: which there are, what each is to the filesystem, their tags.

Concurrency: every function runs in the catalog's worker, inside its transaction; `fetch_devices`
also before there is one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpfs.core.device_names import TAGS_MAX
from fpfs.core.errors import CatalogError, InvalidOperation
from fpfs.daemon.catalog.schema import DeviceRecord, DeviceUse

if TYPE_CHECKING:
    import sqlite3

    from fpfs.core.device_names import TagChange
    from fpfs.daemon.catalog.executor import Transaction


def fetch_devices(transaction: Transaction | sqlite3.Connection) -> tuple[DeviceRecord, ...]:
    """Return all devices that there are, and were, in order of their numbers."""
    tags: dict[int, set[str]] = {}
    for number, tag in transaction.execute("SELECT number, tag FROM device_tags").fetchall():
        tags.setdefault(number, set()).add(tag)
    return tuple(
        DeviceRecord(
            number=number,
            device_id=device_id,
            path=path,
            use=_use_of(number, state),
            tags=frozenset(tags.get(number, ())),
        )
        for number, device_id, path, state in transaction.execute(
            "SELECT number, device_id, path, state FROM devices ORDER BY number"
        ).fetchall()
    )


def _use_of(number: int, state: int) -> DeviceUse:
    try:
        return DeviceUse(state)
    except ValueError:
        raise CatalogError(f"the catalog gives device {number} the unknown state {state}") from None


def add_device(transaction: Transaction, device: DeviceRecord) -> tuple[DeviceRecord, ...]:
    """Enter a device; returns all devices."""
    transaction.execute(
        "INSERT INTO devices (number, device_id, path, state) VALUES (?, ?, ?, ?)",
        (device.number, device.device_id, device.path, device.use),
    )
    return fetch_devices(transaction)


def set_use(transaction: Transaction, number: int, use: DeviceUse) -> tuple[DeviceRecord, ...]:
    """Let a device be something else to the filesystem; returns all devices."""
    transaction.execute("UPDATE devices SET state = ? WHERE number = ?", (use, number))
    if use is DeviceUse.REMOVED:
        transaction.execute("DELETE FROM device_tags WHERE number = ?", (number,))
    return fetch_devices(transaction)


def change_tags(
    transaction: Transaction, number: int, change: TagChange
) -> tuple[DeviceRecord, ...]:
    """Give tags to a device and take others away; returns all devices.

    Raises `InvalidOperation` when it would have too many.
    """
    transaction.executemany(
        "INSERT OR IGNORE INTO device_tags VALUES (?, ?)", [(number, tag) for tag in change.added]
    )
    transaction.executemany(
        "DELETE FROM device_tags WHERE number = ? AND tag = ?",
        [(number, tag) for tag in change.dropped],
    )
    (count,) = transaction.execute(
        "SELECT count(*) FROM device_tags WHERE number = ?", (number,)
    ).fetchone()
    if count > TAGS_MAX:
        raise InvalidOperation(f"device {number} would have {count} tags; {TAGS_MAX} are possible")
    return fetch_devices(transaction)
