"""Policies of directories: kept in memory, since there are few, and asked for in transactions.

Invariants:
  * What is in memory is what the catalog holds: `apply` functions change it in the catalog's order.
  * Where nothing was set, nothing is looked up.

Concurrency: settings are replaced as a whole and never changed, so the catalog's worker may read
them (`effective`) while the trio thread sets others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpfs.core.directory_policy import DEFAULTS, KEYS, DirectoryPolicy
from fpfs.core.questions import PolicyChange
from fpfs.core.reports import PolicySetting, PolicyShown
from fpfs.daemon.catalog_names import path_of
from fpfs.daemon.catalog_policies import fetch_policies, list_ancestors, store_policy

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpfs.daemon.catalog import Catalog
    from fpfs.daemon.catalog_worker import Transaction


class Policies:
    """What was set for the directories of one filesystem."""

    def __init__(self, catalog: Catalog) -> None:
        """Know of nothing before `load`."""
        self._catalog = catalog
        self._settings: Mapping[int, Mapping[str, str]] = {}

    async def load(self) -> None:
        """Read what was set."""
        await self._catalog.read(fetch_policies, apply=self._apply)

    def _apply(self, settings: Mapping[int, Mapping[str, str]]) -> None:
        self._settings = settings

    def any_sets(self, key: str) -> bool:
        """Whether any directory has a setting of this key."""
        return any(key in values for values in self._settings.values())

    def effective(self, transaction: Transaction, directory: int) -> DirectoryPolicy:
        """Return what holds in a directory."""
        if not self._settings:
            return DEFAULTS
        chain = list_ancestors(transaction, directory)
        return DirectoryPolicy.from_settings([self._settings.get(ino, {}) for ino in chain])

    async def change(self, ino: int, change: PolicyChange) -> PolicyShown:
        """Set and unset for a directory, durably; returns what holds there then.

        Raises `NoSuchEntry`, `NotADirectory`, `NoSpace`.
        """
        if change.values or change.unset:
            await self._catalog.write(
                lambda t: store_policy(t, ino, change.values, change.unset), apply=self._apply
            )
            await self._catalog.make_durable()
        return await self._catalog.read(lambda t: self._show(t, ino))

    def _show(self, transaction: Transaction, ino: int) -> PolicyShown:
        chain = list_ancestors(transaction, ino)
        values = self.effective(transaction, ino)
        shown = []
        for key in KEYS:
            origin = next((a for a in chain if key in self._settings.get(a, {})), None)
            shown.append(
                PolicySetting(
                    key=key,
                    value=str(getattr(values, key)),
                    is_default=origin is None,
                    set_at=""
                    if origin is None
                    else "/" + path_of(transaction, origin).decode(errors="backslashreplace"),
                )
            )
        return PolicyShown(settings=tuple(shown))
