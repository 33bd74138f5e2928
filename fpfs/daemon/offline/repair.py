"""Repair: corrections are tried on an image, and then done to the catalog and the devices.

Invariants:
  * Objects are removed only after the catalog that does not name them is durable.
  * The catalog is changed in one transaction.

Concurrency: plain blocking functions; `apply` runs a trio loop of its own.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import trio

from fpfs.core.refusal import Refused
from fpfs.core.threads import run_alone
from fpfs.daemon.catalog.database import Catalog
from fpfs.daemon.offline.image import DATABASE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from fpfs.core.engine import ObjectId
    from fpfs.daemon.catalog.executor import Transaction
    from fpfs.daemon.devices.opened_set import DeviceSet
    from fpfs.daemon.offline.findings import Found, Statement
    from fpfs.daemon.offline.objects import Objects

ROUNDS_MAX = 16
"""How often it is looked at again whether what was corrected brought something else about."""


class Corrections(NamedTuple):
    """What is to be done: `statements` in the catalog, `removals` of objects.

    `done` is what these correct, and `left` what nothing can be done about.
    """

    statements: list[Statement]
    removals: list[ObjectId]
    done: list[Found]
    left: list[Found]


def try_corrections(
    connection: sqlite3.Connection,
    found: list[Found],
    look_again: Callable[[], list[Found]],
) -> Corrections:
    """Correct an image until nothing is left that can be corrected; returns how."""
    statements: list[Statement] = []
    done: list[Found] = []
    for round_ in range(ROUNDS_MAX):
        wanted = [each for each in found if each.statements]
        if not wanted:
            break
        done += [each for each in wanted if round_ == 0 or not each.comes_of_repair]
        for each in wanted:
            for statement in each.statements:
                connection.execute(*statement)
            statements += each.statements
        found = look_again()
    # Some of these objects became nobody's just now.
    removals = [place for each in found for place in each.removals]
    done += [each for each in found if each.removals]
    return Corrections(statements, removals, done, [e for e in found if not e.removals])


def apply(
    corrections: Corrections,
    devices: DeviceSet,
    objects: Objects,
    *,
    remake_copies: bool,
    asked: str,
) -> None:
    """Do to the filesystem what was tried on the image. Raises `Refused`."""
    try:
        if corrections.statements or remake_copies:
            trio.run(_change_catalog, devices, corrections.statements)
        for place in corrections.removals:
            objects.remove(place)
        objects.flush_removals(corrections.removals)
    except (OSError, sqlite3.Error) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise Refused(
            asked=asked,
            wrong=f"the repair failed ({why})",
            remedy="see that the devices are writable and have room, and ask again",
        ) from error


async def _change_catalog(devices: DeviceSet, statements: Sequence[Statement]) -> None:
    paths = [Path(folder, DATABASE) for folder in devices.catalog_directories]

    def change(transaction: Transaction) -> None:
        for statement in statements:
            transaction.execute(*statement)

    # Which makes a copy anew that cannot be used.
    catalog = await run_alone(lambda: Catalog.open(*paths, filesystem_id=devices.filesystem_id))
    try:
        await catalog.write_many(change)
        await catalog.make_durable()
    finally:
        await catalog.close()
