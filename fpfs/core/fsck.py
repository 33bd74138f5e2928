"""What ``fpfs fsck`` and ``fpfs export`` report, and their exit statuses.

The exit statuses of a check are those of fsck(8), added up: 0, 1, 4 or 5, and 8.
"""

from __future__ import annotations

import enum

import msgspec

EXIT_CLEAN = 0
EXIT_CORRECTED = 1
"""Something was wrong and was corrected."""
EXIT_LEFT = 4
"""Something is wrong and was left as it is. Of an export: something was not copied whole."""
EXIT_NOT_CHECKED = 8
"""The check could not be made."""


class Kind(enum.StrEnum):
    """Kinds of findings, as ``--json`` has them."""

    COPY = "copy"
    """A copy of the catalog is missing or damaged."""
    STRUCTURE = "structure"
    """The catalog's database is not sound in itself, or lacks what every filesystem has."""
    NAME = "name"
    """A name leads nowhere, is none, or is at the wrong place."""
    LINKS = "links"
    """A count of links, or the parent of a directory, is wrong."""
    UNNAMED = "unnamed"
    """An inode that nobody can reach."""
    INODE = "inode"
    """An inode has an impossible kind, size or target."""
    LAYOUT = "layout"
    """Rows that say where a content lies, or the content in the catalog, are damaged."""
    SHARES = "shares"
    """What inodes share does not agree with their maps."""
    OBJECTS = "objects"
    """The rows of objects do not agree with the maps."""
    LOST = "lost"
    """An object that a file refers to is not there, or not as long as it should be; or a device is
    missing."""
    DAMAGED = "damaged"
    """Blocks of a file do not fit their checksums, or cannot be read."""
    ORPHAN = "orphan"
    """An object that nobody refers to."""
    STRAY = "stray"
    """Something in an objects directory that is no object."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong; `text` is a line for people. `object` is in hexadecimal.

    What concerns no inode, device or object has 0, -1 or nothing there.
    """

    kind: Kind
    text: str
    ino: int = 0
    path: str = ""
    device: int = -1
    object: str = ""
    corrected: bool = False


class CheckReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a check came to. `notes` say what is no damage but good to know. Sizes in bytes.

    `bytes_checked` were compared with their checksums, `bytes_unverified` have none.
    """

    filesystem_id: str
    ended_cleanly: bool
    mounted: bool
    findings: tuple[Finding, ...]
    notes: tuple[str, ...]
    inodes: int
    objects: int
    bytes_checked: int = 0
    bytes_unverified: int = 0

    @property
    def exit_status(self) -> int:
        """Status of the command: `EXIT_CORRECTED` and `EXIT_LEFT`, added up."""
        corrected = any(finding.corrected for finding in self.findings)
        left = any(not finding.corrected for finding in self.findings)
        return EXIT_CORRECTED * corrected + EXIT_LEFT * left


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """What an export came to. `problems` are lines for people, of what was not copied whole."""

    files: int
    directories: int
    others: int
    bytes_copied: int
    problems: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def exit_status(self) -> int:
        """Status of the command."""
        return EXIT_LEFT if self.problems else EXIT_CLEAN
