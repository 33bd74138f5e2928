"""What settings of a policy must be together, and on the mount that they are set for.

Settings that were right when they were set can become wrong: a device is removed, or the next
mount has less staging. Then `choose_devices` does what comes closest, and says nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fpfs.core.policy import Policy
from fpfs.core.refusal import Refused
from fpfs.core.units import format_exact


class DeviceFacts(NamedTuple):
    """A device as policies name it, and whether it takes new chunks."""

    number: int
    tags: tuple[str, ...] = ()
    accepts: bool = True

    def is_named(self, word: str) -> bool:
        """Whether a number or a tag is this device's."""
        return word == str(self.number) or word in self.tags


class MountFacts(NamedTuple):
    """What the mount gives: `slot_bytes` is what one staging buffer holds, `depth` what is in
    flight on a device at most."""

    devices: Sequence[DeviceFacts]
    slot_bytes: int
    staging_bytes: int
    depth: int


def choose_devices(policy: Policy, devices: Sequence[DeviceFacts]) -> tuple[int, ...]:
    """Return the numbers of the devices that new chunks may go to, in order.

    All that take chunks where none of those named does; all there are where none takes any.
    """
    accepting = [device for device in devices if device.accepts] or list(devices)
    named = [
        device for device in accepting if any(device.is_named(word) for word in policy.devices)
    ]
    return tuple(device.number for device in named or accepting)


def check_policy(policy: Policy, mount: MountFacts, *, asked: str) -> None:
    """Raise `Refused` for what no file could be written by on this mount."""
    words = [word for device in mount.devices for word in (str(device.number), *device.tags)]
    for word in policy.devices:
        if word not in words:
            known = ", ".join(dict.fromkeys(words))
            raise Refused(
                asked=asked,
                wrong=f"devices cannot be '{policy.shown('devices')}': no device has the number or"
                f" tag '{word}'",
                remedy=f"take of {known}",
            )
    count = len(choose_devices(policy, mount.devices))
    if policy.width > count:
        raise Refused(
            asked=asked,
            wrong=f"width cannot be {policy.width}: devices={policy.shown('devices')} are {count}",
            remedy=f"take a number from 1 to {count}, or all",
        )
    _check_chunk(policy, mount, asked=asked)
    if policy.depth > mount.depth:
        raise Refused(
            asked=asked,
            wrong=f"depth cannot be {policy.depth}: this mount's devices take {mount.depth}",
            remedy=f"take a number from 1 to {mount.depth}, or mount with -o depth={policy.depth}",
        )
    _check_buffers(policy, mount, count=policy.width or count, asked=asked)


def _check_chunk(policy: Policy, mount: MountFacts, *, asked: str) -> None:
    slot_bytes = mount.slot_bytes
    if policy.chunk_bytes > slot_bytes and policy.chunk_bytes % slot_bytes:
        slot = format_exact(slot_bytes)
        raise Refused(
            asked=asked,
            wrong=f"chunk cannot be {policy.shown('chunk')}: staging buffers hold {slot}",
            remedy=f"take a multiple of 64K up to {slot}, or a multiple of {slot}",
        )


def _check_buffers(policy: Policy, mount: MountFacts, *, count: int, asked: str) -> None:
    most = mount.staging_bytes // mount.slot_bytes // count
    if policy.buffers > most:
        raise Refused(
            asked=asked,
            wrong=f"buffers cannot be {policy.buffers}: staging holds"
            f" {mount.staging_bytes // mount.slot_bytes} for {count} devices",
            remedy=f"take a number from 2 to {most}, or auto",
        )
