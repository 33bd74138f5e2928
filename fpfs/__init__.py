"""fpfs: a filesystem that makes saving a model's checkpoint as fast as the devices under it.

`fpfs.wait_durable(path)` waits until what was saved survives power loss, `fpfs.status(path)` tells
how far it has come (`FileStatus`, or `Status` of a mount). Both ask the server of the mount; they,
and the errors `Refused`, `NotKept` and `TimedOut`, are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fpfs.core.protocol.control import TimedOut
    from fpfs.core.protocol.reports import FileStatus, Status
    from fpfs.core.protocol.whereabouts import NotKept, status, wait_durable
    from fpfs.core.refusal import Refused

__version__ = "0.1.0"

__all__ = [
    "FileStatus",
    "NotKept",
    "Refused",
    "Status",
    "TimedOut",
    "__version__",
    "status",
    "wait_durable",
]

_PLACES = {
    "FileStatus": "fpfs.core.protocol.reports",
    "NotKept": "fpfs.core.protocol.whereabouts",
    "Refused": "fpfs.core.refusal",
    "Status": "fpfs.core.protocol.reports",
    "TimedOut": "fpfs.core.protocol.control",
    "status": "fpfs.core.protocol.whereabouts",
    "wait_durable": "fpfs.core.protocol.whereabouts",
}


def __getattr__(name: str) -> Any:
    """Import what is asked for by name."""
    if name not in _PLACES:
        raise AttributeError(f"module 'fpfs' has no attribute {name!r}")
    return getattr(import_module(_PLACES[name]), name)


def __dir__() -> list[str]:
    """Name also what is not imported yet."""
    return sorted({*globals(), *__all__})
