"""What ``fpfs-ctl device`` asks of a server.

Concurrency: trio thread only; requests overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpfs.core.device_names import TagChange
from fpfs.core.questions import AddDevice, Question, TagDevice
from fpfs.core.reports import DeviceTags

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpfs.daemon.control import Handler
    from fpfs.daemon.device_changes import DeviceChanges
    from fpfs.daemon.registry import Member


class DeviceControl:
    """Changes of a mount's devices, as the control protocol asks for them."""

    def __init__(self, changes: DeviceChanges) -> None:
        """Answer with `changes`."""
        self._registry = changes.registry
        self._changes = changes

    @property
    def handlers(self) -> Mapping[type[Question[Any]], Handler]:
        """Who answers each question."""
        return {TagDevice: self._tag, AddDevice: self._add}

    async def _tag(self, question: TagDevice) -> DeviceTags:
        """Give tags to a device and take others away. OSError when there is no such device."""
        change = TagChange(question.added, question.dropped)
        number = self._registry.one_named(question.device).number
        return _told(await self._registry.tag(number, change))

    async def _add(self, question: AddDevice) -> DeviceTags:
        """Add a directory as a device. OSError when it cannot be one."""
        return _told(await self._changes.add(question.path))


def _told(device: Member) -> DeviceTags:
    return DeviceTags(number=device.number, path=device.path, tags=tuple(sorted(device.tags)))
