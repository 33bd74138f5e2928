"""What ``fpfs-ctl device`` asks of a server.

Concurrency: trio thread only; requests overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpfs.core.device_names import TagChange
from fpfs.core.errors import InvalidOperation
from fpfs.core.protocol.questions import (
    AddDevice,
    DrainNext,
    EndDrain,
    Question,
    RemoveDevice,
    StartDrain,
    TagDevice,
)
from fpfs.core.protocol.reports import DeviceRemoved, DeviceTags, Drained, DrainStarted

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpfs.core.protocol.questions import Handler
    from fpfs.daemon.devices.members import Member
    from fpfs.daemon.maintenance.evacuate import Draining
    from fpfs.daemon.maintenance.membership import DeviceChanges


class DeviceControl:
    """Changes of a mount's devices, as the control protocol asks for them."""

    def __init__(self, changes: DeviceChanges, draining: Draining) -> None:
        """Answer with `changes`, and steps of `draining`."""
        self._draining = draining
        self.registry = changes.registry
        self._changes = changes

    @property
    def handlers(self) -> Mapping[type[Question[Any]], Handler]:
        """Who answers each question."""
        return {
            TagDevice: self._tag,
            AddDevice: self._add,
            StartDrain: self._start_drain,
            DrainNext: self._drain,
            EndDrain: self._end_drain,
            RemoveDevice: self._remove,
        }

    async def _tag(self, question: TagDevice) -> DeviceTags:
        """Give tags to a device and take others away. OSError when there is no such device."""
        change = TagChange(question.added, question.dropped)
        number = self.registry.one_named(question.device).number
        return _told(await self.registry.tag(number, change))

    async def _add(self, question: AddDevice) -> DeviceTags:
        """Add a directory as a device. OSError when it cannot be one."""
        return _told(await self._changes.add(question.path))

    async def _start_drain(self, question: StartDrain) -> DrainStarted:
        """Let no new chunk go to a device. OSError when what it holds fits nowhere else."""
        return await self._changes.drain(question.device)

    async def _drain(self, question: DrainNext) -> Drained:
        """Move some of what a device holds. OSError when it does not drain."""
        member = self.registry.one_named(str(question.number))
        if not member.is_draining:
            raise InvalidOperation(
                f"device {member.number} does not drain any more",
                remedy="somebody ended it: ask for the drain again",
            )
        return await self._draining.step(member.number, question.cursor, question.bytes_max)

    async def _end_drain(self, question: EndDrain) -> DeviceTags:
        """Let new chunks go to a device again. OSError when there is no such device."""
        return _told(await self._changes.keep(question.device))

    async def _remove(self, question: RemoveDevice) -> DeviceRemoved:
        """Do without a device from now on. OSError while something is on it."""
        return await self._changes.remove(question.device)


def _told(device: Member) -> DeviceTags:
    return DeviceTags(number=device.number, path=device.path, tags=tuple(sorted(device.tags)))
