"""What ``fpfs-ctl device`` asks of a server.

Concurrency: trio thread only; requests overlap.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fpfs.core.device_names import TagChange
from fpfs.core.questions import Question, TagDevice
from fpfs.core.reports import DeviceTags

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fpfs.daemon.control import Handler
    from fpfs.daemon.registry import DeviceRegistry


class DeviceControl:
    """Changes of a mount's devices, as the control protocol asks for them."""

    def __init__(self, *, registry: DeviceRegistry) -> None:
        """Keep the parts."""
        self._registry = registry

    @property
    def handlers(self) -> Mapping[type[Question[Any]], Handler]:
        """Who answers each question."""
        return {TagDevice: self._tag}

    async def _tag(self, question: TagDevice) -> DeviceTags:
        """Give tags to a device and take others away. OSError when there is no such device."""
        change = TagChange(question.added, question.dropped)
        number = self._registry.one_named(question.device).number
        device = await self._registry.tag(number, change)
        return DeviceTags(number=device.number, path=device.path, tags=tuple(sorted(device.tags)))
