"""What each command of ``fpfs-ctl`` prints with ``--json``, and its JSON schema.

`python -m fpfs.cli.schemas FOLDER` writes the schemas; docs/json has them, and a test compares.

Invariants:
  * Every command that takes ``--json`` is here, and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from fpfs.cli.commands.drain import DrainReport
from fpfs.cli.commands.listing import Listing
from fpfs.cli.commands.plan import PlanReport
from fpfs.cli.commands.policy import PoliciesApplied
from fpfs.cli.commands.scrub import ScrubReport
from fpfs.cli.commands.shares import Gathered, SharesReport
from fpfs.cli.commands.stat import FilesReport
from fpfs.cli.commands.status import StatusReport
from fpfs.cli.commands.tune import TuneReport
from fpfs.cli.ctl import Restarted
from fpfs.core.fsck import CheckReport
from fpfs.core.protocol.reports import (
    DeviceRemoved,
    DeviceStatus,
    DeviceTags,
    Flushed,
    PoliciesListed,
    PolicyExplained,
    PolicyShown,
    RecoveryStatus,
    VersionsShown,
)

PRINTED: Mapping[str, Any] = {
    "commit": Flushed,
    "device add": DeviceTags,
    "device drain": DrainReport,
    "device list": tuple[DeviceStatus, ...],
    "device remove": DeviceRemoved,
    "device tag": DeviceTags,
    "flush": Flushed,
    "fsck": CheckReport,
    "gather": Gathered,
    "ls": Listing,
    "plan": PlanReport,
    "policy apply": PoliciesApplied,
    "policy explain": PolicyExplained,
    "policy get": PolicyShown,
    "policy list": PoliciesListed,
    "policy profiles": dict[str, dict[str, str]],
    "policy set": PolicyShown,
    "policy unset": PolicyShown,
    "recovery": RecoveryStatus,
    "restart": Restarted,
    "restore": VersionsShown,
    "scrub": ScrubReport,
    "stat": FilesReport,
    "status": StatusReport,
    "tune": TuneReport,
    "verify": SharesReport,
    "versions": VersionsShown,
    "wait": Flushed,
}
"""By command: the type of what it prints."""

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def schema_of(command: str) -> str:
    """Return the JSON schema of what a command prints, as text."""
    schema = {
        "$schema": DIALECT,
        "title": f"fpfs-ctl {command} --json",
        **msgspec.json.schema(PRINTED[command]),
    }
    return msgspec.json.format(msgspec.json.encode(schema, order="sorted").decode(), indent=2)


def file_of(command: str) -> str:
    """Return the name of a command's schema in docs/json."""
    return f"{command.replace(' ', '-')}.json"


def main(folder: Path) -> None:
    """Write all schemas into a folder, and remove those of commands that are gone."""
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.json"):
        path.unlink()
    for command in PRINTED:
        (folder / file_of(command)).write_text(schema_of(command) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
