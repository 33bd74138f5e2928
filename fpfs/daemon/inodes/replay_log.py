"""Requests that must not be carried out twice, and what became of them.

When a server dies, the kernel sends again what was not answered, and the dead one may have done it
already. A request that makes, links, moves or removes a name, or changes an extended attribute,
leaves a record in the same transaction. One that comes again and has a record is answered from it.

Requests are known by their numbers (`wire::request_number`): those of one connection that are under
way at one time differ.

Invariants:
  * A record is in the catalog if and only if what the request asked for is.
  * Records of another connection, whose numbers mean nothing, are gone before the mount answers.

Concurrency: trio thread only; what `recording` returns runs where the catalog's operations do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.executor import Transaction

RESENT = 1 << 30
"""Set in the number of a request that the kernel sends again."""

RECORDS_MAX = 4096
"""Records kept: more than requests can be under way, each of which makes one at its end."""

Result = TypeVar("Result")


class Requests:
    """The records of this mount."""

    def __init__(self, catalog: Catalog) -> None:
        """Start without records."""
        self._catalog = catalog
        self._left: dict[int, int] = {}
        self._count = 0

    async def take_over(self) -> None:
        """Read the records that a server of the same connection left."""
        records = await self._catalog.read(_list)
        self._left = {number: ino for _slot, number, ino in records}
        # The oldest ones are overwritten first, as by the server that died.
        self._count = max(records, key=lambda record: record[1])[0] if records else 0

    async def start_over(self) -> None:
        """Drop the records of an earlier connection."""
        if await self._catalog.read(_list):
            await self._catalog.write_urgently(_clear)

    def outcome(self, number: int) -> int | None:
        """What a request came to that was carried out before: an inode, or 0. None: it was not."""
        if not number & RESENT:
            return None
        return self._left.get(number & ~RESENT)

    def recording(
        self, number: int, operation: Callable[[Transaction], Result]
    ) -> Callable[[Transaction], Result]:
        """An operation that does the same and leaves a record; an int that it returns is kept.

        Number 0 is no request: nothing is recorded.
        """
        if number == 0:
            return operation
        self._count += 1
        slot = self._count % RECORDS_MAX

        def recorded(transaction: Transaction) -> Result:
            result = operation(transaction)
            transaction.execute(
                "INSERT OR REPLACE INTO requests VALUES (?, ?, ?)",
                (slot, number & ~RESENT, result if isinstance(result, int) else 0),
            )
            return result

        return recorded


def _list(transaction: Transaction) -> list[tuple[int, int, int]]:
    return transaction.execute("SELECT slot, number, ino FROM requests").fetchall()


def _clear(transaction: Transaction) -> None:
    transaction.execute("DELETE FROM requests")
