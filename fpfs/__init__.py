"""fpfs: a filesystem that makes saving a model's checkpoint as fast as the devices under it.

`fpfs.save(state, path)` and `fpfs.load(path)` write and read the files of torch.save by several
threads and by all ranks of a group (docs/client.md): `ALONE`, `RankFailed`, and who writes what,
`Plan` and `Topology`. `fpfs.save_shares` and `fpfs.load_shares` are for nodes that have storage of
their own (docs/multi-node.md). `fpfs.save_safetensors` writes safetensors' files likewise.
`fpfs.AsyncSaver` saves beside training, `fpfs.dcp` is for torch.distributed.checkpoint. They need
torch.

`fpfs.wait_durable(path)` waits until what was saved survives power loss, `fpfs.status(path)` tells
how far it has come (`FileStatus`, or `Status` of a mount). Both ask the server of the mount, and
raise `Refused`, `NotKept` and `TimedOut`. All is imported when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from fpfs.core.lazy import lazily

if TYPE_CHECKING:
    from fpfs import dcp
    from fpfs.client import (
        ALONE,
        AsyncSaver,
        Plan,
        RankFailed,
        Topology,
        load,
        load_shares,
        save,
        save_safetensors,
        save_shares,
    )
    from fpfs.core.protocol.control import TimedOut
    from fpfs.core.protocol.reports import FileStatus, Status
    from fpfs.core.protocol.whereabouts import NotKept, status, wait_durable
    from fpfs.core.refusal import Refused

__version__ = "0.1.0"

__all__ = [
    "ALONE",
    "AsyncSaver",
    "FileStatus",
    "NotKept",
    "Plan",
    "RankFailed",
    "Refused",
    "Status",
    "TimedOut",
    "Topology",
    "__version__",
    "dcp",
    "load",
    "load_shares",
    "save",
    "save_safetensors",
    "save_shares",
    "status",
    "wait_durable",
]

_PLACES = {
    "ALONE": "fpfs.client",
    "AsyncSaver": "fpfs.client",
    "FileStatus": "fpfs.core.protocol.reports",
    "NotKept": "fpfs.core.protocol.whereabouts",
    "Plan": "fpfs.client",
    "RankFailed": "fpfs.client",
    "Refused": "fpfs.core.refusal",
    "Status": "fpfs.core.protocol.reports",
    "TimedOut": "fpfs.core.protocol.control",
    "Topology": "fpfs.client",
    "dcp": "fpfs.dcp",
    "load": "fpfs.client",
    "load_shares": "fpfs.client",
    "save": "fpfs.client",
    "save_safetensors": "fpfs.client",
    "save_shares": "fpfs.client",
    "status": "fpfs.core.protocol.whereabouts",
    "wait_durable": "fpfs.core.protocol.whereabouts",
}

__getattr__, __dir__ = lazily(__name__, _PLACES)
