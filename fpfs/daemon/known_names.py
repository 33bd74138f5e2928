"""Known names: which names directories have, so that one that does not exist is known at once.

The kernel looks every name up before it makes it. Answering that from memory saves a way to the
catalog's thread and back for every new file, which is half of what making a small file waits for.

Invariants:
  * A directory's set, when there is one, holds all its names and no others as of the last
    transaction of the catalog that was delivered: changes come from `apply` functions.
  * All sets together hold at most NAMES_MAX names; a set that would exceed it is given up.

Concurrency: trio thread only; nothing here awaits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

NAMES_MAX = 100_000
"""Names in all sets, about 10 MiB."""

NAMES_LISTED_MAX = 1024
"""Names of a directory that are worth reading to answer the lookups that follow."""


class KnownNames:
    """Complete sets of names by directory."""

    def __init__(self) -> None:
        """Know nothing."""
        self._sets: dict[int, set[bytes]] = {}
        self._refused: set[int] = set()
        self._count = 0

    def lacks(self, directory: int, name: bytes) -> bool:
        """Whether a directory certainly has no such name."""
        names = self._sets.get(directory)
        return names is not None and name not in names

    def wants(self, directory: int) -> bool:
        """Whether the names of a directory should be listed."""
        return directory not in self._sets and directory not in self._refused

    def listed(self, directory: int, names: Iterable[bytes]) -> None:
        """Learn all names of a directory; more than NAMES_LISTED_MAX are refused for good."""
        known = set(names)
        self.forget(directory)
        if len(known) > NAMES_LISTED_MAX or self._count + len(known) > NAMES_MAX:
            self._refused.add(directory)
            return
        self._sets[directory] = known
        self._count += len(known)

    def added(self, directory: int, name: bytes) -> None:
        """Note a new name."""
        names = self._sets.get(directory)
        if names is None or name in names:
            return
        if self._count == NAMES_MAX:
            self.forget(directory)
            self._refused.add(directory)
            return
        names.add(name)
        self._count += 1

    def removed(self, directory: int, name: bytes) -> None:
        """Note that a name is gone."""
        names = self._sets.get(directory)
        if names is not None and name in names:
            names.remove(name)
            self._count -= 1

    def forget(self, directory: int) -> None:
        """Give up what is known of a directory."""
        self._count -= len(self._sets.pop(directory, ()))
        self._refused.discard(directory)
