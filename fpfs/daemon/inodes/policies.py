"""Policies of directories: kept in memory, since there are few, and asked for in transactions.

Invariants:
  * What is in memory is what the catalog holds: `apply` functions change it in the catalog's order.
  * Where nothing was set, nothing is looked up.
  * What is set is right when it is set, for the directory and for all below it.

Concurrency: settings are replaced as a whole and never changed, so the catalog's worker may read
them (`effective`) while the trio thread sets others.
"""

from __future__ import annotations

import logging
import stat
from typing import TYPE_CHECKING, NamedTuple

import trio

from fpfs.core.layout import bytes_by_device, runs_of_file
from fpfs.core.placement import conforms, decode_layout, rank_of
from fpfs.core.policy import KEYS, First, Policy, parse_setting
from fpfs.core.policy_rules import check_policy, choose_devices
from fpfs.core.protocol.reports import (
    DirectorySettings,
    PoliciesListed,
    PolicyExplained,
    PolicySetting,
    PolicyShown,
    PresentPlacement,
)
from fpfs.core.refusal import Refused
from fpfs.daemon.catalog.rows.dirents import look_up, path_of
from fpfs.daemon.catalog.rows.extents import fetch_content
from fpfs.daemon.catalog.rows.policies import (
    fetch_policies,
    list_ancestors,
    name_of_inode,
    store_policies,
)
from fpfs.daemon.catalog.schema import ROOT_INO

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from fpfs.core.policy_rules import DeviceFacts, MountFacts
    from fpfs.core.protocol.questions import PolicyChange
    from fpfs.daemon.catalog.database import Catalog
    from fpfs.daemon.catalog.executor import Transaction

    Settings = Mapping[int, Mapping[str, str]]
    Changes = Mapping[int, tuple[Mapping[str, str], Sequence[str]]]

log = logging.getLogger(__name__)


class Governed(NamedTuple):
    """A file's policy, and the name that it goes by: the oldest one, if there are several."""

    policy: Policy
    name: bytes


class Policies:
    """What was set for the directories of one filesystem."""

    def __init__(
        self, catalog: Catalog, *, defaults: Policy, mount: Callable[[], MountFacts]
    ) -> None:
        """Know of nothing before `load`. `defaults` holds where nothing is set."""
        self._catalog = catalog
        self._defaults = defaults
        self._mount = mount
        self._settings: Settings = {}
        self._resolved: dict[tuple[int, ...], Policy] = {}
        self._changing = trio.Lock()

    async def load(self) -> None:
        """Read what was set."""
        await self._catalog.read(fetch_policies, apply=self._apply)

    def _apply(self, settings: Settings) -> None:
        self._settings = {ino: _readable(ino, values) for ino, values in settings.items()}
        self._resolved = {}

    @property
    def defaults(self) -> Policy:
        """What holds where nothing is set."""
        return self._defaults

    @property
    def mount(self) -> MountFacts:
        """The mount as policies see it now."""
        return self._mount()

    def any_sets(self, key: str) -> bool:
        """Whether any directory has a setting of this key."""
        return any(key in values for values in self._settings.values())

    def effective(self, transaction: Transaction, directory: int) -> Policy:
        """Return what holds in a directory."""
        settings, resolved = self._settings, self._resolved
        if not settings:
            return self._defaults
        chain = tuple(ino for ino in list_ancestors(transaction, directory) if ino in settings)
        policy = resolved.get(chain)
        if policy is None:
            policy = self._defaults.with_settings([settings[ino] for ino in chain])
            resolved[chain] = policy
        return policy

    def is_all_or_nothing(self, transaction: Transaction, directory: int, name: bytes) -> bool:
        """Whether a name in a directory shows finished contents only."""
        return self.effective(transaction, directory).is_all_or_nothing(name)

    async def of_directory(self, ino: int) -> Policy:
        """Return what holds in a directory."""
        if not self._settings:
            return self._defaults
        return await self._catalog.read(lambda t: self.effective(t, ino))

    async def of_file(self, ino: int) -> Governed:
        """Return what holds for a file; what has no name any more is not governed."""

        def find(transaction: Transaction) -> Governed:
            found = name_of_inode(transaction, ino)
            if found is None:
                return Governed(self._defaults, b"")
            return Governed(self.effective(transaction, found[0]), found[1])

        if not self._settings:
            return Governed(self._defaults, b"")
        return await self._catalog.read(find)

    async def change(self, ino: int, change: PolicyChange) -> PolicyShown:
        """Set and unset for a directory, durably; returns what holds there then.

        Raises `NoSuchEntry`, `NotADirectory`, `NoSpace`, and `Refused` for what cannot be.
        """
        if change.values or change.unset:
            await self.change_all({ino: change})
        return await self._catalog.read(lambda t: self._show(t, ino))

    async def change_all(self, changes: Mapping[int, PolicyChange]) -> None:
        """Set and unset for several directories, durably, all of it or nothing.

        Raises as `change`.
        """
        stored = {ino: (_canonical(each.values), each.unset) for ino, each in changes.items()}
        async with self._changing:
            await self._catalog.read(lambda t: self._check_all(t, stored))
            await self._catalog.write(lambda t: store_policies(t, stored), apply=self._apply)
            await self._catalog.make_durable()

    def _check_all(self, transaction: Transaction, stored: Changes) -> None:
        """Raise `Refused` unless what is going to hold in every directory can be followed.

        What was wrong before, since a device has gone, is nobody's fault now.
        """
        mount = self._mount()
        settings = {ino: dict(values) for ino, values in self._settings.items()}
        for ino, (values, unset) in stored.items():
            changed = {**settings.get(ino, {}), **values}
            settings[ino] = {key: text for key, text in changed.items() if key not in unset}
        for ino in settings:
            chain = list_ancestors(transaction, ino)
            if not any(above in stored for above in chain):
                continue
            nearest_first = [settings[above] for above in chain if above in settings]
            try:
                check_policy(self._defaults.with_settings(nearest_first), mount, asked="policy")
            except Refused as refused:
                if ino in stored:
                    raise
                wrong = f"{_path(transaction, ino)} is below, and there {refused.wrong}"
                raise Refused(asked="policy", wrong=wrong, remedy=refused.remedy) from None

    async def list_all(self, directory: int) -> PoliciesListed:
        """Return what was set for a directory and for those below it."""

        def find(transaction: Transaction) -> PoliciesListed:
            found = [
                DirectorySettings(path=_path(transaction, ino), settings=values)
                for ino, values in self._settings.items()
                if directory in list_ancestors(transaction, ino)
            ]
            return PoliciesListed(directories=tuple(sorted(found, key=lambda each: each.path)))

        return await self._catalog.read(find)

    async def apply(self, changes: Sequence[tuple[int, PolicyChange]]) -> PoliciesListed:
        """Change several directories, all or none. Raises as `change`."""
        await self.change_all(dict(changes))
        return await self.list_all(ROOT_INO)

    async def explain(self, directory: int, name: bytes) -> PolicyExplained:
        """Return what holds for a name in a directory, and where its content lies."""

        def find(transaction: Transaction) -> PolicyExplained:
            policy = self.effective(transaction, directory)
            devices = self._mount().devices
            allowed = choose_devices(policy, devices)
            return PolicyExplained(
                settings=self._show(transaction, directory).settings,
                devices=allowed,
                width=min(policy.width or len(allowed), len(allowed)),
                rank=rank_of(name) if policy.first is First.RANK else None,
                is_all_or_nothing=policy.is_all_or_nothing(name),
                present=_present(transaction, directory, name, policy, devices),
            )

        return await self._catalog.read(find)

    def _show(self, transaction: Transaction, ino: int) -> PolicyShown:
        chain = list_ancestors(transaction, ino)
        values = self.effective(transaction, ino)
        shown = []
        for key in KEYS:
            origin = next((a for a in chain if key in self._settings.get(a, {})), None)
            shown.append(
                PolicySetting(
                    key=key,
                    value=values.shown(key),
                    is_default=origin is None,
                    set_at="" if origin is None else _path(transaction, origin),
                )
            )
        return PolicyShown(settings=tuple(shown))


def _path(transaction: Transaction, ino: int) -> str:
    return "/" + path_of(transaction, ino).decode(errors="backslashreplace")


def _present(
    transaction: Transaction,
    directory: int,
    name: bytes,
    policy: Policy,
    devices: Sequence[DeviceFacts],
) -> PresentPlacement | None:
    """Return where the content of a name lies, or None where there is no such file."""
    row = look_up(transaction, directory, name)
    if row is None or not stat.S_ISREG(row.mode):
        return None
    layout = decode_layout(row.layout)
    content = fetch_content(transaction, row.ino)
    return PresentPlacement(
        size=row.size,
        chunk_bytes=layout.chunk_bytes,
        devices=layout.devices,
        bytes_by_device=bytes_by_device(runs_of_file(blob for _, blob in content.segments)),
        follows_policy=conforms(layout, policy, devices),
    )


def _canonical(values: Mapping[str, str]) -> dict[str, str]:
    return {key: parse_setting(key, text, asked="policy") for key, text in values.items()}


def _readable(ino: int, values: Mapping[str, str]) -> dict[str, str]:
    """Return the settings of a directory that mean something: a catalog can be damaged."""
    readable = {}
    for key, text in values.items():
        try:
            readable[key] = parse_setting(key, text, asked=f"policy of inode {ino}")
        except Refused as refused:
            log.warning("a setting is left out: %s", refused)
    return readable
